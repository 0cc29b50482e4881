"""The promise that sets llamarl apart: an asynchronous run repeats, and a killed one resumes, bit for bit."""

from pathlib import Path

import pytest
from conftest import CommandLine, kill_after_rows, rows
from holding_sink import HOLD_AT, hold_at, let_go
from same_run import assert_same_run

PARTIAL = {"generator.max_segments": 2, "generator.oversubscription": 1.5}
RESUMABLE = {
    **PARTIAL,
    "schedule.max_staleness": 2,
    "checkpoint.every": 2,
    "run.num_ticks": 6,
    "optimizer.schedule": '"constant"',  # a falling one would depend on the length of the run
} | HOLD_AT


def weights(run_dir: Path) -> bytes:
    return (run_dir / "model" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def never_killed(llamarl: CommandLine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("never_killed") / "run"
    llamarl.train(run_dir, RESUMABLE)
    return run_dir


def test_the_inline_runtime_gives_the_bits_of_the_processes(
    llamarl: CommandLine, tmp_path: Path, never_killed: Path
) -> None:
    table = rows(never_killed)
    assert [row["step"] for row in table] == list(range(6))
    assert max(row["rollout/segments_max"] for row in table) == 2  # responses were in fact cut and resumed
    assert max(row["staleness/max"] for row in table) == 3  # max_staleness + max_segments - 1
    llamarl.train(tmp_path / "inline", RESUMABLE | {"run.runtime": '"inline"'})
    assert_same_run(tmp_path / "inline", never_killed)


@pytest.mark.parametrize(
    "rows_written", [pytest.param(0, marks=pytest.mark.long), 3, pytest.param(5, marks=pytest.mark.long)]
)
def test_a_run_killed_at_any_moment_resumes_bit_for_bit(
    llamarl: CommandLine, tmp_path: Path, never_killed: Path, rows_written: int
) -> None:
    run_dir = tmp_path / "run"
    hold_at(run_dir, row=rows_written)
    process = llamarl.start(run_dir, RESUMABLE)
    kill_after_rows(process, run_dir, rows_written)
    let_go(run_dir)
    assert len(rows(run_dir)) < 6  # it was in fact cut short
    llamarl.train(run_dir, RESUMABLE, "--resume", str(run_dir))
    assert_same_run(run_dir, never_killed)


@pytest.mark.long
def test_a_finished_run_can_be_prolonged_to_the_bits_of_a_longer_one(
    llamarl: CommandLine, tmp_path: Path, never_killed: Path
) -> None:
    run_dir = tmp_path / "run"
    shorter = {**RESUMABLE, "run.num_ticks": 4, "evaluation.every": 0}
    longer = {**RESUMABLE, "evaluation.every": 0}
    llamarl.train(run_dir, shorter)
    done = llamarl.train(run_dir, longer, "--resume", str(run_dir))
    assert "falls to its end" not in done.stderr
    assert weights(run_dir) == weights(never_killed)  # evaluation changes nothing that is trained
