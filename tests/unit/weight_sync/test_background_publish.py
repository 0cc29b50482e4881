"""A version that is announced before it is written: sinks follow block by block, and never past what is proved."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from whole_versions import read_all

from llamarl.channels.base import ChannelKind, ChannelSpec
from llamarl.channels.weights import WeightsPayload, WeightsReceiver, WeightsSender
from llamarl.errors import DeadlineExceeded, WeightSyncError
from llamarl.transports.checksum import ChecksumKind
from llamarl.transports.slots import Word
from llamarl.weight_sync import source

WAIT_S = 60.0
SPEC = ChannelSpec(name="weights", kind=ChannelKind.WEIGHTS, source="trainer", sink="generator")
ENDS = {"rank": 0, "num_source_ranks": 1, "num_sink_ranks": 1}


def model() -> dict[str, torch.Tensor]:
    return {"w": torch.arange(1_500_000, dtype=torch.float32), "v": torch.ones(3)}  # 6 MB: 6 blocks, v in the last


class Gate:
    """Stands in for the checksum of the copying thread: lets one block through a ticket."""

    def __init__(self, digest: Callable[[torch.Tensor, ChecksumKind], int]) -> None:
        self._digest = digest
        self.tickets = threading.Semaphore(0)
        self.fail = False

    def __call__(self, data: torch.Tensor, kind: ChecksumKind) -> int:
        if threading.current_thread().name == "weight-copy":
            assert self.tickets.acquire(timeout=WAIT_S)
            if self.fail:
                raise RuntimeError("the disk is on fire")
        return self._digest(data, kind)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    gate = Gate(source.block_digest)
    monkeypatch.setattr(source, "block_digest", gate)
    return gate


def announce(sender: WeightsSender) -> tuple[object, threading.Event]:
    released = threading.Event()
    return sender.send(0, WeightsPayload(version=3, tensors=model(), released=released)), released


def test_sink_follows_a_slot_that_is_still_being_written(gate: Gate) -> None:
    sender, receiver = WeightsSender(SPEC, **ENDS), WeightsReceiver(SPEC, **ENDS)
    handle, released = announce(sender)
    assert not released.is_set()
    version = receiver.receive((handle,), WAIT_S)
    live = {name: torch.zeros_like(t) for name, t in model().items()}
    loader = threading.Thread(target=version.load_into, args=(live,), daemon=True)
    loader.start()
    words = sender._slots[0].words
    gate.tickets.release(2)
    loader.join(0.2)
    assert loader.is_alive() and int(words[Word.PROGRESS]) <= 2
    gate.tickets.release(100)
    loader.join(WAIT_S)
    assert not loader.is_alive() and released.is_set()
    assert all(torch.equal(live[name], t) for name, t in model().items())


def test_deadline_says_which_block_was_waited_for(gate: Gate) -> None:
    sender, receiver = WeightsSender(SPEC, **ENDS), WeightsReceiver(SPEC, **ENDS)
    version = receiver.receive((announce(sender)[0],), WAIT_S)
    assert version is not None
    gate.tickets.release(1)
    with pytest.raises(DeadlineExceeded, match=r"loading version 3.*waiting for source rank 0 to write block \d of \d"):
        version.load_into({name: torch.zeros_like(t) for name, t in model().items()}, deadline_s=1.0)
    gate.tickets.release(100)
    sender.close()  # joins the copying thread, which must not meet the next test's gate


def test_failure_in_the_background_is_refused_by_sinks_and_raised_at_the_source(gate: Gate) -> None:
    sender, receiver = WeightsSender(SPEC, **ENDS), WeightsReceiver(SPEC, **ENDS)
    handle, released = announce(sender)
    version = receiver.receive((handle,), WAIT_S)
    assert version is not None
    gate.fail = True
    gate.tickets.release(1)
    assert released.wait(WAIT_S)
    with pytest.raises(WeightSyncError, match="is failed with version 3"):
        read_all(version)
    with pytest.raises(WeightSyncError, match="the disk is on fire"):
        sender.send(1, WeightsPayload(version=4, tensors=model()))


def test_next_send_waits_for_the_copy_before_it(gate: Gate) -> None:
    two = replace(SPEC, capacity=2)
    sender = WeightsSender(two, **ENDS)
    _, released = announce(sender)
    second = threading.Thread(target=sender.send, args=(1, WeightsPayload(version=4, tensors=model())), daemon=True)
    second.start()
    second.join(0.3)
    slots = sender._slots
    assert second.is_alive() and not released.is_set() and slots[1] is None, "nothing of version 4 was begun"
    gate.tickets.release(100)
    second.join(WAIT_S)
    assert not second.is_alive() and released.is_set()
    assert slots[1] is not None and [int(s.words[Word.VERSION]) for s in slots if s is not None] == [3, 4]


def test_altered_checksum_of_an_announced_version_is_found_at_the_end() -> None:
    sender, receiver = WeightsSender(SPEC, **ENDS), WeightsReceiver(SPEC, **ENDS)
    handle, released = announce(sender)
    assert released.wait(WAIT_S)
    sender._slots[0].words[Word.CHECKSUM] += 1
    version = receiver.receive((handle,), WAIT_S)
    assert version is not None
    with pytest.raises(WeightSyncError, match="its manifest does not match"):
        read_all(version)


def test_versions_leave_a_gpu_on_one_stream_of_their_own_behind_what_was_queued_before_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On the trainer's each block would wait for the passes that were queued since; of a stream for each version torch
    would keep the freed memory of each."""
    told: list[tuple[str, str]] = []

    class Stream:
        made = 0

        def __init__(self, device: torch.device) -> None:
            self.name = f"{device} {Stream.made}"
            Stream.made += 1

        def wait_event(self, event: object) -> None:
            told.append((threading.current_thread().name, f"{self.name} waits for {event}"))

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        told.append((threading.current_thread().name, f"on {stream.name}"))
        yield
        told.append((threading.current_thread().name, "off"))

    def digest(data: torch.Tensor, kind: ChecksumKind) -> int:
        told.append((threading.current_thread().name, "block"))
        return real(data, kind)

    real = source.block_digest
    monkeypatch.setattr(source, "block_digest", digest)
    monkeypatch.setattr(source, "_gpu_of", lambda tensors: torch.device("cuda:1"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(record_event=lambda: "the step"))
    for name, stand_in in (("Stream", Stream), ("stream", on), ("device", lambda device: nullcontext())):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    sender = WeightsSender(SPEC, **ENDS)
    for tick in range(2):
        released = threading.Event()
        sender.send(tick, WeightsPayload(version=tick, tensors={"v": torch.ones(3)}, released=released))
        assert released.wait(WAIT_S)
    sender.close()
    assert (
        told == [("weight-copy", what) for what in ("cuda:1 0 waits for the step", "on cuda:1 0", "block", "off")] * 2
    )


def test_who_holds_no_tensor_on_a_gpu_asks_for_none() -> None:
    assert source._gpu_of(model().values()) is None
