"""Processes of a run die, are brought up again, and the run ends with the bits of one that nobody disturbed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import CommandLine, rows, wait_until

from llamarl.observability.keys import is_timing_key

sys.path.append(str(Path(__file__).resolve().parents[1]))
from killing import ranks

SETTINGS = {
    "run.num_ticks": 10,
    "generator.max_segments": 2,
    "generator.oversubscription": 1.5,
    "checkpoint.every": 2,
    "evaluation.every": 4,
}


def what_counts(run_dir: Path) -> dict[str, Any]:
    """All that a run leaves behind and that its clock has no part in."""
    kept = [run_dir / "model" / "model.safetensors", *sorted((run_dir / "rollouts").iterdir())]
    timeless = [{key: value for key, value in row.items() if not is_timing_key(key)} for row in rows(run_dir)]
    return {"rows": timeless} | {str(path.relative_to(run_dir)): path.read_bytes() for path in kept}


def kill(run: subprocess.Popen[str], *executors: str) -> None:
    up: dict[str, int] = {}
    wait_until(
        lambda: bool(up.update(ranks(run.pid)) or all(name in up for name in executors)),
        limit_s=30,
        what="its processes",
    )
    for name in executors:
        os.kill(up[name], signal.SIGKILL)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    done = CommandLine().train(folder, SETTINGS)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_generator_reward_and_evaluator_die_at_several_moments_and_every_byte_is_that_of_the_undisturbed_run(
    llamarl: CommandLine, tmp_path: Path, undisturbed: Path
) -> None:
    run_dir = tmp_path / "run"
    run = llamarl.start(run_dir, SETTINGS)
    kills = [(1, "reward"), (2, "generator"), (5, "generator reward"), (7, "evaluator")]
    for number, (num_rows, executors) in enumerate(kills):  # nobody twice at one tick, which ends the run
        wait_for_rows(run, run_dir, num_rows)
        time.sleep(0.05 * number)  # another moment of its tick each time
        kill(run, *executors.split())
    said, _ = run.communicate(timeout=240)
    assert run.returncode == 0, said
    assert said.count("brought up again") == 5, said
    assert what_counts(run_dir) == what_counts(undisturbed)
    restarts = [key for row in rows(run_dir) for key in row if key.endswith("_restarts")]
    assert set(restarts) >= {"recovery/generator_restarts", "recovery/reward_restarts"}


def test_the_trainer_is_not_brought_up_again_and_the_run_says_so(llamarl: CommandLine, tmp_path: Path) -> None:
    run = llamarl.start(tmp_path / "run", SETTINGS)
    wait_for_rows(run, tmp_path / "run", 2)
    kill(run, "trainer")
    said, _ = run.communicate(timeout=60)
    assert run.returncode == 1
    assert "signal 9" in said and "'trainer' is not brought up again: what it held is not held elsewhere" in said


def wait_for_rows(run: subprocess.Popen[str], run_dir: Path, number: int) -> None:
    file = run_dir / "metrics.jsonl"

    def there() -> bool:
        return run.poll() is not None or (file.is_file() and file.read_text().count("\n") >= number)

    wait_until(there, limit_s=120, what=f"{number} rows")
