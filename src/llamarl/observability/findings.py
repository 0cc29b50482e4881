"""Finds what goes wrong with a run, each with the key to change: for the run's own warnings, and
for the report's first view. Pure.

    rows of metrics.jsonl ──find_in_rows──▶ kind -> text       the mean of the last five ticks: one odd batch is no trouble;
                                │                              of the first ticks, the mean of those that there are
                NewFindings ◀───┴───▶ find_wrong ◀── responses, warnings.jsonl
            a run warns of each once      every tick, and what the responses themselves show

The limits lie far outside of what healthy runs show: a run that learns gives none.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from llamarl.plural import plural

__all__ = [
    "FLAGS",
    "KINDS",
    "WINDOW",
    "Causes",
    "Finding",
    "NewFindings",
    "few_causes",
    "find_in_rows",
    "find_wrong",
    "remedy",
    "too_many_failed",
]

Rows = Sequence[Mapping[str, Any]]

KINDS = {
    "all_rewards_failed": ("Every reward fails", "failures"),
    "rewards_failing": ("Rewards fail", "failures"),
    "mismatch": ("The policy runs away from its data", "curves"),
    "few_samples": ("A few responses carry the step", "curves"),
    "entropy_collapsed": ("Entropy has collapsed", "curves"),
    "mostly_cut": ("Responses are cut at the length limit", "garbage"),
    "empty": ("Responses are empty", "garbage"),
    "repetition": ("Responses run in circles", "garbage"),
    "script": ("Responses are in another script than their prompts", "garbage"),
    "constant_reward": ("The reward is constant", "rollouts"),
    "some_rewards_fail": ("Some rewards fail", "failures"),
    "no_signal": ("Rewards carry no signal", "rollouts"),
    "nothing_trained": ("Nothing trains", "ledger"),
    "replies_late": ("The generator waits for environments", "timeline"),
    "trainer_waits": ("The trainer waits", "timeline"),
    "generator_waits": ("The generator waits", "timeline"),
}
"""Kind -> its title and the report's view that shows it; what often is the cause of another stands before it."""

FLAGS = ("repetition", "cut", "script", "empty")
"""Signs of garbage in a response: bit i of its flags stands for entry i."""

_REPLACED_BY = {
    "no_signal": "constant_reward",
    "rewards_failing": "all_rewards_failed",
    "some_rewards_fail": "all_rewards_failed",
}
"""What says the same more sharply."""
_NOTHING_LEARNED = ("all_rewards_failed", "nothing_trained", "constant_reward")

WINDOW = 5
"""Ticks over which means are taken."""
_NO_SIGNAL = 0.9
"""Share of groups without a signal."""
_CUT = 0.5
"""Share of responses cut at the length limit."""
_FAILED = 0.5
"""Share of samples without a reward."""
_MANY_FAILED = 0.1
"""Share from which on failed rewards keep a run from learning, though its own warning begins later."""
_MISMATCH = 0.5
"""Nats of KL(behaviour, policy) a token; staleness and precision together give hundredths."""
_CLIPPED = 0.3
"""Share of tokens on which the loss's own bound acted."""
_CONCENTRATED = 0.2
"""Effective samples over responses; runs that learn have half and more at staleness 4."""
_EARNS_MORE = 0.1
"""Reward by which responses of evaluations lie above those of equal rewards in training."""
_AS_TEXT = 'an answer reaches it as text ("12" == 12 is never true)'
_COLLAPSED = 0.05
"""Share of its entropy at the start that the policy still has."""
_STOOD_STILL = 0.1
"""Share of the generator's time in which it stood still for environments."""
_WAITS = 0.5
"""Share of the time in which an executor stands idle."""
_GARBAGE = 0.2
_FEW = 8
"""Responses from which on shares say something."""
_FEW_GROUPS = 16
"""Groups from which on their share without a signal does."""
_FEW_TOKENS = 500
"""Computed tokens from which on their ratios do."""

_MOST_CAUSES = 5
"""Of one tick, so that a report stays small."""
_CAUSE = re.compile(r"(?:exception|environment): [\w.]+|\w+")


def few_causes(causes: Mapping[str, int]) -> dict[str, int]:
    """The five commonest causes of a tick, and the others counted together: what a report carries to the console."""
    ordered = sorted(causes.items(), key=lambda item: -item[1])
    rest = sum(count for _, count in ordered[_MOST_CAUSES:])
    return dict(ordered[:_MOST_CAUSES]) | ({"others: of further causes": rest} if rest else {})


def remedy(cause: str) -> str:
    """What to change against failures such as ``cause``: most are the reward's, but some responses never reached it."""
    found = _CAUSE.match(cause)
    if found and found[0] == "generation":
        return (
            "The policy itself is broken, not its reward: lower optimizer.lr (or algorithm.rho) and start again, or from a "
            "checkpoint of before"
        )
    if found and found[0] == "judge":
        return "No model that judges gave a verdict: see its section (reward_model, judge), its server and its limits"
    if found and found[0].startswith("environment"):
        return "Mend the environment (task.environment, task.pool)"
    return "Mend the reward function (task.reward, task.pool)"


def too_many_failed(shares: Sequence[float], *, max_fraction: float, max_ticks: int) -> bool:
    """Whether failures must end the run: more than ``max_fraction`` of the samples in each of the
    last ``max_ticks`` ticks.

    Args:
        shares: Share of failed samples of each tick so far, the last one last.
    """
    recent = shares[-max_ticks:]
    return len(recent) == max_ticks and all(share > max_fraction for share in recent)


class Causes:
    """Adds failures up by kind: an exception's class, or the failure's own. The first of a kind is its example.

    Over a run ten thousand samples may fail with a hundred causes; a user needs the kinds, how many
    each, one example of each.
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._examples: dict[str, str] = {}

    def add(self, failures: Mapping[str, int]) -> list[str]:
        """Count examples; returns those whose kind is new."""
        new = []
        for example, count in failures.items():
            found = _CAUSE.match(example)
            kind = found[0] if found else example
            if kind not in self._examples:
                self._examples[kind] = example
                new.append(example)
            self._counts[kind] += count
        return new

    def commonest(self) -> list[tuple[str, int]]:
        """(example, samples) of every kind; of equal counts the first seen first."""
        return [(self._examples[kind], count) for kind, count in self._counts.most_common()]

    def lines(self, most: int = 3) -> list[str]:
        """``40 x exception: ValueError: no number``, the commonest first."""
        return [f"{count} x {example}" for example, count in self.commonest()[:most]]


class NewFindings:
    """Looks at each row of a run as it comes, and tells each kind of trouble once."""

    def __init__(self, *, group_baseline: bool, rows: Rows = (), said: Iterable[str] = ()) -> None:
        """
        Args:
            group_baseline: Whether a group whose rewards are all equal gives no gradient.
            rows: Of before a resume.
            said: Kinds that the user was warned of before it.
        """
        self._group_baseline = group_baseline
        self._first = list(rows[:WINDOW])
        self._recent = list(rows[-WINDOW:])
        self._said = set(said)

    def look(self, row: Mapping[str, Any], causes: Sequence[str] = ()) -> dict[str, str]:
        """Kind -> text of what was not told before.

        Args:
            causes: Why samples of this tick failed, the commonest first.
        """
        if len(self._first) < WINDOW:
            self._first.append(row)
        self._recent = [*self._recent, row][-WINDOW:]
        found = find_in_rows(self._first, self._recent, group_baseline=self._group_baseline, causes=causes)
        new = {kind: text for kind, text in found.items() if kind not in self._said}
        self._said.update(new)
        return new


def find_in_rows(first: Rows, recent: Rows, *, group_baseline: bool, causes: Sequence[str] = ()) -> dict[str, str]:
    """Kind -> text of all that is wrong now, causes first: what is seen, then what to change.

    Args:
        first: The run's first ``WINDOW`` rows, or as many as there are.
        recent: Its last ``WINDOW`` rows, or as many as there are, the last one last.
        group_baseline: As in ``NewFindings``.
        causes: As in ``NewFindings.look``.
    """
    found = {"all_rewards_failed": _all_failed(recent[-1], causes)}
    if len(recent) == WINDOW:
        found |= {
            "rewards_failing": _failing(recent, causes),
            "entropy_collapsed": _collapsed(_computed(first), _computed(recent)),
            "few_samples": _few_samples(_computed(recent)),
            "nothing_trained": _nothing_trained(recent),
            "replies_late": _replies_late(recent),
        }
    if _sum(recent, "samples/delivered") >= _FEW:
        cut = _mean(recent, "response/truncated_fraction", 0.0)
        cut_at_first = first[0].get("response/truncated_fraction") or 0.0
        found["mostly_cut"] = _episodes_cut(recent) or _mostly_cut(
            cut, f"the responses of {_last(recent)}", cut_at_first
        )
        found["mismatch"] = _mismatch(_computed(recent))
    if group_baseline and (len(recent) == WINDOW or _sum(recent, "groups/generated") >= _FEW_GROUPS):
        found["no_signal"] = _no_signal(first, recent)
    return {kind: found[kind] for kind in KINDS if found.get(kind)}


def _last(rows: Rows) -> str:
    if len(rows) == 1:
        return f"tick {int(step)}" if (step := rows[0].get("step")) else "the first tick"
    return f"the last {len(rows)} ticks"


def _all_failed(row: Mapping[str, Any], causes: Sequence[str]) -> str:
    judged = row.get("samples/delivered") or 0
    if not judged or row.get("reward/failed") != judged:
        return ""
    cause = f": {causes[0]}" if causes else ""
    tick = "this tick" if row.get("step") is None else f"tick {int(row['step'])}"
    return f"every reward of {tick} failed, so nothing trains{cause}. {remedy(causes[0] if causes else '')}"


def _failing(rows: Rows, causes: Sequence[str]) -> str:
    failed, judged = _sum(rows, "reward/failed"), _sum(rows, "samples/delivered")
    if not judged or failed / judged < _FAILED:
        return ""
    cause = f", mostly by {causes[0]}" if causes else ""
    return (
        f"{failed / judged:.0%} of the rewards of {_last(rows)} failed{cause}. {remedy(causes[0] if causes else '')}; "
        f"reward.max_failed_fraction ends such a run"
    )


def _sampled_apart(first: Rows) -> str:
    """What differs where all rewards of the first tick were equal and evaluations of the same policy earned more."""
    row = first[0] if first else {}
    mean, held_out = row.get("reward/mean"), row.get("eval/reward_mean")
    if mean is not None and held_out is not None and held_out - mean > _EARNS_MORE and not row.get("reward/std"):
        return (
            f"held-out responses of the same policy earned {held_out:.3f}, those of the first tick {mean:.3f}: "
            f"compare generator.sampling.temperature with evaluation.temperature, then the questions"
        )
    return ""


def _no_signal(first: Rows, rows: Rows) -> str:
    silent, judged = _sum(rows, "groups/no_signal"), _sum(rows, "groups/generated")
    if not judged or silent / judged < _NO_SIGNAL or _sum(rows, "reward/failed") == _sum(rows, "samples/delivered"):
        return ""
    if _sum(rows, "reward/failed") > _FAILED * _sum(rows, "samples/delivered"):  # these are to be mended first
        return ""
    equal = all(std is not None and std < 1e-9 for std in (row.get("reward/std") for row in (*first, *rows)))
    hint = _sampled_apart(first) or (_AS_TEXT if equal else "")
    hint = f"; {hint}" if hint else ""
    source = "the reward function (task.reward)"
    if any("episodes/delivered" in row for row in rows):
        source, hint = "the rewards of its environment, or task.reward", ""
    return (
        f"no signal: in {silent / judged:.0%} of the groups of {_last(rows)} all rewards are equal (mean "
        f"{_mean(rows, 'reward/mean', 0.0):.3f}), and they move nothing. If the task is neither solved nor too hard, look at "
        f"{source}{hint}; else raise generator.group_size, or choose prompts of another difficulty"
    )


def _episodes_cut(rows: Rows) -> str:
    """Of episodes that end at a limit, by whichever."""
    share, turns = _mean(rows, "episodes/truncated_fraction", 0.0), _mean(rows, "episodes/turns_mean", 0.0)
    if share < _CUT:
        return ""
    return (
        f"{share:.0%} of the episodes of {_last(rows)} were cut at a limit, after {turns:.1f} turns on average: at "
        f"task.max_turns, so long as the environment does not say done, or at generator.sampling.max_new_tokens tokens. Raise the "
        f"one that ends them, or see to it that the environment says done"
    )


def _mostly_cut(share: float, of: str, at_first: float) -> str:
    """
    Args:
        at_first: The share of the run's first tick: where it was small, the limit was long enough once.
    """
    if share < _CUT:
        return ""
    seen = f"{share:.0%} of {of} were cut at the length limit"
    if at_first < _CUT / 2:
        return f"{seen}; in the first tick {at_first:.0%} were. If the rewards fell with it, the policy broke: lower optimizer.lr"
    return (
        f"{seen}: the model was still writing, mostly before its answer, which then earns nothing.\n"
        "Raise generator.sampling.max_new_tokens; a model that thinks first: data.chat_template_kwargs = "
        "{ enable_thinking = false }; one that never stops: its chat template or stop tokens"
    )


def _computed(rows: Rows) -> Rows:
    """Those of ticks in which the trainer computed a token: the others have no ratio and no entropy."""
    return [row for row in rows if row.get("tokens/computed", 1.0)]


def _mismatch(rows: Rows) -> str:
    """Of ticks in which the trainer computed tokens."""
    if sum(row.get("tokens/computed", _FEW_TOKENS) for row in rows) < _FEW_TOKENS:
        return ""
    kl, clipped = _mean(rows, "mismatch/kl", 0.0), _mean(rows, "ratio/clipped_fraction", 0.0)
    seen = [f"mismatch/kl is {kl:.2g} nats a token"] if kl >= _MISMATCH else []
    seen += [f"the ratio is clipped on {clipped:.0%} of the tokens"] if clipped >= _CLIPPED else []
    if not seen:
        return ""
    return (
        f"the policy runs away from what sampled its data: over {_last(rows)} {' and '.join(seen)}. Lower optimizer.lr, or "
        f"schedule.max_staleness"
    )


def _few_samples(rows: Rows) -> str:
    share = _mean(rows, "ratio/effective_samples", 1.0)
    if share >= _CONCENTRATED:
        return ""
    return (
        f"a few responses carry the step: ratio/effective_samples is {share:.0%} over {_last(rows)}, so the samples are too old "
        f"for the policy. Lower optimizer.lr or schedule.max_staleness"
    )


def _collapsed(first: Rows, rows: Rows) -> str:
    start, now = _mean(first, "entropy", 0.0), _mean(rows, "entropy", math.inf)
    if not start or now > _COLLAPSED * start:
        return ""
    return (
        f"entropy has collapsed: {now:.2g} nats a token over {_last(rows)}, {start:.2g} at the start, so responses hardly differ. "
        f"Lower optimizer.lr, or set algorithm.entropy_coef or algorithm.kl_coef"
    )


def _nothing_trained(rows: Rows) -> str:
    if any("tokens/trained" not in row for row in rows):
        return ""
    if not _sum(rows, "tokens/trained"):
        return (
            f"no token trained in {_last(rows)}: every response failed, or none may train (algorithm.train_truncated, "
            f"algorithm.ratio_mask, dynamic_sampling.enabled)"
        )
    if all((row.get("step/skipped") or 0) > 0 for row in rows):
        return f"each of {_last(rows)} skipped an update whose loss or gradient was not finite. Lower optimizer.lr or algorithm.rho"
    return ""


def _replies_late(rows: Rows) -> str:
    waited, worked = _sum(rows, "time/environment_wait_s"), _sum(rows, "time/generator_s")
    if not worked or waited / worked <= _STOOD_STILL:
        return ""
    seen = f"the generator stood still for {waited / worked:.0%} of {_last(rows)}"
    late = [row["time/late_reply_s"] for row in rows if row.get("time/late_reply_s")]
    step_s = _mean(rows, "time/engine_step_s", 0.0)
    if _sum(rows, "time/environment_held_s") < waited / 2 or not late or not step_s:
        return (
            f"{seen}, waiting for environments while no other sample was left to write. Raise task.pool.num_workers if replies "
            f"wait for a worker; more samples at once (generator.oversubscription, schedule.prompts_per_step) hide the rest"
        )
    reply_s = statistics.median(late)
    return (
        f"{seen}, for replies of environments that were late: one takes up to {reply_s:.2g} s, an engine step {step_s:.2g} s. "
        f"generator.reply_delay = {math.ceil(reply_s / step_s)} would hide them; it changes the bits. If replies wait for a "
        f"worker, raise task.pool.num_workers first"
    )


def _sum(rows: Rows, key: str) -> float:
    return sum(row.get(key) or 0 for row in rows)


def _mean(rows: Rows, key: str, missing: float) -> float:
    """Over the rows that have a finite value; ``missing`` where none has."""
    values = [row[key] for row in rows if row.get(key) is not None]
    return sum(values) / len(values) if values else missing


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that looks wrong, for the report."""

    kind: str
    level: Literal["bad", "note"] = "bad"
    """``bad`` keeps a run from learning; ``note`` costs time or deserves a look."""
    text: str
    first_tick: int
    now: bool = True
    """Whether it still holds at the run's last ticks."""

    @property
    def title(self) -> str:
        return KINDS[self.kind][0] if self.kind in KINDS else self.kind.replace("_", " ").capitalize()

    @property
    def view(self) -> str:
        """The page's view that shows it."""
        return KINDS[self.kind][1] if self.kind in KINDS else "curves"


class ResponsesLike(Protocol):
    """What is read of a tick's responses (``report.rollout_index.TickIndex``): a list an attribute,
    an entry a response."""

    tick: int
    reward: list[float | None]
    failure: list[str]
    flags: list[int]


def find_wrong(
    rows: Rows,
    warnings: Sequence[Mapping[str, Any]],
    responses: Sequence[ResponsesLike],
    *,
    group_baseline: bool,
    max_new_tokens: int | None = None,
    reward: str = "",
    distills: bool = False,
) -> list[Finding]:
    """All that looks wrong with a run: what keeps it from learning first, by when it began.

    Args:
        rows: Of ``metrics.jsonl``.
        warnings: Of ``warnings.jsonl``: what the run said itself.
        responses: Of the rollout files, tick by tick.
        group_baseline: Whether a group whose rewards are all equal gives no gradient.
        max_new_tokens: The limit on responses, to name it.
        reward: The reward function, to name it; empty where the task judges itself.
        distills: Whether a teacher makes the advantages, so that rewards are only shown.
    """
    found = {finding.kind: finding for finding in _in_every_window(rows, responses, group_baseline=group_baseline)}
    for warning in warnings:
        kind, step = str(warning["kind"]), int(warning["step"])
        found.setdefault(kind, Finding(kind=kind, text=str(warning["text"]), first_tick=step, now=False))
    if sum(len(one.reward) for one in responses) >= _FEW:
        for finding in _in_responses(responses, reward, rows[:1]):
            found.setdefault(finding.kind, finding)
    if distills:
        found.pop("constant_reward", None)
    if not any(kind in found and found[kind].now for kind in _NOTHING_LEARNED):  # then time is not what is missing
        found |= {finding.kind: finding for finding in _waiting(rows)}
    if "mostly_cut" in found and max_new_tokens is not None:
        cut, key = found["mostly_cut"], "generator.sampling.max_new_tokens"
        found["mostly_cut"] = replace(cut, text=cut.text.replace(key, f"{key} (now {max_new_tokens})", 1))
    if "rewards_failing" in found or "all_rewards_failed" in found:
        found.pop("some_rewards_fail", None)
    for kind, sharper in _REPLACED_BY.items():
        if sharper in found and found[sharper].now:
            found.pop(kind, None)
    rank = {kind: position for position, kind in enumerate(KINDS)}
    return sorted(found.values(), key=lambda f: (f.level != "bad", f.first_tick, rank.get(f.kind, len(rank))))


def _in_every_window(rows: Rows, responses: Sequence[ResponsesLike], *, group_baseline: bool) -> Iterable[Finding]:
    causes: dict[int, list[str]] = {}
    for one in responses:
        counts = Causes()
        counts.add(Counter(cause for cause in one.failure if cause))
        causes[one.tick] = [cause for cause, _ in counts.commonest()]
    first: dict[str, int] = {}
    seen: dict[str, str] = {}
    now: dict[str, str] = {}
    for position, row in enumerate(rows):
        tick = int(row.get("step") or 0)
        recent = rows[max(0, position + 1 - WINDOW) : position + 1]
        now = find_in_rows(rows[:WINDOW], recent, group_baseline=group_baseline, causes=causes.get(tick, ()))
        seen |= now
        for kind in now:
            first.setdefault(kind, tick)
    for kind, text in seen.items():
        level: Literal["bad", "note"] = "note" if kind == "replies_late" else "bad"
        yield Finding(kind=kind, level=level, text=text, first_tick=first[kind], now=kind in now)


def _in_responses(responses: Sequence[ResponsesLike], reward: str, first: Rows) -> Iterable[Finding]:
    began = responses[0].tick
    total = sum(len(one.reward) for one in responses)
    rewards = [value for one in responses for value in one.reward if value is not None]
    if len(set(rewards)) == 1 and len(rewards) >= _FEW:
        named = f"task.reward, here {reward}" if reward else "task.reward"
        text = (
            f"all {plural(len(rewards), 'scored response')} have the reward {rewards[0]:g}, whatever they say, so no advantage "
            f"differs from 0 and nothing is learned. Look at a response and the expected answer side by side; then at the reward "
            f"function ({named}): does it ever give anything else? And {_sampled_apart(first) or _AS_TEXT}"
        )
        yield Finding(kind="constant_reward", text=text, first_tick=began)
    failures = Counter(cause for one in responses for cause in one.failure if cause)
    if failed := failures.total():
        causes = Causes()
        causes.add(dict(failures.most_common()))
        text = (
            f"{failed} of {total} responses ({failed / total:.1%}) have no reward: {'; '.join(causes.lines())}. They are left out "
            f"of every baseline, so what is learned is learned from the others alone"
        )
        level: Literal["bad", "note"] = "bad" if failed / total >= _MANY_FAILED else "note"
        yield Finding(kind="some_rewards_fail", level=level, text=text, first_tick=began)
    for bit, kind in enumerate(FLAGS):
        shares = {
            one.tick: sum(flags >> bit & 1 for flags in one.flags) / len(one.flags) for one in responses if one.flags
        }
        share = sum(flags >> bit & 1 for one in responses for flags in one.flags) / total
        limit = _CUT if kind == "cut" else _GARBAGE
        since = next((tick for tick, of_tick in shares.items() if of_tick >= limit), began)
        if kind == "cut":
            if text := _mostly_cut(share, "all responses", shares.get(began, 0.0)):
                yield Finding(kind="mostly_cut", text=text, first_tick=since)
        elif share >= _GARBAGE:
            text = f"{share:.0%} of all responses. Look at some; a policy that broke is cured by a lower optimizer.lr, or kl_coef"
            yield Finding(kind=kind, text=text, first_tick=since)


def _waiting(rows: Rows) -> Iterable[Finding]:
    for role, other in (("trainer", "generator"), ("generator", "trainer")):
        idle = [float(row[f"idle/{role}"]) for row in rows[1:] if row.get(f"idle/{role}") is not None]
        if len(idle) >= WINDOW and sum(idle) / len(idle) >= _WAITS:
            text = (
                f"the {role} stands idle for {sum(idle) / len(idle):.0%} of the time. Give the {other} more of the machine, or "
                f"ask llamarl plan for a split; the timeline says what each gap waits for"
            )
            if role == "generator":
                text += ". On a CPU, trainer.threads = 0 has the trainer use what the generator leaves of up to 4 cores"
            first = int(rows[1].get("step") or 0)
            yield Finding(kind=f"{role}_waits", level="note", text=text, first_tick=first)
