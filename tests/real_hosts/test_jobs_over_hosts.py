"""The same recipe and the same bits on machines that share nothing: hosts are namespaces (``make test-hosts``)."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from namespace_hosts import KEY, NamespaceHost, namespace_hosts, why_not

_WHY_NOT = why_not()
pytestmark = [pytest.mark.hosts, pytest.mark.skipif(bool(_WHY_NOT), reason=f"hosts of namespaces: {_WHY_NOT}")]

SMALL = [
    *("--run.num_ticks", "4", "--checkpoint.every", "2", "--evaluation.every", "2", "--evaluation.num_prompts", "8"),
    *(
        "--schedule.prompts_per_step",
        "4",
        "--generator.sampling.max_new_tokens",
        "24",
        "--deadlines.host_silence_s",
        "4",
    ),
]
TIMES = re.compile(r"^(time|idle|tokens_per_s)/|^step_s$|_s$")


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Here and on no host: /tmp of a host is its own."""
    with tempfile.TemporaryDirectory(prefix="llamarl-hosts-", dir="/tmp") as made:
        yield Path(made)


@pytest.fixture(scope="module")
def shared() -> Iterator[Path]:
    """Here and on every host, at the same path."""
    with tempfile.TemporaryDirectory(prefix="llamarl-hosts-", dir="/var/tmp") as made:
        yield Path(made)


@pytest.fixture(scope="module")
def key(folder: Path) -> Path:
    path = folder / "key"
    path.write_text(KEY.hex())
    path.chmod(0o600)
    return path


@pytest.fixture
def hosts() -> Iterator[list[NamespaceHost]]:
    with namespace_hosts(3) as made:
        yield made


def command(run_dir: Path, key: Path, hosts: list[NamespaceHost], *words: str) -> list[str]:
    over = ["--hosts", ",".join(host.at for host in hosts), "--hosts.key", str(key)] if hosts else []
    return [sys.executable, "-m", "llamarl.cli.main", "train", *words, "--run.dir", str(run_dir), *over]


def train(*command_of: Any) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command(*command_of), capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def rows(run_dir: Path) -> list[dict[str, Any]]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if not TIMES.search(key)} for line in lines]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def assert_same_run(one: Path, many: Path) -> None:
    assert contents(one / "model") == contents(many / "model")
    assert contents(one / "rollouts") == contents(many / "rollouts")
    assert rows(one) == rows(many) and rows(one)


def start(folder: Path, key: Path, hosts: list[NamespaceHost]) -> tuple[subprocess.Popen[str], Path]:
    """A long job that has done its first tick."""
    run_dir = folder / f"long{time.monotonic_ns()}"
    words = ["tiny", *SMALL, "--run.num_ticks", "100000", "--checkpoint.every", "100000", "--on", "trainer=2"]
    controller = subprocess.Popen(
        command(run_dir, key, hosts, *words), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    until = time.monotonic() + 120.0
    while not ((run_dir / "metrics.jsonl").is_file() and (run_dir / "metrics.jsonl").read_text()):
        assert controller.poll() is None and time.monotonic() < until, controller.communicate(timeout=5)[1]
        time.sleep(0.1)
    return controller, run_dir


def wait_for_none_left(hosts: list[NamespaceHost], limit_s: float = 10.0) -> None:
    until = time.monotonic() + limit_s
    while left := {host.name: host.ranks() for host in hosts if host.ranks()}:
        assert time.monotonic() < until, left
        time.sleep(0.1)


def test_three_hosts_that_share_no_folder_give_the_bits_of_one_machine(
    folder: Path, key: Path, hosts: list[NamespaceHost]
) -> None:
    train(folder / "one", key, [], "tiny", *SMALL)
    train(folder / "many", key, hosts, "tiny", *SMALL, "--on", "generator=0", "--on", "trainer=2")
    assert_same_run(folder / "one", folder / "many")
    wait_for_none_left(hosts)


def test_parallel_ranks_over_hosts_that_share_a_folder_give_the_bits_of_one_machine(
    shared: Path, key: Path, hosts: list[NamespaceHost]
) -> None:
    sizes = ["--generator.dp", "2", "--trainer.fsdp", "2", "--run.num_ticks", "2"]
    train(shared / "one-parallel", key, [], "tiny", *SMALL, *sizes)
    train(shared / "parallel", key, hosts, "tiny", *SMALL, *sizes, "--on", "generator=0,1", "--on", "trainer=1,2")
    assert_same_run(shared / "one-parallel", shared / "parallel")


def test_a_killed_rank_is_told_within_a_second_with_its_host(
    shared: Path, key: Path, hosts: list[NamespaceHost]
) -> None:
    controller, _ = start(shared, key, hosts)
    rank = max(hosts[2].ranks())
    began = time.monotonic()
    os.kill(rank, signal.SIGKILL)
    _, errors = controller.communicate(timeout=30)
    took_s = time.monotonic() - began
    assert controller.returncode == 1
    told = (
        rf"executor 'trainer', rank 0 on host {hosts[2].at} \(pid \d+\), tick \d+: its process was killed by signal 9"
    )
    assert re.search(told, errors), errors
    assert took_s < 8.0, took_s  # the whole command: the cause, closing of the others, the summary
    wait_for_none_left(hosts)


def test_a_host_that_is_cut_off_is_told_and_nothing_is_left_on_either_side(
    shared: Path, key: Path, hosts: list[NamespaceHost]
) -> None:
    controller, _ = start(shared, key, hosts)
    began = time.monotonic()
    hosts[2].cut_off()
    _, errors = controller.communicate(timeout=40)
    took_s = time.monotonic() - began
    assert controller.returncode == 1
    assert f"host {hosts[2].at} does not answer: no sign of it for 4 s" in errors, errors
    assert took_s < 14.0, took_s
    wait_for_none_left(hosts)


def test_a_killed_controller_leaves_nothing_on_any_host(shared: Path, key: Path, hosts: list[NamespaceHost]) -> None:
    controller, _ = start(shared, key, hosts)
    assert all(host.ranks() for host in hosts)
    controller.kill()
    controller.communicate()
    wait_for_none_left(hosts)
