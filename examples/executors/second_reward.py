"""A second reward beside the first, at the same time, and an executor that adds the two.

                 ┌── completions ──▶ reward ── scored ──┐
    generator ───┤                                      ├──▶ sum ── summed ──▶ trainer
                 └── to_measure ──▶ brevity ── brief ───┘

Run: llamarl train examples/executors/second_reward.toml
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from llamarl.executors.base import BaseExecutor, StepResult
from llamarl.observability.ledger import failed_tokens
from llamarl.types import Group, Response, Score

__all__ = ["Brevity", "WeightedSum"]


class Brevity(BaseExecutor):
    """Rewards short responses: 1 for none, 0 for option ``max_tokens`` and above."""

    def step(self, tick: int, inputs: Mapping[str, Any]) -> StepResult:
        return StepResult(outputs=self.outputs_of([self._judged(group) for group in self.items_of(inputs)]))

    def _judged(self, group: Group) -> Group:
        limit = self.context.options["max_tokens"]
        scores = [max(0.0, 1 - len(response.tokens) / limit) for response in group.responses]
        responses = zip(group.responses, scores, strict=True)
        judged = tuple(dataclasses.replace(response, outcome=Score(value=score)) for response, score in responses)
        return dataclasses.replace(group, responses=judged)


class WeightedSum(BaseExecutor):
    """Reads two judgements of the same groups; a reward becomes first + option ``weight`` * second.

    A sample that one of them failed stays failed.
    """

    def step(self, tick: int, inputs: Mapping[str, Any]) -> StepResult:
        first, second = (inputs[channel.name] for channel in self.context.reads)  # in the order of the recipe's reads
        others = {group.prompt.index: group for group in second}
        groups = [self._sum(group, others[group.prompt.index]) for group in first]
        values = [r.outcome.value for group in groups for r in group.responses if isinstance(r.outcome, Score)]
        mean = sum(values) / len(values) if values else float("nan")
        failed = failed_tokens(groups) - failed_tokens(first)  # by the second alone; of the others the first has told
        metrics = {"reward/with_brevity": mean, "tokens/failed": failed}
        return StepResult(outputs=self.outputs_of(groups), metrics=metrics)

    def _sum(self, group: Group, other: Group) -> Group:
        pairs = zip(group.responses, other.responses, strict=True)
        return dataclasses.replace(group, responses=tuple(self._add(one, two) for one, two in pairs))

    def _add(self, one: Response, two: Response) -> Response:
        if not isinstance(one.outcome, Score) or not isinstance(two.outcome, Score):
            return one if not isinstance(one.outcome, Score) else two
        total = one.outcome.value + self.context.options["weight"] * two.outcome.value
        parts = {**one.outcome.parts, "brevity": two.outcome.value}
        return dataclasses.replace(one, outcome=Score(value=total, parts=parts))
