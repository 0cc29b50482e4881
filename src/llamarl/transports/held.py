"""Segments of other processes of this machine, held so that they outlive them.

    owner: memfd ◀── /proc/OWNER/fd/N ── this process opens it: a descriptor of its own ◀── /proc/THIS/fd/M ── readers

The memory of a memfd lives as long as somebody has it open. A handle that names this process's
descriptor stays good whoever dies, and the pages are the same: nothing is copied. In a job on
several hosts what is held is offered to the others by this process's own server.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, replace
from pathlib import Path

from llamarl.errors import ChannelError
from llamarl.transports.network import mine
from llamarl.transports.segment_server import SegmentServer, server_here
from llamarl.transports.segments import MappedSegment, SegmentHandle, is_elsewhere, open_segment

__all__ = ["HeldSegments"]


@dataclass
class _Held:
    handle: SegmentHandle
    """Names this process's descriptor."""
    wanted: int
    """How often."""
    offered: tuple[SegmentServer, MappedSegment] | None
    """To other hosts; None in a job on one machine."""


class HeldSegments:
    """Descriptors by segment, each open as long as somebody wants it."""

    def __init__(self) -> None:
        self._held: dict[bytes, _Held] = {}
        """By nonce."""

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, handle: SegmentHandle) -> SegmentHandle | None:
        """A handle of the same segment that outlives its owner, until it is let go as often as it was asked for.

        Returns:
            None if the owner has ended.

        Raises:
            ChannelError: The owner lives, and its segment cannot be held: it is a file, lies on
                another host, has been closed, or this process may open no more descriptors.
        """
        held = self._held.get(handle.nonce) or self._open(handle)
        if held is None:
            return None
        held.wanted += 1
        self._held[handle.nonce] = held
        return held.handle

    def let_go(self, handle: SegmentHandle) -> None:
        """Undo one ``hold``."""
        held = self._held[handle.nonce]
        held.wanted -= 1
        if not held.wanted:
            del self._held[handle.nonce]
            _release(held)

    def close(self) -> None:
        """Let all go. Idempotent."""
        for held in self._held.values():
            _release(held)
        self._held.clear()

    def _open(self, handle: SegmentHandle) -> _Held | None:
        if handle.path or is_elsewhere(handle):
            raise ChannelError("only memory of this machine can be held")
        try:
            fd = os.open(f"/proc/{handle.pid}/fd/{handle.fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            if _runs(handle.pid):
                raise ChannelError(f"a segment of process {handle.pid} cannot be held: {error}") from error
            return None
        try:
            return _offered(replace(handle, pid=os.getpid(), fd=fd))
        except ChannelError:
            os.close(fd)
            if _runs(handle.pid):
                raise
            return None


def _offered(handle: SegmentHandle) -> _Held:
    """Raises ChannelError: the descriptor is of something else."""
    mapped = open_segment(handle)
    network, server = mine(), server_here()
    if network is None or server is None:
        mapped.close()
        return _Held(handle, 0, None)
    server.register(handle.nonce, mapped.bytes.data)
    return _Held(replace(handle, space=network.space, endpoint=server.endpoint), 0, (server, mapped))


def _release(held: _Held) -> None:
    os.close(held.handle.fd)
    if held.offered is not None:
        server, mapped = held.offered
        server.withdraw(held.handle.nonce)
        mapped.close()


def _runs(pid: int) -> bool:
    """False for a process that has ended, also where nobody has buried it yet."""
    state = ""
    with contextlib.suppress(OSError, IndexError):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return state not in ("", "Z", "X")
