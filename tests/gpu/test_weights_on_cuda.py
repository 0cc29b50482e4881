"""Weight versions from one process's device memory into another's, on the same GPU, and within one process."""

import threading
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

from llamarl.channels.base import ChannelKind, ChannelSpec
from llamarl.channels.weights import WeightsPayload, WeightsReceiver, WeightsSender
from llamarl.errors import WeightSyncError
from llamarl.transports.checksum import block_digest
from llamarl.transports.cuda_ipc import CudaIpcSink, CudaIpcSource
from llamarl.transports.shared_memory import SharedMemorySink, SharedMemorySource

WAIT_S = 120.0
SPEC = ChannelSpec(name="weights", kind=ChannelKind.WEIGHTS, source="trainer", sink="generator", delay=1, capacity=2)
SHAPES = {"embed": (3001, 96), "q": (96, 96), "norm": (97,)}  # a block boundary inside a row, an odd length


def model(version: int, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=generator).to(device) for name, shape in SHAPES.items()}


def sender(transport: str, device: torch.device) -> WeightsSender:
    source = CudaIpcSource(device, num_sink_ranks=1) if transport == "cuda_ipc" else SharedMemorySource()
    return WeightsSender(SPEC, rank=0, num_source_ranks=1, num_sink_ranks=1, transport=source)


def receiver(transport: str, device: torch.device) -> WeightsReceiver:
    sink = CudaIpcSink(device, rank=0) if transport == "cuda_ipc" else SharedMemorySink()
    return WeightsReceiver(SPEC, rank=0, num_source_ranks=1, num_sink_ranks=1, transport=sink)


def trainer_process(pipe: Connection, transport: str, index: int) -> None:
    """Sends the versions it is asked for, in the dtype asked for; ends on None."""
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    end = sender(transport, device)
    while (asked := pipe.recv()) is not None:
        version, dtype, background = asked
        released = threading.Event() if background else None
        payload = WeightsPayload(
            version=version, tensors=model(version, device), wire_dtype=getattr(torch, dtype), released=released
        )
        pipe.send(end.send(version, payload))
        if released is not None:
            assert released.wait(WAIT_S)
    end.close()


def answer(pipe: Connection) -> Any:
    assert pipe.poll(WAIT_S), "the other process does not answer"
    return pipe.recv()


@pytest.mark.parametrize("transport", ["cuda_ipc", "shared_memory"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_processes_on_one_device(transport: str, dtype: str, device: torch.device) -> None:
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=trainer_process, args=(theirs, transport, device.index), daemon=True)
    process.start()
    theirs.close()
    try:
        end = receiver(transport, device)
        live = {name: torch.zeros(shape, dtype=getattr(torch, dtype), device=device) for name, shape in SHAPES.items()}
        addresses = {name: t.data_ptr() for name, t in live.items()}
        for version, background in ((1, False), (2, True), (3, True), (4, False)):
            ours.send((version, dtype, background))
            handles = (answer(ours),)
            found = end.receive(handles, WAIT_S)
            found.load_into(live, deadline_s=WAIT_S)
            for name, expected in model(version).items():
                assert torch.equal(live[name].cpu(), expected.to(getattr(torch, dtype))), (version, name)
        assert {name: t.data_ptr() for name, t in live.items()} == addresses
        end.close()
        ours.send(None)
        process.join(WAIT_S)
        assert process.exitcode == 0
    finally:
        if process.is_alive():
            process.kill()
            process.join(WAIT_S)


def test_both_ends_in_one_process(device: torch.device) -> None:
    """As under runtime ``inline``: CUDA opens no handle in the process that made it."""
    source, sink = sender("cuda_ipc", device), receiver("cuda_ipc", device)
    live = {name: torch.zeros(shape, device=device) for name, shape in SHAPES.items()}
    for version in (1, 2, 3):
        handle = source.send(version, WeightsPayload(version=version, tensors=model(version, device)))
        found = sink.receive((handle,), WAIT_S)
        found.load_into(live, deadline_s=WAIT_S)
        assert all(torch.equal(live[name].cpu(), expected) for name, expected in model(version).items())
    sink.close()
    source.close()


def test_altered_device_memory_is_refused(device: torch.device) -> None:
    source, sink = sender("cuda_ipc", device), receiver("cuda_ipc", device)
    handle = source.send(0, WeightsPayload(version=1, tensors=model(1, device)))
    slot = source._slots[0]
    slot.buffer.data[12345] ^= 1
    found = sink.receive((handle,), WAIT_S)
    assert found is not None
    live = {name: torch.zeros(shape, device=device) for name, shape in SHAPES.items()}
    with pytest.raises(WeightSyncError, match="do not match the manifest's checksum"):
        found.load_into(live, deadline_s=WAIT_S)
    sink.close()
    source.close()


@pytest.mark.parametrize("size", [0, 1, 7, 8, 4096, 100_003])
def test_mix64_is_the_same_number_on_both_devices(size: int, device: torch.device) -> None:
    data = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
    assert block_digest(data.to(device), "mix64") == block_digest(data, "mix64")


def test_a_version_is_copied_behind_the_kernels_that_make_it(device: torch.device) -> None:
    """The copy runs on a stream of its own; it must wait for work that the trainer had queued when it published."""
    source, sink = sender("cuda_ipc", device), receiver("cuda_ipc", device)
    tensors = {name: torch.zeros(shape, device=device) for name, shape in SHAPES.items()}
    busy = torch.randn(2048, 2048, device=device)
    for _ in range(50):
        busy = busy @ busy / 50.0
    for name, value in model(5, device).items():
        tensors[name].copy_(value)
    released = threading.Event()
    handle = source.send(0, WeightsPayload(version=5, tensors=tensors, released=released))
    found = sink.receive((handle,), WAIT_S)
    live = {name: torch.zeros(shape, device=device) for name, shape in SHAPES.items()}
    found.load_into(live, deadline_s=WAIT_S)
    assert released.wait(WAIT_S)
    assert all(torch.equal(live[name].cpu(), expected) for name, expected in model(5).items())
    sink.close()
    source.close()
