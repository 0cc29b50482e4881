"""Segments of other processes of this machine, held so that they outlive them.

    owner: memfd ◀── /proc/OWNER/fd/N ── this process opens it: a descriptor of its own ◀── /proc/THIS/fd/M ── readers

The memory of a memfd lives as long as somebody has it open. A handle that names this process's
descriptor stays good whoever dies, and the pages are the same: nothing is copied. In a job on
several hosts what is held is offered to the others by this process's own server.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from llamarl.errors import ChannelError, SourceGone
from llamarl.transports.network import mine
from llamarl.transports.segment_server import SegmentServer, server_here
from llamarl.transports.segments import MappedSegment, SegmentHandle, is_elsewhere, open_segment

__all__ = ["HeldSegment"]


class HeldSegment:
    """A segment that outlives its owner, until the last reference to this object goes.

    Raises:
        SourceGone: The owner has ended.
        ChannelError: The owner lives, and its segment cannot be held: it lies on another host,
            has been closed, or this process may open no more descriptors.
    """

    def __init__(self, handle: SegmentHandle) -> None:
        if is_elsewhere(handle):
            raise ChannelError("only memory of this machine can be held")
        self._fd = -1
        self._offered: tuple[SegmentServer, MappedSegment] | None = None
        """To other hosts; None in a job on one machine."""
        try:
            self._fd = os.open(f"/proc/{handle.pid}/fd/{handle.fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            self.handle = replace(handle, pid=os.getpid(), fd=self._fd)
            """Names this process's descriptor."""
            mapped = open_segment(self.handle)  # refuses a descriptor of something else
        except (OSError, ChannelError) as error:
            kind = ChannelError if _runs(handle.pid) else SourceGone
            raise kind(f"a segment of process {handle.pid} cannot be held: {error}") from error
        network, server = mine(), server_here()
        if network is None or server is None:
            mapped.close()
            return
        server.register(handle.nonce, mapped.bytes.data)
        self._offered = server, mapped
        self.handle = replace(self.handle, space=network.space, endpoint=server.endpoint)

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            os.close(self._fd)
        if (offered := getattr(self, "_offered", None)) is not None:
            server, mapped = offered
            server.withdraw(self.handle.nonce)
            mapped.close()


def _runs(pid: int) -> bool:
    """False for a process that has ended, also where nobody has buried it yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:  # this process may open nothing more: that says nothing of the other one
        return True
