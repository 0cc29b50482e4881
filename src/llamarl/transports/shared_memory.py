"""Shared memory on one host: a sink maps the source's buffer and reads it in place."""

from __future__ import annotations

import ctypes

import torch

from llamarl.errors import ChannelError, SourceGone
from llamarl.transports.base import RemoteBuffer, SinkTransport, SourceTransport, Transport
from llamarl.transports.checksum import BLOCK_BYTES, ChecksumKind
from llamarl.transports.segments import MappedSegment, Segment, SegmentHandle, open_segment, owner_holds, tensor_over

__all__ = ["SharedMemory", "SharedMemorySink", "SharedMemorySource"]


class _Buffer:
    def __init__(self, segment: Segment, control_bytes: int) -> None:
        self._segment = segment
        whole = torch.from_numpy(segment.bytes)
        self.control, self.data = whole[:control_bytes], whole[control_bytes:]

    @property
    def address(self) -> SegmentHandle:
        return self._segment.handle

    def close(self) -> None:
        self.control = self.data = torch.empty(0, dtype=torch.uint8)
        self._segment.close()


class SharedMemorySource(SourceTransport):
    """Registers segments of this process."""

    name = "shared_memory"
    checksum: ChecksumKind = "xxh3"
    block_bytes = BLOCK_BYTES

    def register(self, control_bytes: int, data_bytes: int) -> _Buffer:
        return _Buffer(Segment(control_bytes + data_bytes), control_bytes)


class _Remote(RemoteBuffer):
    def __init__(self, segment: MappedSegment) -> None:
        self._segment = segment
        self._data = tensor_over(segment.bytes)

    def view(self) -> torch.Tensor:
        return self._data

    def read(self, offset: int, into: torch.Tensor, deadline_s: float, *, fresh: bool = False) -> None:
        size = into.numel()
        if offset < 0 or offset + size > self._data.numel():
            raise ChannelError(f"bytes {offset} to {offset + size} lie outside a buffer of {self._data.numel()} bytes")
        ctypes.memmove(into.data_ptr(), self._data.data_ptr() + offset, size)

    def check_source(self) -> None:
        if not owner_holds(self._segment.handle):
            raise SourceGone("the source has ended or closed its buffer")

    def close(self) -> None:
        self._data = torch.empty(0, dtype=torch.uint8)
        self._segment.close()


class SharedMemorySink(SinkTransport):
    """Maps segments of processes on this host."""

    name = "shared_memory"
    device = torch.device("cpu")

    def open(self, address: SegmentHandle, deadline_s: float) -> _Remote:
        return _Remote(open_segment(address))


class SharedMemory(Transport):
    """Between processes of one host."""

    @staticmethod
    def source(*, num_sink_ranks: int) -> SharedMemorySource:
        return SharedMemorySource()

    @staticmethod
    def sink(*, rank: int) -> SharedMemorySink:
        return SharedMemorySink()
