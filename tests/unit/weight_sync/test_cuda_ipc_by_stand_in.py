"""CUDA IPC between real processes, over a stand-in for the device: memory files, torch's handles and its counts of who opened them."""

import ctypes
import mmap
import os
import pickle
import signal
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llamarl.errors import ChannelError
from llamarl.transports import cuda_ipc
from llamarl.transports.cuda_ipc import CudaIpcSink, CudaIpcSource

GPU = torch.device("cuda", 0)
CONTROL, DATA = 64, 4096


class _Device:
    """Memory that forks share, and for each handle how often it is still held, as torch counts: 1 from the start,
    one less for an opener that let go and one less for a source that gave it up; memory may go at 0 or below."""

    def __init__(self) -> None:
        self.memory: dict[bytes, mmap.mmap] = {}
        self.counts = (ctypes.c_int64 * 16).from_buffer(mmap.mmap(-1, 128))
        self.handles = 0

    def zeros(self, size: int, **_: Any) -> torch.Tensor:
        name = f"device memory {len(self.memory)}".encode()
        self.memory[name] = mmap.mmap(-1, size)
        tensor = torch.frombuffer(self.memory[name], dtype=torch.uint8)
        tensor.untyped_storage = lambda: SimpleNamespace(_share_cuda_=lambda: self.share(name, size))  # type: ignore[method-assign]
        return tensor

    def share(self, name: bytes, size: int) -> tuple[Any, ...]:
        number, self.handles = self.handles, self.handles + 1
        self.counts[number] = 1
        return (0, name, size, 0, b"counter", number, b"event", True)

    def open(self, device: int, name: bytes, size: int, offset: int, counter: bytes, number: int, *_: Any) -> Any:
        assert (device, offset, counter) == (0, 0, b"counter") and self.counts[number] > 0
        return SimpleNamespace(bytes=self.memory[name], number=number)

    def release(self, counter: bytes, number: int, *, device: torch.device) -> None:
        self.counts[number] -= 1

    def held(self) -> list[int]:
        return list(self.counts[: self.handles])


class _Mapped:
    """An empty tensor of the device until it is set to shared memory."""

    def set_(self, storage: Any, start: int, shape: tuple[int], strides: tuple[int]) -> torch.Tensor:
        assert (start, strides) == (0, (1,))
        return torch.frombuffer(storage.bytes, dtype=torch.uint8)[: shape[0]]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Device]:
    made = _Device()
    stream = SimpleNamespace(wait_stream=lambda other: None, record_event=lambda: SimpleNamespace(query=lambda: True))
    cuda = SimpleNamespace(
        is_available=lambda: True,
        synchronize=lambda device: None,
        device_count=lambda: 1,
        get_device_properties=lambda device: SimpleNamespace(uuid="GPU-1"),
        Stream=lambda device: stream,
        current_stream=lambda device: stream,
        device=lambda device: nullcontext(),
        stream=lambda stream: nullcontext(),
    )

    class Torch:
        zeros = staticmethod(made.zeros)
        UntypedStorage = SimpleNamespace(_new_shared_cuda=made.open, _release_ipc_counter=made.release)

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        def empty(self, *size: int, device: Any = None, **settings: Any) -> Any:
            return _Mapped() if device is not None else torch.empty(*size, **settings)

    Torch.cuda = cuda  # type: ignore[attr-defined]
    monkeypatch.setattr(cuda_ipc, "torch", Torch())
    yield made


def _in_a_process(work: Callable[[], None]) -> int:
    """Its exit status, or minus the signal that ended it."""
    child = os.fork()
    if not child:
        try:
            work()
            os._exit(0)
        except BaseException as error:  # told by the status alone
            print(repr(error))
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_killed_sink_opens_again_and_keeps_no_memory_of_the_source(device: _Device) -> None:
    buffer = CudaIpcSource(GPU, num_sink_ranks=2).register(CONTROL, DATA)
    buffer.data.copy_(torch.arange(DATA) % 251)
    buffer.control.fill_(7)
    address = buffer.address
    cuda_ipc._of_this_process.clear()  # what a fork would have inherited
    into = torch.empty(1000, dtype=torch.uint8)

    def pull(rank: int, end: Callable[[], None] = lambda: None) -> Callable[[], None]:
        def work() -> None:
            remote = CudaIpcSink(GPU, rank=rank).open(address, 5.0)
            remote.check_source()
            remote.read(0, into[:CONTROL], 5.0)
            assert torch.equal(into[:CONTROL], torch.full((CONTROL,), 7, dtype=torch.uint8))
            end()
            remote.read(CONTROL + 500, into, 5.0)
            assert torch.equal(into, (torch.arange(500, 1500) % 251).to(torch.uint8))
            device.release(b"counter", rank, device=GPU)  # as torch does when the last tensor over it goes

        return work

    assert _in_a_process(pull(0, lambda: os.kill(os.getpid(), signal.SIGKILL))) == -signal.SIGKILL
    assert device.held() == [1, 1]  # the killed one has told nobody
    assert _in_a_process(pull(0)) == 0 and device.held() == [0, 1]  # opened once more; rank 1 has not come
    buffer.close()
    assert max(device.held()) <= 0  # both given up, opened or not

    def too_late() -> None:
        with pytest.raises(ChannelError, match="cannot open the GPU buffer"):
            CudaIpcSink(GPU, rank=1).open(address, 5.0)

    assert _in_a_process(too_late) == 0


def test_expandable_segments_that_a_container_forbids_are_told_by_their_variable(
    device: _Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: Any) -> Any:
        raise RuntimeError("pidfd_getfd: Operation not permitted")

    buffer = CudaIpcSource(GPU, num_sink_ranks=1).register(CONTROL, DATA)
    cuda_ipc._of_this_process.clear()
    monkeypatch.setattr(cuda_ipc.torch.UntypedStorage, "_new_shared_cuda", forbidden)
    with pytest.raises(ChannelError, match="not permitted: expandable segments, which PYTORCH_ALLOC_CONF .* unset it"):
        CudaIpcSink(GPU, rank=0).open(buffer.address, 5.0)
    buffer.close()


def test_a_source_that_died_is_found_and_a_rank_without_a_handle_refused(device: _Device) -> None:
    reading, writing = os.pipe()
    source = os.fork()
    if not source:
        buffer = CudaIpcSource(GPU, num_sink_ranks=1).register(CONTROL, DATA)
        os.write(writing, pickle.dumps(buffer.address))
        signal.pause()
    address = pickle.loads(os.read(reading, 4096))
    device.memory[b"device memory 0"] = mmap.mmap(-1, DATA)  # the child's, as far as this process sees of it
    device.handles, device.counts[0] = 1, 1
    remote = CudaIpcSink(GPU, rank=0).open(address, 5.0)
    remote.check_source()
    with pytest.raises(ChannelError, match="with 1 sink ranks, this is rank 1"):
        CudaIpcSink(GPU, rank=1).open(address, 5.0)
    with pytest.raises(ChannelError, match="outside the buffer"):
        remote.read(CONTROL + DATA - 10, torch.empty(11, dtype=torch.uint8), 5.0)
    os.kill(source, signal.SIGKILL)
    os.waitpid(source, 0)
    with pytest.raises(ChannelError, match="the source has ended"):
        remote.check_source()
    remote.close()
