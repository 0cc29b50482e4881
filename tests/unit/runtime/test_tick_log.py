"""What is held of an executor, for how long, and what happens where it cannot be."""

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from llamarl.channels.base import ChannelKind, ChannelSpec
from llamarl.channels.data import DataReceiver, DataSender
from llamarl.channels.weights import WeightsPayload, WeightsSender
from llamarl.errors import ChannelError, SourceGone
from llamarl.executors.base import BaseExecutor, ExecutorContext, Stateless, is_journaled
from llamarl.runtime.base import Report, SetupReport
from llamarl.runtime.tick_log import TickLog
from llamarl.runtime.tick_record import State, read_state, write_state
from llamarl.transports.held import HeldSegment
from llamarl.transports.segments import Segment, SegmentHandle, open_segment
from llamarl.transports.slots import SlotState, Word

CHANNEL = ChannelSpec(name="numbers", kind=ChannelKind.GATHER, source="source", sink="sink", capacity=1)

WEIGHTS = ChannelSpec(name="weights", kind=ChannelKind.WEIGHTS, source="trainer", sink="sink", capacity=1)


class Source:
    """The shell's part of an executor that writes ``numbers``."""

    def __init__(self, channel: ChannelSpec = CHANNEL) -> None:
        self.sender = DataSender(channel, rank=0, num_source_ranks=1, num_sink_ranks=1)
        self.states: list[Segment] = []

    def report(self, tick: int) -> Report:
        handle = self.sender.send(tick, [tick, tick + 1])
        segment, state = write_state(f"state after {tick}".encode())
        self.states.append(segment)
        return Report(executor="source", tick=tick, outputs={"numbers": (handle,)}, journal=(state,))

    def die(self) -> None:
        """What is left of it then: nothing that it had open."""
        self.sender.close()
        for segment in self.states:
            segment.close()


class Trainer:
    """The shell's part of one that publishes versions."""

    def __init__(self) -> None:
        self.sender = WeightsSender(WEIGHTS, rank=0, num_source_ranks=1, num_sink_ranks=1)

    def report(self, tick: int) -> Report:
        weights = {"w": torch.full((8,), float(tick))}
        handle = self.sender.send(tick, WeightsPayload(version=tick + 1, tensors=weights))
        self.nonce = handle.address.nonce
        announced = replace(handle, manifest_checksum=None)  # as it is while a thread copies
        return Report(executor="trainer", tick=tick, outputs={"weights": (announced,)}, journal=(None,))

    def half_written(self) -> None:
        (slot,) = (slot for slot in self.sender._slots if slot is not None)
        slot.words[Word.STATE] = SlotState.WRITING

    def die(self) -> None:
        self.sender.close()


def received(report: Report | None) -> list[int]:
    receiver = DataReceiver(CHANNEL, rank=0, num_source_ranks=1, num_sink_ranks=1)
    items: list[int] = receiver.receive(report.outputs["numbers"], 5.0)
    receiver.close()
    return items


def keeping(*journaled: str, channel: ChannelSpec = CHANNEL) -> TickLog:
    log = TickLog()
    log.begin([channel], {name: SetupReport(executor=name) for name in (channel.source, channel.sink)}, journaled)
    return log


def test_token_and_state_outlive_their_process_and_are_let_go_when_no_one_needs_them() -> None:
    kept, source = keeping("source", "sink"), Source()
    first = kept.take(source.report(0))
    second = kept.take(source.report(1))
    source.die()
    assert (received(first), received(second)) == ([0, 1], [1, 2])
    assert [read_state(state) for state in kept.states("source")] == [b"state after 1"]
    assert len(kept._segments) == 2 + 1  # two slots, one state
    again = Source()  # the next incarnation: its first slot stands where the second of the old one stood
    kept.take(Report(executor="sink", tick=0))
    third = kept.take(again.report(2))
    assert (received(second), received(third)) == ([1, 2], [2, 3])
    kept.take(Report(executor="sink", tick=1))
    kept.take(again.report(3))
    assert len(kept._segments) == 2 + 1  # nothing of the old one
    kept.close()
    again.die()


def test_a_report_whose_process_has_ended_is_not_taken() -> None:
    kept, source = keeping("source", "sink"), Source()
    report = source.report(0)
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    (state,) = report.journal
    assert isinstance(state, State)
    of_the_dead = replace(state, address=replace(state.address, pid=child.pid))
    assert kept.take(replace(report, journal=(of_the_dead,))) is None
    assert not kept._segments and kept.replaceable() == {"source": 0, "sink": 0}
    source.die()


@pytest.mark.parametrize("trouble", ["no journal", "another kind of handle", "closed"])
def test_what_cannot_be_held_of_a_living_process_is_passed_on_as_it_is_and_its_death_will_end_the_run(
    trouble: str,
) -> None:
    kept, source = keeping("source"), Source()
    report = source.report(0)
    if trouble == "no journal":
        report = replace(report, journal=(None,))
    elif trouble == "another kind of handle":
        report = replace(report, outputs={"numbers": (7,)})
    else:
        source.die()
    assert kept.take(report) is report
    assert kept.replaceable() == {} and not kept._segments
    source.die()


KEPT = replace(CHANNEL, kept=True)


def test_what_is_read_by_one_whose_state_is_in_checkpoints_alone_is_held_until_one_has_it() -> None:
    kept, source = keeping("source", channel=KEPT), Source(KEPT)
    for tick in range(4):
        kept.take(source.report(tick))
        kept.take(Report(executor="sink", tick=tick))
    source.die()
    assert kept.replaceable() == {"source": 4, "sink": 0}
    assert [received(Report(executor="source", tick=t, outputs=kept.inputs("sink", t))) for t in range(4)] == [
        [t, t + 1] for t in range(4)
    ]
    kept.saved(1)
    assert kept.replaceable() == {"source": 4, "sink": 2}
    assert len(kept._segments) == 2 + 1  # two tokens, one state
    kept.saved(3)
    assert len(kept._segments) == 1
    kept.close()


def test_of_a_tick_that_is_repeated_only_what_was_not_whole_is_taken() -> None:
    kept, trainer = keeping("sink", channel=WEIGHTS), Trainer()
    first = kept.take(trainer.report(0))
    assert first is not None and kept.torn("trainer") == frozenset()
    trainer.half_written()
    assert kept.torn("trainer") == {("weights", 0)}
    trainer.die()
    again = Trainer()
    repeated = kept.take(again.report(0))
    assert [handle.address.nonce for handle in repeated.outputs["weights"]] == [again.nonce]
    twice = kept.take(again.report(0))
    assert twice is not None and twice.outputs == {}
    again.die()
    kept.close()


def test_when_too_much_was_read_nothing_of_it_is_held_until_the_next_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("llamarl.runtime.tick_log.MAX_PAST_SEGMENTS", 2)
    kept, source = keeping("source", channel=KEPT), Source(KEPT)
    for tick in range(3):
        kept.take(source.report(tick))
        kept.take(Report(executor="sink", tick=tick))
    assert kept.replaceable() == {"source": 3} and len(kept._segments) == 1
    kept.saved(1)
    assert kept.replaceable() == {"source": 3}  # tick 2 cannot be done again
    kept.saved(2)
    assert kept.replaceable() == {"source": 3, "sink": 3}
    source.die()


def test_one_that_reads_weights_is_brought_up_again_only_with_a_journal() -> None:
    assert keeping(channel=WEIGHTS).replaceable() == {"trainer": 0}
    assert keeping("sink", channel=WEIGHTS).replaceable() == {"trainer": 0, "sink": 0}


def test_tokens_that_lie_on_an_edge_at_start_are_held_too() -> None:
    channel = replace(CHANNEL, delay=1, kept=True)
    kept, source = TickLog(), Source(channel)
    start = source.report(-1)
    tokens = {"numbers": {-1: start.outputs["numbers"]}}
    setups = [SetupReport(executor="source", initial_tokens=tokens), SetupReport(executor="sink")]
    ready = kept.begin([channel], {setup.executor: setup for setup in setups}, ["source", "sink"])
    source.die()
    assert received(replace(start, outputs={"numbers": ready["source"].initial_tokens["numbers"][-1]})) == [-1, 0]
    kept.take(Report(executor="sink", tick=0))
    assert not kept._segments


def test_a_held_segment_is_the_same_memory_and_its_descriptor_goes_with_the_last_who_wants_it() -> None:
    segment = Segment(8)
    before = len(os.listdir("/proc/self/fd"))
    one = two = HeldSegment(segment.handle)
    assert one.handle.nonce == segment.handle.nonce and one.handle.fd != segment.handle.fd
    del one
    assert len(os.listdir("/proc/self/fd")) == before + 1 and two.handle.pid == os.getpid()
    del two
    assert len(os.listdir("/proc/self/fd")) == before
    segment.close()
    with pytest.raises(ChannelError, match="cannot be held") as raised:
        HeldSegment(segment.handle)
    assert not isinstance(raised.value, SourceGone)  # its owner lives


@pytest.mark.parametrize("take", [HeldSegment, open_segment])
def test_who_may_open_no_more_files_does_not_take_the_owner_for_gone(take: Callable[[SegmentHandle], object]) -> None:
    segment, limits = Segment(8), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        with pytest.raises(ChannelError, match="Too many open files") as raised:
            take(segment.handle)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert not isinstance(raised.value, SourceGone)
    segment.close()


def test_a_state_that_was_altered_is_refused() -> None:
    segment, state = write_state(b"carried")
    segment.bytes[0] ^= 1
    with pytest.raises(ChannelError, match="does not match its checksum"):
        read_state(state)
    segment.close()


def test_a_subclass_that_saves_more_than_its_parent_journals_is_not_brought_up_again() -> None:
    class Plain(Stateless, BaseExecutor): ...

    class SavesMore(Plain):
        def save(self, folder: object, tick: int) -> None: ...

    class JournalsMore(SavesMore):
        def journal(self, tick: int) -> bytes:
            return b"more"

    context = ExecutorContext(name="me", rank=0, num_ranks=1, device="cpu", run_dir=None, seed=0)
    assert [is_journaled(kind(None, context)) for kind in (Plain, SavesMore, JournalsMore, BaseExecutor)] == [
        True,
        False,
        True,
        False,
    ]
