"""The reward executor: judges every response in a pool of worker processes, and keeps the run's rollouts.

In: ``completions``; out: ``scored``. A response without a verdict is *failed*, never scored zero. With dynamic sampling,
``scored`` holds the groups chosen for the tick; rollouts and ``reward/*`` still cover every judged one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llamarl.config import RunConfig
from llamarl.environments.pool import RewardPool
from llamarl.executors.base import ExecutorContext, StepResult
from llamarl.executors.dynamic_sampling import DynamicSampler
from llamarl.observability.rollouts import RolloutWriter
from llamarl.types import Failure, Group, Score

__all__ = ["JUDGING_SHARE", "RewardExecutor", "reward_metrics"]

JUDGING_SHARE = 0.9
"""Of ``deadlines.step_s``, what judging may take; the samples that are left then are failed, and the run goes on."""


class RewardExecutor:
    """Scores groups. Its only state between ticks are the spare groups of dynamic sampling, if that is on."""

    def __init__(self, config: RunConfig, context: ExecutorContext) -> None:
        self.name = context.name
        self.config = config
        self.context = context
        self._writer: RolloutWriter | None = None
        self._sampler: DynamicSampler | None = None
        if config.dynamic_sampling.enabled:
            self._sampler = DynamicSampler(
                config.algorithm,
                num_wanted=config.schedule.prompts_per_step,
                max_staleness=config.token_staleness_bound,
            )

    def setup(self) -> None:
        self.pool = RewardPool(self.config.task, seed=self.config.run.seed)
        if self.context.run_dir is not None:
            self._writer = RolloutWriter(self.context.run_dir / "rollouts")

    def initial_token(self, channel: str, source_tick: int) -> Any:
        raise ValueError(
            f"channel {channel!r} leaves the reward executor with a delay; only the weights edge may have one"
        )

    def step(self, tick: int, inputs: Mapping[str, Any]) -> StepResult:
        started = time.monotonic()
        limit_s = JUDGING_SHARE * self.config.deadlines.step_s
        groups = self.pool.score(inputs["completions"], limit_s=limit_s)
        scored = time.monotonic()
        if self._writer is not None and self.config.observability.rollouts_due(tick):
            self._writer.write(tick, groups)
        spans = (("score", started, scored), ("write_rollouts", scored, time.monotonic()))
        metrics = reward_metrics(groups)
        if self._sampler is not None:
            groups, counts = self._sampler.select(groups, tick)
            metrics |= counts
        return StepResult(outputs={"scored": groups}, metrics=metrics, spans=spans)

    def save(self, folder: Path, tick: int) -> None:
        if self._sampler is not None:  # every verdict is a function of its response: there is no other state
            self._sampler.save(folder)

    def load(self, folder: Path, tick: int) -> None:
        if self._sampler is not None:
            self._sampler.load(folder)

    def close(self) -> None:
        if hasattr(self, "pool"):
            self.pool.close()


def reward_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """``reward/*`` and ``groups/*`` of scored groups; failed samples count as failed and nothing else.

    ``reward/parts/NAME`` is the mean of a named part over the responses that have it.
    """
    outcomes = [r.outcome for g in groups for r in g.responses]
    values = [o.value for o in outcomes if isinstance(o, Score)]
    parts: dict[str, list[float]] = {}
    for outcome in outcomes:
        for name, value in outcome.parts.items() if isinstance(outcome, Score) else ():
            parts.setdefault(name, []).append(value)
    no_signal = 0
    for group in groups:
        rewards = {r.outcome.value for r in group.responses if isinstance(r.outcome, Score)}
        no_signal += len(rewards) <= 1
    return {
        "reward/mean": float(np.mean(values)) if values else float("nan"),
        "reward/std": float(np.std(values)) if values else float("nan"),
        "reward/failed": float(sum(isinstance(o, Failure) for o in outcomes)),
        "groups/no_signal": float(no_signal),
        **{f"reward/parts/{name}": float(np.mean(values)) for name, values in sorted(parts.items())},
    }
