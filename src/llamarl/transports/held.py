"""Segments of other processes of this machine, held so that they outlive them.

    owner: memfd ◀── /proc/OWNER/fd/N ── this process opens it: a descriptor of its own ◀── /proc/THIS/fd/M ── readers

The memory of a memfd lives as long as somebody has it open. A handle that names this process's descriptor stays good whoever
dies, and the pages are the same: nothing is copied.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from pathlib import Path

from llamarl.errors import ChannelError
from llamarl.transports.segments import SegmentHandle, open_segment

__all__ = ["HeldSegments"]


class HeldSegments:
    """Descriptors by segment, each open as long as somebody wants it."""

    def __init__(self) -> None:
        self._held: dict[bytes, tuple[SegmentHandle, int]] = {}
        """Nonce -> handle that names this process's descriptor, and how often it is wanted."""

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, handle: SegmentHandle) -> SegmentHandle | None:
        """A handle of the same segment that outlives its owner, until it is let go as often as it was asked for.

        Returns:
            None if the owner has ended.

        Raises:
            ChannelError: The owner lives, and its segment cannot be held: it is a file, lies on another host, has been closed, or
                this process may open no more descriptors.
        """
        held, wanted = self._held.get(handle.nonce) or (self._open(handle), 0)
        if held is not None:
            self._held[handle.nonce] = held, wanted + 1
        return held

    def let_go(self, handle: SegmentHandle) -> None:
        """Undo one ``hold``."""
        held, wanted = self._held[handle.nonce]
        if wanted > 1:
            self._held[handle.nonce] = held, wanted - 1
        else:
            del self._held[handle.nonce]
            os.close(held.fd)

    def close(self) -> None:
        """Let all go. Idempotent."""
        for held, _ in self._held.values():
            os.close(held.fd)
        self._held.clear()

    def _open(self, handle: SegmentHandle) -> SegmentHandle | None:
        if handle.path or handle.space:
            raise ChannelError("only memory of this machine can be held")
        try:
            fd = os.open(f"/proc/{handle.pid}/fd/{handle.fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            if _runs(handle.pid):
                raise ChannelError(f"a segment of process {handle.pid} cannot be held: {error}") from error
            return None
        mine = replace(handle, pid=os.getpid(), fd=fd)
        try:
            open_segment(mine).close()  # proves that it is the one
        except ChannelError:
            os.close(fd)
            if _runs(handle.pid):
                raise
            return None
        return mine


def _runs(pid: int) -> bool:
    """False for a process that has ended, also where nobody has buried it yet."""
    state = ""
    with contextlib.suppress(OSError, IndexError):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return state not in ("", "Z", "X")
