"""The promise that sets llamarl apart: an asynchronous run repeats, and a killed one resumes, bit for bit."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from conftest import CommandLine, rows, wait_until
from same_run import assert_same_run

PARTIAL = {"generator.max_segments": 2, "generator.oversubscription": 1.5}
RESUMABLE = {
    **PARTIAL,
    "schedule.max_staleness": 2,
    "checkpoint.every": 2,
    "run.num_ticks": 8,
    "optimizer.schedule": '"constant"',  # a falling one would depend on the length of the run
}


def weights(run_dir: Path) -> bytes:
    return (run_dir / "model" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def never_killed(llamarl: CommandLine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("never_killed") / "run"
    done = llamarl.train(run_dir, RESUMABLE)
    assert done.returncode == 0, done.stdout + done.stderr
    return run_dir


def test_two_asynchronous_runs_with_partial_rollouts_give_the_same_bits(
    llamarl: CommandLine, tmp_path: Path, never_killed: Path
) -> None:
    done = llamarl.train(tmp_path / "two", RESUMABLE)
    assert done.returncode == 0, done.stdout + done.stderr
    table = rows(never_killed)
    assert [row["step"] for row in table] == list(range(8))
    assert max(row["rollout/segments_max"] for row in table) == 2  # responses were in fact cut and resumed
    assert max(row["staleness/max"] for row in table) == 3  # max_staleness + max_segments - 1
    assert_same_run(tmp_path / "two", never_killed)


def test_another_seed_gives_another_run(llamarl: CommandLine, tmp_path: Path) -> None:
    for seed in (0, 1):
        done = llamarl.train(tmp_path / str(seed), {"run.seed": seed, "run.num_ticks": 1, "run.runtime": '"inline"'})
        assert done.returncode == 0, done.stdout + done.stderr
    assert weights(tmp_path / "0") != weights(tmp_path / "1")


def test_the_inline_runtime_gives_the_bits_of_the_processes(
    llamarl: CommandLine, tmp_path: Path, never_killed: Path
) -> None:
    done = llamarl.train(tmp_path / "inline", RESUMABLE | {"run.runtime": '"inline"'})
    assert done.returncode == 0, done.stdout + done.stderr
    assert_same_run(tmp_path / "inline", never_killed)


@pytest.mark.parametrize(
    "rows_written", [pytest.param(0, marks=pytest.mark.long), 3, pytest.param(6, marks=pytest.mark.long)]
)
def test_a_run_killed_at_any_moment_resumes_bit_for_bit(
    llamarl: CommandLine, tmp_path: Path, never_killed: Path, rows_written: int
) -> None:
    run_dir = tmp_path / "run"
    process = llamarl.start(run_dir, RESUMABLE)
    try:
        started = lambda: (run_dir / "config.toml").exists()  # noqa: E731
        wait_until(lambda: started() and len(rows(run_dir)) >= rows_written, limit_s=120, what=f"{rows_written} rows")
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=30)
    assert len(rows(run_dir)) < 8  # it was in fact cut short
    done = llamarl.train(run_dir, RESUMABLE, "--resume", str(run_dir))
    assert done.returncode == 0, done.stdout + done.stderr
    assert_same_run(run_dir, never_killed)


@pytest.mark.long
def test_a_finished_run_can_be_prolonged_to_the_bits_of_a_longer_one(
    llamarl: CommandLine, tmp_path: Path, never_killed: Path
) -> None:
    run_dir = tmp_path / "run"
    shorter = {**RESUMABLE, "run.num_ticks": 4, "evaluation.every": 0}
    longer = {**RESUMABLE, "evaluation.every": 0}
    assert llamarl.train(run_dir, shorter).returncode == 0
    done = llamarl.train(run_dir, longer, "--resume", str(run_dir))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "falls to its end" not in done.stderr
    assert weights(run_dir) == weights(never_killed)  # evaluation changes nothing that is trained
