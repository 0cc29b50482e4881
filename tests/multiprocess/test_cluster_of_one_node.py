"""A job on a Ray cluster of one node, which is this machine: the bits of one machine, and who may use it (more: ``make test-cluster``)."""

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
from forked_command import run_llamarl
from same_run import assert_same_run

pytest.importorskip("ray", reason="needs Ray (pip install 'llamarl[cluster]')")

SMALL = (
    *("--run.num_ticks", "3", "--checkpoint.every", "2", "--evaluation.every", "0", "--hosts.run_folder", "own"),
    *("--schedule.prompts_per_step", "4", "--generator.sampling.max_new_tokens", "16"),
)


@dataclass
class Cluster:
    address: str
    environment: dict[str, str]

    def train(self, run_dir: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """``llamarl train tiny`` by a user of the cluster, whose environment may differ."""
        given = {key: value for key, value in {**self.environment, **environment}.items() if value}
        with mock.patch.dict(os.environ, given, clear=True):
            return run_llamarl(["train", "tiny", *SMALL, "--run.dir", str(run_dir), *words])


def answers(port: int) -> bool:
    with socket.socket() as asking:
        return asking.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    home = tmp_path_factory.mktemp("ray")
    with socket.create_server(("127.0.0.1", 0)) as tried:
        port = tried.getsockname()[1]
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("RAY_")},
        **{"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "HOME": str(home)},
    }
    ray = [sys.executable, "-m", "ray.scripts.scripts"]
    start = [*ray, "start", "--block", "--head", f"--port={port}", "--include-dashboard=false", "--num-cpus=2"]
    start += [
        "--disable-usage-stats",
        "--object-store-memory=200000000",
        "--node-name=alone",
        f"--temp-dir=/tmp/r{port}",
    ]
    process = subprocess.Popen(start, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        address, until = f"127.0.0.1:{port}", time.monotonic() + 90.0
        while not answers(port):
            assert process.poll() is None and time.monotonic() < until, "no cluster"
            time.sleep(0.2)
        status = [*ray, "status", "--address", address]
        while subprocess.run(status, env=environment, capture_output=True).returncode:
            assert process.poll() is None and time.monotonic() < until, "no cluster"
            time.sleep(0.5)
        yield Cluster(address, environment)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60.0)


def test_a_job_on_a_cluster_of_one_node_has_the_bits_of_one_machine_and_leaves_nothing(
    cluster: Cluster, tmp_path: Path
) -> None:
    alone = cluster.train(tmp_path / "alone")
    assert alone.returncode == 0, alone.stderr
    done = cluster.train(tmp_path / "run", "--cluster", cluster.address, "--on", "trainer=here")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == alone.stderr, "no line of Ray's own"
    assert "generator on alone" in done.stdout and 'hosts.run_folder = "own"' in done.stdout
    assert_same_run(tmp_path / "alone", tmp_path / "run")
    kept = Path(cluster.environment["HOME"]) / ".cache" / "llamarl" / "node" / "runs"
    assert list(kept.iterdir()) == []


@pytest.mark.parametrize(("token", "said"), [("", "this user has no token"), ("f" * 64, "not that cluster's")])
def test_who_has_no_token_or_another_clusters_is_told_so_in_a_line(
    cluster: Cluster, tmp_path: Path, token: str, said: str
) -> None:
    done = cluster.train(tmp_path / "run", "--cluster", cluster.address, RAY_AUTH_TOKEN=token)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and said in line and not (tmp_path / "run").exists()


def test_a_dry_run_says_who_may_use_the_cluster_and_how_soon_a_death_is_known(cluster: Cluster, tmp_path: Path) -> None:
    done = cluster.train(tmp_path / "run", "--cluster", cluster.address, "--dry-run")
    assert done.returncode == 0, done.stderr
    for line in (
        "alone (2 cores, 0 GPUs); the controller is on alone",
        "token: asked for",
        "TLS: off",
        "15 s, one that is",
    ):
        assert line in done.stdout, done.stdout
    refused = cluster.train(tmp_path / "run", "--cluster", cluster.address, "--on", "trainer=other", "--dry-run")
    assert refused.returncode == 2 and "'other' is none of the nodes alone" in refused.stderr
    client = cluster.train(tmp_path / "run", "--cluster", "ray://10.0.0.1:10001")
    assert client.returncode == 2 and "ray job submit" in client.stderr
