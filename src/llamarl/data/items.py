"""What a task hands to the prompt stream: items by (split, index), never "the next one".

Random access is what makes a resumed run exact: the cursor into the data is one number, and no iterator has to be
wound forward. A split is ``"train"`` or ``"eval"``; the two never share a question.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Literal, Protocol, TypeVar

from llamarl.determinism import derive_seed
from llamarl.errors import DataError

__all__ = ["ItemSource", "Split", "TaskItem", "draw_item", "held_out", "read_messages", "split_questions"]

Split = Literal["train", "eval"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskItem:
    """One question, before any tokenizer has seen it."""

    question: str
    """The user's words. With ``messages``, a plain-text form of them for logs and for hashing."""
    answer: str | None = None
    """Reference answer, if the task has one."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """What the judge needs besides the answer; plain JSON values."""
    messages: tuple[Mapping[str, str], ...] | None = None
    """A whole conversation (``role``, ``content``) instead of one question."""
    where: str = ""
    """``file:line`` of an item that was read from a file; for errors."""


class ItemSource(Protocol):
    """The half of a task that the prompt stream sees."""

    @property
    def name(self) -> str: ...

    def num_items(self, split: Split) -> int | None:
        """Items in a split; None where they are made on demand without end."""
        ...

    def item(self, split: Split, index: int) -> TaskItem:
        """Item ``index`` of a split: a pure function of the task's configuration, its seed and the two arguments."""
        ...


def read_messages(record: Mapping[str, Any], where: str, name: str = "messages") -> tuple[Mapping[str, str], ...]:
    """The conversation in a record's field ``name``, without what is null in a message: tables fill the columns of all
    messages, and templates ask whether one has, say, ``tool_calls``.

    Raises:
        DataError: It is no list of objects with the texts ``role`` and ``content``, or names roles otherwise; names ``where``.
    """
    messages = record[name]
    wrong = f"{where}: field {name!r} is {messages!r:.80}, expected a list of {{role, content}}"
    if not isinstance(messages, list) or not messages:
        raise DataError(wrong)
    for place, m in enumerate(messages):
        if not (isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)):
            raise DataError(f"{wrong}, both text: message {place} is {m!r:.80}")
        if m["role"] in ("human", "gpt"):  # a template would write any name
            raise DataError(
                f"{where}: message {place} has the role {m['role']!r} (ShareGPT's): write user and assistant"
            )
    return tuple({key: value for key, value in message.items() if value is not None} for message in messages)


def held_out(question: str, *, seed: int, fraction: float) -> bool:
    """Tell whether a question belongs to the eval split: its own words decide, so duplicates fall on one side.

    Args:
        fraction: Expected share of distinct questions that are held out, 0 to 1.
    """
    return _hash(question, seed) < fraction * 2**64


def split_questions(questions: Sequence[str], *, seed: int, fraction: float) -> list[bool]:
    """Choose which questions are held out: by ``held_out``, and of two distinct ones or more at least one on each side.

    A tenth of six questions is nobody by the hash alone; then the one with the smallest hash is
    held out. A lone question is trained on.

    Args:
        questions: May repeat; equal ones fall on one side.
        fraction: Expected share of distinct questions that are held out, 0 to 1; 0 holds out none.

    Returns:
        [len(questions)] True where held out.
    """
    held = {question for question in questions if held_out(question, seed=seed, fraction=fraction)}
    distinct = set(questions)
    if fraction > 0 and not held and len(distinct) > 1:
        held = {min(distinct, key=lambda question: (_hash(question, seed), question))}
    elif distinct and len(held) == len(distinct):
        held = distinct - {max(distinct, key=lambda question: (_hash(question, seed), question))}
    return [question in held for question in questions]


_MAX_ATTEMPTS = 2000
_SPLIT_NUMBER: dict[Split, int] = {"train": 1, "eval": 2}


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


def _hash(question: str, seed: int) -> int:
    return derive_seed(seed, int.from_bytes(blake2b(question.encode(), digest_size=8).digest(), "little"))
