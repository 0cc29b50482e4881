"""The critic and the reference executor: a number beside every token that trains.

In: judged samples; out: the same, with values (critic) or a frozen model's log-probs (reference).

The critic learns from the same samples. At tick k it values batch k with its weights after k ticks, then updates
them on that batch. So the values that the trainer uses at tick k come from critic version k, made
of batches 0 .. k - 1: fixed by the schedule, whatever the speeds, and never learned from the
returns that they help to judge.

The reference model is ``reference.path``, or the policy's version
0, which never changes: so it holds no state, and what it writes is a function of the samples alone.
A policy that teaches itself (``reference.template`` without a path) comes with each tick in the
version that has written the tick's responses: no state either.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from llamarl.channels.base import ChannelKind
from llamarl.data.prompts import with_answer
from llamarl.errors import ConfigError, TrainingDiverged
from llamarl.executors.base import BaseExecutor, Stateless, StepResult
from llamarl.models.loading import load_model_config, load_tokenizer
from llamarl.observability.keys import own_metrics
from llamarl.trainer.critic import Critic
from llamarl.trainer.scoring import FrozenScorer
from llamarl.trainer.sharded_state import in_background
from llamarl.types import Group

__all__ = ["CriticExecutor", "ReferenceExecutor"]


class ReferenceExecutor(Stateless, BaseExecutor):
    """Scores groups that are trained on; stateless between ticks, so a checkpoint of it is an empty folder.

    With ``options.tasks`` it scores groups of these tasks alone and hands the others on as they are: one teacher a task.
    """

    def setup(self) -> None:
        known, asked = list(self.config.task.tasks), self.context.options.get("tasks")
        if asked is not None and (not isinstance(asked, list) or not asked or set(asked) - set(known)):
            raise ConfigError(f"executors.{self.name}.options: tasks must be some of {known} in a list, got {asked!r}")
        self._tasks = None if asked is None else frozenset(asked)
        if self.config.reference.template:
            model = self.config.model
            self._tokenizer = load_tokenizer(model.path, trust_remote_code=model.trust_remote_code)
        self._versions = next((c.name for c in self.context.reads if c.kind is ChannelKind.WEIGHTS), "")
        if self.config.teaches_itself and not self._versions:
            raise ConfigError(f"executors.{self.name}: it has no teacher: name one (settings.reference.path)")
        self.scorer = FrozenScorer(
            self.config.reference.path or self.config.model.path,
            self.config.reference,
            self.config.algorithm,
            self.config.trainer,
            temperature=self.config.trained_temperature,
            num_tokens=load_model_config(self.config.model.path).get_text_config().vocab_size,
            device=self.context.device,
        )

    def step(self, tick: int, inputs: Mapping[str, Any]) -> StepResult:
        started = time.monotonic()
        groups = self.items_of(inputs)
        if self._versions:
            inputs[self._versions].load_into(self.scorer.tensors)
        tasks, trained = self._tasks, [i for i, group in enumerate(groups) if not group.is_held_out]
        own = [i for i in trained if tasks is None or groups[i].prompt.task in tasks]
        for i, scored in zip(own, self.scorer.score([self._shown(groups[i]) for i in own]), strict=True):
            groups[i] = dataclasses.replace(groups[i], responses=scored.responses)
        layout = self.scorer.layout  # tensor-parallel peers and stages hold the same groups: one of them sends
        return StepResult(
            outputs=self.outputs_of(groups if layout.is_data_leader else []),
            spans=(("reference", started, time.monotonic()),),
        )

    def _shown(self, group: Group) -> Group:
        """As the teacher sees it."""
        if not (template := self.config.reference.template):
            return group
        prompt = with_answer(group.prompt, template, self._tokenizer, self.config.data)
        return dataclasses.replace(group, prompt=prompt)

    def close(self) -> None:
        self.__dict__.pop("scorer", None)


class CriticExecutor(BaseExecutor):
    """Owns the value model. Its own weights never leave it but in checkpoints. If it diverges, the job is asked to stop."""

    _stop = ""

    def setup(self) -> None:
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
        try:
            groups, metrics = self.critic.step(self.items_of(inputs), tick)
        except TrainingDiverged as error:
            groups, metrics = self.critic.made
            self._stop = self._stop or str(error)
        finished = time.monotonic()
        layout = self.critic.layout  # tensor-parallel peers and stages hold the same groups: one of them sends
        return StepResult(
            outputs=self.outputs_of(groups if layout.is_data_leader else []),
            metrics=own_metrics(metrics) if self.context.rank else metrics,  # they are over all ranks already
            spans=(("critic", started, finished),),
            stop=self._stop,
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
