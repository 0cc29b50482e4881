"""The prompts of a recipe, and the executor that gives what is there already in place of a generator
and its judges: rows of demonstrations, or samples that an earlier run has recorded.

Demonstrations, in: nothing; out: ``scored``, the rows of the tick, and at ticks that are evaluated the held-out
ones behind them, which the trainer knows by their numbers (from ``EVAL_INDEX_OFFSET`` on): of these
it measures the loss. Row i of the run is a pure function of data and seed, so nothing is carried
from tick to tick.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from llamarl.config import RunConfig
from llamarl.data.chat import Tokenizer
from llamarl.data.demonstrations import DemonstrationStream
from llamarl.data.mixture import MixedStream
from llamarl.data.prompts import PromptStream
from llamarl.environments.config import TaskConfig
from llamarl.environments.episode_pool import Environments, EpisodeOpener
from llamarl.environments.factory import make_task
from llamarl.errors import ConfigError
from llamarl.executors.base import BaseExecutor, Stateless, StepResult
from llamarl.executors.recorded import RecordedStream
from llamarl.models.folders import resolve_model_path
from llamarl.models.loading import context_length, load_tokenizer
from llamarl.reading import user_path
from llamarl.types import Group

__all__ = ["DemonstrationsExecutor", "make_demonstrations", "make_prompt_stream", "num_training_rows"]


def make_prompt_stream(
    config: RunConfig, tokenizer: Tokenizer, environments: Environments | None = None
) -> PromptStream | MixedStream:
    """The same stream wherever it is made: every executor that reads prompts makes its own.

    Args:
        environments: Where the recipe's environments live; None only where it has none.

    Raises:
        ConfigError: The longest response leaves no room for a prompt.
        DataError: The task cannot be made.
    """
    context, longest = context_length(config.model.path), config.generator.sampling.max_new_tokens
    if context is not None and context <= longest:
        raise ConfigError(
            f"generator.sampling.max_new_tokens = {longest} leaves no room for a prompt in the context of "
            f"{config.model.path} ({context} tokens): lower it"
        )
    seed, room = config.run.seed, None if context is None else context - longest

    def stream_of(task: TaskConfig, label: str = "") -> PromptStream:
        opener = None
        if task.environment:
            assert environments is not None, "a recipe with an environment needs a pool of them"
            opener = EpisodeOpener(environments, task, label)
        return PromptStream(make_task(task, seed), tokenizer, config.data, seed=seed, room=room, opener=opener)

    if not config.task.mixture:
        return stream_of(config.task)
    streams = {label: stream_of(task, label) for label, task in config.task.tasks.items()}
    return MixedStream(streams, {task.title: task.weight for task in config.task.mixture}, seed)


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
    tokenizer = load_tokenizer(resolve_model_path(config.model.path), trust_remote_code=config.model.trust_remote_code)
    return make_demonstrations(config, tokenizer).num_items("train")


class DemonstrationsExecutor(Stateless, BaseExecutor):
    """Hands ``schedule.prompts_per_step`` rows to each tick."""

    def setup(self) -> None:
        model = self.config.model
        tokenizer = load_tokenizer(model.path, trust_remote_code=model.trust_remote_code)
        self._rows = make_demonstrations(self.config, tokenizer)
        self._held_out: list[Group] = []
        if self.config.evaluation.every and self.config.algorithm.imitates:
            self._held_out = self._rows.held_out(self.config.evaluation.num_prompts)

    def step(self, tick: int, inputs: Mapping[str, Any]) -> StepResult:
        started = time.monotonic()
        count, num_ticks = self.config.schedule.prompts_per_step, self.config.run.num_ticks
        groups = [self._rows.demonstration(tick * count + i) for i in range(count)]
        due = tick == 0 or self.config.evaluation.is_due(tick + 1, num_ticks)
        return StepResult(
            outputs=self.outputs_of(groups + (self._held_out if due else [])),
            metrics={"groups/generated": float(len(groups))},
            spans=(("read rows", started, time.monotonic()),),
        )
