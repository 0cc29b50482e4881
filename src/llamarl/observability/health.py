"""What is going wrong with a run, told from its last rows in plain words, each with the key to change. Pure.

    first rows, last rows ──find_trouble──▶ [Trouble(kind, text)]     several ticks must agree: one odd batch is no trouble

A warning is said once a run. The limits lie far outside of what healthy runs show: a run that learns gives none.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llamarl.observability.failures import remedy
from llamarl.plural import plural

__all__ = ["WINDOW", "Health", "Trouble", "find_trouble", "hiding_delay"]

Rows = Sequence[Mapping[str, Any]]

WINDOW = 5
"""Ticks that must agree."""
_NO_SIGNAL = 0.9
"""Share of groups without a signal."""
_CUT = 0.5
"""Share of responses cut at the length limit."""
_FAILED = 0.5
"""Share of samples without a reward."""
_MISMATCH = 0.5
"""Nats of KL(behaviour, policy) a token; staleness and precision together give hundredths."""
_CLIPPED = 0.3
"""Share of tokens on which the loss's own bound acted."""
_COLLAPSED = 0.05
"""Share of its entropy at the start that the policy still has."""
_STOOD_STILL = 0.1
"""Share of the generator's time in which it stood still for environments."""


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """One thing that goes wrong."""

    kind: str
    text: str
    """What is seen, then what to change."""


class Health:
    """Looks at each row of a run as it comes, and says each kind of trouble once."""

    def __init__(self, *, group_baseline: bool, rows: Rows = (), said: Iterable[str] = ()) -> None:
        """
        Args:
            group_baseline: Whether a group whose rewards are all equal gives no gradient.
            rows: Of before a resume.
            said: Kinds that the user has been told of before it.
        """
        self._group_baseline = group_baseline
        self._first = list(rows[:WINDOW])
        self._recent = list(rows[-WINDOW:])
        self._said = set(said)

    def look(self, row: Mapping[str, Any], causes: Sequence[str] = ()) -> list[Trouble]:
        """Troubles of which nobody was told before.

        Args:
            causes: Why samples of this tick failed, the commonest first.
        """
        if len(self._first) < WINDOW:
            self._first.append(row)
        self._recent = [*self._recent, row][-WINDOW:]
        found = find_trouble(self._first, self._recent, group_baseline=self._group_baseline, causes=causes)
        new = [trouble for trouble in found if trouble.kind not in self._said]
        self._said.update(trouble.kind for trouble in new)
        return new


def find_trouble(first: Rows, recent: Rows, *, group_baseline: bool, causes: Sequence[str] = ()) -> list[Trouble]:
    """All that is wrong now.

    Args:
        first: The run's first ``WINDOW`` rows, or as many as there are.
        recent: Its last ``WINDOW`` rows, or as many as there are, the last one last.
        group_baseline: As in ``Health``.
        causes: As in ``Health.look``.
    """
    found = {"all_rewards_failed": _all_failed(recent[-1], causes)}
    if len(recent) == WINDOW:
        checks: dict[str, Callable[[], str]] = {
            "rewards_failing": lambda: _failing(recent, causes),
            "no_signal": lambda: _no_signal(recent) if group_baseline else "",
            "mostly_cut": lambda: _cut(recent),
            "mismatch": lambda: _mismatch(recent),
            "entropy_collapsed": lambda: _collapsed(first, recent),
            "nothing_trained": lambda: _nothing_trained(recent),
            "replies_late": lambda: _replies_late(recent),
        }
        found |= {kind: check() for kind, check in checks.items()}
    return [Trouble(kind=kind, text=text) for kind, text in found.items() if text]


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
        f"{failed / judged:.0%} of the rewards of the last {plural(len(rows), 'tick')} failed{cause}. "
        f"{remedy(causes[0] if causes else '')}; reward.max_failed_fraction ends such a run"
    )


def _no_signal(rows: Rows) -> str:
    silent, judged = _sum(rows, "groups/no_signal"), _sum(rows, "groups/generated")
    if not judged or silent / judged < _NO_SIGNAL or _sum(rows, "reward/failed") == _sum(rows, "samples/delivered"):
        return ""
    equal = all(std is not None and std < 1e-9 for std in (row.get("reward/std") for row in rows))
    look = "the reward function (task.reward)" + (
        '; an answer reaches it as text ("12" == 12 is never true)' if equal else ""
    )
    return (
        f"no signal: in {silent / judged:.0%} of the groups of the last {plural(len(rows), 'tick')} all rewards are equal (mean "
        f"{_mean(rows, 'reward/mean', 0.0):.3f}), and they move nothing. If the task is neither solved nor too hard, look at "
        f"{look}; else raise generator.group_size, or choose prompts of another difficulty"
    )


def _cut(rows: Rows) -> str:
    share = _mean(rows, "response/truncated_fraction", 0.0)
    if share < _CUT:
        return ""
    return (
        f"{share:.0%} of the responses of the last {plural(len(rows), 'tick')} were cut at the length limit, mostly before their "
        f"answer. Raise generator.sampling.max_new_tokens, or see to it that the model stops"
    )


def _computed(rows: Rows) -> Rows:
    """Those of ticks in which the trainer computed a token: the others have no ratio and no entropy."""
    return [row for row in rows if row.get("tokens/computed", 1.0)]


def _mismatch(rows: Rows) -> str:
    rows = _computed(rows)
    kl, clipped = _mean(rows, "mismatch/kl", 0.0), _mean(rows, "ratio/clipped_fraction", 0.0)
    if kl < _MISMATCH and clipped < _CLIPPED:
        return ""
    return (
        f"the policy runs away from what sampled its data: over the last {plural(len(rows), 'tick')} mismatch/kl is {kl:.2g} nats a "
        f"token and the ratio is clipped on {clipped:.0%} of the tokens. Lower optimizer.lr, or schedule.max_staleness"
    )


def _collapsed(first: Rows, rows: Rows) -> str:
    first, rows = _computed(first), _computed(rows)
    start, now = _mean(first, "entropy", 0.0), _mean(rows, "entropy", math.inf)
    if not start or now > _COLLAPSED * start:
        return ""
    return (
        f"entropy has collapsed: {now:.2g} nats a token over the last {plural(len(rows), 'tick')}, {start:.2g} at the start, so "
        f"responses hardly differ. Lower optimizer.lr, or set algorithm.entropy_coef or algorithm.kl_coef"
    )


def _nothing_trained(rows: Rows) -> str:
    if any("tokens/trained" not in row for row in rows):
        return ""
    if not _sum(rows, "tokens/trained"):
        return (
            f"no token trained in the last {plural(len(rows), 'tick')}: every response failed, or none may train "
            f"(algorithm.train_truncated, algorithm.ratio_mask, dynamic_sampling.enabled)"
        )
    if all((row.get("step/skipped") or 0) > 0 for row in rows):
        return (
            f"each of the last {plural(len(rows), 'tick')} skipped an update whose loss or gradient was not finite. Lower "
            f"optimizer.lr or algorithm.rho"
        )
    return ""


def _replies_late(rows: Rows) -> str:
    waited, worked = _sum(rows, "time/environment_wait_s"), _sum(rows, "time/generator_s")
    if not worked or waited / worked <= _STOOD_STILL:
        return ""
    seen = f"the generator stood still for {waited / worked:.0%} of the last {plural(len(rows), 'tick')}"
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
        f"generator.reply_delay = {hiding_delay(reply_s, step_s)} would hide them; it changes the bits. If replies wait for a "
        f"worker, raise task.pool.num_workers first"
    )


def hiding_delay(reply_s: float, step_s: float) -> int:
    """``generator.reply_delay`` at which a reply that takes ``reply_s`` is not late, at ``step_s`` > 0 an engine step."""
    return math.ceil(reply_s / step_s)


def _sum(rows: Rows, key: str) -> float:
    return sum(row.get(key) or 0 for row in rows)


def _mean(rows: Rows, key: str, absent: float) -> float:
    """Over the rows that have a finite value; ``absent`` where none has."""
    values = [row[key] for row in rows if row.get(key) is not None]
    return sum(values) / len(values) if values else absent
