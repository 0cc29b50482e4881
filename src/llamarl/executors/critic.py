"""The critic executor: values of every token that trains, by a model that learns from the same samples.

In: ``scored`` or ``referenced``; out: ``valued``. At tick k it values batch k with its weights after k ticks, then updates
them on that batch. So the values that the trainer uses at tick k come from critic version k, made of batches 0 .. k - 1:
fixed by the schedule, whatever the speeds, and never learned from the returns that they help to judge.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from llamarl.checkpoint.storage import saving
from llamarl.config import RunConfig
from llamarl.executors.base import ExecutorContext, StepResult
from llamarl.executors.sample_path import sample_channel_from, sample_channel_into
from llamarl.trainer.critic import Critic
from llamarl.trainer.sharded_state import in_background

__all__ = ["CriticExecutor"]


class CriticExecutor:
    """Owns the value model. Its own weights never leave it but in checkpoints and, at the end, in ``RUN/critic``."""

    def __init__(self, config: RunConfig, context: ExecutorContext) -> None:
        self.name = context.name
        self.config = config
        self.context = context

    def setup(self) -> None:
        self.critic = Critic(
            self.config.critic.path or self.config.model.path,
            self.config.critic,
            self.config.algorithm,
            device=self.context.device,
            num_ticks=self.config.run.num_ticks,
        )

    def initial_token(self, channel: str, source_tick: int) -> Any:
        raise ValueError(f"channel {channel!r} leaves the critic with a delay; only the weights edge may have one")

    def step(self, tick: int, inputs: Mapping[str, Any]) -> StepResult:
        started = time.monotonic()
        groups, metrics = self.critic.step(inputs[sample_channel_into(self.config, "critic")], tick)
        finished = time.monotonic()
        if tick == self.config.run.num_ticks - 1 and self.context.run_dir is not None:
            self._export(self.context.run_dir / "critic")
        first_peer = self.critic.layout.tp_rank == 0  # tensor-parallel peers hold the same groups: one of them sends
        return StepResult(
            outputs={sample_channel_from("critic"): groups if first_peer else []},
            metrics=metrics,
            spans=(("critic", started, finished),),
        )

    def _export(self, folder: Path) -> None:
        """A Hugging Face folder; the old one, if any, stays until the new one is whole."""
        partial = folder.with_name(folder.name + ".partial")
        if self.context.rank == 0:  # who writes also tidies
            shutil.rmtree(partial, ignore_errors=True)
        with saving(partial):
            self.critic.export(partial)
            if self.context.rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
                os.replace(partial, folder)

    def save(self, folder: Path, tick: int) -> Future[None]:
        """All ranks write into one folder beside their own, on a thread unless ``checkpoint.background`` is off."""
        background = self.config.checkpoint.background
        state = self.critic.stage(copy=background)
        writing = in_background(lambda: self.critic.write(state, folder.parent / "state"))
        if not background:
            writing.result()
        return writing

    def load(self, folder: Path, tick: int) -> None:
        self.critic.load(folder.parent / "state")
        assert self.critic.ticks_done == tick + 1, f"{folder}: {self.critic.ticks_done} ticks done, tick {tick}"

    def close(self) -> None:
        self.__dict__.pop("critic", None)
