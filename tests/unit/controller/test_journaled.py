"""Where a run goes on beyond its checkpoint: as far as the journal holds what this job does."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamarl.channels.base import ChannelKind, ChannelSpec
from llamarl.channels.data import DataSender
from llamarl.channels.weights import WeightsPayload, WeightsSender
from llamarl.checkpoint.snapshot import FileRecord
from llamarl.config import RunConfig
from llamarl.controller.graph import Graph
from llamarl.controller.journaled import load_journal, read_journal
from llamarl.controller.marking import Marking
from llamarl.executors.base import ExecutorSpec
from llamarl.runtime.base import Report, SetupReport
from llamarl.runtime.tick_log import JOURNAL_FOLDER, Resumed, TickLog
from llamarl.runtime.tick_record import Record, read_state, write_state
from llamarl.settings.checkpoint import CheckpointConfig
from llamarl.types import Group, Prompt

GROUPS = ChannelSpec(name="groups", kind=ChannelKind.GATHER, source="generator", sink="trainer", capacity=2, kept=True)
WEIGHTS = ChannelSpec(name="weights", kind=ChannelKind.WEIGHTS, source="trainer", sink="generator", delay=2, capacity=2)
GRAPH = Graph(
    tuple(ExecutorSpec(name=name, factory="tests:none") for name in ("generator", "trainer")), (GROUPS, WEIGHTS)
)


def config(**checkpoint: object) -> RunConfig:
    base = RunConfig()
    return replace(
        base,
        run=replace(base.run, num_ticks=10),
        checkpoint=replace(CheckpointConfig(), **checkpoint),  # type: ignore[arg-type]
    )


def group_of(tick: int) -> Group:
    return Group(prompt=Prompt(index=tick, tokens=np.arange(3, dtype=np.int32), text=""), responses=())


def begun(log: TickLog) -> TickLog:
    tokens = {"weights": {-2: (None,), -1: (None,)}}
    setups = [SetupReport(executor="generator"), SetupReport(executor="trainer", initial_tokens=tokens)]
    log.begin(GRAPH.channels, {setup.executor: setup for setup in setups}, ["generator"])
    return log


def journal_of(
    run_dir: Path, order: list[tuple[str, int]], items: Callable[[int], list[Any]] = lambda tick: [group_of(tick)]
) -> None:
    log = begun(TickLog(run_dir / JOURNAL_FOLDER, "mine"))
    groups = DataSender(GROUPS, rank=0, num_source_ranks=1, num_sink_ranks=1)
    weights = WeightsSender(WEIGHTS, rank=0, num_source_ranks=1, num_sink_ranks=1)
    for name, tick in order:
        if name == "generator":
            segment, state = write_state(f"after {tick}".encode())
            report = Report(
                executor=name, tick=tick, outputs={"groups": (groups.send(tick, items(tick)),)}, journal=(state,)
            )
        else:
            version = weights.send(tick, WeightsPayload(version=tick + 1, tensors={}))
            report = Report(executor=name, tick=tick, outputs={"weights": (version,)}, journal=(None,))
        held = log.take(report)
        assert held is not None
        log.append(held)
    log.close()
    groups.close()
    weights.close()


def release(resumed: Resumed) -> None:
    for segment in resumed.segments:
        segment.close()


COUNTED = [("generator", 0), ("generator", 1), ("trainer", 0), ("generator", 2), ("trainer", 1), ("generator", 3)]


def test_a_run_stands_where_it_was_with_the_last_states_and_the_tokens_that_are_yet_to_be_read(tmp_path: Path) -> None:
    journal_of(tmp_path, COUNTED)
    resumed = load_journal(tmp_path, "mine", GRAPH, config(), after_tick=-1)
    assert [(report.executor, report.tick) for report in resumed.reports] == COUNTED
    assert [[read_state(s) for s in report.journal] for report in resumed.reports if report.executor == "generator"] == [
        [], [], [], [b"after 3"],
    ]  # fmt: skip
    assert resumed.last_tick == 3
    kept = begun(TickLog(resumed=resumed))
    reports = kept.counted
    assert kept.replaceable() == {"generator": 4, "trainer": 0}
    assert [len(kept.inputs("trainer", tick)["groups"]) for tick in (0, 1)] == [1, 1]  # to repeat them
    marking = Marking(GRAPH, first_tick=0, num_ticks=10, initial_tokens={"weights": {-2: (None,), -1: (None,)}})
    marking.advance_by((report.executor, report.tick, report.outputs) for report in reports)
    assert marking.done_ticks == {"generator": 4, "trainer": 2} and not marking.busy
    assert marking.withdrawn("trainer") == frozenset()  # versions 1 and 2 were read by ticks 2 and 3
    kept.close()


def test_ticks_from_the_next_saved_one_on_are_done_again_so_that_everyone_saves_it(tmp_path: Path) -> None:
    journal_of(tmp_path, COUNTED)
    resumed = load_journal(tmp_path, "mine", GRAPH, config(every=3), after_tick=-1)
    assert [(report.executor, report.tick) for report in resumed.reports] == [at for at in COUNTED if at[1] < 2]
    release(resumed)
    kept = [at for at in COUNTED if at[1] < 2]
    assert [(record.executor, record.tick) for record in read_journal(tmp_path, "mine")] == kept


def test_after_a_checkpoint_all_counts_that_is_beyond_it_though_ticks_before_it_are_missing_in_between(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal_of(tmp_path, COUNTED)
    for path in (tmp_path / JOURNAL_FOLDER).glob(
        "*-0"
    ):  # the trainer's has a number after that of the generator's tick 1
        path.unlink()
    resumed = load_journal(tmp_path, "mine", GRAPH, config(), after_tick=0)
    assert [(report.executor, report.tick) for report in resumed.reports] == [at for at in COUNTED if at[1] > 0]
    release(resumed)
    next((tmp_path / JOURNAL_FOLDER).glob("*-1")).unlink()  # lost with the machine: the others build on it
    assert load_journal(tmp_path, "mine", GRAPH, config(), after_tick=0).reports == ()
    assert "goes on from its checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize("trouble", ["another order", "more ranks", "another channel", "another layout"])
def test_what_this_job_would_not_have_done_is_of_no_use(
    tmp_path: Path, trouble: str, capsys: pytest.CaptureFixture[str]
) -> None:
    journal_of(tmp_path, COUNTED[1:3] if trouble == "another order" else COUNTED)
    graph = GRAPH
    if trouble == "more ranks":
        graph = Graph(tuple(replace(spec, num_ranks=2) for spec in GRAPH.executors), GRAPH.channels)
    elif trouble == "another channel":
        graph = Graph(GRAPH.executors, (replace(GROUPS, name="others"), WEIGHTS))
    resumed = load_journal(tmp_path, "mine", graph, config(), after_tick=-1, moved=trouble == "another layout")
    assert resumed.reports == ()
    assert read_journal(tmp_path, "mine") == []
    if trouble in ("more ranks", "another channel"):
        assert "goes on from its checkpoint" in capsys.readouterr().err


def told_of(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Why a journal is of no use."""
    resumed = load_journal(run_dir, "mine", GRAPH, config(), after_tick=-1)
    assert (resumed.reports, resumed.segments, read_journal(run_dir, "mine")) == ((), [], [])
    return capsys.readouterr().err


def test_items_that_the_sink_cannot_read_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal_of(tmp_path, COUNTED, lambda tick: ["x", tick, None])
    assert "'trainer' reads groups, and channel 'groups' holds a str" in told_of(tmp_path, capsys)


@pytest.mark.parametrize(
    "wrong", [{"source_rank": 1}, {"source_rank": 1 << 39}, {"num_parts": 2}, {"tokens": []}, {"tokens": [None]}]
)
def test_tokens_that_are_not_those_of_the_sources_ranks_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, wrong: dict[str, Any]
) -> None:
    journal_of(tmp_path, COUNTED)

    def altered(*where: Any) -> list[Record]:
        def of(record: Record) -> Record:
            outputs = record.outputs
            if "groups" in outputs:
                given = [
                    replace(token, **wrong)
                    for token in outputs["groups"]
                    if token is not None and "tokens" not in wrong
                ]
                outputs = {"groups": wrong.get("tokens", given)}
            return replace(record, outputs=outputs)

        return [of(record) for record in read_journal(*where)]

    monkeypatch.setattr("llamarl.controller.journaled.read_journal", altered)
    assert "its tokens of channel 'groups' are not those of the ranks of 'generator'" in told_of(tmp_path, capsys)


def test_a_tick_whose_file_no_disk_can_hold_is_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal_of(tmp_path, COUNTED)

    def altered(*where: Any) -> list[Record]:
        files = {0: (FileRecord(path="a" * 3000, num_bytes=1, xxh3_128="00"),)}
        return [replace(r, files=files) if r.tick == 1 else r for r in read_journal(*where)]

    monkeypatch.setattr("llamarl.controller.journaled.read_journal", altered)
    resumed = load_journal(tmp_path, "mine", GRAPH, config(), after_tick=-1)
    assert [(report.executor, report.tick) for report in resumed.reports] == [at for at in COUNTED if at[1] < 1]
    release(resumed)


def test_ranks_of_a_source_that_may_be_any_number_go_on_as_another_one(tmp_path: Path) -> None:
    journal_of(tmp_path, COUNTED)
    executors = (replace(GRAPH.executors[0], num_ranks=2), GRAPH.executors[1])
    graph = Graph(executors, (replace(GROUPS, elastic=True), WEIGHTS))
    resumed = load_journal(tmp_path, "mine", graph, config(), after_tick=-1)
    assert [(report.executor, report.tick) for report in resumed.reports] == COUNTED
    release(resumed)


def test_more_pieces_than_may_be_open_are_refused_and_none_stays_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    journal_of(tmp_path, COUNTED)
    monkeypatch.setattr("llamarl.controller.journaled.raise_open_files", lambda: 404)
    resumed = load_journal(tmp_path, "mine", GRAPH, config(), after_tick=-1)
    assert resumed.reports == () and resumed.segments == []
    assert "it holds more than 2 pieces, as many as may be open: save more often" in capsys.readouterr().err


def test_a_version_that_was_on_its_edge_is_withdrawn_until_it_is_made_again() -> None:
    marking = Marking(GRAPH, first_tick=0, num_ticks=10, initial_tokens={"weights": {-2: (None,), -1: (None,)}})
    marking.advance_by((name, tick, {"groups": (tick,)} if name == "generator" else {}) for name, tick in COUNTED[:5])
    assert marking.withdrawn("trainer") == {("weights", 1)}
    with pytest.raises(ValueError, match="tick 7 of 'trainer' cannot have counted by then"):
        marking.advance_by([("trainer", 7, {})])
