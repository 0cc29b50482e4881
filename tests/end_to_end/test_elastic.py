"""Generator replicas are another number after a resume, and every byte is that of a run with one."""

import os
import re
import signal
from pathlib import Path

import pytest
from conftest import LONG_LEDGERS, CommandLine, wait_for_rows, wait_until
from forked_command import Started
from same_run import assert_same_run
from tools.chaos.processes import ranks

from llamarl.observability.metrics import read_warnings

SETTINGS = {
    "task.options": LONG_LEDGERS,
    "run.num_ticks": 12,
    "generator.shards": 4,
    "generator.max_segments": 2,
    "generator.oversubscription": 2.0,
    "generator.threads": 1,
    "evaluation.every": 0,
    "checkpoint.every": 5,
}


@pytest.mark.long  # in short: tests/unit/executors/test_generator_shards.py
def test_of_two_replicas_one_dies_then_the_controller_and_four_end_the_run(
    llamarl: CommandLine, tmp_path: Path
) -> None:
    one, moved = tmp_path / "one", tmp_path / "moved"
    done = llamarl.train(one, SETTINGS)

    run = llamarl.start(moved, {**SETTINGS, "generator.dp": 2})
    wait_for_rows(run, moved, 1)
    up = wait_for_ranks(run, 2)
    os.kill(up["generator 1"], signal.SIGKILL)
    wait_until(lambda: bool(restarts(moved)), limit_s=60, what="its replacement")
    wait_for_rows(run, moved, restarts(moved)[0] + 1)
    os.kill(run.pid, signal.SIGKILL)
    said, _ = run.communicate(timeout=60)
    assert re.search(r"'generator' rank 1 died .* \(restart 1\)", said), said  # those that were asked for are none

    done = llamarl.run(["train", "--resume", str(moved), "--generator.dp", "4"])
    assert "goes on from its journal: generator after" in done.stderr
    assert_same_run(one, moved)


def restarts(run_dir: Path) -> list[int]:
    """Ticks before which an executor was brought up again."""
    return [warning["step"] for warning in read_warnings(run_dir) if warning["kind"] == "restart"]


def wait_for_ranks(run: Started, replicas: int) -> dict[str, int]:
    up: dict[str, int] = {}
    names = {f"generator {rank}" for rank in range(replicas)}
    wait_until(lambda: bool(up.update(ranks(run.pid)) or names <= up.keys()), limit_s=30, what="its processes")
    return up
