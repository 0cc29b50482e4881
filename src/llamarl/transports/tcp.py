"""Between hosts: the segments of shared memory, read over a socket where they lie elsewhere and
mapped where they do not.

    source: a segment, as for shared memory        sink: same space? map it : RemoteSegment, next blocks asked for ahead

The choice is made for each buffer that is opened, so one channel may join ranks of one host and of
many. Nothing runs at the source for it but the server of :mod:`llamarl.transports.segment_server`,
which sends straight from the mapped memory.
"""

from __future__ import annotations

import torch

from llamarl.transports.base import RemoteBuffer, SinkTransport, Transport
from llamarl.transports.remote_segment import RemoteSegment
from llamarl.transports.segments import SegmentHandle, is_elsewhere
from llamarl.transports.shared_memory import SharedMemorySink, SharedMemorySource

__all__ = ["Tcp", "TcpSink", "TcpSource"]

_AHEAD = 4
"""Blocks that are on their way while one is proved."""
_CHECK_S = 5.0


class TcpSource(SharedMemorySource):
    """Registers segments of this process; where the job is on several hosts, they can be read from the others."""

    name = "tcp"


class _Remote(RemoteBuffer):
    """A buffer of another space; implements :class:`llamarl.transports.base.RemoteBuffer`."""

    def __init__(self, handle: SegmentHandle, deadline_s: float) -> None:
        self._segment = RemoteSegment(handle, deadline_s)

    def read(self, offset: int, into: torch.Tensor, deadline_s: float, *, fresh: bool = False) -> None:
        self._segment.read(offset, into.numpy(), deadline_s, fresh=fresh)

    def expect(self, offset: int, nbytes: int, deadline_s: float) -> bool:
        if self._segment.num_expected >= _AHEAD:
            return False
        self._segment.expect(offset, nbytes, deadline_s)
        return True

    def join_chain(
        self, mirror: SegmentHandle, deadline_s: float, gone: SegmentHandle | None = None
    ) -> tuple[bool, SegmentHandle | None]:
        return self._segment.join_chain(mirror, deadline_s, gone)

    def forget(self) -> None:
        self._segment.forget()

    def check_source(self) -> None:
        self._segment.check(_CHECK_S)

    def close(self) -> None:
        self._segment.close()


class TcpSink(SinkTransport):
    """Reads segments of other hosts, and maps those of this one."""

    name = "tcp"
    device = torch.device("cpu")

    def __init__(self) -> None:
        self._mapped = SharedMemorySink()

    def is_elsewhere(self, address: SegmentHandle) -> bool:
        return is_elsewhere(address)

    def open(self, address: SegmentHandle, deadline_s: float) -> RemoteBuffer:
        if is_elsewhere(address):
            return _Remote(address, deadline_s)
        return self._mapped.open(address, deadline_s)


class Tcp(Transport):
    """Between processes of any hosts."""

    between_hosts = True

    @staticmethod
    def source(*, num_sink_ranks: int) -> TcpSource:
        return TcpSource()

    @staticmethod
    def sink(*, rank: int) -> TcpSink:
        return TcpSink()
