"""What a run amounts to, added up row by row: the last thing that the console prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["RunSummary", "SummaryBuilder", "is_graded"]


def is_graded(row: Mapping[str, Any]) -> bool:
    """Whether the evaluation of a row gave rewards other than 0 and 1: only then do accuracy and mean reward differ."""
    accuracy, reward = row.get("eval/accuracy"), row.get("eval/reward_mean")
    return accuracy is not None and reward is not None and abs(reward - accuracy) > 1e-9


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """Totals over all rows of a run, also those from before a resume. None where nothing was reported."""

    num_ticks: int
    wall_s: float
    """Sum of ``time/step_s``: the time that the run was up."""
    first_accuracy: float | None = None
    last_accuracy: float | None = None
    is_graded: bool = False
    """Whether held-out rewards took other values than 0 and 1."""
    first_eval_reward: float | None = None
    last_eval_reward: float | None = None
    first_reward: float | None = None
    last_reward: float | None = None
    tokens_generated: int = 0
    tokens_trained: int | None = None
    had_gradient: bool | None = None
    """Whether any update had a gradient other than 0."""
    staleness_mean: float | None = None
    staleness_max: int | None = None
    num_failed: int = 0
    failures: tuple[str, ...] = ()
    """The commonest causes of those failures, with counts, as far as this process saw them."""
    num_skipped: int = 0
    idle: Mapping[str, float] = field(default_factory=dict)
    """Executor -> share of the run in which it did nothing."""
    stopped: str = ""
    """By what the run was stopped before its last tick ("by the user"); empty where it was not."""
    places: Mapping[str, str] = field(default_factory=dict)
    """What lies where: label -> path, for the last lines of the console."""

    @property
    def trained_nothing(self) -> bool:
        """Whether rows were made and no token of any of them trained."""
        return self.tokens_trained == 0


class SummaryBuilder:
    """Adds rows up."""

    def __init__(self) -> None:
        self._num_ticks = 0
        self._sums: dict[str, float] = {}
        self._firsts: dict[str, float] = {}
        self._lasts: dict[str, float] = {}
        self._staleness_max: int | None = None
        self._had_gradient: bool | None = None
        self._is_graded = False

    def add(self, row: Mapping[str, Any]) -> None:
        """Count one row."""
        self._num_ticks += 1
        known = {key: value for key, value in row.items() if value is not None}
        if "grad_norm" in row:  # one that is not finite is null
            self._had_gradient = bool(self._had_gradient) or row["grad_norm"] != 0
        self._is_graded |= is_graded(row)
        if (
            known.get("eval/failed") and "eval/accuracy" not in known
        ):  # an evaluation of nothing but failures is the last one
            self._lasts.pop("eval/accuracy", None)
            self._lasts.pop("eval/reward_mean", None)
        for key in ("eval/accuracy", "eval/reward_mean", "reward/mean"):
            if key in known:
                self._firsts.setdefault(key, known[key])
                self._lasts[key] = known[key]
        weight = {"idle": known.get("time/step_s", 0.0), "staleness": known.get("tokens/trained", 1)}
        for key, value in known.items():
            share = weight["idle"] if key.startswith("idle/") else 1.0
            share = weight["staleness"] if key == "staleness/mean" else share
            self._sums[key] = self._sums.get(key, 0.0) + share * value
        for name, amount in weight.items():
            self._sums[f"weight {name}"] = self._sums.get(f"weight {name}", 0.0) + amount
        if "staleness/max" in known:
            self._staleness_max = max(self._staleness_max or 0, int(known["staleness/max"]))

    def build(
        self, *, stopped: str = "", failures: Sequence[str] = (), places: Mapping[str, str] | None = None
    ) -> RunSummary:
        """The totals so far."""
        idle_weight = self._sums.get("weight idle", 0.0)
        idle = {
            key.removeprefix("idle/"): self._sums[key] / idle_weight
            for key in self._sums
            if key.startswith("idle/") and idle_weight > 0
        }
        staleness_weight = self._sums.get("weight staleness", 0.0)
        has_staleness = "staleness/mean" in self._sums and staleness_weight > 0
        return RunSummary(
            num_ticks=self._num_ticks,
            wall_s=self._sums.get("time/step_s", 0.0),
            first_accuracy=self._firsts.get("eval/accuracy"),
            last_accuracy=self._lasts.get("eval/accuracy"),
            is_graded=self._is_graded,
            first_eval_reward=self._firsts.get("eval/reward_mean"),
            last_eval_reward=self._lasts.get("eval/reward_mean"),
            first_reward=self._firsts.get("reward/mean"),
            last_reward=self._lasts.get("reward/mean"),
            tokens_generated=round(self._sums.get("tokens/generated", 0.0)),
            tokens_trained=round(self._sums["tokens/trained"]) if "tokens/trained" in self._sums else None,
            had_gradient=self._had_gradient,
            staleness_mean=self._sums["staleness/mean"] / staleness_weight if has_staleness else None,
            staleness_max=self._staleness_max,
            num_failed=round(self._sums.get("reward/failed", 0.0)),
            failures=tuple(failures),
            num_skipped=round(self._sums.get("step/skipped", 0.0)),
            idle=idle,
            stopped=stopped,
            places=dict(places or {}),
        )
