"""``schedule.weights = "latest"``: timing decides, and its log repeats the run bit for bit, killed and resumed or not."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from conftest import CommandLine, rows, wait_until
from test_repeatable import assert_same_run

from llamarl.cli.main import main

SETTINGS = {
    "schedule.weights": '"latest"',
    "schedule.max_staleness": 1,
    "generator.max_segments": 2,
    "generator.oversubscription": 1.5,
    "generator.kv_on_update": '"keep"',
    "checkpoint.every": 2,
    "evaluation.every": 0,
    "run.num_ticks": 5,
}


@pytest.fixture(scope="module")
def killed_and_resumed(llamarl: CommandLine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("latest") / "run"
    process = llamarl.start(run_dir, SETTINGS)
    try:
        wait_until(lambda: len(rows(run_dir)) >= 3, limit_s=240, what="3 rows")
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=30)
    assert len(rows(run_dir)) < 5  # it was in fact cut short
    done = llamarl.train(run_dir, SETTINGS, "--resume", str(run_dir))
    assert done.returncode == 0, done.stdout + done.stderr
    return run_dir


def test_a_run_of_processes_that_was_killed_and_resumed_is_repeated_inline_bit_for_bit(
    killed_and_resumed: Path, tmp_path: Path
) -> None:
    table = rows(killed_and_resumed)
    assert [row["step"] for row in table] == list(range(5))
    assert max(row["staleness/max"] for row in table) == 1  # max_staleness, though responses were carried over
    again = tmp_path / "again"
    assert main(["train", "--replay", str(killed_and_resumed), "--run.dir", str(again), "--run.runtime", "inline"]) == 0
    assert_same_run(killed_and_resumed, again)
    assert (killed_and_resumed / "events.jsonl").read_bytes() == (again / "events.jsonl").read_bytes()


def test_a_replay_under_other_settings_is_refused(killed_and_resumed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--replay", str(killed_and_resumed), "--run.seed", "1", "--optimizer.lr", "1.0"]) == 2
    told = capsys.readouterr().err
    assert "run.seed: " in told and "optimizer.lr: " in told
    assert not Path(f"{killed_and_resumed}-replay").exists()


def test_a_torn_log_is_refused_by_name(
    killed_and_resumed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = killed_and_resumed / "events.jsonl"
    whole = log.read_bytes()
    log.write_bytes(whole[:-9])
    try:
        assert main(["train", "--replay", str(killed_and_resumed), "--run.dir", str(tmp_path / "torn")]) == 1
    finally:
        log.write_bytes(whole)
    assert f"{log}, line 6 is torn" in capsys.readouterr().err
    assert not (tmp_path / "torn").exists()
