"""A filter between reward and trainer: groups with a response over a limit of tokens do not train.

    generator ── completions ──▶ reward ── scored ──▶ short ── kept ──▶ trainer

Run: llamarl train examples/executors/filter.toml
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llamarl.executors.base import BaseExecutor, StepResult
from llamarl.observability.ledger import scored_tokens
from llamarl.types import Group

__all__ = ["DropLong"]


class DropLong(BaseExecutor):
    """Drops groups whose longest response has more tokens than its option ``max_tokens``."""

    def step(self, tick: int, inputs: Mapping[str, Any]) -> StepResult:
        groups: list[Group] = self.items_of(inputs)
        limit = self.context.options["max_tokens"]
        kept = [group for group in groups if _longest(group) <= limit]
        dropped = [group for group in groups if _longest(group) > limit]
        metrics = {
            "groups/too_long": len(dropped),
            "tokens/dropped": scored_tokens(dropped),
        }  # the run's books must close
        return StepResult(outputs=self.outputs_of(kept), metrics=metrics)


def _longest(group: Group) -> int:
    return max(len(response.tokens) for response in group.responses)
