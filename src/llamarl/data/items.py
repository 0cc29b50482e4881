"""What a task hands to the prompt stream: items by (split, index), never "the next one".

Random access is what makes a resumed run exact: the cursor into the data is one number, and no iterator has to be
wound forward. A split is ``"train"`` or ``"eval"``; the two never share a question.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Literal, Protocol

from llamarl.errors import DataError
from llamarl.seeding import derive_seed

__all__ = ["ItemSource", "Split", "TaskItem", "held_out", "read_messages"]

Split = Literal["train", "eval"]


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


def read_messages(record: Mapping[str, Any], where: str) -> tuple[Mapping[str, str], ...]:
    """The conversation in a record's field ``messages``.

    Raises:
        DataError: It is no list of objects with the texts ``role`` and ``content``; names ``where``.
    """
    messages = record["messages"]
    good = isinstance(messages, list) and messages
    if not good or not all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in messages
    ):
        raise DataError(f"{where}: field 'messages' is {messages!r:.80}, expected a list of {{role, content}}")
    return tuple(messages)


def held_out(question: str, *, seed: int, fraction: float) -> bool:
    """True where a question belongs to the eval split: decided by its own words, so duplicates fall on one side.

    Args:
        fraction: Expected share of distinct questions that are held out, 0 to 1.
    """
    digest = int.from_bytes(blake2b(question.encode(), digest_size=8).digest(), "little")
    return derive_seed(seed, digest) < fraction * 2**64
