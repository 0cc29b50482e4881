"""Whether the other host is still there, by what its kernel says: a stopped process, a busy one or one that swaps is not gone.

A host that is idle is asked by keep-alives. One to which something is under way is asked by sending that again, or, where its
process takes nothing and its buffers are full, by probes; ``TCP_USER_TIMEOUT`` would count that last case as silence, so it is not
set where the kernel tells (Linux) when the other end was last heard, and whether it owes an answer.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import struct
from dataclasses import dataclass

__all__ = ["Signs", "Silence", "end_when_silent", "signs_of", "watch_over"]

_TCP_INFO = getattr(socket, "TCP_INFO", None)
_INFO = struct.Struct("=8B13I")
"""The head of the kernel's ``tcp_info``, which has not changed since it came."""
_LOOKS = 3
"""In a row in which an answer is owed: one that is under way in this moment is no silence."""


@dataclass(frozen=True, kw_only=True)
class Signs:
    """Of life, on one connection."""

    silent_s: float
    """Since anything came, be it that what was sent has arrived."""
    owed: bool
    """Something was sent or asked again, and nothing has come since."""


def watch_over(connection: socket.socket, silence_s: float, *, full_is_silent: bool = False) -> None:
    """Let the kernel ask the other host for signs of life, often enough to know after ``silence_s`` that it is gone.

    Where nothing is under way the connection then breaks by itself; for the rest see :class:`Silence`.

    Args:
        full_is_silent: It also breaks by itself where something is under way, though it may be that the other process takes
            nothing: for who dials again.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    ask_s = max(1, round(silence_s / 6))
    options = {
        "TCP_KEEPIDLE": max(1, round(silence_s) - 3 * ask_s),
        "TCP_KEEPINTVL": ask_s,
        "TCP_KEEPCNT": 3,
    }
    if _TCP_INFO is None or full_is_silent:
        options["TCP_USER_TIMEOUT"] = round(1000 * silence_s)
    for name, value in options.items():
        if hasattr(socket, name):  # macOS lacks some
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def signs_of(connection: socket.socket) -> Signs | None:
    """What the kernel knows; None where it does not tell."""
    if _TCP_INFO is None:
        return None
    words = _INFO.unpack(connection.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _INFO.size))
    retransmits, probes, last_data_ms, last_ack_ms = words[2], words[3], words[8 + 11], words[8 + 12]
    return Signs(silent_s=min(last_data_ms, last_ack_ms) / 1000, owed=bool(retransmits or probes))


class Silence:
    """Decides, look by look, whether a host has been silent for too long. Pure.

    Args:
        limit_s: Longest silence of a host that owes an answer.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._owing = 0

    def gone(self, signs: Signs) -> bool:
        """After one more look; looks are a quarter of a second apart or more."""
        self._owing = self._owing + 1 if signs.owed else 0
        return signs.silent_s >= self._limit_s and self._owing >= _LOOKS


async def end_when_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limit_s: float) -> None:
    """Break a connection whose other host is gone: who reads it gets ``TimeoutError``. Run beside the reader until then."""
    connection, silence = writer.get_extra_info("socket"), Silence(limit_s)
    while True:
        await asyncio.sleep(min(1.0, max(0.25, limit_s / 12)))
        try:
            signs = signs_of(connection)
        except OSError:  # closed meanwhile: whoever reads it knows
            return
        if signs is None:
            return  # TCP_USER_TIMEOUT does it
        if silence.gone(signs):
            reader.set_exception(TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)))
            writer.transport.abort()  # what waits to be sent would keep it open
            return
