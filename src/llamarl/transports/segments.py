"""Shared memory between processes of one host: the owner writes, any number of readers map the same pages.

    owner: Segment(size) ──handle (pid, fd, size, nonce; < 200 bytes)──▶ reader: open_segment(handle) ──▶ read-only pages

A segment is a ``memfd``: anonymous memory that another process of the same user opens through
``/proc/<pid>/fd/<n>``. It needs no ``/dev/shm`` (64 MB in many containers) and leaves nothing
behind, not even after SIGKILL: the kernel frees it with its last user. Its size is sealed, so a
reader can never be killed by a bus error.

A header carries a random nonce. A reader compares it with the handle's, so a recycled pid, a recycled descriptor and a
segment that has been replaced are all told apart from the real one.

In a job on several hosts each segment is also registered with this process's server, and its handle
says in which space it lies and where that server listens: a reader elsewhere asks there
(:mod:`llamarl.transports.remote_segment`).
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
import struct
import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from llamarl.errors import ChannelError, SourceGone
from llamarl.linux_calls import SEAL_SIZE, new_memory, seal
from llamarl.transports.network import mine
from llamarl.transports.segment_server import Endpoint, server_here

if TYPE_CHECKING:  # imported with the first tensor: a rank that computes nothing has segments too
    import torch

__all__ = [
    "HEADER_BYTES",
    "MappedSegment",
    "Segment",
    "SegmentHandle",
    "is_elsewhere",
    "open_segment",
    "owner_holds",
    "tensor_over",
]

HEADER_BYTES = 4096
"""Bytes before the payload: one page, so that the payload starts on a page of its own."""

_MAGIC = b"llamarl1"
_HEADER = struct.Struct("<8s16sQ")
_MEMFD_NAME = "llamarl"


@dataclass(frozen=True, slots=True)
class SegmentHandle:
    """Where a segment lies. Small and picklable."""

    pid: int
    fd: int
    size: int
    """Payload bytes, without the header."""
    nonce: bytes
    space: str = ""
    """Whose ``/proc`` shows it: see :class:`llamarl.transports.network.Network`. Empty in a job on one machine."""
    endpoint: Endpoint = ("", 0)
    """Where readers of another space ask for its bytes."""

    def __reduce__(self) -> tuple[type[SegmentHandle], tuple[object, ...]]:
        """Pickled without what a job on one machine does not fill."""
        values: tuple[object, ...] = (self.pid, self.fd, self.size, self.nonce)
        if self.space:
            values += (self.space, self.endpoint)
        return SegmentHandle, values


class Segment:
    """Memory that this process owns and others may read.

    Args:
        size: Payload bytes, > 0. Zero-filled; pages cost nothing until they are touched.

    Raises:
        ChannelError: The memory cannot be had.
    """

    def __init__(self, size: int) -> None:
        self._server = server_here()
        nonce = os.urandom(16)
        total = HEADER_BYTES + size
        try:
            self._fd, self._map = _sealed_memory(total)
        except OSError as error:
            raise ChannelError(
                f"cannot allocate a shared segment of {total:,} bytes in process {os.getpid()}: {error}; free memory, "
                "lower the channel's capacity or send smaller payloads"
            ) from error
        _HEADER.pack_into(self._map, 0, _MAGIC, nonce, size)
        self.handle = SegmentHandle(os.getpid(), self._fd, size, nonce)
        if self._server is not None and (network := mine()) is not None:
            self._server.register(nonce, memoryview(self._map)[HEADER_BYTES:])
            self.handle = replace(self.handle, space=network.space, endpoint=self._server.endpoint)
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8, offset=HEADER_BYTES)
        """[size] payload, writable; every reader sees what is written here."""

    @property
    def size(self) -> int:
        return self.handle.size

    def close(self) -> None:
        """Give up ownership. Readers that have it open keep their pages; nobody new can open it. Idempotent."""
        if self._fd < 0:
            return
        if self._server is not None:
            self._server.withdraw(self.handle.nonce)
        os.close(self._fd)
        self._fd = -1
        self.bytes = np.empty(0, np.uint8)
        _close_map(self._map)

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            self.close()


class MappedSegment:
    """A segment of another process (or of this one), mapped read-only: writing to it is a fault."""

    def __init__(self, handle: SegmentHandle, mapping: mmap.mmap) -> None:
        self.handle = handle
        self._map = mapping
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(mapping, dtype=np.uint8, offset=HEADER_BYTES)

    def close(self) -> None:
        """Unmap; memory goes when the last view of it goes. Idempotent."""
        self.bytes = np.empty(0, np.uint8)
        _close_map(self._map)


def is_elsewhere(handle: SegmentHandle) -> bool:
    """Whether the segment lies in another space than this process's, so that its bytes come through a socket only."""
    network = mine()
    return network is not None and handle.space != network.space


def open_segment(handle: SegmentHandle) -> MappedSegment:
    """Map the segment that ``handle`` names, which is not elsewhere.

    Raises:
        ChannelError: Its owner is gone, has closed it, or the name now means something else.
    """
    path = f"/proc/{handle.pid}/fd/{handle.fd}"
    where = f"segment of process {handle.pid} ({path})"
    try:
        if not os.readlink(path).startswith(f"/memfd:{_MEMFD_NAME}"):
            raise SourceGone(f"{where}: the descriptor now belongs to something else; its owner closed it or restarted")
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise ChannelError(
                f"{where}: cannot be opened ({error}): raise the limit of open files (ulimit -n)"
            ) from error
        raise SourceGone(f"{where}: cannot be opened ({error}); its owner has ended or closed it") from error
    try:
        status = os.fstat(fd)
        total = HEADER_BYTES + handle.size
        if not stat.S_ISREG(status.st_mode) or status.st_size < total:
            raise ChannelError(f"{where}: holds {status.st_size} bytes, the handle says {total}; it has been replaced")
        mapping = mmap.mmap(fd, total, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED)
    finally:
        os.close(fd)
    magic, nonce, size = _HEADER.unpack_from(mapping)
    if magic != _MAGIC or nonce != handle.nonce or size != handle.size:
        mapping.close()
        raise ChannelError(f"{where}: is not the one the handle names (its header differs); its owner restarted")
    return MappedSegment(handle, mapping)


def owner_holds(handle: SegmentHandle) -> bool:
    """False if the owner has ended or closed the segment (its pages stay readable for who has them open)."""
    try:
        return os.readlink(f"/proc/{handle.pid}/fd/{handle.fd}").startswith(f"/memfd:{_MEMFD_NAME}")
    except OSError:
        return False  # also a killed process that nobody has waited for yet: it holds no descriptors


def tensor_over(buffer: npt.NDArray[np.uint8]) -> torch.Tensor:
    """uint8 tensor [n] over the same memory, without a copy. Never write to it if the memory is a reader's."""
    import torch

    with warnings.catch_warnings():  # torch warns that the memory is read-only: that is the point
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(buffer)


def _sealed_memory(total: int) -> tuple[int, mmap.mmap]:
    fd = new_memory(_MEMFD_NAME)
    try:
        os.ftruncate(fd, total)
        seal(fd, SEAL_SIZE)
        return fd, mmap.mmap(fd, total)
    except OSError:
        os.close(fd)
        raise


def _close_map(mapping: mmap.mmap) -> None:
    with contextlib.suppress(BufferError):  # a view still lives; the pages go with it
        mapping.close()
