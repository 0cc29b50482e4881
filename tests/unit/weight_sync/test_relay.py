"""Hosts that pass weights on: equal bytes, one copy from the source, and what happens when a host in between fails."""

import gc
import threading
import weakref
from collections.abc import Iterator

import pytest
import torch
from other_space import alone_again, being_at, place
from slow_reads import slow_reads

from llamarl.errors import WeightSyncError
from llamarl.transports.checksum import BLOCK_BYTES
from llamarl.transports.deadline import Clock
from llamarl.transports.slots import SlotState, Word
from llamarl.transports.tcp import TcpSink, TcpSource
from llamarl.weight_sync import relay
from llamarl.weight_sync.sink import Puller
from llamarl.weight_sync.slot import RemoteSlot, SlotHandle
from llamarl.weight_sync.source import Publisher, WeightsPayload

A = place("a")
NUM_BLOCKS = 6


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(relay, "_PATIENCE_S", 0.3)
    with alone_again():
        yield


class Source:
    """Publishes at space a, with two slots."""

    def __init__(self) -> None:
        self.publisher = Publisher(rank=0, num_source_ranks=1, num_slots=2, transport=TcpSource())
        self.tensors: dict[str, torch.Tensor] = {}

    def publish(self, version: int, *, background: bool = False) -> SlotHandle:
        generator = torch.Generator().manual_seed(version)
        self.tensors = {"w": torch.randn(NUM_BLOCKS * BLOCK_BYTES // 4096, 1024, generator=generator)}
        with being_at(A):
            released = threading.Event() if background else None
            return self.publisher.publish(WeightsPayload(version=version, tensors=self.tensors, released=released))

    def sent(self, slot: int = 0) -> int:
        """Bytes that have left, of this slot's process."""
        made = self.publisher._slots[slot]
        return made.buffer._segment._server.sent_bytes  # type: ignore[attr-defined,no-any-return]


class Sink:
    """A replica at a space of its own."""

    def __init__(self, space: str, rank: int = 0) -> None:
        self.where = place(space)
        self.puller = Puller(rank=rank, num_sink_ranks=4, transport=TcpSink(), fan_out=True)
        self.live: dict[str, torch.Tensor] = {}

    def load(self, handle: SlotHandle, deadline_s: float = 10.0) -> dict[str, torch.Tensor]:
        with being_at(self.where):
            opened = self.puller.open([handle], deadline_s)
        self.live = {"w": torch.zeros(NUM_BLOCKS * BLOCK_BYTES // 4096, 1024)}
        opened.load_into(self.live)
        return self.live

    @property
    def mirror(self) -> relay.Mirror:
        (mirror,) = self.puller.slots.mirrors
        return mirror


def test_each_host_reads_from_the_one_before_it_and_the_source_sends_one_copy() -> None:
    source = Source()
    sinks = [Sink("b"), Sink("c"), Sink("d")]
    for version in (1, 2, 3, 4):  # each slot twice
        handle = source.publish(version)
        for sink in sinks:
            assert torch.equal(sink.load(handle)["w"], source.tensors["w"])
    whole = 4 * NUM_BLOCKS * BLOCK_BYTES
    assert whole <= source.sent(0) + source.sent(1) < 1.1 * whole
    for sink in sinks:
        sink.puller.close()


def test_a_second_rank_of_a_host_maps_its_hosts_copy() -> None:
    source = Source()
    first, second = Sink("b"), Sink("b", rank=1)
    handle = source.publish(1)
    for sink in (first, second):
        with being_at(sink.where):
            opened = sink.puller.open([handle], 10.0)
        views = opened.map_tensors()
        assert views is not None and torch.equal(views["w"], source.tensors["w"])
        opened.check_current()
    assert source.sent() < 1.1 * NUM_BLOCKS * BLOCK_BYTES
    assert not second.puller.slots.mirrors


def test_a_copy_that_is_served_outlives_its_source_also_when_the_next_version_comes_from_one_in_its_place() -> None:
    former, sink = Source(), Sink("b")
    handle = former.publish(1)
    with being_at(sink.where):
        served = sink.puller.open([handle], 10.0)
    views = served.map_tensors()
    former.publisher.close()
    stand_in = Source()
    following = sink.load(stand_in.publish(2))
    served.check_current()
    assert views is not None and torch.equal(views["w"], former.tensors["w"])
    assert torch.equal(following["w"], stand_in.tensors["w"])


def test_a_host_that_takes_another_version_is_passed_over_after_a_while() -> None:
    source = Source()
    ahead, behind = Sink("b"), Sink("c")
    for version in (1, 2):  # one in each slot
        handle = source.publish(version)
        for sink in (ahead, behind):
            sink.load(handle)
    handle = source.publish(3)  # the first slot again, which ``ahead`` does not ask for
    assert torch.equal(behind.load(handle)["w"], source.tensors["w"])
    assert sum(mirror.num_passed_over for mirror in behind.puller.slots.mirrors) == 1


def test_hosts_whose_processes_are_others_now_pass_versions_on_again_and_one_that_came_too() -> None:
    source = Source()
    before = [Sink("b"), Sink("c")]
    for version in (1, 2):  # one in each slot
        handle = source.publish(version)
        for sink in before:
            sink.load(handle)
    for sink in before:
        sink.puller.close()
    now = [Sink("c"), Sink("d"), Sink("b"), Sink("b", rank=1)]  # they may ask in any order
    had = source.sent(0) + source.sent(1)
    for version in (3, 4):
        handle = source.publish(version)
        for sink in now:
            assert torch.equal(sink.load(handle)["w"], source.tensors["w"])
    whole = 2 * NUM_BLOCKS * BLOCK_BYTES
    assert whole <= source.sent(0) + source.sent(1) - had < 1.1 * whole
    assert [len(sink.puller.slots.mirrors) for sink in now] == [2, 2, 2, 0]


def test_a_copy_altered_on_the_way_is_not_served_from_there() -> None:
    source = Source()
    ahead, behind = Sink("b"), Sink("c")
    handle = source.publish(1)
    ahead.load(handle)
    ahead.mirror._buffer.data[3 * BLOCK_BYTES + 5] ^= 1
    assert torch.equal(behind.load(handle)["w"], source.tensors["w"])
    assert behind.mirror.num_passed_over == 1


def test_a_copy_altered_with_its_checksum_is_found_by_the_sources_manifest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "_PATIENCE_S", 60.0)  # a busy machine must not send the reader to the source
    source = Source()
    ahead, behind = Sink("b"), Sink("c")
    handle = source.publish(1)
    ahead.load(handle)
    data = ahead.mirror._buffer.data
    data[:8] = 1
    ahead.mirror._checksums.view("<u8")[0] = relay.block_digest(data[:BLOCK_BYTES], "xxh3")
    with pytest.raises(WeightSyncError, match="are not the source's|manifest does not match"):
        behind.load(handle)


def test_what_goes_wrong_in_filling_is_told_as_it_was() -> None:
    source = Source()
    sink = Sink("b")
    handle = source.publish(1)
    slot = source.publisher._slots[0]
    slot.blocks[2][17] ^= 1
    with pytest.raises(WeightSyncError, match="w: the bytes pulled 3 times do not match"):
        sink.load(handle)
    assert sink.mirror._words[Word.STATE] == SlotState.FAILED


def test_a_copy_that_failed_is_freed_with_its_last_reader() -> None:
    """Without waiting for who collects circles: it is as large as the weights."""
    source, sink = Source(), Sink("b")
    handle = source.publish(1)
    slot = source.publisher._slots[0]
    slot.blocks[2][17] ^= 1
    with pytest.raises(WeightSyncError):
        sink.load(handle)
    mirror = weakref.ref(sink.mirror)
    sink.mirror.stop()
    gc.collect()
    gc.disable()
    try:
        stand_in = Source()
        sink.load(stand_in.publish(2))
        assert mirror() is None
    finally:
        gc.enable()


def test_hosts_may_load_at_the_same_time() -> None:
    source = Source()
    sinks = [Sink(space) for space in "bcde"]
    for version in (1, 2, 3):
        handle = source.publish(version, background=True)
        opened = []
        for sink in sinks:
            with being_at(sink.where):
                opened.append(sink.puller.open([handle], 10.0))
            sink.live = {"w": torch.zeros_like(source.tensors["w"])}
        threads = [
            threading.Thread(target=one.load_into, args=(sink.live,)) for one, sink in zip(opened, sinks, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        for sink in sinks:
            assert torch.equal(sink.live["w"], source.tensors["w"])
        source.publisher.wait()


class LoneSink(Sink):
    """The only replica: nobody reads from it."""

    def __init__(self, space: str) -> None:
        super().__init__(space)
        self.puller = Puller(rank=0, num_sink_ranks=1, transport=TcpSink())

    def fetch(self, handle: SlotHandle) -> None:
        """Ahead, to its end."""
        with being_at(self.where):
            self.puller.fetch_ahead([handle], 10.0)
            self.puller.slots._fetching.join()
        for mirror in self.puller.slots.mirrors:
            if mirror._thread is not None:
                mirror._thread.join()


def test_a_version_that_was_fetched_ahead_is_loaded_without_another_byte_of_it_from_the_source() -> None:
    source, sink = Source(), LoneSink("b")
    for version in (1, 2, 3, 4):  # each slot twice
        handle = source.publish(version)
        before = source.sent(handle.slot)
        sink.fetch(handle)
        fetched = source.sent(handle.slot) - before
        assert NUM_BLOCKS * BLOCK_BYTES <= fetched < NUM_BLOCKS * BLOCK_BYTES * 1.01
        assert torch.equal(sink.load(handle)["w"], source.tensors["w"])
        assert source.sent(handle.slot) - before == fetched


def test_a_copy_may_take_as_long_as_it_must_while_blocks_come(monkeypatch: pytest.MonkeyPatch) -> None:
    now = slow_reads(monkeypatch, 4.0)  # of 10 s that the fetching gives
    source, sink = Source(), LoneSink("b")
    handle = source.publish(1)
    sink.fetch(handle)
    (mirror,) = sink.puller.slots.mirrors
    assert mirror.failure is None and now[0] == 4.0 * NUM_BLOCKS
    assert torch.equal(sink.load(handle)["w"], source.tensors["w"])


def test_news_that_comes_after_the_version_was_opened_copies_nothing_again() -> None:
    source, sink = Source(), LoneSink("b")
    handle = source.publish(1)
    sink.load(handle)
    before = source.sent()
    sink.fetch(handle)
    assert source.sent() - before < BLOCK_BYTES
    assert torch.equal(sink.load(handle)["w"], source.tensors["w"])


def test_what_goes_wrong_ahead_is_told_by_the_opening() -> None:
    source, sink = Source(), LoneSink("b")
    handle = source.publish(1)
    source.publisher.close()
    sink.fetch(handle)
    with pytest.raises(WeightSyncError, match="cannot take version 1"):
        sink.load(handle)


def test_a_copy_that_failed_ahead_is_read_from_the_source_instead() -> None:
    source, sink = Source(), LoneSink("b")
    handle = source.publish(1)
    sink.fetch(handle)
    sink.mirror.failure = RuntimeError("the cable was pulled for a moment")
    assert torch.equal(sink.load(handle)["w"], source.tensors["w"])


def test_a_version_that_is_still_being_written_is_followed_ahead() -> None:
    source, sink = Source(), LoneSink("b")
    handle = source.publish(1, background=True)
    sink.fetch(handle)
    assert torch.equal(sink.load(handle)["w"], source.tensors["w"])


def test_a_source_that_was_brought_up_again_is_fetched_ahead_from_the_version_after_the_first_that_is_opened() -> None:
    old, sink = Source(), LoneSink("b")
    handle = old.publish(1)
    sink.fetch(handle)
    served = sink.load(handle)["w"]
    new = Source()
    handle = new.publish(2)
    mirror = sink.mirror
    sink.fetch(handle)
    assert sink.mirror is mirror and torch.equal(served, old.tensors["w"])  # what is served stays as it is
    assert torch.equal(sink.load(handle)["w"], new.tensors["w"])
    new.publish(3)
    handle = new.publish(4)  # the same slot again
    sink.fetch(handle)
    before = new.sent(handle.slot)
    assert torch.equal(sink.load(handle)["w"], new.tensors["w"])
    assert new.sent(handle.slot) == before


def test_a_copy_that_was_stuck_too_long_does_not_end_the_one_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "_STOP_S", 0.05)
    source, sink = Source(), Sink("b")
    stuck, really = threading.Event(), RemoteSlot.read

    def read(self: RemoteSlot, offset: int, into: torch.Tensor, clock: Clock, *, fresh: bool = False) -> None:
        if self.handle.version == 1:
            assert stuck.wait(10.0)
            raise WeightSyncError("the cable was pulled for a while")
        stuck.set()
        former.join(10.0)
        really(self, offset, into, clock, fresh=fresh)

    monkeypatch.setattr(RemoteSlot, "read", read)
    with being_at(sink.where):
        sink.puller.open([source.publish(1)], 10.0)
    former = sink.mirror._thread
    assert former is not None
    source.publish(2)
    assert torch.equal(sink.load(source.publish(3))["w"], source.tensors["w"])  # in the slot of the first
    assert not former.is_alive()
