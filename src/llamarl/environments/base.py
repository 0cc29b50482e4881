"""What a task is: questions, and a judge of what the policy wrote.

    item ─▶ prompt ─▶ policy writes ─▶ respond ──▶ Score

``respond`` is a function of the prompt and of what the policy has written, with no hidden state.
What answers back in the middle of an episode is an environment: see ``episode``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from llamarl.data.items import ItemSource, Split, TaskItem, held_out
from llamarl.errors import DataError
from llamarl.seeding import derive_seed
from llamarl.types import Prompt, Score

__all__ = ["ItemSource", "Split", "Task", "TaskItem", "draw_item"]


class Task(ItemSource, Protocol):
    """Questions and their judge.

    Items are read where prompts are made; ``respond`` runs in the reward pool's worker processes, in the main thread,
    under a time limit. It may raise, hang or crash: the sample is then failed, and the run goes on.
    """

    def respond(self, prompt: Prompt, turns: Sequence[str]) -> Score:
        """Judge.

        Args:
            prompt: What the episode began with.
            turns: The policy's words, one entry a turn; never empty. Without an environment there is one.
        """
        ...


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
