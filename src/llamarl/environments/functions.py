"""A user's own reward function, by import path, over JSONL items or over any bundled task's questions.

``reward(prompt, response, answer) -> float``: the prompt's text, the response's text, the reference answer or None.
A finite real number (or a bool) is a score; a ``llamarl.types.Score`` is one with named parts. Anything else, and any
exception, fails the sample.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llamarl.data.items import Split, TaskItem, read_messages
from llamarl.environments.base import Task
from llamarl.environments.jsonl import JsonlSplits, text_field
from llamarl.environments.user_code import check_function, import_function
from llamarl.types import Prompt, Score

__all__ = ["FunctionTask", "JsonlItems", "NotANumber", "as_score", "function_item"]


class NotANumber(ValueError):
    """A reward that is no finite real number."""


def as_score(value: object) -> Score:
    """What a reward function returned, as a score.

    Raises:
        NotANumber: It is NaN, infinite, or no real number at all.
    """
    if isinstance(value, Score):
        for part, number in value.parts.items():
            as_score(number)
            if not isinstance(part, str):
                raise NotANumber(f"reward part {part!r} must be named by text")
        return Score(value=as_score(value.value).value, parts={k: float(v) for k, v in value.parts.items()})
    if not isinstance(value, (numbers.Real, bool)):
        raise NotANumber(f"reward is {type(value).__name__} {str(value)[:80]!r}, expected a number: return float(...)")
    number = float(value)
    if not math.isfinite(number):
        raise NotANumber(f"reward is {number}, expected a finite number")
    return Score(value=number)


def function_item(record: Mapping[str, Any], where: str) -> TaskItem:
    """One line: ``question``, ``problem``, ``prompt`` (text) or ``messages`` (a conversation); ``answer`` if there is one.

    The other fields become the item's metadata.

    Raises:
        DataError: No question, or a malformed conversation; names ``where``.
    """
    messages = None
    if "messages" in record:
        messages = read_messages(record, where)
        question = "\n\n".join(message["content"] for message in messages)
    else:
        question = text_field(record, ("question", "problem", "prompt"), where)
    answer = record.get("answer")
    used = ("question", "problem", "prompt", "messages", "answer")
    return TaskItem(
        question=question,
        answer=None if answer is None else text_field(record, ("answer",), where),
        metadata={key: value for key, value in record.items() if key not in used},
        messages=messages,
        where=where,
    )


class JsonlItems(JsonlSplits):
    """Questions from JSONL without a judge of their own."""

    name = "function"

    def __init__(self, train_file: str, eval_file: str, *, seed: int, eval_fraction: float) -> None:
        super().__init__(train_file, eval_file, function_item, seed=seed, eval_fraction=eval_fraction)

    def respond(self, prompt: Prompt, turns: Sequence[str]) -> Score:
        raise NotImplementedError("questions from JSONL have no judge: set task.reward")


class FunctionTask:
    """Another task's questions, judged by a user's function. Single-turn.

    Made everywhere, but only where it judges is the user's module imported: see ``user_code``.

    Raises:
        DataError: There is no such module or function, as far as can be told without running it.
    """

    def __init__(self, items: Task, path: str) -> None:
        self._items = items
        self._path = path
        self._function: Callable[..., Any] | None = None
        check_function(path)

    def prepare(self) -> None:
        """Import the user's module, which runs it.

        Raises:
            DataError: It cannot be imported, or has no such function.
        """
        self._function = import_function(self._path)

    @property
    def name(self) -> str:
        return self._items.name

    def num_items(self, split: Split) -> int | None:
        return self._items.num_items(split)

    def item(self, split: Split, index: int) -> TaskItem:
        return self._items.item(split, index)

    def respond(self, prompt: Prompt, turns: Sequence[str]) -> Score:
        """What the function returns, checked.

        Raises:
            NotANumber: The function returned no finite number. Whatever the function raises passes through.
        """
        if self._function is None:
            self.prepare()
        assert self._function is not None
        return as_score(self._function(prompt.text, turns[-1], prompt.answer))
