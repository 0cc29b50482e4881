"""The bundled model's task: add up a ledger of named digits, one written step a line.

    question     a3 b9 c4 =
    response     b+9=12
                 c+4=16
                 #16

Only what follows the last ``#`` is judged. A ledger of k entries takes k - 1 lines, so response lengths spread over a
factor of five and more within one batch, as they do with real reasoning.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import accumulate
from string import ascii_lowercase
from typing import Any

from llamarl.data.items import Split, TaskItem, draw_item
from llamarl.errors import DataError
from llamarl.types import Prompt, Score

__all__ = ["StepsTask", "read_ledger", "write_ledger", "written_steps"]


def read_ledger(question: str) -> list[int]:
    """The digits of a question, in order."""
    return [int(entry[1]) for entry in question.split()[:-1]]


def write_ledger(digits: Sequence[int]) -> str:
    """The question for a list of digits."""
    return " ".join(name + str(digit) for name, digit in zip(ascii_lowercase, digits, strict=False)) + " =\n"


def written_steps(digits: Sequence[int]) -> str:
    """The full, right response for a list of digits."""
    entries = zip(ascii_lowercase, digits, accumulate(digits), strict=False)
    lines = [f"{name}+{digit}={total}" for name, digit, total in entries][1:]
    return "\n".join([*lines, f"#{sum(digits)}"])


class StepsTask:
    """Ledgers of ``min_terms`` to ``max_terms`` digits (2 to 9 unless told otherwise, 26 at most).
    Score: 1 for the right sum after the last ``#``, else 0."""

    name = "steps"

    def __init__(self, options: Mapping[str, Any], *, seed: int, eval_fraction: float) -> None:
        unknown = set(options) - {"min_terms", "max_terms"}
        if unknown:
            raise DataError.at("task.options", f": steps has no option {sorted(unknown)}; it has min_terms, max_terms")
        wrong = {name: value for name, value in options.items() if type(value) is not int}
        if wrong:
            raise DataError.at("task.options", f": min_terms and max_terms of steps are integers, got {wrong}")
        self._min_terms: int = options.get("min_terms", 2)
        self._max_terms: int = options.get("max_terms", 9)
        if not 2 <= self._min_terms <= self._max_terms <= len(ascii_lowercase):
            raise DataError.at(
                "task.options", f": need 2 <= min_terms <= max_terms <= 26, got {self._min_terms} and {self._max_terms}"
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
        question = write_ledger(digits)
        return question, TaskItem(question=question, answer=str(sum(digits)))

    def respond(self, prompt: Prompt, turns: Sequence[str]) -> Score:
        before, mark, given = turns[-1].rpartition("#")
        correct = mark == "#" and given.strip() == prompt.answer
        steps = float(before.count("\n"))
        return Score(value=float(correct), parts={"correct": float(correct), "steps": steps})
