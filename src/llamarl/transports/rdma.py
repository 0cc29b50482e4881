"""RDMA between hosts, by Monarch's buffers; TCP takes its place where there is no card.

    source: buffer = page 0 (the slot's header) + control chunks + data chunks, each an RDMABuffer; a directory lists them
    sink:   read the directory once, then whole chunks; the last one is kept for the reads that follow it

Monarch reads whole buffers, so the chunk is the grain of a transfer: 64 KiB of the control part (checksums are read again
and again while a slot is being written), 8 MiB of data. What was kept is as old as its transfer. Who needs the bytes of
this moment (the header, checksums, a second attempt) asks for fresh ones; who follows a slot that is being written reads
data only up to ``ready_to_read`` of it, so that no chunk is moved before all of it is there, nor moved twice.

Buffers are registered and read on a thread that has a Monarch context: an actor's endpoint, or the main program.
"""

from __future__ import annotations

import bisect
import contextlib
import math
import os
import pickle
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch

from llamarl.errors import ChannelError, DeadlineExceeded
from llamarl.running_time import running_s
from llamarl.transports.checksum import ChecksumKind
from llamarl.transports.deadline import Clock

__all__ = ["CHUNK_BYTES", "RdmaAddress", "RdmaSink", "RdmaSource", "rdma_backend"]

CHUNK_BYTES = 8 << 20
_CONTROL_CHUNK_BYTES = 64 << 10
_PAGE = 4096


@dataclass(frozen=True)
class RdmaAddress:
    """Where a registered buffer lies. Under a kilobyte when pickled."""

    token: bytes
    """Random; tells this buffer from every other."""
    nbytes: int
    directory: Any = field(compare=False, repr=False)
    """RDMABuffer that holds the pickled list of chunk buffers."""


def rdma_backend(allow_tcp: bool) -> str:
    """``ibverbs`` or ``tcp``: what carries the bytes on this host.

    Raises:
        ChannelError: There is neither.
    """
    try:
        from monarch.config import configure
        from monarch.rdma import get_rdma_backend
    except ImportError as error:
        raise ChannelError(f"the rdma transport needs torchmonarch: {error}") from error
    configure(rdma_allow_tcp_fallback=allow_tcp)
    backend = str(get_rdma_backend())
    if backend == "none":
        raise ChannelError("the rdma transport finds no RDMA card on this host; pass allow_tcp=True to use TCP")
    return backend


class _Buffer:
    def __init__(self, control_bytes: int, data_bytes: int, chunk_bytes: int) -> None:
        from monarch.rdma import RDMABuffer, RDMATcpFallbackWarning

        nbytes = control_bytes + data_bytes
        whole = torch.zeros(nbytes, dtype=torch.uint8)
        self.control, self.data = whole[:control_bytes], whole[control_bytes:]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RDMATcpFallbackWarning)  # the transport's name says it
            edges = _edges(control_bytes, data_bytes, chunk_bytes)
            self._chunks = [RDMABuffer(whole[a:b]) for a, b in zip(edges, edges[1:], strict=False)]
            listing = pickle.dumps((edges, self._chunks))
            self._listing = torch.frombuffer(bytearray(listing), dtype=torch.uint8)
            self._directory = RDMABuffer(self._listing)
        self._address = RdmaAddress(os.urandom(16), nbytes, self._directory)

    @property
    def address(self) -> RdmaAddress:
        return self._address

    def close(self) -> None:
        for buffer in (self._directory, *self._chunks):
            buffer.drop().get(timeout=30)
        self._chunks = []
        self.control = self.data = torch.empty(0, dtype=torch.uint8)


class RdmaSource:
    """Registers host memory with the network card, or offers it over TCP.

    Args:
        allow_tcp: Use TCP on a host without an RDMA card, instead of failing.
        chunk_bytes: Bytes that one read moves.

    Raises:
        ChannelError: No backend on this host.
    """

    checksum: ChecksumKind = "xxh3"
    block_bytes = 1 << 20  # divides a chunk: the link is slower than any cache

    def __init__(self, *, allow_tcp: bool = True, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.name = f"rdma ({rdma_backend(allow_tcp)})"
        self._chunk_bytes = chunk_bytes

    @classmethod
    def here(cls, *, num_sink_ranks: int) -> RdmaSource:
        return cls()

    def register(self, control_bytes: int, data_bytes: int) -> _Buffer:
        try:
            return _Buffer(control_bytes, data_bytes, self._chunk_bytes)
        except (RuntimeError, MemoryError) as error:
            raise ChannelError(
                f"cannot register {control_bytes + data_bytes:,} bytes with {self.name}: {error}"
            ) from error

    def close(self) -> None:
        pass  # each buffer is closed by who registered it


class _Remote:
    def __init__(self, address: RdmaAddress, deadline_s: float) -> None:
        listing = torch.zeros(address.directory.size(), dtype=torch.uint8)
        _read(address.directory, listing, deadline_s)
        self._edges, self._chunks = pickle.loads(listing.numpy().tobytes())
        self._kept: int | None = None  # the chunk that ``_memory`` holds
        self._memory = torch.empty(0, dtype=torch.uint8)

    def view(self) -> None:
        return None

    def read(self, offset: int, into: torch.Tensor, deadline_s: float, *, fresh: bool = False) -> None:
        started, done = running_s(), 0
        while done < into.numel():
            index = self._find(offset + done)
            start, stop = self._edges[index : index + 2]
            first = offset + done - start
            count = min(into.numel() - done, stop - start - first)
            left_s = deadline_s - (running_s() - started)
            if fresh:  # does not take the place of the data chunk at hand
                chunk = torch.empty(stop - start, dtype=torch.uint8)
                _read(self._chunks[index], chunk, left_s)
                self._kept = None if index == self._kept else self._kept
            else:
                chunk = self._keep(index, stop - start, left_s)
            into[done : done + count] = chunk[first : first + count]
            done += count

    def expect(self, offset: int, nbytes: int, deadline_s: float) -> bool:
        return False

    def ready_to_read(self, stop: int) -> int:
        return int(self._edges[self._find(stop - 1) + 1])

    def forget(self) -> None:
        self._kept = None

    def check_source(self) -> None:
        """Nothing to ask: who waits for a slow source reads its header, which fails when the source is gone."""

    def close(self) -> None:
        self._kept = None
        self._memory = torch.empty(0, dtype=torch.uint8)

    def _find(self, position: int) -> int:
        """The chunk that holds the byte at ``position``."""
        if not 0 <= position < self._edges[-1]:
            raise ChannelError(f"byte {position} lies outside a buffer of {self._edges[-1]} bytes")
        return bisect.bisect_right(self._edges, position) - 1

    def _keep(self, index: int, size: int, deadline_s: float) -> torch.Tensor:
        if self._kept != index:
            self._kept = None  # a read that fails leaves a mixture
            if self._memory.numel() < size:
                self._memory = torch.empty(size, dtype=torch.uint8)
            _read(self._chunks[index], self._memory[:size], deadline_s)
            self._kept = index
        return self._memory[:size]


class RdmaSink:
    """Reads buffers of other hosts.

    Raises:
        ChannelError: No backend on this host.
    """

    device = torch.device("cpu")

    def __init__(self, *, allow_tcp: bool = True) -> None:
        self.name = f"rdma ({rdma_backend(allow_tcp)})"

    @classmethod
    def here(cls, *, rank: int) -> RdmaSink:
        return cls()

    def pulling(self, clock: Clock) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def open(self, address: RdmaAddress, deadline_s: float) -> _Remote:
        return _Remote(address, deadline_s)

    def close(self) -> None:
        pass


def _edges(control_bytes: int, data_bytes: int, chunk_bytes: int) -> list[int]:
    """Where page 0 and each chunk after it begin, and where the last one ends; no chunk holds both control and data."""
    stop = control_bytes + data_bytes
    edges = {0, *range(_PAGE, control_bytes, _CONTROL_CHUNK_BYTES), *range(control_bytes, stop, chunk_bytes), stop}
    return sorted(edges)


def _read(buffer: Any, into: torch.Tensor, deadline_s: float) -> None:
    try:
        buffer.read_into(into, timeout=max(1, math.ceil(deadline_s))).get(timeout=max(0.001, deadline_s))
    except TimeoutError as error:
        raise DeadlineExceeded(
            f"reading {into.numel():,} bytes from another host took longer than {deadline_s:g} s; "
            "look at the source's process and the network, or raise the limit"
        ) from error
    except Exception as error:  # Monarch raises its own, unexported, types for a lost peer
        raise ChannelError(f"the source cannot be read any more ({type(error).__name__}: {error})") from error
