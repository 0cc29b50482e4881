"""CUDA IPC on one host: a sink maps a trainer GPU's buffer and copies from it, over NVLink where there is one.

    control (header, catalog, checksums): a shared memory segment        data: device memory of the source
    one IPC handle for each sink rank, each with a count of its own   ──▶ sink: peer copy on a stream of its own, mix64 there

The source alone decides how long its memory lives: it closes a buffer only when no version in it is
wanted any more, and then gives up every handle's count, opened or not. So a sink that restarts may
open its handle again, and one that was killed, or never came, keeps no memory of the source. A
sink's waits for its device have the pull's deadline.

Blocks are larger than on the CPU: each costs the sink a few launches; it waits once for all of them. CUDA cannot open a
handle in the process that made it, so where both ends share a process (runtime ``inline``) the sink
is given the source's buffer itself.

Two processes on one H200 have run it (docs/results/gpu.md); copies from one GPU to another have not.
The handles are those of ``torch.multiprocessing.reductions``, of torch 2.13.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch

from llamarl.errors import ChannelError
from llamarl.transports.base import RemoteBuffer, SinkTransport, SourceTransport, Transport
from llamarl.transports.checksum import ChecksumKind
from llamarl.transports.deadline import Clock, wait_for_device
from llamarl.transports.segments import MappedSegment, Segment, SegmentHandle, open_segment, owner_holds, tensor_over

__all__ = ["CudaIpcAddress", "CudaIpcSink", "CudaIpcSource"]

_BLOCK_BYTES = 32 << 20
_EXPANDABLE = (
    ": expandable segments, which PYTORCH_ALLOC_CONF or PYTORCH_CUDA_ALLOC_CONF asks for, lie in files that a "
    "container may keep one process from taking of another (pytorch issue 165685); unset it, or set schedule.transport "
    "to shared_memory"
)


@dataclass(frozen=True)
class CudaIpcAddress:
    """Where a registered buffer lies. The IPC handles themselves lie in the segment, behind the control part."""

    segment: SegmentHandle
    control_bytes: int
    handles_bytes: int
    data_bytes: int


class _Buffer:
    def __init__(self, control_bytes: int, data_bytes: int, device: torch.device, num_sink_ranks: int) -> None:
        self.data = torch.zeros(data_bytes, dtype=torch.uint8, device=device)
        torch.cuda.synchronize(device)  # the zeros must be there before anyone else can look
        start = int(self.data.storage_offset())
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        # Each call makes a handle with a reference count of its own, which the sink that opens it counts down.
        shares = [self.data.untyped_storage()._share_cuda_() for _ in range(num_sink_ranks)]
        self._counters = [(share[4], share[5]) for share in shares]
        handles = pack_handles(uuid, start, shares)
        self._segment = Segment(control_bytes + len(handles))
        whole = torch.from_numpy(self._segment.bytes)
        whole[control_bytes:] = torch.frombuffer(bytearray(handles), dtype=torch.uint8)
        self.control = whole[:control_bytes]
        self._address = CudaIpcAddress(self._segment.handle, control_bytes, len(handles), data_bytes)
        _of_this_process[self._segment.handle.nonce] = self

    @property
    def address(self) -> CudaIpcAddress:
        return self._address

    def close(self) -> None:
        for counter in self._counters:  # torch keeps memory whose handle nobody has opened, or whose opener was killed
            torch.UntypedStorage._release_ipc_counter(*counter, device=self.data.device)
        self._counters = []
        self.control = torch.empty(0, dtype=torch.uint8)
        self.data = torch.empty(0, dtype=torch.uint8)
        self._segment.close()


_of_this_process: WeakValueDictionary[bytes, _Buffer] = WeakValueDictionary()
"""Registered buffers by the nonce of their control segment."""


class CudaIpc(Transport):
    """Between processes of one host that have GPUs: each end on its process's current one."""

    on_device = True

    @staticmethod
    def source(*, num_sink_ranks: int) -> CudaIpcSource:
        return CudaIpcSource(_current_gpu(), num_sink_ranks=num_sink_ranks)

    @staticmethod
    def sink(*, rank: int) -> CudaIpcSink:
        return CudaIpcSink(_current_gpu(), rank=rank)


class CudaIpcSource(SourceTransport):
    """Registers memory of one GPU.

    Args:
        device: The trainer rank's GPU.
        num_sink_ranks: Sink ranks on this host.

    Raises:
        ChannelError: There is no GPU.
    """

    name = "cuda_ipc"
    checksum: ChecksumKind = "mix64"
    block_bytes = _BLOCK_BYTES

    def __init__(self, device: torch.device, *, num_sink_ranks: int) -> None:
        _check_device(device)
        self._device = device
        self._num_sink_ranks = num_sink_ranks

    def register(self, control_bytes: int, data_bytes: int) -> _Buffer:
        try:
            return _Buffer(control_bytes, data_bytes, self._device, self._num_sink_ranks)
        except (torch.OutOfMemoryError, ChannelError) as error:
            raise ChannelError(
                f"cannot register a buffer of {data_bytes:,} bytes on {self._device}: {error}"
            ) from error


class _Remote(RemoteBuffer):
    def __init__(self, address: CudaIpcAddress, segment: MappedSegment, rank: int) -> None:
        self._address = address
        self._segment = segment
        self._control = tensor_over(segment.bytes)
        own = _of_this_process.get(address.segment.nonce)
        self._data = _shared_data(address, segment, rank) if own is None else own.data

    def read(self, offset: int, into: torch.Tensor, deadline_s: float, *, fresh: bool = False) -> None:
        size, control = into.numel(), self._address.control_bytes
        if offset < control:
            if offset < 0 or offset + size > control:
                raise ChannelError(f"bytes {offset} to {offset + size} lie outside a control part of {control} bytes")
            ctypes.memmove(into.data_ptr(), self._control.data_ptr() + offset, size)
            return
        if offset + size > control + self._address.data_bytes:
            raise ChannelError(f"bytes {offset} to {offset + size} lie outside the buffer")
        into.copy_(self._data[offset - control : offset - control + size], non_blocking=True)

    def check_source(self) -> None:
        if not owner_holds(self._segment.handle):
            raise ChannelError("the source has ended or closed its buffer")

    def close(self) -> None:
        self._data = self._control = torch.empty(0, dtype=torch.uint8)
        self._segment.close()


class CudaIpcSink(SinkTransport):
    """Maps GPU buffers of processes on this host.

    Args:
        device: The generator rank's GPU; copies run on a stream of its own there.
        rank: This sink rank, which of the source's handles is its own.

    Raises:
        ChannelError: There is no GPU.
    """

    name = "cuda_ipc"

    def __init__(self, device: torch.device, *, rank: int) -> None:
        _check_device(device)
        self.device = device
        self._rank = rank
        self._stream = torch.cuda.Stream(device)

    def open(self, address: CudaIpcAddress, deadline_s: float) -> _Remote:
        segment = None
        try:
            segment = open_segment(address.segment)
            return _Remote(address, segment, self._rank)
        except (ChannelError, RuntimeError) as error:
            if segment is not None:
                segment.close()
            hint = _EXPANDABLE if "pidfd" in str(error) else ""
            raise ChannelError(f"cannot open the GPU buffer: {error}{hint}") from error

    @contextlib.contextmanager
    def pulling(self, clock: Clock) -> Iterator[None]:
        """Copy on the side stream, behind what the engine has queued; wait for it before the version is served."""
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            yield
        wait_for_device(self._stream.record_event(), clock, "copying the last blocks")


def pack_handles(uuid: str, start: int, shares: Sequence[Sequence[Any]]) -> bytes:
    """Write the GPU, where in its storage the buffer starts, and a handle for each sink rank, as
    JSON: what torch calls the parts of a handle are numbers, truth values and bytes, and bytes are
    written as hexadecimal text."""
    plain = [[part.hex() if isinstance(part, bytes) else part for part in share] for share in shares]
    return json.dumps([uuid, start, plain]).encode()


def unpack_handles(data: bytes) -> tuple[str, int, list[list[Any]]]:
    """Read what ``pack_handles`` wrote.

    Raises:
        ChannelError: It is something else.
    """
    try:
        uuid, start, shares = json.loads(data)
        return (
            str(uuid),
            int(start),
            [[bytes.fromhex(part) if isinstance(part, str) else part for part in share] for share in shares],
        )
    except (ValueError, TypeError) as error:
        raise ChannelError(f"the source's handles cannot be read: {error}") from error


def _shared_data(address: CudaIpcAddress, segment: MappedSegment, rank: int) -> torch.Tensor:
    """The source's device memory, mapped here."""
    at = address.control_bytes
    uuid, start, shares = unpack_handles(segment.bytes[at : at + address.handles_bytes].tobytes())
    if not 0 <= rank < len(shares):
        raise ChannelError(f"the source shares its buffer with {len(shares)} sink ranks, this is rank {rank}")
    device = _device_of(uuid)
    storage = torch.UntypedStorage._new_shared_cuda(device.index, *shares[rank][1:])
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, start, (address.data_bytes,), (1,))


def _current_gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)


def _check_device(device: torch.device) -> None:
    if device.type != "cuda" or device.index is None:
        raise ValueError(f"the cuda_ipc transport needs a device like cuda:0, got {device}")
    if not torch.cuda.is_available():
        raise ChannelError("the cuda_ipc transport needs a CUDA GPU; this process sees none")


def _device_of(uuid: Any) -> torch.device:
    """This process's number for a GPU; ``CUDA_VISIBLE_DEVICES`` may differ between the two sides."""
    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) == uuid:
            return torch.device("cuda", index)
    raise ChannelError(
        f"the source's GPU {uuid} is not visible here: list it in this process's CUDA_VISIBLE_DEVICES, after its own"
    )
