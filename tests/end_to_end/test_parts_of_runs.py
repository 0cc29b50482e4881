"""Runs whose ticks are done in parts give the same bits, whenever parts arrive and whoever dies after one was sent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY, CommandLine

from llamarl.observability.warning_log import read_warnings

sys.path.append(str(Path(__file__).resolve().parents[1]))
from forked_command import ENVIRONMENT
from same_run import assert_same_run, contents

SETTINGS: dict[str, Any] = {
    "run.num_ticks": 4,
    "schedule.max_staleness": 0,
    "schedule.parts": 4,
    "schedule.prompts_per_step": 8,
    "generator.group_size": 4,
    "generator.engine.max_sequences": 8,  # groups are complete one after the other
    "optimizer.warmup_ticks": 1,
    "evaluation.every": 0,
    "checkpoint.every": 2,
}
DISTURBED = """\
import json, os, signal, sys

import cloudpickle

from llamarl.cli.main import main
from llamarl.runtime import ranks
from llamarl.runtime.passed_parts import PartMade

if __name__ == "__main__":
    kills, lost, words = json.loads(sys.argv[1])
    pass_on = ranks.Ranks._pass_on
    told = []

    def disturbed(self, source, blob):
        made = cloudpickle.loads(blob)
        if [source.executor, made.tick, made.part] not in lost:
            told.append((made.tick, made.part))
            pass_on(self, source, blob)
        for kill in list(kills):
            executor, tick, part, victim = kill
            if (executor, tick, part) == (source.executor, made.tick, made.part):
                kills.remove(kill)
                pid = self.of[victim][0].link.pid
                self._loop.call_later(0.02, os.kill, pid, signal.SIGKILL)  # it may be at work on the part by then

    ranks.Ranks._pass_on = disturbed
    code = main(words)
    print("parts passed on:", len(told), "kills left:", len(kills))
    sys.exit(code)
"""
"""The command with its controller's ear for parts disturbed: some are lost, and at some a process is killed."""


def words(run_dir: Path, **settings: Any) -> list[str]:
    merged = {**SETTINGS, "run.dir": json.dumps(str(run_dir)), "observability.console": '"none"', **settings}
    return ["train", str(REPOSITORY / "recipes" / "tiny.toml")] + [
        part for key, value in merged.items() for part in (f"--{key}", str(value))
    ]


def disturbed(
    run_dir: Path,
    *,
    kills: Sequence[tuple[str, int, int, str]] = (),
    lost: Sequence[tuple[str, int, int]] = (),
    limit_s: float = 240,
) -> str:
    """A run in processes; what it said.

    Args:
        kills: (executor, tick, part, victim): when the executor has told of that part, the victim is killed.
        lost: (executor, tick, part) that nobody hears of.
    """
    program = run_dir.parent / "disturbed.py"
    program.write_text(DISTURBED)
    given = json.dumps([kills, lost, words(run_dir)])
    done = subprocess.run(
        [sys.executable, str(program), given], capture_output=True, text=True, timeout=limit_s,
        env={**os.environ, **ENVIRONMENT},
    )  # fmt: skip
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    return said


@pytest.fixture(scope="module")
def inline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """No parts are passed on here."""
    run_dir = tmp_path_factory.mktemp("inline") / "run"
    done = CommandLine().run(words(run_dir, **{"run.runtime": '"inline"'}))
    assert done.returncode == 0, done.stdout + done.stderr
    return run_dir


def assert_same_bits(one: Path, other: Path) -> None:
    assert_same_run(one, other)
    assert contents(one / "trained") == contents(other / "trained") != {}


def ahead(run_dir: Path, executor: str) -> int:
    """Spans of work that an executor did before its tick came."""
    events = json.loads((run_dir / "trace.json").read_text())
    (lane,) = [e["tid"] for e in events if e["name"] == "thread_name" and e["args"]["name"] == executor]
    return sum(e["name"] == "ahead" and e["tid"] == lane for e in events)


def test_processes_that_work_ahead_make_the_run_of_one_process_that_does_not(inline: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    said = disturbed(run_dir)
    assert_same_bits(inline, run_dir)
    assert "parts passed on: 24" in said, "three parts a tick of generator and of reward"
    assert ahead(run_dir, "reward") == 12
    assert ahead(run_dir, "trainer") == 12
    assert ahead(inline, "trainer") == 0


def test_parts_are_lost_or_out_of_turn_and_processes_die_after_one_was_sent_and_the_bits_stay(
    inline: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    kills = [
        ("generator", 0, 1, "generator"),
        ("generator", 1, 1, "reward"),
        ("reward", 2, 0, "trainer"),
        ("generator", 3, 0, "generator"),
    ]
    lost = [("generator", 0, 0), ("reward", 1, 1), ("generator", 3, 1)]
    said = disturbed(run_dir, kills=kills, lost=lost)
    assert "kills left: 0" in said, said
    restarts = [warning for warning in read_warnings(run_dir) if warning["kind"] == "restart"]
    assert len(restarts) == 4, restarts
    assert_same_bits(inline, run_dir)
