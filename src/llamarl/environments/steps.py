"""The bundled model's task: add a list of digits, one written step a line.

    question     3+9+4=
    response     3+9=12
                 12+4=16
                 #16

Only what follows the last ``#`` is judged. A list of k digits takes k - 1 lines, so response lengths spread over a factor
of five and more within one batch, as they do with real reasoning.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from llamarl.data.items import Split, TaskItem
from llamarl.environments.procedural import draw_item
from llamarl.errors import DataError
from llamarl.types import Prompt, Score

__all__ = ["StepsTask", "written_steps"]


def written_steps(digits: Sequence[int]) -> str:
    """The full, right response for a list of digits."""
    totals = list(accumulate(digits))
    lines = [f"{before}+{digit}={after}" for before, digit, after in zip(totals, digits[1:], totals[1:], strict=False)]
    return "\n".join([*lines, f"#{totals[-1]}"])


class StepsTask:
    """Sums of ``min_terms`` to ``max_terms`` digits. Score: 1 for the right sum after the last ``#``, else 0."""

    name = "steps"

    def __init__(self, options: Mapping[str, Any], *, seed: int, eval_fraction: float) -> None:
        unknown = set(options) - {"min_terms", "max_terms"}
        if unknown:
            raise DataError(f"task.options: steps has no option {sorted(unknown)}; it has min_terms, max_terms")
        self._min_terms = int(options.get("min_terms", 2))
        self._max_terms = int(options.get("max_terms", 10))
        if not 2 <= self._min_terms <= self._max_terms:
            raise DataError(
                f"task.options: need 2 <= min_terms <= max_terms, got {self._min_terms} and {self._max_terms}"
            )
        self._seed = seed
        self._eval_fraction = eval_fraction

    def num_items(self, split: Split) -> int | None:
        return None

    def item(self, split: Split, index: int) -> TaskItem:
        return draw_item(self._make, split, index, seed=self._seed, eval_fraction=self._eval_fraction, name=self.name)

    def _make(self, number: int) -> tuple[str, TaskItem]:
        rng = random.Random(number)
        digits = [rng.randrange(10) for _ in range(rng.randint(self._min_terms, self._max_terms))]
        question = "+".join(map(str, digits)) + "=\n"
        return question, TaskItem(question=question, answer=str(sum(digits)))

    def respond(self, prompt: Prompt, turns: Sequence[str]) -> Score:
        before, mark, given = turns[-1].rpartition("#")
        correct = mark == "#" and given.strip() == prompt.answer
        steps = float(before.count("\n"))
        return Score(value=float(correct), parts={"correct": float(correct), "steps": steps})
