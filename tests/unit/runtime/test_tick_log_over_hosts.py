"""What is held of ranks on other hosts: copies of data and states, nothing of the weights, which are made again."""

import gc
from dataclasses import replace

import pytest
import torch
from other_space import being_at, place

from llamarl.channels.base import ChannelKind, ChannelSpec
from llamarl.channels.data import DataReceiver, DataSender
from llamarl.channels.weights import WeightsPayload, WeightsSender
from llamarl.errors import ChannelError, SourceGone, WeightSyncError
from llamarl.runtime.base import Report, SetupReport
from llamarl.runtime.rank_plans import combine_reports, deaths_alone, must_follow_from_a_death, readers_of_the_dead
from llamarl.runtime.tick_log import TickLog, copy_to_controller
from llamarl.runtime.tick_record import read_state, write_state
from llamarl.runtime.worker import RankFailure, RankReport, RankSetup, capture
from llamarl.transports.held import HeldSegment
from llamarl.transports.remote_segment import RemoteSegment, copy_of
from llamarl.transports.segment_server import server_here
from llamarl.transports.segments import Segment
from llamarl.transports.tcp import TcpSink, TcpSource

CONTROLLER, HOST, OTHER_HOST = place("controller"), place("a"), place("b")
NUMBERS = ChannelSpec(name="numbers", kind=ChannelKind.GATHER, source="source", sink="sink", kept=True)
WEIGHTS = ChannelSpec(name="weights", kind=ChannelKind.WEIGHTS, source="trainer", sink="sink", delay=1)

BOTH = ("source", "sink")

pytestmark = pytest.mark.usefixtures("alone")


def a_report(sender: DataSender, tick: int) -> tuple[RankReport, Segment]:
    """Of a rank of ``source`` on the host."""
    with being_at(HOST):
        handle = sender.send(tick, [tick, tick + 1])
        segment, state = write_state(f"state after {tick}".encode())
    outputs = {"numbers": handle}
    return (
        RankReport(
            rank=0, tick=tick, outputs=outputs, metrics={}, spans=(), started_s=0.0, finished_s=1.0, journal=state
        ),
        segment,
    )


def received(handle: object) -> list[int]:
    receiver = DataReceiver(NUMBERS, rank=0, num_source_ranks=1, num_sink_ranks=1, transport=TcpSink())
    items: list[int] = receiver.receive((handle,), 5.0)
    receiver.close()
    return items


def publishing(handle: object) -> dict[str, SetupReport]:
    """A trainer with a version on its edge at start, and its sink."""
    setups = [
        SetupReport(executor="trainer", initial_tokens={"weights": {-1: (handle,)}}),
        SetupReport(executor="sink"),
    ]
    return {setup.executor: setup for setup in setups}


def test_token_and_state_of_a_rank_elsewhere_are_read_on_any_host_after_it_has_gone() -> None:
    sender = DataSender(NUMBERS, rank=0, num_source_ranks=1, num_sink_ranks=1, transport=TcpSource())
    report, state = a_report(sender, 0)
    with being_at(CONTROLLER):
        kept = TickLog()
        kept.begin([NUMBERS], {name: SetupReport(executor=name) for name in BOTH}, BOTH)
        brought, copies = copy_to_controller(report, 5.0)
        taken = kept.take(combine_reports("source", [brought], controller_bytes=0))
        for copy in copies:
            copy.close()
        server = server_here()
    assert taken is not None and server is not None
    with being_at(HOST):
        assert received(taken.outputs["numbers"][0]) == [0, 1]
    assert server.sent_bytes == 0  # it was read where it was made
    sender.close()
    state.close()
    for where in (OTHER_HOST, HOST, CONTROLLER):
        with being_at(where):
            assert received(taken.outputs["numbers"][0]) == [0, 1]
            assert read_state(kept.states("source")[0], 5.0) == b"state after 0"
    with being_at(CONTROLLER):
        kept.take(Report(executor="sink", tick=0))
        assert len(kept._segments) == 1  # the state
        kept.close()
    with being_at(OTHER_HOST), pytest.raises(ChannelError, match="closed it"):
        received(taken.outputs["numbers"][0])


def test_what_lies_on_this_machine_is_not_copied_and_what_is_not_held_goes() -> None:
    with being_at(CONTROLLER):
        here = DataSender(NUMBERS, rank=0, num_source_ranks=1, num_sink_ranks=1, transport=TcpSource())
        setup = RankSetup(rank=0, initial_tokens={"numbers": {-1: here.send(-1, [7])}})
        assert copy_to_controller(setup, 5.0) == (setup, [])
        here.close()
    sender = DataSender(NUMBERS, rank=0, num_source_ranks=1, num_sink_ranks=1, transport=TcpSource())
    report, state = a_report(sender, 0)
    with being_at(CONTROLLER):
        brought, copies = copy_to_controller(report, 5.0)
        del copies
        gc.collect()
    with being_at(OTHER_HOST), pytest.raises(ChannelError):
        received(brought.outputs["numbers"])
    sender.close()
    state.close()


def test_a_rank_that_has_gone_before_it_was_copied_is_told_as_such() -> None:
    sender = DataSender(NUMBERS, rank=0, num_source_ranks=1, num_sink_ranks=1, transport=TcpSource())
    report, state = a_report(sender, 0)
    sender.close()
    state.close()
    with being_at(CONTROLLER), pytest.raises(ChannelError, match="closed it"):
        copy_to_controller(report, 5.0)


def test_versions_elsewhere_stay_where_they_are_and_all_of_them_go_with_their_process() -> None:
    with being_at(HOST):
        trainer = WeightsSender(WEIGHTS, rank=0, num_source_ranks=1, num_sink_ranks=1, transport=TcpSource())
        version = WeightsPayload(version=0, tensors={"w": torch.zeros(8)})
        handle = trainer.send(-1, version)
    with being_at(CONTROLLER):
        kept, ready = TickLog(), publishing(handle)
        assert kept.begin([WEIGHTS], ready, ["sink"]) == ready and not kept._segments
        assert kept.replaceable() == {"trainer": 0, "sink": 0}
        assert kept.torn("trainer") == {("weights", -1)}
        again = kept.take(Report(executor="trainer", tick=-1, outputs={"weights": (handle,)}, at_start=True))
        assert again is not None and again.outputs == {"weights": (handle,)}
        twice = kept.take(Report(executor="trainer", tick=-1, outputs={"weights": (handle,)}, at_start=True))
        assert twice is not None and twice.outputs == {}
        assert kept.torn("sink") == frozenset() and kept.torn("trainer") == {("weights", -1)}
    trainer.close()


def test_a_version_elsewhere_of_one_that_cannot_make_it_again_makes_its_death_end_the_run() -> None:
    with being_at(HOST):
        trainer = WeightsSender(WEIGHTS, rank=0, num_source_ranks=1, num_sink_ranks=1, transport=TcpSource())
        handle = trainer.send(-1, WeightsPayload(version=0, tensors={"w": torch.zeros(8)}))
    with being_at(CONTROLLER):
        kept = TickLog()
        kept.begin([WEIGHTS], publishing(handle), ["sink", "trainer"])
        assert kept.replaceable() == {"sink": 0}
    trainer.close()


def test_a_held_segment_is_offered_until_the_last_of_its_holders_lets_it_go() -> None:
    with being_at(CONTROLLER):
        segment = Segment(8)
        segment.bytes[:] = 5
        held = HeldSegment(segment.handle)
        segment.close()
    handle = held.handle
    with being_at(OTHER_HOST):
        copy = copy_of(handle, 5.0)
        assert copy.bytes.tolist() == [5] * 8
    del held
    with being_at(OTHER_HOST), pytest.raises(ChannelError, match="closed it"):
        RemoteSegment(handle, 5.0)


def failure(executor: str, *, died: bool = False, source_gone: bool = False) -> RankFailure:
    return RankFailure(
        executor=executor,
        rank=0,
        doing="tick 3",
        cause="why",
        traceback="",
        pid=1,
        at_s=0.0,
        died=died,
        source_gone=source_gone,
    )


def test_one_that_was_reading_what_has_gone_follows_from_a_death_and_from_nothing_else() -> None:
    dead, reader, other = failure("trainer", died=True), failure("generator", source_gone=True), failure("reward")
    assert [death.executor for death in deaths_alone([reader, dead])] == ["trainer"]
    assert readers_of_the_dead([reader, dead]) == ("generator",)
    assert must_follow_from_a_death([reader]) and not must_follow_from_a_death([reader, dead])
    assert deaths_alone([reader]) == () and deaths_alone([dead, reader, other]) == ()
    assert readers_of_the_dead([replace(reader, executor="trainer"), dead]) == ()


def test_what_was_raised_because_of_a_source_that_has_gone_is_marked() -> None:
    def raised(cause: Exception) -> RankFailure:
        try:
            raise WeightSyncError("cannot take version 3") from cause
        except WeightSyncError as error:
            return capture("generator", 0, "tick 3", error)

    assert raised(SourceGone("it hung up")).source_gone
    assert not raised(ChannelError("its bytes are torn")).source_gone
