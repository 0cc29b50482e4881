"""A generator and a trainer that do their work and then wait, so that a tick lasts as long as the environment says: what is measured
around them does not hang on how busy the machine is. Seconds of decoding in COSTED_GENERATOR_S, of a trainer's tick in
COSTED_TRAINER_S."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from llamarl.executors.base import StepResult
from llamarl.executors.generator import GeneratorExecutor
from llamarl.executors.generator_shard import GeneratorShard
from llamarl.executors.trainer import TrainerExecutor

__all__ = ["CostedGenerator", "CostedTrainer"]


def _wait_since(started: float, name: str) -> None:
    time.sleep(max(0.0, started + float(os.environ[name]) - time.monotonic()))


class CostedGenerator(GeneratorExecutor):
    """Its tick is the hand-over and COSTED_GENERATOR_S."""

    def _decode(self, shard: GeneratorShard, tick: int, weights: Any) -> Any:
        started = time.monotonic()
        delivered = super()._decode(shard, tick, weights)
        _wait_since(started, "COSTED_GENERATOR_S")
        return delivered


class CostedTrainer(TrainerExecutor):
    """Its tick is reading the batch and COSTED_TRAINER_S."""

    def step(self, tick: int, inputs: Mapping[str, Any]) -> StepResult:
        started = time.monotonic()
        result = super().step(tick, inputs)
        _wait_since(started, "COSTED_TRAINER_S")
        return result
