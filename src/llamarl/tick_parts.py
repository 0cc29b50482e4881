"""A tick in parts, as whoever works on a part before the whole tick has come must know it. No torch.

    part 0, part 1, ..  ─▶ PartsAhead.keep: what was made of each, with a digest of what it was made of
    the whole tick      ─▶ split_into_parts ─▶ PartsAhead.take: results of the first parts, as far as they are still true

A part that comes early is a hint: the whole tick holds its groups again and decides. So it does not matter whether a part
came at all, came twice, or was made by a process that has died since and did its tick again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Generic, TypeVar

import numpy as np

from llamarl.types import Group

__all__ = ["AHEAD", "PartsAhead", "digest_of", "split_into_parts"]

Made = TypeVar("Made")

AHEAD = "ahead"
"""Label of spans in which parts of a tick were done before the tick itself came. They are part of its time."""


def split_into_parts(groups: Sequence[Group], num_parts: int) -> list[list[Group]]:
    """The groups of each part of a tick, in the tick's order."""
    if num_parts == 1:
        return [list(groups)]
    parts: list[list[Group]] = [[] for _ in range(num_parts)]
    for group in groups:
        parts[group.part].append(group)
    return parts


def digest_of(groups: Sequence[Group]) -> bytes:
    """Of all that is known of groups: tokens, log-probs, versions, outcomes, whatever else a response carries."""
    state = hashlib.blake2b(digest_size=16)
    for group in groups:
        _add(state, group)
    return state.digest()


def _add(state: Any, value: Any) -> None:
    """Values of one kind after each other; each says how long it is, so that none runs into the next."""
    if isinstance(value, np.ndarray):
        state.update(f"{value.dtype.str}{value.shape}".encode())
        state.update(value.tobytes())
    elif isinstance(value, tuple | list):
        state.update(f"[{len(value)}]".encode())
        for item in value:
            _add(state, item)
    elif hasattr(value, "__dataclass_fields__"):
        state.update(type(value).__name__.encode())
        for field in fields(value):
            _add(state, getattr(value, field.name))
    else:
        text = repr(value).encode()
        state.update(f"{type(value).__name__}{len(text)}:".encode())
        state.update(text)


class PartsAhead(Generic[Made]):
    """What was made of the first parts of ticks that have not come yet."""

    def __init__(self) -> None:
        self._kept: dict[int, list[tuple[bytes, Made]]] = {}

    def is_next(self, tick: int, part: int) -> bool:
        """Whether it is the part of its tick that follows those that are done; others are not worked on."""
        return part == self.num_done(tick)

    def num_done(self, tick: int) -> int:
        return len(self._kept.get(tick, ()))

    def keep(self, tick: int, groups: Sequence[Group], made: Made) -> None:
        """Keep what was made of a tick's next part."""
        self._kept.setdefault(tick, []).append((digest_of(groups), made))

    def take(self, tick: int, parts: Sequence[Sequence[Group]]) -> list[Made]:
        """What was made of the first of ``parts``, up to the first that is not what it was made of. It is forgotten, and so is
        what belongs to earlier ticks."""
        kept = self._kept.get(tick, [])
        self._kept = {later: made for later, made in self._kept.items() if later > tick}
        found: list[Made] = []
        for (digest, made), groups in zip(kept, parts, strict=False):
            if digest != digest_of(groups):
                break
            found.append(made)
        return found
