"""Processes of a run die, are brought up again, and the run ends with the bits of one that nobody disturbed."""

import errno
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import LONG_LEDGERS, CommandLine, rows, wait_for_rows, wait_until
from forked_command import Started
from same_run import assert_same_run
from tools.chaos.processes import ranks

from llamarl.checkpoint.snapshot import MANIFEST
from llamarl.checkpoint.storage import CheckpointStore

SETTINGS = {
    "task.options": LONG_LEDGERS,
    "run.num_ticks": 8,
    "generator.max_segments": 2,
    "generator.oversubscription": 1.5,
    "checkpoint.every": 2,
    "evaluation.every": 4,
}
INLINE = {"run.runtime": '"inline"'}
"""For runs that nobody disturbs: in one process, to the same bits."""


def checkpoints(run_dir: Path) -> dict[str, bytes]:
    """Every state in them; manifests say when they were made."""
    files = (path for path in (run_dir / "checkpoints").rglob("*") if path.is_file() and path.name != MANIFEST)
    return {str(path.relative_to(run_dir)): path.read_bytes() for path in files}


def kill(run: Started, *executors: str, number: int = signal.SIGKILL) -> None:
    up: dict[str, int] = {}
    wait_until(
        lambda: bool(up.update(ranks(run.pid)) or all(name in up for name in executors)),
        limit_s=30,
        what="its processes",
    )
    for name in executors:
        os.kill(up[name], number)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    CommandLine().train(folder, SETTINGS | INLINE)
    return folder


def test_generator_reward_and_evaluator_die_at_several_moments_and_every_byte_is_that_of_the_undisturbed_run(
    llamarl: CommandLine, tmp_path: Path, undisturbed: Path
) -> None:
    run_dir = tmp_path / "run"
    run = llamarl.start(run_dir, SETTINGS)
    kills = [(1, "reward"), (2, "generator"), (4, "generator reward"), (6, "evaluator")]
    for number, (num_rows, executors) in enumerate(kills):  # nobody twice at one tick, which ends the run
        wait_for_rows(run, run_dir, num_rows)
        time.sleep(0.05 * number)  # another moment of its tick each time
        kill(run, *executors.split())
    said, _ = run.communicate(timeout=240)
    assert run.returncode == 0, said
    assert said.count("brought up again") == 5, said
    assert_same_run(run_dir, undisturbed)
    restarts = [key for row in rows(run_dir) for key in row if key.endswith("_restarts")]
    assert set(restarts) >= {"recovery/generator_restarts", "recovery/reward_restarts"}


CRITIC = {**SETTINGS, "algorithm.advantage": '"gae"', "run.num_ticks": 9, "checkpoint.every": 3}


@pytest.fixture(scope="module")
def undisturbed_with_critic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed_with_critic") / "run"
    CommandLine().train(folder, CRITIC | INLINE)
    return folder


def test_trainer_and_critic_that_die_or_hang_repeat_their_ticks_alone_and_every_byte_is_that_of_the_undisturbed_run(
    llamarl: CommandLine, tmp_path: Path, undisturbed_with_critic: Path
) -> None:
    run_dir = tmp_path / "run"
    run = llamarl.start(run_dir, {**CRITIC, "deadlines.step_s": 15})
    wait_for_rows(run, run_dir, 1)
    kill(run, "trainer")  # there is no checkpoint yet
    wait_for_rows(run, run_dir, 2)
    kill(run, "critic", number=signal.SIGSTOP)
    wait_for_rows(run, run_dir, 5)  # two more than the critic may have been ahead: it has been brought up again
    kill(run, "trainer", "critic")  # neither has done its last tick
    said, _ = run.communicate(timeout=240)
    assert run.returncode == 0, said
    assert said.count("brought up again") == 4, said
    assert re.search(r"'trainer' rank 0 died .*, ticks 0 to \d done again", said), said
    assert re.search(r"'critic' rank 0 died .*: it was stopped \(SIGSTOP\), and gave no answer within 15 s", said), said
    assert re.search(r"'critic' rank 0 died .*SIGKILL.*, ticks? \d (to \d )?done again", said), said
    assert_same_run(run_dir, undisturbed_with_critic)
    assert checkpoints(run_dir) == checkpoints(undisturbed_with_critic)


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_controller_that_dies_goes_on_from_its_journal_and_nothing_is_generated_anew(
    llamarl: CommandLine, tmp_path: Path, undisturbed: Path, number: signal.Signals
) -> None:
    run_dir = tmp_path / "run"
    run = llamarl.start(run_dir, {**SETTINGS, "checkpoint.every": 0})
    wait_for_rows(run, run_dir, 5)
    os.kill(run.pid, number)
    said, _ = run.communicate(timeout=60)
    if number is signal.SIGTERM:
        assert re.search(r"no checkpoint .* was finished, the journal holds the samples and rewards of \d+ ticks", said)
        assert said.rstrip().endswith(f"llamarl train --resume {run_dir}"), said
    written = rollouts(run_dir)
    done = llamarl.run(["train", "--resume", str(run_dir)])
    said = done.stdout + done.stderr
    told = re.search(r"goes on from its journal: generator after (\d+) ticks?, reward after (\d+) ticks?", said)
    assert told is not None, said
    generated, judged = map(int, told.groups())
    assert generated >= judged >= 5
    assert rollouts(run_dir)[:judged] == written[:judged]  # the very files: nobody wrote them again
    assert_same_run(run_dir, undisturbed)
    assert not (run_dir / "journal").exists()


def rollouts(run_dir: Path) -> list[tuple[str, int, int]]:
    """Name, inode and time of writing of each tick's file."""
    files = sorted((run_dir / "rollouts").iterdir())
    return [(path.name, path.stat().st_ino, path.stat().st_mtime_ns) for path in files]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """64 MB: six times what a checkpoint takes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(file: Path, *, leaving: int) -> None:
    """Take what is free on the disk, but for so many bytes, while the run takes and frees space too."""
    with open(file, "ab", buffering=0) as taken:
        for _ in range(1000):
            free = shutil.disk_usage(file.parent).free
            if free <= leaving:
                return
            try:
                os.posix_fallocate(taken.fileno(), taken.seek(0, os.SEEK_END), free - leaving)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
    raise AssertionError(f"the disk of {file} could not be filled up to {leaving} bytes")


def test_a_disk_without_room_for_a_checkpoint_and_then_for_a_line_costs_neither_the_run_nor_a_bit(
    llamarl: CommandLine, small_disk: Path, undisturbed: Path
) -> None:
    run_dir, filler = small_disk / "run", small_disk / "filler"
    fill(filler, leaving=6 << 20)
    run = llamarl.start(run_dir, {**SETTINGS, "checkpoint.max_failed": 5})
    wait_until(
        lambda: run.poll() is not None or "could not be written" in run.out, limit_s=120, what="a failed checkpoint"
    )
    wait_until(
        lambda: (
            fill(filler, leaving=0)  # again and again: what a failed checkpoint has taken becomes free
            or run.poll() is not None
            or "The run waits until it can" in run.out
        ),
        limit_s=60,
        what="a full disk",
    )
    filler.unlink()
    said, _ = run.communicate(timeout=240)
    assert run.returncode == 0, said
    assert re.search(
        r"checkpoint of tick 1 could not be written: .*No space left on device.*There is none before it", said
    ), said
    assert "the disk has only 6." in said, said
    assert_same_run(run_dir, undisturbed)
    assert CheckpointStore(run_dir / "checkpoints").load().tick == 7
    assert (
        checkpoints(run_dir)["checkpoints/tick_000007/trainer/state/rank_0.safetensors"]
        == (checkpoints(undisturbed)["checkpoints/tick_000007/trainer/state/rank_0.safetensors"])
    )
