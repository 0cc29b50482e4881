"""What looks wrong with a run, and what to change: the first thing that the page says. Pure.

The rules are those by which the run itself warns (``observability.health``), held against every tick instead of the last; beside
them stand a few that look at the responses, which work from the first tick on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from llamarl.observability.failures import Causes
from llamarl.observability.health import WINDOW, find_trouble
from llamarl.plural import plural
from llamarl.report.garbage import FLAGS
from llamarl.report.rollout_index import TickIndex

__all__ = ["Finding", "find_wrong"]

_MANY_FAILED = 0.1
"""Share of failed rewards from which on they are named, though the run's own warning begins later."""
_MOSTLY_CUT = 0.5
_GARBAGE = 0.2
_FEW = 8
"""Responses from which on shares say something."""
_TITLES = {
    "all_rewards_failed": "Every reward fails",
    "rewards_failing": "Rewards fail",
    "no_signal": "Rewards carry no signal",
    "constant_reward": "The reward is constant",
    "mostly_cut": "Responses are cut at the length limit",
    "mismatch": "The policy runs away from its data",
    "entropy_collapsed": "Entropy has collapsed",
    "nothing_trained": "Nothing trains",
    "replies_late": "The generator waits for environments",
    "some_rewards_fail": "Some rewards fail",
    "repetition": "Responses run in circles",
    "script": "Responses are in another script than their prompts",
    "empty": "Responses are empty",
    "trainer_waits": "The trainer waits",
    "generator_waits": "The generator waits",
}
_VIEWS = {
    "all_rewards_failed": "failures",
    "rewards_failing": "failures",
    "some_rewards_fail": "failures",
    "no_signal": "rollouts",
    "constant_reward": "rollouts",
    "mostly_cut": "garbage",
    "repetition": "garbage",
    "script": "garbage",
    "empty": "garbage",
    "mismatch": "curves",
    "entropy_collapsed": "curves",
    "nothing_trained": "ledger",
    "replies_late": "timeline",
    "trainer_waits": "timeline",
    "generator_waits": "timeline",
}
_CAUSES_FIRST = (
    *("all_rewards_failed", "rewards_failing", "mostly_cut", "empty", "repetition", "script", "constant_reward"),
    *("some_rewards_fail", "mismatch", "entropy_collapsed", "no_signal", "nothing_trained"),
)
"""What often is the cause of another stands before it."""
_REPLACED_BY = {
    "no_signal": "constant_reward",
    "rewards_failing": "all_rewards_failed",
    "some_rewards_fail": "all_rewards_failed",
}
"""What says the same more sharply."""
_NOTHING_LEARNED = ("all_rewards_failed", "nothing_trained", "constant_reward")
_COSTS_TIME = ("replies_late",)
"""Of the run's own warnings, what keeps no run from learning."""
_WAITS = 0.5


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that looks wrong."""

    kind: str
    level: Literal["bad", "note"]
    """``bad`` keeps a run from learning; ``note`` costs time or deserves a look."""
    text: str
    first_tick: int
    now: bool
    """Whether it still holds at the run's last ticks."""

    @property
    def title(self) -> str:
        return _TITLES.get(self.kind, self.kind.replace("_", " ").capitalize())

    @property
    def view(self) -> str:
        """The page's view that shows it."""
        return _VIEWS.get(self.kind, "curves")


def find_wrong(
    rows: Sequence[Mapping[str, Any]],
    warnings: Sequence[Mapping[str, Any]],
    indexes: Sequence[TickIndex],
    *,
    group_baseline: bool,
    max_new_tokens: int | None = None,
    reward: str = "",
) -> list[Finding]:
    """All findings, the worst first.

    Args:
        rows: Of ``metrics.jsonl``.
        warnings: Of ``warnings.jsonl``: what the run said itself.
        indexes: Of the rollout files.
        group_baseline: Whether a group whose rewards are all equal gives no gradient.
        max_new_tokens: The limit on responses, to name it.
        reward: The reward function, to name it; empty where the task judges itself.
    """
    found = {f.kind: f for f in _by_rows(rows, indexes, group_baseline=group_baseline)}
    for warning in warnings:
        kind, step = str(warning["kind"]), int(warning["step"])
        found.setdefault(kind, Finding(kind=kind, level="bad", text=str(warning["text"]), first_tick=step, now=False))
    for finding in _by_responses(indexes, reward=reward):
        found.setdefault(finding.kind, finding)
    if not any(kind in found and found[kind].now for kind in _NOTHING_LEARNED):  # then time is not what is missing
        found |= {finding.kind: finding for finding in _by_waiting(rows)}
    if "mostly_cut" in found and max_new_tokens is not None:
        cut, key = found["mostly_cut"], "generator.sampling.max_new_tokens"
        found["mostly_cut"] = replace(cut, text=cut.text.replace(key, f"{key} (now {max_new_tokens})", 1))
    if "rewards_failing" in found or "all_rewards_failed" in found:
        found.pop("some_rewards_fail", None)
    for kind, other in _REPLACED_BY.items():
        if other in found and found[other].now:
            found.pop(kind, None)
    rank = {kind: position for position, kind in enumerate(_CAUSES_FIRST)}
    return sorted(found.values(), key=lambda f: (f.level != "bad", not f.now, rank.get(f.kind, len(rank))))


def _by_rows(rows: Sequence[Mapping[str, Any]], indexes: Sequence[TickIndex], *, group_baseline: bool) -> list[Finding]:
    causes: dict[int, list[str]] = {}
    for index in indexes:
        counts = Causes()
        counts.add(Counter(cause for cause in index.failure if cause))
        causes[index.tick] = [cause for cause, _ in counts.commonest()]
    first: dict[str, int] = {}
    now: dict[str, str] = {}
    seen: dict[str, str] = {}
    for position, row in enumerate(rows):
        tick = int(row.get("step") or 0)
        recent = rows[max(0, position + 1 - WINDOW) : position + 1]
        trouble = find_trouble(rows[:WINDOW], recent, group_baseline=group_baseline, causes=causes.get(tick, ()))
        now = {one.kind: one.text for one in trouble}
        seen |= now
        for kind in now:
            first.setdefault(kind, tick)
    return [
        Finding(
            kind=kind,
            level="note" if kind in _COSTS_TIME else "bad",
            text=text,
            first_tick=first[kind],
            now=kind in now,
        )
        for kind, text in seen.items()
    ]


def _by_responses(indexes: Sequence[TickIndex], *, reward: str) -> list[Finding]:
    total = sum(len(index.reward) for index in indexes)
    if total < _FEW:
        return []
    found = []
    rewards = {value for index in indexes for value in index.reward if value is not None}
    scored = sum(value is not None for index in indexes for value in index.reward)
    if len(rewards) == 1 and scored >= _FEW:
        value = next(iter(rewards))
        named = f"task.reward, here {reward}" if reward else "task.reward"
        text = (
            f"all {plural(scored, 'scored response')} have the reward {value:g}, whatever they say, so no advantage differs from 0 "
            f"and nothing is learned. Look at a response and the expected answer side by side; then at the reward function "
            f'({named}): does it ever give anything else? An answer reaches it as text, so "12" == 12 is never true'
        )
        found.append(_finding("constant_reward", "bad", text, indexes))
    counts = Counter(cause for index in indexes for cause in index.failure if cause)
    failed = sum(counts.values())
    if failed:
        causes = Causes()
        causes.add(dict(counts.most_common()))
        share = failed / total
        text = f"{failed} of {total} responses ({share:.1%}) have no reward: {'; '.join(causes.lines())}. "
        text += "They are left out of every baseline, so what is learned is learned from the others alone"
        found.append(_finding("some_rewards_fail", "bad" if share >= _MANY_FAILED else "note", text, indexes))
    for bit, kind in enumerate(FLAGS):
        share = sum(flags >> bit & 1 for index in indexes for flags in index.flags) / total
        if kind == "cut" and share >= _MOSTLY_CUT:
            text = (
                f"{share:.0%} of the responses end at the length limit, mostly before their answer, so their reward says "
                f"nothing of it. Raise generator.sampling.max_new_tokens, or see to it that the model stops (its chat template, "
                f"its stop tokens)"
            )
            found.append(_finding("mostly_cut", "bad", text, indexes))
        elif kind != "cut" and share >= _GARBAGE:
            text = f"{share:.0%} of all responses. Look at some; a policy that broke is cured by a lower optimizer.lr, or kl_coef"
            found.append(_finding(kind, "bad", text, indexes))
    return found


def _by_waiting(rows: Sequence[Mapping[str, Any]]) -> list[Finding]:
    found = []
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
            found.append(Finding(kind=f"{role}_waits", level="note", text=text, first_tick=first, now=True))
    return found


def _finding(kind: str, level: Literal["bad", "note"], text: str, indexes: Sequence[TickIndex]) -> Finding:
    return Finding(kind=kind, level=level, text=text, first_tick=indexes[0].tick, now=True)
