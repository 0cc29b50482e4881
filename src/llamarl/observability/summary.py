"""What a run amounts to, added up row by row: the last thing that the console prints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["RunSummary", "SummaryBuilder"]


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """Totals over all rows of a run, also those from before a resume. None where nothing was reported."""

    num_ticks: int
    wall_s: float
    """Sum of ``time/step_s``: the time that the run was up."""
    first_accuracy: float | None = None
    last_accuracy: float | None = None
    first_reward: float | None = None
    last_reward: float | None = None
    tokens_generated: int = 0
    tokens_trained: int = 0
    staleness_mean: float | None = None
    staleness_max: int | None = None
    num_failed: int = 0
    num_skipped: int = 0
    idle: Mapping[str, float] = field(default_factory=dict)
    """Executor -> share of the run in which it did nothing."""
    stopped: str = ""
    """Why the run ended before its last tick; empty where it did not."""
    places: Mapping[str, str] = field(default_factory=dict)
    """What lies where: label -> path, for the last lines of the console."""


class SummaryBuilder:
    """Adds rows up."""

    def __init__(self) -> None:
        self._num_ticks = 0
        self._sums: dict[str, float] = {}
        self._firsts: dict[str, float] = {}
        self._lasts: dict[str, float] = {}
        self._staleness_max: int | None = None

    def add(self, row: Mapping[str, Any]) -> None:
        """Count one row."""
        self._num_ticks += 1
        known = {key: value for key, value in row.items() if value is not None}
        for key in ("eval/accuracy", "reward/mean"):
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

    def build(self, *, stopped: str = "", places: Mapping[str, str] | None = None) -> RunSummary:
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
            first_reward=self._firsts.get("reward/mean"),
            last_reward=self._lasts.get("reward/mean"),
            tokens_generated=round(self._sums.get("tokens/generated", 0.0)),
            tokens_trained=round(self._sums.get("tokens/trained", 0.0)),
            staleness_mean=self._sums["staleness/mean"] / staleness_weight if has_staleness else None,
            staleness_max=self._staleness_max,
            num_failed=round(self._sums.get("reward/failed", 0.0)),
            num_skipped=round(self._sums.get("step/skipped", 0.0)),
            idle=idle,
            stopped=stopped,
            places=dict(places or {}),
        )
