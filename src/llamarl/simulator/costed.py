"""Reward and trainer that only take time: what they carry is counts of tokens and versions.

weights (version) ─▶ CostedGenerator ─▶ Batch ─▶ CostedReward ─▶ Batch ─▶ CostedTrainer ─▶ version + 1
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from llamarl.executors.base import ExecutorContext
from llamarl.simulator.costed_generator import Batch
from llamarl.simulator.scenario import Scenario
from llamarl.simulator.tick_costs import jitter
from llamarl.simulator.virtual_clock import TimedStep

__all__ = ["STALENESS_METRIC", "CostedReward", "CostedTrainer"]

STALENESS_METRIC = "staleness_tokens/"
"""Metric prefix: trained tokens of each staleness."""

_REWARD, _TRAINER = 4, 5  # streams of random numbers


class CostedReward:
    """Judges a batch."""

    def __init__(self, scenario: Scenario, context: ExecutorContext) -> None:
        self.scenario = scenario

    def initial_token(self, channel: str, source_tick: int) -> Any:
        raise ValueError(f"channel {channel!r} leaves the reward executor with a delay; only weights may have one")

    def step(self, tick: int, inputs: Mapping[str, Any]) -> TimedStep:
        batch: Batch = inputs["completions"]
        rng = np.random.default_rng([self.scenario.seed, _REWARD, tick])
        duration = self.scenario.reward.batch_s(batch.sequences, rng)
        ahead_s = tuple(duration * tokens / batch.tokens for tokens in batch.parts)
        return TimedStep(
            duration_s=duration, outputs={"scored": batch}, spans=(("score", 0.0, duration),), ahead_s=ahead_s
        )

    def save(self) -> Any:
        return None

    def load(self, state: Any) -> None:
        pass


class CostedTrainer:
    """Owns the policy's version: v after v ticks."""

    def __init__(self, scenario: Scenario, context: ExecutorContext) -> None:
        self.scenario = scenario
        self._version = 0

    def initial_token(self, channel: str, source_tick: int) -> Any:
        return max(0, source_tick + 1)

    def step(self, tick: int, inputs: Mapping[str, Any]) -> TimedStep:
        s = self.scenario
        batch: Batch = inputs["scored"]
        rng = np.random.default_rng([s.seed, _TRAINER, tick])
        factor = float(jitter(s.variation.trainer_jitter, 1, rng)[0])
        duration = s.trainer.batch_s(batch.tokens) * factor
        staleness = {self._version - version: tokens for version, tokens in batch.tokens_of_version.items()}
        self._version += 1
        metrics = {f"{STALENESS_METRIC}{lag}": float(tokens) for lag, tokens in sorted(staleness.items())}
        metrics["tokens/trained"] = float(sum(staleness.values()))
        return TimedStep(
            duration_s=duration,
            outputs={"weights": self._version},
            metrics=metrics,
            spans=(("train", 0.0, duration),),
            ahead_s=tuple(s.trainer.token_s * tokens * factor for tokens in batch.parts),
        )

    def save(self) -> Any:
        return self._version

    def load(self, state: Any) -> None:
        self._version = state
