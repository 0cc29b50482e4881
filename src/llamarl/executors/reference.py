"""The reference executor: a frozen model's log-prob beside every token that trains.

In: judged samples; out: the same, scored. The model is ``reference.path``, or the policy's version
0, which never changes: so it holds no state, and what it writes is a function of the samples alone.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from llamarl.executors.base import BaseExecutor, Stateless, StepResult
from llamarl.trainer.scoring import FrozenScorer

__all__ = ["ReferenceExecutor"]


class ReferenceExecutor(Stateless, BaseExecutor):
    """Scores groups; stateless between ticks, so a checkpoint of it is an empty folder."""

    def setup(self) -> None:
        self.scorer = FrozenScorer(
            self.config.reference.path or self.config.model.path,
            self.config.reference,
            self.config.algorithm,
            self.config.trainer,
            temperature=self.config.generator.sampling.temperature,
            device=self.context.device,
        )

    def step(self, tick: int, inputs: Mapping[str, Any]) -> StepResult:
        started = time.monotonic()
        groups = self.scorer.score(self.items_of(inputs))
        layout = self.scorer.layout  # tensor-parallel peers and stages hold the same groups: one of them sends
        return StepResult(
            outputs=self.outputs_of(groups if layout.is_data_leader else []),
            spans=(("reference", started, time.monotonic()),),
        )

    def close(self) -> None:
        self.__dict__.pop("scorer", None)
