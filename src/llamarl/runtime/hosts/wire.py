"""What travels between a controller and the daemon of a host, once both have proved the key.

Every message is a head (word, number of the rank, bytes that follow) and its bytes. Small ones are JSON: the daemon unpickles
nothing, its ranks do.
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Mapping
from enum import IntEnum
from typing import Any

__all__ = ["CHUNK", "FILES", "PURPOSE", "Word", "message", "read_message", "unpack"]

PURPOSE = "worker"
"""For which both ends prove the key where ranks are started."""
FILES = "files"
"""The same where files are sent and fetched (:mod:`llamarl.files`)."""
CHUNK = 1 << 18
"""Most bytes of a rank in one message: others are not kept waiting by a large one."""
_HEAD = struct.Struct("!BIQ")
_MOST_BYTES = 1 << 24


class Word(IntEnum):
    """Of a message. Those about one rank carry its number, which the controller gives."""

    HELLO = 0
    """From the daemon, once: its ``Inventory``."""
    START = 1
    """To the daemon: label, environment, folders to import from, whether peers on other hosts listen for it."""
    STARTED = 2
    """From the daemon: pid, or why there is no process."""
    BYTES = 3
    """Either way: what goes through the rank's socket."""
    OUTPUT = 4
    """From the daemon: bytes of stdout; none: its end."""
    ERRORS = 5
    """The same of stderr."""
    TAKEN = 6
    """To the daemon: so many bytes of output have been handed on; more may come."""
    KILL = 7
    """To the daemon: end the process; ``at_once`` without asking its guard."""
    ENDED = 8
    """From the daemon: how the process ended, as ``subprocess`` tells it."""
    MEET = 9
    """To the daemon: name a place where ranks can meet; the number says which question is answered."""
    PLACE = 10
    """From the daemon: the place, an ``init_method`` of ``torch.distributed``."""
    PING = 11
    """To the daemon."""
    PONG = 12
    """From the daemon: its ``time.monotonic``."""
    ASK = 13
    """To the daemon: whether a signal has stopped the process."""
    STATE = 14
    """From the daemon: whether one has."""
    REACH = 15
    """To the daemon: see whether something listens at each of these places; the number says which question is answered."""
    REACHED = 16
    """From the daemon: where nothing does, in words; empty: all are reached."""


def message(word: Word, number: int = 0, content: bytes | Mapping[str, Any] = b"") -> bytes:
    """One message as it travels."""
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    return _HEAD.pack(word, number, len(data)) + data


async def read_message(reader: asyncio.StreamReader) -> tuple[Word, int, bytes]:
    """The next message.

    Raises:
        EOFError: The other end has closed the connection.
        OSError: The connection broke.
        ValueError: It is none of ours.
    """
    word, number, size = _HEAD.unpack(await reader.readexactly(_HEAD.size))
    if size > _MOST_BYTES:
        raise ValueError(f"a message of {size} bytes")
    return Word(word), number, await reader.readexactly(size)


def unpack(data: bytes) -> dict[str, Any]:
    """What a message with named values holds."""
    values: dict[str, Any] = json.loads(data)
    return values
