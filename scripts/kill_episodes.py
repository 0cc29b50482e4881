"""Kills runs of episodes at random moments and compares what becomes of them: ``python scripts/kill_episodes.py --kills 20``

A task with a tool that remembers, ``max_staleness`` 1, partial rollouts. Two runs that nobody disturbs must be equal. Then one run a
kill: at a seeded moment ``kill -9`` hits

    controller     the run ends; it is resumed
    a rank         generator, reward or trainer: the run ends; it is resumed
    environments   every process that holds live ones: the run goes on by itself

and the run that results must equal the undisturbed one: weights, rollouts and metrics (but for times), byte for byte. Exits 1 where
one does not.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from killing import environment_workers, kill_all, ranks  # noqa: E402

from llamarl.observability.keys import is_timing_key  # noqa: E402

__all__ = ["SETTINGS", "Kill", "differences", "killed", "play"]

SETTINGS: Mapping[str, Any] = {
    "task.name": '"episodes"',
    "task.environment": json.dumps(f"{ROOT / 'tests' / 'small_environments.py'}:Till"),
    "task.environment_options": "{ calls = 10 }",
    "task.max_turns": 12,
    "task.max_turn_tokens": 4,
    "task.pool.num_workers": 2,
    "generator.group_size": 4,
    "generator.max_segments": 2,
    "generator.oversubscription": 1.5,
    "generator.sampling.max_new_tokens": 180,
    "schedule.prompts_per_step": 4,
    "schedule.max_staleness": 1,
    "checkpoint.every": 1,
    "evaluation.every": 0,
    "optimizer.schedule": '"constant"',
    "observability.rollouts": "true",
    "observability.console": '"plain"',
    "run.num_ticks": 12,
}
TARGETS = ("controller", "environments", "generator", "reward", "trainer")
_LIMIT_S = 300.0
_LONGEST_DELAY_S = 0.3
"""About a tick, so that moments fall anywhere in one."""


@dataclass(frozen=True, kw_only=True)
class Kill:
    """When ``delay_s`` have passed since the run has ``rows`` rows of metrics."""

    target: str
    rows: int
    delay_s: float


@dataclass(frozen=True, kw_only=True)
class Outcome:
    rows: int
    """That the run had when it was killed."""
    num_killed: int
    ended: bool
    """Whether it had to be resumed."""
    carried: bool
    """Whether the checkpoint that it was resumed from holds episodes that were cut inside."""
    differences: tuple[str, ...]


def plan(num_kills: int, seed: int) -> list[Kill]:
    """Each target in turn; moments spread over the run."""
    rng = random.Random(seed)
    moments = [
        rng.randrange(int(SETTINGS["run.num_ticks"]) - 1) for _ in range(num_kills)
    ]  # not after the last but one, so that it hits
    return [
        Kill(target=TARGETS[i % len(TARGETS)], rows=rows, delay_s=rng.uniform(0.0, _LONGEST_DELAY_S))
        for i, rows in enumerate(moments)
    ]


def play(run_dir: Path, settings: Mapping[str, Any], *flags: str) -> None:
    """A run to its end.

    Raises:
        RuntimeError: It did not end well; carries what it printed.
    """
    process = _start(run_dir, settings, *flags)
    try:
        text, _ = process.communicate(timeout=_LIMIT_S)
    finally:
        process.kill()
    if process.returncode:
        raise RuntimeError(f"{run_dir} ended with {process.returncode}:\n{text}")


def killed(run_dir: Path, kill: Kill, undisturbed: Path, settings: Mapping[str, Any] = SETTINGS) -> Outcome:
    """A run with one kill in it, resumed where that ended it.

    Raises:
        RuntimeError: The kill hit nobody, ended a run that should go on, or did not end one; or what was resumed failed.
    """
    settings = {**settings, "recovery.max_restarts": 0}  # what is tried here is the resume
    process = _start(run_dir, settings)
    try:
        _wait_for_rows(run_dir, kill.rows, process)
        time.sleep(kill.delay_s)
        written = len(rows_of(run_dir))
        num_killed = kill_all(_victims(process.pid, kill.target))
        text, _ = process.communicate(timeout=_LIMIT_S)
    finally:
        process.kill()
    ended = process.returncode != 0
    if not num_killed or ended != (kill.target != "environments"):
        raise RuntimeError(f"{kill}: {num_killed} processes killed, exit status {process.returncode}:\n{text}")
    carried = _holds_cut_episodes(run_dir)
    if ended:
        play(run_dir, settings, "--resume", str(run_dir))
    return Outcome(
        rows=written,
        num_killed=num_killed,
        ended=ended,
        carried=carried,
        differences=tuple(differences(run_dir, undisturbed)),
    )


def differences(one: Path, other: Path) -> list[str]:
    """What of two runs is not equal: weights, rollouts, metrics without times."""
    found = []
    if (one / "model/model.safetensors").read_bytes() != (other / "model/model.safetensors").read_bytes():
        found.append("weights")
    names = sorted({path.name for run in (one, other) for path in (run / "rollouts").iterdir()})
    for name in names:
        files = [run / "rollouts" / name for run in (one, other)]
        if not all(file.exists() for file in files) or files[0].read_bytes() != files[1].read_bytes():
            found.append(f"rollouts/{name}")
    rows = [[{k: v for k, v in row.items() if not is_timing_key(k)} for row in rows_of(run)] for run in (one, other)]
    if rows[0] != rows[1]:
        found.append("metrics")
    return found


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    """A run's metrics, as far as they are written."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _start(run_dir: Path, settings: Mapping[str, Any], *flags: str) -> subprocess.Popen[str]:
    given = {**settings, "run.dir": json.dumps(str(run_dir))}
    words = [part for key, value in given.items() for part in (f"--{key}", str(value))]
    return subprocess.Popen(
        [sys.executable, "-m", "llamarl.cli.main", "train", str(ROOT / "recipes/tiny.toml"), *flags, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _wait_for_rows(run_dir: Path, count: int, process: subprocess.Popen[str]) -> None:
    """Until the run has so many rows, and its ranks and environments are there."""
    end = time.monotonic() + _LIMIT_S
    while len(rows_of(run_dir)) < count or len(ranks(process.pid)) < 3 or not environment_workers(process.pid):
        if process.poll() is not None or time.monotonic() > end:
            process.kill()
            raise RuntimeError(f"{run_dir} never came to {count} rows:\n{process.communicate()[0]}")
        time.sleep(0.01)


def _victims(run: int, target: str) -> Sequence[int]:
    if target == "controller":
        return [run]
    return environment_workers(run) if target == "environments" else [ranks(run)[target]]


def _holds_cut_episodes(run_dir: Path) -> bool:
    """Whether the generator's last saved state has a sequence with turns that is not finished."""
    saved = sorted(run_dir.glob("checkpoints/tick_*/**/generator.json"))
    if not saved:
        return False
    groups = json.loads(saved[-1].read_text())["active"]
    return any(s["episode"]["turns"] and s["finish_reason"] is None for g in groups for s in g["sequences"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # runs that are under way end with this
    with tempfile.TemporaryDirectory() as folder:
        undisturbed, again = Path(folder) / "undisturbed", Path(folder) / "again"
        play(undisturbed, SETTINGS)
        play(again, SETTINGS)
        bad = differences(again, undisturbed)
        print(f"undisturbed, twice: {', '.join(bad) + ' differ' if bad else 'equal'}", flush=True)
        failures, inside = int(bool(bad)), 0
        for number, kill in enumerate(plan(args.kills, args.seed), 1):
            outcome = killed(Path(folder) / f"killed_{number}", kill, undisturbed)
            failures += bool(outcome.differences)
            inside += outcome.ended and outcome.carried
            print(
                f"kill {number:2}: {kill.target:12} after {outcome.rows:2} rows and {kill.delay_s * 1e3:3.0f} ms, "
                f"{'resumed' if outcome.ended else 'went on'}"
                f"{' inside episodes' if outcome.ended and outcome.carried else ''}: "
                f"{', '.join(outcome.differences) + ' differ' if outcome.differences else 'equal'}",
                flush=True,
            )
    print(f"{args.kills} kills, {inside} resumed from inside episodes, {failures} with a difference")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
