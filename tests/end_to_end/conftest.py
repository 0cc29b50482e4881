"""Runs of the real command line on the bundled model, small enough for a test."""

import json
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from forked_command import Started, run_llamarl
from same_run import assert_same_run, untimed
from waiting import wait_until

from llamarl.observability.keys import KEYS, REPLICA_KEY

REPOSITORY = Path(__file__).resolve().parents[2]
RECIPE = REPOSITORY / "recipes" / "tiny.toml"
SHORT_LEDGERS = "{ max_terms = 4 }"
"""Responses of a dozen tokens, of which two of three are right: a run learns in each tick, in half of the time."""
LONG_LEDGERS = "{ max_terms = 9 }"
"""As the task is by itself: for a run that is to be struck within a tick."""
SMALL = {
    "run.num_ticks": 6,
    "schedule.prompts_per_step": 4,
    "generator.group_size": 4,
    "task.options": SHORT_LEDGERS,
    "evaluation.every": 3,
    "evaluation.num_prompts": 4,
    "observability.console": '"plain"',
}


def arguments(run_dir: Path, settings: dict[str, Any]) -> list[str]:
    small = {key: value for key, value in SMALL.items() if key != "task.options" or "task.name" not in settings}
    return as_flags({**small, "run.dir": json.dumps(str(run_dir)), **settings})


def as_flags(settings: Mapping[str, Any]) -> list[str]:
    return [part for key, value in settings.items() for part in (f"--{key}", str(value))]


class CommandLine:
    """Starts ``llamarl`` as a user would, in a process of its own (``run``: forked from one that has imported torch)."""

    def train(
        self, run_dir: Path, settings: dict[str, Any] | None = None, *flags: str, recipe: Path = RECIPE, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        return self.run(["train", str(recipe), *flags, *arguments(run_dir, settings or {})], **options)

    def run(self, words: Sequence[str], *, status: int = 0, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run to the end, which has to be with this status."""
        done = run_llamarl(words, **options)
        assert done.returncode == status, done.stdout + done.stderr
        return done

    def start(self, run_dir: Path, settings: dict[str, Any] | None = None, *flags: str) -> Started:
        """A run under way; what it says on either stream is its ``out``."""
        return Started(["train", str(RECIPE), *flags, *arguments(run_dir, settings or {})], together=True)


OF_EXAMPLES = {
    "run.num_ticks": 4,
    "run.runtime": "inline",
    "schedule.prompts_per_step": 3,
    "generator.group_size": 4,
    "checkpoint.every": 2,
    "observability.console": "none",
    "observability.tensorboard": "false",
    "observability.trace": "false",
}


def train_example(*words: str, status: int = 0, **changes: Any) -> subprocess.CompletedProcess[str]:
    """Train where the examples lie; the changes are keys."""
    return CommandLine().run(["train", *words, *as_flags(changes)], status=status, cwd=REPOSITORY, limit_s=280)


def whole_as_resumed(recipe: str, settings: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Rows of four ticks in ``whole``, which are those of a run in ``cut`` that ended after two, in processes, and went on."""
    train_example(recipe, **settings, **{"run.dir": folder / "whole"})
    train_example(recipe, **{**settings, "run.num_ticks": 2, "run.runtime": "local"}, **{"run.dir": folder / "cut"})
    train_example("--resume", str(folder / "cut"), **{"run.num_ticks": 4, "run.runtime": "inline"})
    assert_same_run(folder / "whole", folder / "cut")
    whole = untimed(folder / "whole")
    assert len(whole) == 4
    return whole


@pytest.fixture(scope="session")
def llamarl() -> CommandLine:
    return CommandLine()


def rows(run_dir: Path) -> list[dict[str, Any]]:
    """A run's metrics; every key of every run that a test looks at stands in docs/metrics.md."""
    path = run_dir / "metrics.jsonl"
    found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    names = {name for row in found for name in row if not name.startswith(("reward/parts/", "eval/parts/"))}
    names = {re.sub(r"^time/replica_\d+_s$", REPLICA_KEY.format("N"), name) for name in names}
    assert names <= {key.name for key in KEYS}, f"not in the table of metrics: {names - {key.name for key in KEYS}}"
    return found


def wait_for_rows(run: Started, run_dir: Path, number: int) -> None:
    """Until there are so many, or the run has ended."""
    file = run_dir / "metrics.jsonl"
    wait_until(
        lambda: run.poll() is not None or (file.is_file() and file.read_text().count("\n") >= number),
        limit_s=240,
        what=f"{number} rows",
    )


def kill_after_rows(run: Started, run_dir: Path, number: int) -> None:
    """All at once, as where a machine loses its power."""
    try:
        wait_for_rows(run, run_dir, number)
    finally:
        run.send_signal(signal.SIGKILL)
        run.wait(60)
