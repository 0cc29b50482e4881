"""``schedule.weights = "latest"``: timing decides, and its log repeats the run bit for bit, killed and resumed or not."""

import dataclasses
from pathlib import Path

import pytest
from conftest import RECIPE, CommandLine, as_flags, kill_after_rows, rows
from holding_sink import HOLD_AT, hold_at, let_go
from test_repeatable import assert_same_run

from llamarl.cli.main import main
from llamarl.executors.in_flight import Logged
from llamarl.observability.events import EventLog, read_events

SETTINGS = {
    "schedule.weights": '"latest"',
    "schedule.max_staleness": 1,
    "generator.max_segments": 2,
    "generator.oversubscription": 1.5,
    "checkpoint.every": 2,
    "evaluation.every": 0,
    "run.num_ticks": 5,
} | HOLD_AT


@pytest.fixture(scope="module")
def killed_and_resumed(llamarl: CommandLine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("latest") / "run"
    hold_at(run_dir, row=3)
    kill_after_rows(llamarl.start(run_dir, SETTINGS), run_dir, 3)
    let_go(run_dir)
    assert len(rows(run_dir)) < 5  # it was in fact cut short
    llamarl.train(run_dir, SETTINGS, "--resume", str(run_dir))
    return run_dir


def test_a_run_of_processes_that_was_killed_and_resumed_is_repeated_inline_bit_for_bit(
    killed_and_resumed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = rows(killed_and_resumed)
    assert [row["step"] for row in table] == list(range(5))
    assert max(row["staleness/max"] for row in table) == 1  # max_staleness, though responses were carried over
    again = tmp_path / "again"
    assert main(["train", "--replay", str(killed_and_resumed), "--run.dir", str(again), "--run.runtime", "inline"]) == 0
    assert_same_run(killed_and_resumed, again)
    told = capsys.readouterr().out.splitlines()[-1]
    assert told == f"equal bits: 5 rows but for times, and the policy's weights, as in {killed_and_resumed}"
    assert (killed_and_resumed / "events.jsonl").read_bytes() == (again / "events.jsonl").read_bytes()


@pytest.mark.usefixtures("own_signals")
def test_a_replay_under_other_settings_is_refused(killed_and_resumed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--replay", str(killed_and_resumed), "--run.seed", "1", "--optimizer.lr", "1.0"]) == 2
    told = capsys.readouterr().err
    assert "run.seed: " in told and "optimizer.lr: " in told
    assert not Path(f"{killed_and_resumed}-replay").exists()


@pytest.mark.long
def test_a_version_may_be_gone_when_the_next_tick_starts_with_a_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two slots hold two versions. Tick 2 is served version 1 to its end, tick 3 begins with version 3: in version 1's slot."""
    source, again = tmp_path / "source", tmp_path / "again"
    settings = {**SETTINGS, "checkpoint.every": 0, "run.dir": source, "run.runtime": "inline"}
    assert main(["train", str(RECIPE), *as_flags(settings)]) == 0
    served = {0: 0, 1: 0, 2: 1, 3: 3, 4: 4}
    made = read_events(source / "events.jsonl", num_ticks=5)
    (source / "events.jsonl").unlink()
    changed = [dataclasses.replace(event, swaps=((0, served[tick]),)) for (tick, _), event in made.items()]
    EventLog(source).append(event.to_plain() for event in changed)
    monkeypatch.setattr(Logged, "check", lambda self, event: None)  # decisions that no run has made
    assert main(["train", "--replay", str(source), "--run.dir", str(again)]) == 0
    taken = {tick: event.swaps for (tick, _), event in read_events(again / "events.jsonl", num_ticks=5).items()}
    assert taken == {tick: ((0, version),) for tick, version in served.items()}
