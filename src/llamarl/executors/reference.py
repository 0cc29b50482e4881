"""The reference executor: a frozen model's log-prob beside every token that trains.

In: ``scored``; out: ``referenced``. The model is ``reference.path``, or the policy's version 0, which never changes: so it
holds no state, and what it writes is a function of the samples alone.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llamarl.config import RunConfig
from llamarl.executors.base import ExecutorContext, StepResult
from llamarl.executors.sample_path import sample_channel_from, sample_channel_into
from llamarl.trainer.scoring import FrozenScorer

__all__ = ["ReferenceExecutor"]


class ReferenceExecutor:
    """Scores groups; stateless between ticks, so a checkpoint of it is an empty folder."""

    def __init__(self, config: RunConfig, context: ExecutorContext) -> None:
        self.name = context.name
        self.config = config
        self.context = context

    def setup(self) -> None:
        self.scorer = FrozenScorer(
            self.config.reference.path or self.config.model.path,
            self.config.reference,
            self.config.algorithm,
            temperature=self.config.generator.sampling.temperature,
            device=self.context.device,
        )

    def initial_token(self, channel: str, source_tick: int) -> Any:
        raise ValueError(
            f"channel {channel!r} leaves the reference executor with a delay; only the weights edge may have one"
        )

    def step(self, tick: int, inputs: Mapping[str, Any]) -> StepResult:
        started = time.monotonic()
        groups = self.scorer.score(inputs[sample_channel_into(self.config, "reference")])
        first_peer = self.scorer.layout.tp_rank == 0  # tensor-parallel peers hold the same groups: one of them sends
        return StepResult(
            outputs={sample_channel_from("reference"): groups if first_peer else []},
            spans=(("reference", started, time.monotonic()),),
        )

    def save(self, folder: Path, tick: int) -> None:
        pass  # log-probs are a function of the samples

    def load(self, folder: Path, tick: int) -> None:
        pass

    def close(self) -> None:
        self.__dict__.pop("scorer", None)
