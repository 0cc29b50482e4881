"""Idle gaps and what ended them: worked by hand from the times of a made job."""

from pathlib import Path

from made_run import MadeRun

from llamarl.observability.job_description import Edge
from llamarl.observability.trace import Slice, Trace, read_trace
from llamarl.report.timeline import channels_of, find_gaps

CHANNELS = [
    Edge(name="data", source="generator", sink="trainer", delay=0, capacity=2),
    Edge(name="weights", source="trainer", sink="generator", delay=1, capacity=2),
]


def _trace(generator: list[tuple[float, float]], trainer: list[tuple[float, float]]) -> Trace:
    ticks = {
        name: [Slice(tick, start, end) for tick, (start, end) in enumerate(times)]
        for name, times in (("generator", generator), ("trainer", trainer))
    }
    return Trace(lanes=("generator", "trainer"), ticks=ticks)


def test_a_gap_names_the_tick_that_it_waited_for_and_the_channel() -> None:
    trace = _trace([(0.0, 4.0), (7.5, 11.0)], [(4.0, 7.0), (11.0, 14.0)])
    generator, first, second = find_gaps(trace, CHANNELS)
    # generator tick 1 needs version of trainer tick 0, done at 7: idle from 4 to 7.5, half a second of it overhead
    assert (generator.lane, generator.tick, generator.start_s, generator.end_s) == ("generator", 1, 4.0, 7.5)
    assert (generator.cause_lane, generator.cause_tick, generator.cause_end_s) == ("trainer", 0, 7.0)
    assert generator.channel == "weights" and not generator.for_room
    # the trainer's first gap begins when the first executor does
    assert (first.lane, first.tick, first.start_s, first.end_s, first.cause_lane) == (
        "trainer",
        0,
        0.0,
        4.0,
        "generator",
    )
    assert (second.tick, second.start_s, second.end_s, second.cause_tick) == (1, 7.0, 11.0, 1)


def test_a_gap_for_want_of_room_says_so() -> None:
    channels = [Edge(name="data", source="generator", sink="trainer", delay=0, capacity=1)]
    trace = _trace([(0.0, 1.0), (6.0, 7.0)], [(1.0, 6.0), (7.0, 9.0)])
    gap = find_gaps(trace, channels)[0]
    assert (gap.tick, gap.for_room, gap.channel, gap.cause_lane, gap.cause_tick) == (1, True, "data", "trainer", 0)


def test_a_gap_whose_needs_were_there_before_it_names_no_cause() -> None:
    trace = _trace([(0.0, 1.0), (9.0, 10.0)], [(1.0, 2.0), (10.0, 11.0)])
    # trainer tick 0 ended at 2, inside the generator's gap from 1 to 9: that ended the wait, the rest is overhead
    assert find_gaps(trace, CHANNELS)[0].cause_end_s == 2.0
    assert find_gaps(trace, [])[0].cause_lane == ""  # without channels nothing is known


def test_time_in_which_the_job_was_down_is_no_gap() -> None:
    trace = _trace([(0.0, 1.0), (5.0, 6.0)], [(1.0, 2.0), (6.0, 7.0)])
    resumed = Trace(lanes=trace.lanes, ticks=trace.ticks, resumed=((0, 4.5),))
    assert [(g.lane, g.start_s) for g in find_gaps(resumed, CHANNELS) if g.tick == 1] == [
        ("generator", 4.5),
        ("trainer", 4.5),
    ]


def test_channels_are_read_as_far_as_they_are_known() -> None:
    entries = [{"name": "w", "source": "a", "sink": "b", "delay": 2, "capacity": None}, {"name": "odd"}, 7]
    assert channels_of({"channels": entries}) == [Edge(name="w", source="a", sink="b", delay=2)]
    assert channels_of({}) == []


def test_a_torn_line_and_foreign_events_leave_the_trace_readable(tmp_path: Path) -> None:
    path = MadeRun(ticks=2).write(tmp_path / "run") / "trace.json"
    path.write_bytes(path.read_bytes()[:-40] + b'\n{"ph":"X","name":"other","tid":1},\n[1,2],\n{"name":"tick 2","ca')
    trace = read_trace(path)
    assert trace.lanes == ("generator", "reward", "trainer")
    assert [s.tick for s in trace.ticks["generator"]] == [0, 1]
