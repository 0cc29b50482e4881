"""Adds up what a run amounts to, row by row: the last thing that the console prints, and the first
numbers of the report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["RunSummary", "is_graded"]

_FIRST_AND_LAST = ("eval/accuracy", "eval/reward_mean", "reward/mean", "eval/loss")
_WORSE = 0.1
"""Accuracy lost since the first evaluation that is told as a fall; of mean rewards and losses, a share of the first."""
_FAR_WORSE = 0.2
"""Accuracy lost since the best evaluation: the best of many is high by chance."""


def is_graded(row: Mapping[str, Any]) -> bool:
    """Whether the evaluation of a row gave rewards other than 0 and 1: only then do accuracy and mean reward differ."""
    accuracy, reward = row.get("eval/accuracy"), row.get("eval/reward_mean")
    return accuracy is not None and reward is not None and abs(reward - accuracy) > 1e-9


@dataclass(kw_only=True)
class RunSummary:
    """Totals over all rows of a run, also those from before a resume. None where nothing was reported."""

    num_ticks: int = 0
    first: dict[str, float] = field(default_factory=dict)
    """Accuracy, held-out reward, reward and held-out loss as they were first reported, by key."""
    last: dict[str, float] = field(default_factory=dict)
    best_accuracy: float = 0.0
    """The highest that an evaluation found."""
    lowest_loss: float | None = None
    """The lowest held-out loss of a version that was trained."""
    warnings: tuple[tuple[int, str], ...] = ()
    """(tick, text) of what the user was warned of, in the order in which it began."""
    is_graded: bool = False
    """Whether held-out rewards took other values than 0 and 1."""
    had_gradient: bool | None = None
    """Whether any update had a finite gradient other than 0; None where there was no update."""
    all_skipped: bool = False
    """Whether updates were tried and each was skipped, since its loss or gradient was not finite."""
    staleness_max: int | None = None
    stopped: str = ""
    """By what the run was stopped before its last tick ("by the user"); empty where it was not."""
    failures: tuple[str, ...] = ()
    """The commonest causes of failed rewards, with counts, as far as this process saw them."""
    places: Mapping[str, str] = field(default_factory=dict)
    """What lies where: label -> path, for the last lines of the console."""
    _sums: dict[str, float] = field(default_factory=dict)
    _staleness: tuple[float, float] = (0.0, 0.0)
    """Sum over trained tokens, and tokens; a row that does not count them weighs one."""
    _idle: dict[str, float] = field(default_factory=dict)
    """Executor -> seconds in which it did nothing."""

    def add(self, row: Mapping[str, Any]) -> None:
        """Count one row."""
        self.num_ticks += 1
        known = {key: value for key, value in row.items() if value is not None}
        if "grad_norm" in row:  # one that is not finite is null
            finite = row["grad_norm"] is not None
            self.all_skipped = not finite and (self.all_skipped or self.had_gradient is None)
            self.had_gradient = bool(self.had_gradient) or (finite and row["grad_norm"] != 0)
        self.is_graded |= is_graded(row)
        if known.get("eval/failed") and "eval/accuracy" not in known:  # of nothing but failures: it is the last one
            self.last.pop("eval/accuracy", None)
            self.last.pop("eval/reward_mean", None)
        for key in _FIRST_AND_LAST:
            if key in known:
                self.first.setdefault(key, known[key])
                self.last[key] = known[key]
        if "eval/loss" in known and known.get("eval/policy_version"):
            loss = known["eval/loss"]
            self.lowest_loss = loss if self.lowest_loss is None else min(self.lowest_loss, loss)
        self.best_accuracy = max(self.best_accuracy, known.get("eval/accuracy", 0.0))
        for key in ("time/step_s", "tokens/generated", "tokens/trained", "reward/failed", "step/skipped"):
            if key in known:
                self._sums[key] = self._sums.get(key, 0.0) + known[key]
        for key, share in known.items():
            if key.startswith("idle/"):
                name = key.removeprefix("idle/")
                self._idle[name] = self._idle.get(name, 0.0) + share * known.get("time/step_s", 0.0)
        if "staleness/mean" in known:
            (total, tokens), weight = self._staleness, known.get("tokens/trained", 1)
            self._staleness = total + weight * known["staleness/mean"], tokens + weight
        if "staleness/max" in known:
            self.staleness_max = max(self.staleness_max or 0, int(known["staleness/max"]))

    @property
    def wall_s(self) -> float:
        """Sum of ``time/step_s``: the time that the run was up."""
        return self._sums.get("time/step_s", 0.0)

    @property
    def tokens_generated(self) -> int:
        return round(self._sums.get("tokens/generated", 0.0))

    @property
    def tokens_trained(self) -> int | None:
        return round(self._sums["tokens/trained"]) if "tokens/trained" in self._sums else None

    @property
    def trained_nothing(self) -> bool:
        """Whether rows were made and no token of any of them trained."""
        return self.tokens_trained == 0

    @property
    def got_worse(self) -> str:
        """What evaluations say if the policy is worse than it was: ``accuracy fell from 0.375 to 0.000``."""
        first, last = self.first, self.last
        if "eval/loss" in last and last["eval/loss"] > first["eval/loss"] * (1 + _WORSE):
            return f"held-out loss rose from {first['eval/loss']:.4f} to {last['eval/loss']:.4f}"
        if self.is_graded and "eval/reward_mean" in last:
            began, now = first["eval/reward_mean"], last["eval/reward_mean"]
            return f"held-out reward fell from {began:.3f} to {now:.3f}" if began - now > _WORSE * abs(began) else ""
        if "eval/accuracy" not in last:
            return ""
        began, best, now = first["eval/accuracy"], self.best_accuracy, last["eval/accuracy"]
        if best - now >= _FAR_WORSE:
            return f"accuracy fell from {best:.3f} to {now:.3f}"
        return f"accuracy fell from {began:.3f} to {now:.3f}" if began - now >= _WORSE or now < began / 2 else ""

    @property
    def staleness_mean(self) -> float | None:
        """Over trained tokens."""
        total, tokens = self._staleness
        return total / tokens if tokens else None

    @property
    def num_failed(self) -> int:
        return round(self._sums.get("reward/failed", 0.0))

    @property
    def num_skipped(self) -> int:
        return round(self._sums.get("step/skipped", 0.0))

    @property
    def idle(self) -> dict[str, float]:
        """Executor -> share of the run in which it did nothing."""
        return {name: seconds / self.wall_s for name, seconds in self._idle.items() if self.wall_s}
