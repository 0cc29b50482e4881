"""Choice of transport, and what of the GPU path runs without a GPU: its checksum, and the protocol around it."""

import random
from typing import Any

import pytest
import torch
from whole_versions import read_all

from llamarl.channels.base import ChannelKind, ChannelSpec
from llamarl.channels.weights import WeightsPayload, WeightsReceiver, WeightsSender
from llamarl.errors import ChannelError, DeadlineExceeded, WeightSyncError
from llamarl.transports import shared_memory
from llamarl.transports.checksum import block_digest, digest
from llamarl.transports.cuda_ipc import CudaIpcSink, CudaIpcSource, pack_handles, unpack_handles
from llamarl.transports.deadline import Clock, wait_for_device
from llamarl.transports.shared_memory import SharedMemorySource


def test_cuda_ipc_says_what_it_lacks() -> None:
    with pytest.raises(ValueError, match="like cuda:0"):
        CudaIpcSource(torch.device("cpu"), num_sink_ranks=1)
    if not torch.cuda.is_available():
        with pytest.raises(ChannelError, match="sees none"):
            CudaIpcSink(torch.device("cuda:0"), rank=0)


def slow_mix64(data: bytes) -> int:
    """The definition, in Python integers."""
    mask = (1 << 64) - 1
    whole = len(data) // 8 * 8
    words = [int.from_bytes(data[i : i + 8], "little") for i in range(0, whole, 8)]
    words.append(int.from_bytes(data[whole:], "little"))
    total = len(data)
    for position, word in enumerate(words, start=1):
        x = word ^ (position * 0x9E3779B97F4A7C15 & mask)
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
        total += x ^ x >> 31
    return total & mask


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 64, 1001])
def test_mix64_equals_its_definition(size: int) -> None:
    data = random.Random(size).randbytes(size)
    tensor = torch.tensor(list(data), dtype=torch.uint8)
    assert block_digest(tensor, "mix64") == slow_mix64(data)
    assert block_digest(tensor, "xxh3") == digest(data)


@pytest.mark.parametrize("kind", ["xxh3", "mix64"])
def test_checksum_tells_bytes_from_their_complements(kind: str) -> None:
    for size in (8, 9, 1 << 12):
        zeros = torch.zeros(size, dtype=torch.uint8)
        assert block_digest(zeros, kind) != block_digest(zeros ^ 0xFF, kind)  # type: ignore[arg-type]
        assert block_digest(zeros ^ 0xFF, "mix64") == slow_mix64(b"\xff" * size)
    data = torch.tensor(list(random.Random(1).randbytes(96)), dtype=torch.uint8)
    seen = {block_digest(data, kind)}  # type: ignore[arg-type]
    for start in range(0, 96, 8):
        for stop in range(start + 8, 97, 8):
            turned = data.clone()
            turned[start:stop] ^= 0xFF
            seen.add(block_digest(turned, kind))  # type: ignore[arg-type]
    assert len(seen) == 1 + 12 * 13 // 2


@pytest.mark.parametrize("kind", ["xxh3", "mix64"])
def test_checksum_finds_each_flipped_bit_and_swapped_words(kind: str) -> None:
    data = torch.tensor(list(random.Random(0).randbytes(83)), dtype=torch.uint8)
    seen = {block_digest(data, kind)}  # type: ignore[arg-type]
    for bit in range(8 * 83):
        flipped = data.clone()
        flipped[bit // 8] ^= 1 << (bit % 8)
        seen.add(block_digest(flipped, kind))  # type: ignore[arg-type]
    assert len(seen) == 1 + 8 * 83
    swapped = torch.cat([data[16:32], data[:16], data[32:]])
    longer = torch.cat([data, torch.zeros(1, dtype=torch.uint8)])
    assert block_digest(swapped, kind) not in seen  # type: ignore[arg-type]
    assert block_digest(longer, kind) not in seen  # type: ignore[arg-type]


class Countdown:
    """A device's event that is done at the n-th look."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    def query(self) -> bool:
        self.looks -= 1
        return self.looks <= 0


def test_wait_for_a_device_ends_when_it_is_done_or_at_the_deadline() -> None:
    event = Countdown(5)
    wait_for_device(event, Clock(60.0, "sink rank 0"), "copying block 3")
    assert event.looks == 0
    with pytest.raises(DeadlineExceeded, match=r"sink rank 0: .*copying block 3\), limit 0.05 s"):
        wait_for_device(Countdown(10**9), Clock(0.05, "sink rank 0"), "copying block 3")


class SharedMemoryWithMix64(SharedMemorySource):
    """A source whose blocks are proved as a GPU's are."""

    checksum = "mix64"
    block_bytes = 4096


def test_sink_proves_blocks_of_a_gpu_together_and_pulls_again_what_was_torn(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = ChannelSpec(name="weights", kind=ChannelKind.WEIGHTS, source="trainer", sink="generator")
    ends = {"rank": 0, "num_source_ranks": 1, "num_sink_ranks": 1}
    sender = WeightsSender(spec, **ends, transport=SharedMemoryWithMix64())
    receiver = WeightsReceiver(spec, **ends)
    sent = {"w": torch.randn(100, 37), "v": torch.randn(5).to(torch.bfloat16)}
    handle = sender.send(0, WeightsPayload(version=1, tensors=sent))
    version = receiver.receive((handle,), 5.0)
    assert version is not None
    got = read_all(version)
    assert all(torch.equal(got[name], tensor) for name, tensor in sent.items())
    read, torn = shared_memory._Remote.read, []

    def read_torn(self: Any, offset: int, into: torch.Tensor, deadline_s: float, *, fresh: bool = False) -> None:
        read(self, offset, into, deadline_s, fresh=fresh)
        if offset >= handle.data_offset and len(torn) < 2:
            torn.append(offset)
            into[5] ^= 1

    with monkeypatch.context() as patch:
        patch.setattr(shared_memory._Remote, "read", read_torn)
        got = read_all(version)
    assert len(torn) == 2 and all(torch.equal(got[name], tensor) for name, tensor in sent.items())  # pulled again
    sender._slots[0].buffer.data[9000] ^= 4
    with pytest.raises(WeightSyncError, match="w: the bytes pulled"):
        read_all(version)


def test_handles_of_gpu_memory_cross_as_plain_data() -> None:
    share = (1, b"\x00\xffhandle", 4096, 512, b"counter\x80", 7, b"", True)  # as torch's _share_cuda_ gives it
    data = pack_handles("GPU-1", 256, [share, share])
    assert unpack_handles(data) == ("GPU-1", 256, [list(share)] * 2)
    for wrong in (b"\x80\x04N.", b"{}", b'["GPU-1", 0, [["no hex"]]]', b"[1, 2]"):
        with pytest.raises(ChannelError, match="handles cannot be read"):
            unpack_handles(wrong)
