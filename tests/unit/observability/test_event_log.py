"""The event log: what is written is read, and what is torn, altered or missing is refused by name."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llamarl.errors import EventLogError
from llamarl.observability.events import EVENTS_FILE, EventLog, TickEvent, event_platform, ranges, read_events
from llamarl.observability.writing import Patience
from llamarl.reading import read_bytes


def event(tick: int, rank: int = 0) -> TickEvent:
    joins = ((3, 1, 0, tick), (9, 1, 1, 0)) if rank else ()
    return TickEvent(
        tick=tick, rank=rank, swaps=((0, tick), (7, tick + 1)), steps=40, delivered="0-3", digest="ab", joins=joins
    )


def written(folder: Path, ticks: int = 3, ranks: int = 2) -> Path:
    log = EventLog(folder)
    for tick in range(ticks):
        log.append([event(tick, rank).to_plain() for rank in range(ranks)])
    log.sync()
    return folder / EVENTS_FILE


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = written(tmp_path)
    assert read_events(path, num_ticks=3) == {(t, r): event(t, r) for t in range(3) for r in range(2)}
    assert set(read_events(path, num_ticks=2)) == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert "torch" in event_platform(path)


def test_a_run_without_decisions_leaves_no_file(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    log.append([])
    log.sync()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_out_of_reach_for_a_moment_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stat, told, fails = os.stat, list[str](), [errno.ESTALE]

    def stale(*args: Any, **options: Any) -> os.stat_result:
        if fails:
            number = fails.pop()
            raise OSError(number, os.strerror(number))
        return stat(*args, **options)

    monkeypatch.setattr(os, "stat", stale)
    EventLog(tmp_path, patience=Patience(60.0, told.append)).append([event(0).to_plain()])
    assert read_events(tmp_path / EVENTS_FILE, num_ticks=1) == {(0, 0): event(0)}
    assert "Stale file handle. The run waits" in told[0] and told[1].endswith("the run goes on")


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda data: data[:-9], r"events\.jsonl, line 7 is torn .*--resume"),
        (lambda data: data.replace(b"[7, 2]", b"[8, 2]"), "line 4 is torn or was altered .*checksum"),
    ],
)
def test_a_torn_or_altered_line_is_refused_by_name(tmp_path: Path, spoil: Callable[[bytes], bytes], why: str) -> None:
    path = written(tmp_path)
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(EventLogError, match=why):
        read_events(path, num_ticks=3)


def test_another_format_is_refused(tmp_path: Path) -> None:
    EventLog(tmp_path).append([{"format": 2}])
    lines = (tmp_path / EVENTS_FILE).read_text().splitlines(keepends=True)
    (tmp_path / EVENTS_FILE).write_text(lines[1])
    with pytest.raises(EventLogError, match="reads format 1"):
        read_events(tmp_path / EVENTS_FILE, num_ticks=1)


@pytest.mark.parametrize(("without", "missing"), [('"tick": 2', 2), ('"tick": 1, "rank": 1', 1)])
def test_a_log_that_is_too_short_says_how_far_it_reaches(tmp_path: Path, without: str, missing: int) -> None:
    path = written(tmp_path)
    path.write_text("".join(line for line in path.read_text().splitlines(keepends=True) if without not in line))
    with pytest.raises(EventLogError, match=rf"no decisions of tick {missing}.*--run.num_ticks {missing}"):
        read_events(path, num_ticks=3)


def test_a_missing_log_is_named(tmp_path: Path) -> None:
    with pytest.raises(EventLogError, match=r"events\.jsonl cannot be read"):
        read_events(tmp_path / EVENTS_FILE, num_ticks=1)


def test_resuming_cuts_the_log_to_the_checkpoint_and_drops_a_torn_end(tmp_path: Path) -> None:
    path = written(tmp_path)
    path.write_bytes(path.read_bytes()[:-9])
    log = EventLog(tmp_path, resume_after_tick=0)
    assert set(read_events(path, num_ticks=1)) == {(0, 0), (0, 1)}
    log.append([event(1, rank).to_plain() for rank in range(2)])
    assert set(read_events(path, num_ticks=2)) == {(t, r) for t in range(2) for r in range(2)}
    EventLog(tmp_path, resume_after_tick=-1)
    assert [json.loads(line).get("tick") for line in path.read_text().splitlines()] == [None]


def test_resuming_over_a_torn_line_in_the_middle_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path)
    path.write_text(path.read_text().replace("[7, 1]", "[7, 3]", 1))
    with pytest.raises(EventLogError, match="line 2 is torn"):
        EventLog(tmp_path, resume_after_tick=1)


def test_resuming_cuts_a_torn_line_of_a_tick_that_is_decided_anew(tmp_path: Path) -> None:
    path = written(tmp_path)
    path.write_text(path.read_text().replace('"tick": 1', '"tick": 7', 1))
    EventLog(tmp_path, resume_after_tick=0)
    assert set(read_events(path, num_ticks=1)) == {(0, 0), (0, 1)}


@pytest.mark.parametrize("kept", [0, 5])
def test_a_log_that_was_emptied_or_removed_is_begun_again_and_goes_on(tmp_path: Path, kept: int) -> None:
    """By a power failure before anything was flushed, or by the user, since it was damaged."""
    path = written(tmp_path)
    path.write_bytes(path.read_bytes()[:kept])
    log = EventLog(tmp_path, resume_after_tick=0)
    for tick in (1, 2):
        log.append([event(tick).to_plain()])
    EventLog(tmp_path, resume_after_tick=2)
    assert set(read_events(path, num_ticks=3, first_tick=1)) == {(1, 0), (2, 0)}
    path.write_text(path.read_text().replace('"steps": 40', '"steps": 41', 1))
    with pytest.raises(EventLogError, match=f"line 2 is torn.* To go on all the same, remove {path}"):
        EventLog(tmp_path, resume_after_tick=2)


@pytest.mark.parametrize(("indices", "text"), [([], ""), ([4], "4"), ([2, 0, 1, 5], "0-2,5"), ([1, 3, 4], "1,3-4")])
def test_ranges_are_written_short(indices: list[int], text: str) -> None:
    assert ranges(indices) == text


def test_a_log_may_grow_beyond_what_other_files_may_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path)
    monkeypatch.setitem(read_bytes.__kwdefaults__, "max_bytes", 10)
    EventLog(tmp_path, resume_after_tick=2)
    assert len(read_events(path, num_ticks=3)) == 6 and "torch" in event_platform(path)
