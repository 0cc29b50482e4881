"""RDMA without a second host: buffers that copy memory stand in for Monarch's, the transport and the protocol are real."""

from __future__ import annotations

import sys
import threading
import time
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from whole_versions import read_all

from llamarl.errors import DeadlineExceeded, WeightSyncError
from llamarl.transports.rdma import CHUNK_BYTES, RdmaSink, RdmaSource
from llamarl.weight_sync import source
from llamarl.weight_sync.sink import Puller
from llamarl.weight_sync.source import Publisher

WAIT_S = 60.0


class Done:
    def get(self, timeout: float) -> None:
        assert timeout > 0


class CopyingBuffer:
    """A Monarch RDMABuffer whose reads are memory copies; counts them."""

    memory: list[torch.Tensor] = []
    read_bytes: list[int] = []
    gone = False

    def __init__(self, tensor: torch.Tensor) -> None:
        self.index = len(self.memory)
        self.memory.append(tensor)

    def size(self) -> int:
        return self.memory[self.index].numel()

    def read_into(self, into: torch.Tensor, timeout: int) -> Done:
        if CopyingBuffer.gone:
            raise RuntimeError("the peer hung up")
        assert into.numel() == self.size(), "Monarch reads whole buffers"
        into.copy_(self.memory[self.index])
        self.read_bytes.append(into.numel())
        return Done()

    def drop(self) -> Done:
        self.memory[self.index] = torch.empty(0)
        return Done()


@pytest.fixture(autouse=True)
def monarch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    rdma, config = types.ModuleType("monarch.rdma"), types.ModuleType("monarch.config")
    rdma.RDMABuffer = CopyingBuffer  # type: ignore[attr-defined]
    rdma.RDMATcpFallbackWarning = UserWarning  # type: ignore[attr-defined]
    rdma.get_rdma_backend = lambda: "tcp"  # type: ignore[attr-defined]
    config.configure = lambda **_: None  # type: ignore[attr-defined]
    for module in (rdma, config):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(CopyingBuffer, "memory", [])
    monkeypatch.setattr(CopyingBuffer, "read_bytes", [])
    monkeypatch.setattr(CopyingBuffer, "gone", False)
    yield


class Steps:
    """Stands in for the checksum of the copying thread: lets so many blocks through at a time, once asked to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._digest = source.block_digest
        self.tickets = threading.Semaphore(0)
        monkeypatch.setattr(source, "block_digest", self)

    def __call__(self, data: torch.Tensor, kind: Any) -> int:
        if threading.current_thread().name == "weight-copy":
            assert self.tickets.acquire(timeout=WAIT_S)
        return self._digest(data, kind)


def model(version: int, megabytes: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {f"w{i}": torch.randn(1 << 18, generator=generator) for i in range(megabytes)}


def ends() -> tuple[Publisher, Puller]:
    publisher = Publisher(rank=0, num_source_ranks=1, num_slots=1, transport=RdmaSource())
    return publisher, Puller(rank=0, num_sink_ranks=1, transport=RdmaSink())


@pytest.mark.parametrize(("megabytes", "chunks"), [(3, 1), (20, 3)])
def test_sink_that_follows_a_slot_gets_each_version_and_moves_each_chunk_once(
    monkeypatch: pytest.MonkeyPatch, megabytes: int, chunks: int
) -> None:
    publisher, puller = ends()
    steps = Steps(monkeypatch)
    for version in range(3):
        sent = model(version, megabytes)
        handle = publisher.publish(version, sent, background=True)
        live = {name: torch.zeros_like(t) for name, t in sent.items()}
        opened = puller.open([handle], WAIT_S)
        outcome: list[object] = []

        def load(opened: Any = opened, live: Any = live, outcome: list[object] = outcome) -> None:
            try:
                outcome.append(opened.load_into(live, deadline_s=WAIT_S))
            except Exception as error:
                outcome.append(error)

        CopyingBuffer.read_bytes.clear()
        loader = threading.Thread(target=load)
        loader.start()
        for _ in range(megabytes):  # the source is the slower one: the sink looks between any two blocks
            steps.tickets.release()
            loader.join(0.002)
        loader.join(WAIT_S)
        assert outcome == [megabytes << 20], outcome
        assert all(torch.equal(live[name], t) for name, t in sent.items())
        large = [n for n in CopyingBuffer.read_bytes if n > 64 << 10]
        assert len(large) == chunks and sum(large) == megabytes << 20, large
        publisher.wait()


def test_a_chunk_of_which_some_blocks_are_already_known_is_waited_for_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    publisher, puller = ends()
    steps = Steps(monkeypatch)
    opened = puller.open([publisher.publish(1, model(1, 20), background=True)], WAIT_S)
    steps.tickets.release(17)  # two chunks, and the first of the four blocks of the third
    while steps.tickets._value:
        time.sleep(0.001)
    time.sleep(0.05)  # the seventeenth is written
    live = {name: torch.zeros_like(t) for name, t in model(1, 20).items()}
    CopyingBuffer.read_bytes.clear()
    late = threading.Timer(0.2, steps.tickets.release, [3])
    late.start()
    opened.load_into(live, deadline_s=WAIT_S)
    assert [n for n in CopyingBuffer.read_bytes if n > 64 << 10] == [CHUNK_BYTES, CHUNK_BYTES, 4 << 20]
    publisher.wait()


def test_no_chunk_is_read_before_all_of_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    publisher, puller = ends()
    steps = Steps(monkeypatch)
    opened = puller.open([publisher.publish(1, model(1, 12), background=True)], WAIT_S)
    live = {name: torch.zeros_like(t) for name, t in model(1, 12).items()}
    steps.tickets.release((CHUNK_BYTES >> 20) - 1)
    with pytest.raises(DeadlineExceeded, match="to write block 7 of 12"):
        opened.load_into(live, deadline_s=1.0)
    assert CHUNK_BYTES not in CopyingBuffer.read_bytes
    steps.tickets.release(12)
    publisher.wait()
    opened.load_into(live, deadline_s=WAIT_S)
    assert all(torch.equal(live[name], t) for name, t in model(1, 12).items())


def test_second_attempt_goes_to_the_source_again() -> None:
    publisher, puller = ends()
    handle = publisher.publish(1, model(1, 3))
    opened = puller.open([handle], WAIT_S)
    slot = publisher._slots[0]
    assert slot is not None
    whole = next(t for t in CopyingBuffer.memory if t.numel() == 3 << 20)
    flipped: list[int] = []
    read_into = CopyingBuffer.read_into

    def torn(self: CopyingBuffer, into: torch.Tensor, timeout: int) -> Done:
        done = read_into(self, into, timeout)
        if into.numel() == whole.numel() and len(flipped) < 2:
            into[2 << 20] ^= 1
            flipped.append(into.numel())
        return done

    CopyingBuffer.read_into = torn  # type: ignore[method-assign]
    try:
        got = read_all(opened)
    finally:
        CopyingBuffer.read_into = read_into  # type: ignore[method-assign]
    assert len(flipped) == 2 and all(torch.equal(got[name], t) for name, t in model(1, 3).items())


def test_source_that_is_gone_while_it_writes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    publisher, puller = ends()
    steps = Steps(monkeypatch)
    opened = puller.open([publisher.publish(1, model(1, 3), background=True)], WAIT_S)
    CopyingBuffer.gone = True
    with pytest.raises(WeightSyncError, match="the peer hung up"):
        read_all(opened)
    steps.tickets.release(3)
    publisher.wait()
