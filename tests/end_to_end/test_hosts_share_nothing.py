"""Hosts that share no folder with their controller: the run, its checkpoints and its resume are those of one machine, byte for byte."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from conftest import CommandLine, rows
from loopback_hosts import KEY, LoopbackHost, loopback_hosts

from llamarl.checkpoint.storage import CheckpointStore
from llamarl.observability.keys import is_timing_key

REWARD = """
def exact(prompt, response, answer):
    return float(response.strip().endswith(answer)) - 0.001 * len(response)
"""
NUM_TICKS = 4


def _may_unshare() -> bool:
    tried = subprocess.run(
        ["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, check=False
    )
    return tried.returncode == 0


@contextmanager
def hosts_apart(folder: Path, hidden: Sequence[Path]) -> Iterator[list[LoopbackHost]]:
    """Two workers, each with a cache of its own; where this user may, each with a mount namespace in which ``hidden`` is empty."""
    before: tuple[str, ...] = ()
    if hidden and _may_unshare():
        mounts = " && ".join(f"mount -t tmpfs none {path}" for path in hidden)
        before = ("unshare", "--mount", "bash", "-c", f'{mounts} && exec "$@"', "bash")
    with loopback_hosts("ab", before=before, environment={"XDG_CACHE_HOME": str(folder / "cache-{name}")}) as hosts:
        yield hosts


def settings(hosts: Sequence[LoopbackHost], key: Path, on: dict[str, str], run_folder: str) -> dict[str, Any]:
    names = [f"127.0.0.1:{host.worker.port}" for host in hosts]
    return {
        "hosts.workers": json.dumps(names),
        "hosts.key": json.dumps(str(key)),
        "hosts.run_folder": json.dumps(run_folder),
        **{f"hosts.on.{executor}": json.dumps([host]) for executor, host in on.items()},
    }


ONE_WAY = {"generator": "0", "reward": "1", "trainer": "1", "evaluator": "0"}
THE_OTHER = {"generator": "1", "reward": "0", "trainer": "0", "evaluator": "1"}


def common(mine: Path) -> dict[str, Any]:
    return {
        "run.num_ticks": NUM_TICKS,
        "checkpoint.every": 2,
        "checkpoint.keep": 0,
        "generator.max_segments": 2,
        "generator.oversubscription": 1.5,
        "optimizer.schedule": '"constant"',
        "task.reward": json.dumps(f"{mine / 'reward.py'}:exact"),
    }


def files_of(run_dir: Path) -> dict[str, bytes]:
    """Everything that ranks wrote, without the controller's own files and what names paths or times."""
    kept = ("checkpoints", "model", "rollouts", "trained")
    return {
        str(path.relative_to(run_dir)): path.read_bytes()
        for name in kept
        for path in sorted((run_dir / name).rglob("*"))
        if path.is_file() and path.name != "manifest.json"
    }


def untimed(run_dir: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if not is_timing_key(key)} for row in rows(run_dir)]


def assert_same_run(one: Path, other: Path) -> None:
    ours, theirs = files_of(one), files_of(other)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name] != theirs[name]] == []
    assert untimed(one) == untimed(other)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("apart")
    for name in ("mine", "runs"):
        (folder / name).mkdir()
    (folder / "mine" / "reward.py").write_text(REWARD)
    (folder / "key").write_text(KEY.hex())
    (folder / "key").chmod(0o600)
    return folder


@pytest.fixture(scope="module")
def one_machine(llamarl: CommandLine, folder: Path) -> Path:
    run_dir = folder / "one"
    done = llamarl.train(run_dir, common(folder / "mine"))
    assert done.returncode == 0, done.stdout + done.stderr
    return run_dir


@pytest.fixture(scope="module")
def apart(folder: Path) -> Iterator[list[LoopbackHost]]:
    with hosts_apart(folder, [folder / "mine", folder / "runs"]) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def run_apart(llamarl: CommandLine, folder: Path, one_machine: Path, apart: list[LoopbackHost]) -> Path:
    run_dir = folder / "runs" / "apart"
    where = settings(apart, folder / "key", ONE_WAY, "auto" if _may_unshare() else "own")
    done = llamarl.train(run_dir, {**common(folder / "mine"), **where})
    assert done.returncode == 0, done.stdout + done.stderr
    if _may_unshare():
        assert "it has no folder" in done.stdout + done.stderr
    return run_dir


def test_a_run_over_hosts_that_share_nothing_leaves_what_one_machine_leaves(one_machine: Path, run_apart: Path) -> None:
    assert_same_run(run_apart, one_machine)
    assert [path.name for path in CheckpointStore(run_apart / "checkpoints").list()] == ["tick_000001", "tick_000003"]
    for path in CheckpointStore(run_apart / "checkpoints").list():
        CheckpointStore(run_apart / "checkpoints").verify(path)
    assert not (run_apart / ".incoming").exists()


def test_nothing_of_the_run_stays_on_the_hosts(folder: Path, run_apart: Path) -> None:
    for name in "ab":
        assert list((folder / f"cache-{name}" / "llamarl" / "worker" / "runs").iterdir()) == []


@pytest.mark.long
def test_a_resume_on_the_other_host_gives_the_same_bits(
    llamarl: CommandLine, folder: Path, one_machine: Path, run_apart: Path, apart: list[LoopbackHost]
) -> None:
    run_dir = folder / "runs" / "resumed"
    shutil.copytree(run_apart, run_dir)
    for name in ("checkpoints/tick_000003", "model"):
        shutil.rmtree(run_dir / name)
    where = settings(apart, folder / "key", THE_OTHER, "auto" if _may_unshare() else "own")
    done = llamarl.train(run_dir, {**common(folder / "mine"), **where}, "--resume", str(run_dir))
    assert done.returncode == 0, done.stdout + done.stderr
    assert_same_run(run_dir, one_machine)


@pytest.mark.parametrize("executor", ["generator", "trainer"])
def test_a_state_that_was_altered_or_removed_is_refused_by_name(
    llamarl: CommandLine, folder: Path, run_apart: Path, apart: list[LoopbackHost], executor: str
) -> None:
    run_dir = folder / "runs" / f"damaged-{executor}"
    shutil.copytree(run_apart, run_dir)
    shutil.rmtree(run_dir / "model")
    found = sorted(p for p in (run_dir / "checkpoints" / "tick_000003" / executor).rglob("*") if p.is_file())[0]
    if executor == "trainer":
        found.unlink()
    else:
        found.write_bytes(b"x" + found.read_bytes()[1:])
    where = settings(apart, folder / "key", THE_OTHER, "auto" if _may_unshare() else "own")
    done = llamarl.train(run_dir, {**common(folder / "mine"), **where, "run.num_ticks": 6}, "--resume", str(run_dir))
    assert done.returncode == 1
    assert found.name in done.stderr and ("is missing" in done.stderr or "was altered" in done.stderr)


@pytest.mark.long
def test_what_hosts_decided_on_the_latest_weights_is_repeated_on_one_machine(
    llamarl: CommandLine, folder: Path, apart: list[LoopbackHost]
) -> None:
    run_dir, again = folder / "runs" / "latest", folder / "latest-again"
    where = settings(apart, folder / "key", ONE_WAY, "own")
    few = {**common(folder / "mine"), "run.num_ticks": 2, "checkpoint.every": 0}
    done = llamarl.train(run_dir, {**few, **where, "schedule.weights": '"latest"'})
    assert done.returncode == 0, done.stdout + done.stderr
    done = llamarl.run(["train", "--replay", str(run_dir), "--run.dir", str(again), "--hosts", "here"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert (run_dir / "events.jsonl").read_text().count("\n") > 2
    assert_same_run(again, run_dir)


@pytest.mark.long
def test_hosts_that_see_the_folder_use_it(llamarl: CommandLine, folder: Path, one_machine: Path) -> None:
    run_dir = folder / "shared"
    with hosts_apart(folder, []) as hosts:
        where = settings(hosts, folder / "key", ONE_WAY, "auto")
        done = llamarl.train(run_dir, {**common(folder / "mine"), **where})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "shared with" in done.stdout + done.stderr
    assert_same_run(run_dir, one_machine)
    assert not [path.name for path in run_dir.iterdir() if path.name.startswith(".shared")]


@pytest.mark.long
def test_parallel_ranks_on_hosts_that_share_nothing_write_one_checkpoint_between_them(
    llamarl: CommandLine, folder: Path, apart: list[LoopbackHost]
) -> None:
    sizes = {**common(folder / "mine"), "run.num_ticks": 2, "trainer.fsdp": 2, "generator.dp": 2, "evaluation.every": 0}
    where = settings(apart, folder / "key", {}, "auto" if _may_unshare() else "own")
    both = {f"hosts.on.{executor}": '["0", "1"]' for executor in ("generator", "trainer")}
    for name, more in (("two-ranks", {}), ("two-ranks-apart", {**where, **both})):
        done = llamarl.train(folder / "runs" / name, {**sizes, **more})
        assert done.returncode == 0, done.stdout + done.stderr
    assert_same_run(folder / "runs" / "two-ranks-apart", folder / "runs" / "two-ranks")
    state = folder / "runs" / "two-ranks-apart" / "checkpoints" / "tick_000001" / "trainer" / "state"
    assert sorted(path.name for path in state.iterdir()) == ["rank_0.safetensors", "rank_1.safetensors", "values.json"]
