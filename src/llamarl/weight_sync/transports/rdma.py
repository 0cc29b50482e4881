"""RDMA between hosts, by Monarch's buffers; TCP takes its place where there is no card.

    source: buffer = page 0 (the slot's header) + chunks of CHUNK_BYTES, each an RDMABuffer; a directory lists them
    sink:   read the directory once, then whole chunks, each kept until it is asked for the same bytes again

Monarch reads whole buffers, so the chunk is the grain of a transfer. Asking twice for the same bytes goes to the source
twice: that is what a second attempt after a wrong checksum needs, and what following a header word needs.

Buffers are registered and read on a thread that has a Monarch context: an actor's endpoint, or the main program.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch

from llamarl.errors import DeadlineExceeded, WeightSyncError
from llamarl.weight_sync.checksum import BLOCK_BYTES, ChecksumKind

__all__ = ["CHUNK_BYTES", "RdmaAddress", "RdmaSink", "RdmaSource", "rdma_backend"]

CHUNK_BYTES = 8 << 20
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
        WeightSyncError: There is neither.
    """
    try:
        from monarch.config import configure
        from monarch.rdma import get_rdma_backend
    except ImportError as error:
        raise WeightSyncError(f"the rdma transport needs torchmonarch: {error}") from error
    configure(rdma_allow_tcp_fallback=allow_tcp)
    backend = str(get_rdma_backend())
    if backend == "none":
        raise WeightSyncError("the rdma transport finds no RDMA card on this host; pass allow_tcp=True to use TCP")
    return backend


class _Buffer:
    def __init__(self, control_bytes: int, data_bytes: int, chunk_bytes: int) -> None:
        from monarch.rdma import RDMABuffer, RDMATcpFallbackWarning

        nbytes = control_bytes + data_bytes
        whole = torch.zeros(nbytes, dtype=torch.uint8)
        self.control, self.data = whole[:control_bytes], whole[control_bytes:]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RDMATcpFallbackWarning)  # the transport's name says it
            self._chunks = [RDMABuffer(whole[a:b]) for a, b in _bounds(nbytes, chunk_bytes)]
            listing = pickle.dumps((chunk_bytes, self._chunks))
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
        WeightSyncError: No backend on this host.
    """

    checksum: ChecksumKind = "xxh3"
    block_bytes = BLOCK_BYTES

    def __init__(self, *, allow_tcp: bool = True, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.name = f"rdma ({rdma_backend(allow_tcp)})"
        self._chunk_bytes = chunk_bytes

    def register(self, control_bytes: int, data_bytes: int) -> _Buffer:
        try:
            return _Buffer(control_bytes, data_bytes, self._chunk_bytes)
        except (RuntimeError, MemoryError) as error:
            raise WeightSyncError(
                f"cannot register {control_bytes + data_bytes:,} bytes with {self.name}: {error}"
            ) from error

    def close(self) -> None:
        pass  # each buffer is closed by who registered it


class _Remote:
    def __init__(self, address: RdmaAddress, deadline_s: float) -> None:
        listing = torch.zeros(address.directory.size(), dtype=torch.uint8)
        _read(address.directory, listing, deadline_s)
        chunk_bytes, self._chunks = pickle.loads(listing.numpy().tobytes())
        self._bounds = _bounds(address.nbytes, chunk_bytes)
        self._staged: dict[int, torch.Tensor] = {}
        self._served: dict[int, int] = {}  # chunk -> end of the bytes handed out since it was fetched
        self._spare: list[torch.Tensor] = []

    def view(self) -> None:
        return None

    def read(self, offset: int, into: torch.Tensor, deadline_s: float) -> None:
        done = 0
        while done < into.numel():
            index, start, stop = self._find(offset + done)
            first = offset + done - start
            count = min(into.numel() - done, stop - start - first)
            chunk = self._staged.get(index)
            if chunk is None or first < self._served[index]:
                chunk = self._fetch(index, stop - start, deadline_s)
            into[done : done + count] = chunk[first : first + count]
            self._served[index] = first + count
            done += count

    def check_source(self) -> None:
        """Nothing to ask: the next read finds out, within its deadline."""

    def close(self) -> None:
        self._staged.clear()

    def _find(self, position: int) -> tuple[int, int, int]:
        if not 0 <= position < self._bounds[-1][1]:
            raise WeightSyncError(f"byte {position} lies outside a buffer of {self._bounds[-1][1]} bytes")
        if position < _PAGE or len(self._bounds) == 1:
            return 0, *self._bounds[0]
        size = self._bounds[1][1] - self._bounds[1][0]
        index = 1 + (position - self._bounds[1][0]) // size
        return index, *self._bounds[index]

    def _fetch(self, index: int, size: int, deadline_s: float) -> torch.Tensor:
        if index not in self._staged and len(self._staged) > 3:  # header, checksums, and the chunk at hand
            oldest = next(iter(self._staged))
            self._spare.append(self._staged.pop(oldest))
        chunk = self._staged.pop(index, None)
        if chunk is None:
            chunk = next((s for s in self._spare if s.numel() == size), None)
            self._spare.clear()
            chunk = chunk if chunk is not None else torch.empty(size, dtype=torch.uint8)
        _read(self._chunks[index], chunk, deadline_s)
        self._staged[index] = chunk
        self._served[index] = 0
        return chunk


class RdmaSink:
    """Reads buffers of other hosts.

    Raises:
        WeightSyncError: No backend on this host.
    """

    device = torch.device("cpu")

    def __init__(self, *, allow_tcp: bool = True, open_deadline_s: float = 60.0) -> None:
        self.name = f"rdma ({rdma_backend(allow_tcp)})"
        self._open_deadline_s = open_deadline_s

    def pulling(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def open(self, address: RdmaAddress) -> _Remote:
        return _Remote(address, self._open_deadline_s)

    def close(self) -> None:
        pass


def _bounds(nbytes: int, chunk_bytes: int) -> list[tuple[int, int]]:
    """(start, stop) of page 0 and of each chunk after it."""
    edges = [0, *range(min(_PAGE, nbytes), nbytes, chunk_bytes), nbytes]
    return [(a, b) for a, b in zip(edges, edges[1:], strict=False) if a < b]


def _read(buffer: Any, into: torch.Tensor, deadline_s: float) -> None:
    try:
        buffer.read_into(into, timeout=max(1, math.ceil(deadline_s))).get(timeout=max(0.001, deadline_s))
    except TimeoutError as error:
        raise DeadlineExceeded(
            f"reading {into.numel():,} bytes from another host took longer than {deadline_s:g} s; "
            "look at the source's process and the network, or raise the limit"
        ) from error
    except Exception as error:  # Monarch raises its own, unexported, types for a lost peer
        raise WeightSyncError(f"the source cannot be read any more ({type(error).__name__}: {error})") from error
