"""The critic executor: values of every token that trains, by a model that learns from the same samples.

In: judged samples; out: the same, valued. At tick k it values batch k with its weights after k ticks, then updates
them on that batch. So the values that the trainer uses at tick k come from critic version k, made
of batches 0 .. k - 1: fixed by the schedule, whatever the speeds, and never learned from the
returns that they help to judge.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from llamarl.checkpoint.run_identity import RunIdentity
from llamarl.executors.base import BaseExecutor, StepResult
from llamarl.observability.keys import own_metrics
from llamarl.trainer.critic import Critic
from llamarl.trainer.sharded_state import in_background

__all__ = ["CriticExecutor"]


class CriticExecutor(BaseExecutor):
    """Owns the value model. Its own weights never leave it but in checkpoints and, at the end, in ``RUN/critic``."""

    def setup(self) -> None:
        if self.context.run_dir is not None:
            self._folder = RunIdentity.of(self.context.run_dir)
        self.critic = Critic(
            self.config.critic.path or self.config.model.path,
            self.config.critic,
            self.config.algorithm,
            self.config.trainer,
            self.config.optimizer,
            device=self.context.device,
            num_ticks=self.config.run.num_ticks,
        )

    def step(self, tick: int, inputs: Mapping[str, Any]) -> StepResult:
        started = time.monotonic()
        groups, metrics = self.critic.step(self.items_of(inputs), tick)
        finished = time.monotonic()
        files: tuple[Path, ...] = ()
        if tick == self.config.run.num_ticks - 1 and self.context.run_dir is not None:
            files = self._folder.replace_folder("critic", self.critic.export, writes=self.context.rank == 0)
        layout = self.critic.layout  # tensor-parallel peers and stages hold the same groups: one of them sends
        return StepResult(
            outputs=self.outputs_of(groups if layout.is_data_leader else []),
            metrics=own_metrics(metrics) if self.context.rank else metrics,  # they are over all ranks already
            spans=(("critic", started, finished),),
            files=files,
        )

    def save(self, folder: Path, tick: int) -> Future[tuple[Path, ...]]:
        """All ranks write into one folder beside their own, on a thread."""
        state = self.critic.stage(copy=True)
        return in_background(lambda: self.critic.write(state, folder.parent / "state"))

    def load(self, folder: Path, tick: int) -> None:
        self.critic.load(folder.parent / "state")
        assert self.critic.ticks_done == tick + 1, f"{folder}: {self.critic.ticks_done} ticks done, tick {tick}"

    def close(self) -> None:
        self.__dict__.pop("critic", None)
