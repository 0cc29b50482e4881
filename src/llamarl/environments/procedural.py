"""Endless questions made from numbers, split into train and eval by the questions' own words.

Item i of a split tries the numbers seed(run seed, split, i, 0), seed(..., 1), ... until a question falls on its side of
the hash. So the splits share no question even where the task has few distinct ones, and any item can be made alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from llamarl.data.items import Split, held_out
from llamarl.errors import DataError
from llamarl.seeding import derive_seed

__all__ = ["draw_item"]

_MAX_ATTEMPTS = 2000
_SPLIT_NUMBER: dict[Split, int] = {"train": 1, "eval": 2}

T = TypeVar("T")


def draw_item(
    make: Callable[[int], tuple[str, T]], split: Split, index: int, *, seed: int, eval_fraction: float, name: str
) -> T:
    """The item of (split, index).

    Args:
        make: Question and item of a 63-bit number.

    Raises:
        DataError: No attempt gave a question of this split.
    """
    for attempt in range(_MAX_ATTEMPTS):
        number = derive_seed(seed, _SPLIT_NUMBER[split], index, attempt) >> 1
        question, item = make(number)
        if held_out(question, seed=seed, fraction=eval_fraction) == (split == "eval"):
            return item
    raise DataError(
        f"task {name!r}: no {split} question in {_MAX_ATTEMPTS} attempts at eval_fraction={eval_fraction}; the task has "
        "too few distinct questions, or the fraction is too near 0 or 1"
    )
