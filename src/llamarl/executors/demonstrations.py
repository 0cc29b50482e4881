"""The demonstrations executor: rows of the data in place of a generator and its judges.

In: nothing; out: ``scored``, the rows of the tick, and at ticks that are evaluated the held-out
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
from llamarl.environments.factory import make_task
from llamarl.executors.base import BaseExecutor, Stateless, StepResult
from llamarl.models.loading import context_length, load_tokenizer
from llamarl.types import Group

__all__ = ["DemonstrationsExecutor", "make_demonstrations"]


def make_demonstrations(config: RunConfig, tokenizer: Tokenizer) -> DemonstrationStream:
    """Open the recipe's rows.

    Raises:
        DataError: The table cannot be read.
    """
    task = make_task(config.task, config.run.seed)
    return DemonstrationStream(task, tokenizer, config.data, config.run.seed, room=context_length(config.model.path))


class DemonstrationsExecutor(Stateless, BaseExecutor):
    """Hands ``schedule.prompts_per_step`` rows to each tick."""

    def setup(self) -> None:
        model = self.config.model
        tokenizer = load_tokenizer(model.path, trust_remote_code=model.trust_remote_code)
        self._rows = make_demonstrations(self.config, tokenizer)
        self._held_out: list[Group] = []
        if self.config.evaluation.every:
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
