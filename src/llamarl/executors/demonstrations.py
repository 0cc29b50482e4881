"""The executor that gives what is there already in place of a generator and its judges: rows of
demonstrations, or samples that an earlier run has recorded.

Demonstrations, in: nothing; out: ``scored``, the rows of the tick, and at ticks that are evaluated the held-out
ones behind them, which the trainer knows by their numbers (from ``EVAL_INDEX_OFFSET`` on): of these
it measures the loss. Row i of the run is a pure function of data and seed, so nothing is carried
from tick to tick.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llamarl.config import RunConfig
from llamarl.data.demonstrations import DemonstrationStream
from llamarl.data.prompts import Tokenizer
from llamarl.environments.factory import make_task
from llamarl.errors import ConfigError
from llamarl.executors.base import BaseExecutor, Stateless, StepResult
from llamarl.executors.recorded import RecordedStream, numbered
from llamarl.models.folders import resolve_model_path
from llamarl.models.loading import context_length, load_tokenizer
from llamarl.reading import user_path
from llamarl.roles import ROLES
from llamarl.types import Group, Score

__all__ = ["DemonstrationsExecutor", "make_demonstrations", "num_training_rows"]


def make_demonstrations(config: RunConfig, tokenizer: Tokenizer) -> DemonstrationStream | RecordedStream:
    """Open the recipe's rows, or the rollouts that it names.

    Raises:
        DataError: They cannot be read.
    """
    if config.task.rollouts:
        return RecordedStream(
            str(user_path(config.task.rollouts, "task.rollouts")),
            tokenizer,
            seed=config.run.seed,
            imitate=config.algorithm.imitates,
            least_reward=config.task.least_reward,
            eval_fraction=config.task.eval_fraction,
            shuffle=config.data.shuffle,
            room=context_length(config.model.path),
        )
    task = make_task(config.task, config.run.seed)
    return DemonstrationStream(task, tokenizer, config.data, config.run.seed, room=context_length(config.model.path))


def num_training_rows(config: RunConfig) -> int | None:
    """Rows, or recorded groups, that one pass over them takes."""
    if not config.task.rollouts:
        return make_task(config.task, config.run.seed).num_items("train")
    code = config.model.trust_remote_code
    folder = resolve_model_path(config.model.path, weights=False, code=code)  # it may be for a dry-run
    config = replace(config, model=replace(config.model, path=str(folder)))
    return make_demonstrations(config, load_tokenizer(folder, trust_remote_code=code)).num_items("train")


class DemonstrationsExecutor(Stateless, BaseExecutor):
    """Hands ``schedule.prompts_per_step`` rows to each tick.

    A second time, as an executor of the user's own, it gives rows beside what a generator samples: nothing is held
    out, each rank gives its part, and ``options.weight`` is what a row's loss is multiplied by.
    """

    def setup(self) -> None:
        model = self.config.model
        tokenizer = load_tokenizer(model.path, trust_remote_code=model.trust_remote_code)
        self._rows = make_demonstrations(self.config, tokenizer)
        self._held_out: list[Group] = []
        self._beside = self.name not in ROLES
        self._weight = self.context.options.get("weight", 1.0)
        if not isinstance(self._weight, (int, float)) or not 0 <= self._weight < math.inf:
            raise ConfigError(f"executors.{self.name}.options: weight must be a number >= 0, got {self._weight!r}")
        if self.config.evaluation.every and self.config.algorithm.imitates and not self._beside:
            self._held_out = self._rows.held_out(self.config.evaluation.num_prompts)

    def step(self, tick: int, inputs: Mapping[str, Any]) -> StepResult:
        started = time.monotonic()
        count, num_ticks = self.config.schedule.prompts_per_step, self.config.run.num_ticks
        own = range(self.context.rank, count, self.context.num_ranks)
        groups = [self._row(tick * count + i) for i in own]
        if self._beside:
            sampled = sum(response.num_sampled for group in groups for response in group.responses)
            metrics = self.own_keys({"groups/generated": float(len(groups)), "tokens/imitated": float(sampled)})
            return StepResult(outputs=self.outputs_of(groups), metrics=metrics)
        due = tick == 0 or self.config.evaluation.is_due(tick + 1, num_ticks)
        return StepResult(
            outputs=self.outputs_of(groups + (self._held_out if due else [])),
            metrics={"groups/generated": float(len(groups))},
            spans=(("read rows", started, time.monotonic()),),
        )

    def _row(self, index: int) -> Group:
        """Row ``index``; beside samples under a number of its own, with its weight as its outcome."""
        group = self._rows.demonstration(index)
        if not self._beside:
            return group
        group = numbered(group, self.first_prompt + index)
        if not self.config.algorithm.imitates:
            return group
        weight = Score(value=float(self._weight))
        return replace(group, responses=tuple(replace(response, outcome=weight) for response in group.responses))
