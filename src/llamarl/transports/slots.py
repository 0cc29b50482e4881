"""The header of a slot: what a registered buffer holds now, told to readers who may look at any moment.

    slot of weights = [ header | catalog | checksums | data blocks ]      slot of data = [ header | table | parts ]

    EMPTY ─▶ WRITING ─▶ READY ─▶ WRITING ─▶ ...      generation: another one at each WRITING
                 │
                 └────▶ FAILED

Each header word is an aligned 8-byte integer, stored whole, so a reader sees the old or the new one
and nothing between. ``progress`` counts the blocks that are in place with their checksums: a sink
may follow a slot while it is written. The checksum is that of what proves all others (the manifest
of a version, the table of a token's parts).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

__all__ = ["HEADER_BYTES", "PAGE", "SlotHeader", "SlotState", "Word", "header_words", "parse_header"]

PAGE = 4096
"""The catalog starts here; the data starts on a page of its own."""

_MAGIC = int.from_bytes(b"lrlslot2", "little")


class SlotState(IntEnum):
    """What a slot holds."""

    EMPTY = 0
    WRITING = 1
    READY = 2
    FAILED = 3


class Word(IntEnum):
    """Index of each header word."""

    MAGIC = 0
    STATE = 1
    GENERATION = 2
    VERSION = 3
    PROGRESS = 4
    CHECKSUM = 5


HEADER_BYTES = 8 * len(Word)


@dataclass(frozen=True, slots=True)
class SlotHeader:
    """The header words as a reader found them."""

    state: int
    generation: int
    version: int
    progress: int
    """Blocks in place."""
    checksum: int
    """Of what proves all other bytes; valid once READY."""

    def __str__(self) -> str:
        state = SlotState(self.state).name.lower() if self.state in list(SlotState) else f"in state {self.state}"
        return f"{state} with version {self.version}, generation {self.generation}"


def header_words(memory: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    """The words over the slot's own memory; a store to one is seen by every reader. Also marks the buffer as a slot."""
    words = memory[:HEADER_BYTES].view(np.uint64)
    words[Word.MAGIC] = _MAGIC
    return words


def parse_header(data: npt.NDArray[np.uint8]) -> SlotHeader | None:
    """The header in ``HEADER_BYTES`` bytes; None if this is no slot."""
    words = data.view(np.uint64)
    if int(words[Word.MAGIC]) != _MAGIC:
        return None
    return SlotHeader(
        state=int(words[Word.STATE]),
        generation=int(words[Word.GENERATION]),
        version=int(words[Word.VERSION]),
        progress=int(words[Word.PROGRESS]),
        checksum=int(words[Word.CHECKSUM]),
    )
