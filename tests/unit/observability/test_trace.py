"""trace.json: whole JSON after every event, bubbles where nobody works, cut and continued on resume."""

import json
import os
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamarl.observability.trace import TraceWriter, idle_share, read_trace


def _slices(path: Path, category: str = "tick") -> list[tuple[int, str, float, float]]:
    events = json.loads(path.read_text())
    return [(e["tid"], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X" and e["cat"] == category]


@given(st.lists(st.tuples(st.integers(-5, 25), st.integers(0, 10)), max_size=8))
def test_idle_share_equals_a_count_of_uncovered_seconds(spans: list[tuple[int, int]]) -> None:
    intervals = [(float(start), float(start + length)) for start, length in spans]
    free = sum(not any(a <= second and second + 1 <= b for a, b in intervals) for second in range(20))
    assert idle_share(intervals, (0.0, 20.0)) == pytest.approx(free / 20)


def test_a_window_of_no_time_is_not_idle() -> None:
    assert idle_share([(0.0, 1.0)], (5.0, 5.0)) == 0.0


def test_lanes_slices_and_spans_lie_where_the_clock_says(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = TraceWriter(path, ["generator", "trainer"])
    spans = [("generate", 10.5, 12.0), ("weight_sync", 10.0, 10.5)]
    trace.step("generator", 0, 10.0, 12.0, spans=spans, args={"tokens": 5})
    trace.step("trainer", 0, 12.25, 13.0)
    names = {e["tid"]: e["args"]["name"] for e in json.loads(path.read_text()) if e["name"] == "thread_name"}
    assert names == {1: "generator", 2: "trainer"}
    assert _slices(path) == [(1, "tick 0", 100000.0, 2e6), (2, "tick 0", 2350000.0, 750000.0)]
    assert _slices(path, "span") == [(1, "weight_sync", 100000.0, 500000.0), (1, "generate", 600000.0, 1.5e6)]


def test_a_span_is_cut_to_its_tick(tmp_path: Path) -> None:
    trace = TraceWriter(tmp_path / "trace.json", ["a"])
    trace.step("a", 0, 1.0, 2.0, spans=[("early", 0.0, 1.5), ("late", 1.5, 9.0), ("elsewhere", 5.0, 6.0)])
    assert _slices(tmp_path / "trace.json", "span") == [
        (1, "early", 100000.0, 500000.0),
        (1, "late", 600000.0, 500000.0),
    ]


def test_a_span_that_ended_before_its_tick_lies_there_unless_the_file_began_later(tmp_path: Path) -> None:
    trace = TraceWriter(tmp_path / "trace.json", ["a"])
    trace.step("a", 0, 1.0, 2.0, spans=[("restart", 0.0, 1.0)])
    trace.step("a", 1, 5.0, 6.0, spans=[("restart", 2.5, 5.0)])
    assert _slices(tmp_path / "trace.json", "span") == [(1, "restart", 100000.0, 0.0), (1, "restart", 1600000.0, 2.5e6)]


@given(st.lists(st.floats(0, 1e6), min_size=4, max_size=4))
def test_rounding_never_pushes_a_span_out_of_its_tick(tmp_path_factory, times: list[float]) -> None:
    start, inner, outer, end = sorted(times)
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    TraceWriter(path, ["a"]).step("a", 0, start, end, spans=[("s", inner, outer)])
    [(_, _, tick_ts, tick_dur)], [(_, _, ts, dur)] = _slices(path), _slices(path, "span")
    in_ns = [round(x * 1e3) for x in (tick_ts, ts, ts + dur, tick_ts + tick_dur)]
    assert in_ns == sorted(in_ns)


@pytest.mark.parametrize("torn", [0, 3, 40])
def test_a_resumed_trace_cuts_repeated_ticks_and_goes_on_at_its_end(tmp_path: Path, torn: int) -> None:
    path = tmp_path / "trace.json"
    trace = TraceWriter(path, ["generator", "trainer"])
    for tick in range(4):
        trace.step("generator", tick, float(tick), tick + 1.0)
    trace.close()
    os.truncate(path, path.stat().st_size - torn)
    resumed = TraceWriter(path, ["generator", "trainer"], resume_after_tick=1)
    resumed.step("generator", 2, 9000.0, 9001.0)  # another clock: the machine was restarted
    assert [(name, ts) for _, name, ts, _ in _slices(path)] == [
        ("tick 0", 100000.0),
        ("tick 1", 1100000.0),
        ("tick 2", 2200000.0),
    ]
    events = json.loads(path.read_text())
    assert sum(e["name"] == "thread_name" for e in events) == 2
    assert [e["name"] for e in events if e["ph"] == "i"] == ["resumed after tick 1"]


def test_a_resume_holds_the_lines_of_its_trace_and_not_their_values(tmp_path: Path) -> None:
    trace = TraceWriter(tmp_path / "trace.json", ["trainer"])
    for tick in range(100):
        trace.step("trainer", tick, float(tick), tick + 1.0, args={f"key/{i}": tick + i / 7 for i in range(100)})
    tracemalloc.start()
    TraceWriter(trace.path, ["trainer"], resume_after_tick=99)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 3.5 * trace.path.stat().st_size  # its lines, and the whole twice as it is written; with values 7


def test_an_executor_that_a_resume_adds_or_drops_leaves_the_others_their_lanes(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    lives = [["generator", "filter"], ["generator", "evaluator", "filter"], ["evaluator", "generator"]]
    for tick, lanes in enumerate(lives):
        trace = TraceWriter(path, lanes, resume_after_tick=tick - 1 if tick else None)
        for number, lane in enumerate(lanes):
            trace.step(lane, tick, float(number), number + 1.0)
        trace.close()
    ticks = {name: [found.tick for found in slices] for name, slices in read_trace(path).ticks.items()}
    assert ticks == {"generator": [0, 1, 2], "filter": [0, 1], "evaluator": [1, 2]}


def test_a_resume_from_before_the_first_checkpoint_starts_over(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    TraceWriter(path, ["a"]).step("a", 0, 0.0, 1.0)
    TraceWriter(path, ["a"], resume_after_tick=-1)
    assert [e["ph"] for e in json.loads(path.read_text())] == ["M", "M", "M"]
