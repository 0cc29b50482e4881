"""What is written of ticks that counted, and what of it is read again after tears, holes and strangers."""

from __future__ import annotations

import errno
import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llamarl.channels.base import ChannelKind, ChannelSpec
from llamarl.channels.data import DataReceiver, DataSender
from llamarl.runtime.base import Report
from llamarl.runtime.journal import JOURNAL_FOLDER, Journal, Record, read_journal, records_of, remove_journal
from llamarl.runtime.kept_states import read_state, write_state
from llamarl.runtime.kept_tokens import KeptTokens
from llamarl.transports.segments import Segment
from llamarl.types import Group, Prompt, Response, Score

CHANNEL = ChannelSpec(name="groups", kind=ChannelKind.GATHER, source="source", sink="sink", capacity=1, kept=True)


def group(index: int) -> Group:
    prompt = Prompt(index=index, tokens=np.arange(3, dtype=np.int32), text="1 + 1 =", metadata={"level": 2})
    response = Response(
        prompt_index=index,
        sample_index=0,
        tokens=np.array([7, 8], np.int32),
        behavior_logprobs=np.array([-0.5, np.nan], np.float32),
        policy_versions=np.array([index, -1], np.int32),
        loss_mask=np.array([True, False]),
        text="2",
        finish_reason="stop",
        outcome=Score(value=1.0, parts={"correct": 1.0}),
    )
    return Group(prompt=prompt, responses=(response,))


def write(run_dir: Path, num_ticks: int, *, run_id: str = "mine", payload: object = None, saved: int = -1) -> None:
    """Source and sink, each with a journal of its own, do ``num_ticks`` ticks."""
    kept, journal = KeptTokens([CHANNEL], ["source", "sink"], ["source"]), Journal(run_dir, run_id)
    sender = DataSender(CHANNEL, rank=0, num_source_ranks=1, num_sink_ranks=1)
    for tick in range(num_ticks):
        handle = sender.send(tick, [group(tick) if payload is None else payload])
        segment, state = write_state(f"state after {tick}".encode())
        made = Report(
            executor="source", tick=tick, outputs={"groups": (handle,)}, journal=(state,), metrics={"a": 0.1, "b": float("nan")},
            spans=(("work", 1.0, 2.0),), started_s=1.0, finished_s=2.0, failures={"late": 1}, events=({"tick": tick},),
        )  # fmt: skip
        for report in (made, Report(executor="sink", tick=tick)):
            held = kept.take(report)
            assert held is not None
            journal.append(held)
        segment.close()
    journal.saved(saved)
    sender.close()
    kept.close()
    journal.close(done=False)


def ticks(records: list[Record]) -> list[tuple[str, int]]:
    return [(record.executor, record.tick) for record in records]


BOTH = [(name, tick) for tick in range(3) for name in ("source", "sink")]


def test_what_is_read_is_what_counted_with_token_and_state_in_memory_of_this_process(tmp_path: Path) -> None:
    write(tmp_path, 3)
    records = read_journal(tmp_path, "mine")
    assert ticks(records) == BOTH
    segments: list[Segment] = []
    report = records[2].report(segments, tokens=["groups"], states=True)
    assert (report.executor, report.tick, report.spans, report.failures) == (
        "source",
        1,
        (("work", 1.0, 2.0),),
        {"late": 1},
    )
    assert report.metrics["a"] == 0.1 and np.isnan(report.metrics["b"]) and report.events == ({"tick": 1},)
    assert [read_state(state) for state in report.journal] == [b"state after 1"]
    receiver = DataReceiver(CHANNEL, rank=0, num_source_ranks=1, num_sink_ranks=1)
    (found,) = receiver.receive(report.outputs["groups"], 5.0)
    assert str(found) == str(group(1))
    assert records[2].report(segments, tokens=[], states=False).outputs == {"groups": (None,)}
    assert [record.tells_states for record in records[:2]] == [True, False]
    receiver.close()
    for segment in segments:
        segment.close()


@pytest.mark.parametrize(("trouble", "left"), [("torn", 3), ("altered", 3), ("missing", 3), ("of another run", 0)])
def test_only_a_beginning_of_what_counted_is_read(tmp_path: Path, trouble: str, left: int) -> None:
    write(tmp_path, 3, run_id="other" if trouble == "of another run" else "mine")
    path = tmp_path / JOURNAL_FOLDER / f"{3:012d}"
    data = bytearray(path.read_bytes())
    if trouble == "torn":
        path.write_bytes(data[:-1])
    elif trouble == "altered":
        data[-1] ^= 1
        path.write_bytes(data)
    elif trouble == "missing":
        path.unlink()
    assert ticks(read_journal(tmp_path, "mine")) == BOTH[:left]


def test_what_a_checkpoint_contains_is_removed_and_all_at_the_end(tmp_path: Path) -> None:
    write(tmp_path, 3, saved=0)
    assert ticks(read_journal(tmp_path, "mine")) == BOTH[2:]
    Journal(tmp_path, "mine").close(done=True)
    assert not (tmp_path / JOURNAL_FOLDER).exists()


def test_ticks_are_chosen_from_the_checkpoint_on_and_none_where_one_of_them_is_missing(tmp_path: Path) -> None:
    write(tmp_path, 3)
    records = read_journal(tmp_path, "mine")
    assert ticks(records_of(records, after_tick=0, before_tick=2)) == BOTH[2:4]
    assert records_of(records[4:], after_tick=0, before_tick=9) == []
    assert remove_journal(tmp_path, records[:3]) == 3
    assert ticks(read_journal(tmp_path, "mine")) == BOTH[:3]


def test_a_token_that_names_anything_but_plain_records_is_refused(tmp_path: Path) -> None:
    write(tmp_path, 1, payload=Path("secrets"))
    with pytest.raises(ValueError, match=r"names pathlib.*, which is no plain record"):
        read_journal(tmp_path, "mine")[0].report([], tokens=["groups"], states=False)


def test_what_is_not_held_ends_the_journal_and_says_so(tmp_path: Path) -> None:
    told: list[str] = []
    journal = Journal(tmp_path, "mine", tell=told.append)
    segment, state = write_state(b"elsewhere")
    elsewhere = replace(state, segment=replace(state.segment, pid=1))
    journal.append(Report(executor="source", tick=0, journal=(elsewhere,)))
    journal.append(Report(executor="source", tick=1))
    journal.close(done=False)
    segment.close()
    assert len(told) == 1 and "'source' made at tick 0 is not held" in told[0]
    assert not (tmp_path / JOURNAL_FOLDER).exists()


def written_while(run_dir: Path, monkeypatch: pytest.MonkeyPatch, **changes: object) -> list[str]:
    """Two ticks are appended while something of the module is otherwise; what was told."""
    kept, told = KeptTokens([CHANNEL], ["source", "sink"], ["source"]), list[str]()
    sender = DataSender(CHANNEL, rank=0, num_source_ranks=1, num_sink_ranks=1)
    with monkeypatch.context() as patch:
        for name, value in changes.items():
            patch.setattr(f"llamarl.runtime.journal.{name}", value, raising=False)
        journal = Journal(run_dir, "mine", tell=told.append)
        for tick in range(2):
            held = kept.take(
                Report(executor="source", tick=tick, outputs={"groups": (sender.send(tick, [group(tick)]),)})
            )
            assert held is not None
            journal.append(held)
        until = time.monotonic() + 5.0
        while (not told or journal.folder.exists()) and time.monotonic() < until:
            time.sleep(0.01)  # its own thread makes the room
        assert not journal.folder.exists()
    sender.close()
    kept.close()
    journal.close(done=False)
    return told


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.ENOENT])
def test_a_disk_that_refuses_it_ends_it_once_and_gets_its_room_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    write(tmp_path, 1)
    assert read_journal(tmp_path, "mine")

    def refuse(*_: object) -> object:
        raise OSError(number, os.strerror(number))

    (told,) = written_while(tmp_path, monkeypatch, open=refuse)
    assert f"{os.strerror(number)}. A resume begins at the last checkpoint" in told
    assert read_journal(tmp_path, "mine") == []


def test_a_disk_that_is_too_slow_for_it_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (told,) = written_while(tmp_path, monkeypatch, _MAX_BACKLOG_BYTES=10)
    assert "the disk is too slow for it. A resume begins at the last checkpoint" in told
