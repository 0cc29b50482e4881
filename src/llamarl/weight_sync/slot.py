"""One slot of the ring: a registered buffer, its header words, and the handle by which a sink finds it.

    slot = [ header | catalog | checksums | data blocks ]

    EMPTY ─▶ WRITING ─▶ READY ─▶ WRITING ─▶ ...      generation: +1 at each WRITING
                 │
                 └────▶ FAILED

Each header word is an aligned 8-byte integer, stored whole, so a reader sees the old or the new one and nothing between.
``progress`` counts the blocks that are in place with their checksums: a sink may follow a slot while it is written.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from llamarl.weight_sync.transports.base import Address

__all__ = ["HEADER_BYTES", "PAGE", "SlotHandle", "SlotHeader", "SlotState", "Word", "header_words", "parse_header"]

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
    MANIFEST_CHECKSUM = 5


HEADER_BYTES = 8 * len(Word)


@dataclass(frozen=True, slots=True)
class SlotHeader:
    """The header words as a reader found them."""

    state: int
    generation: int
    version: int
    progress: int
    """Blocks in place."""
    manifest_checksum: int
    """Valid once READY."""

    def __str__(self) -> str:
        state = SlotState(self.state).name.lower() if self.state in list(SlotState) else f"in state {self.state}"
        return f"{state} with version {self.version}, generation {self.generation}"


@dataclass(frozen=True, slots=True)
class SlotHandle:
    """One source rank's share of one version. Small and picklable."""

    source_rank: int
    version: int
    slot: int
    generation: int
    address: Address
    transport: str
    pid: int
    catalog_bytes: int
    catalog_checksum: int
    checksums_offset: int
    data_offset: int
    manifest_checksum: int | None
    """None: the version was announced while it was still being written; the slot's header says it at the end."""


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
        manifest_checksum=int(words[Word.MANIFEST_CHECKSUM]),
    )
