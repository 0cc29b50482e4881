"""Who does not hold the cluster's token is told so at once, in a line, and disturbs nobody (``make test-cluster``)."""

import os
import re
import secrets
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosted_jobs import ON_A_CLUSTER, SMALL, begin, run_dir_of, train, wait_for_none_left
from ray_hosts import RayHosts, ray_hosts
from same_run import assert_same_run

import llamarl

pytestmark = ON_A_CLUSTER
TINY = ("tiny", *SMALL, "--run.num_ticks", "40")


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayHosts]:
    with ray_hosts(2, "10.82.0") as made:
        yield made


def refused(cluster: RayHosts, token: str) -> tuple[float, str]:
    """Seconds, and what a job with another token, or none, is told."""
    command = cluster.llamarl("train", "tiny", "--cluster", "auto", "--run.dir", "/tmp/none", host=1, token=token)
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=60.0)
    took_s = time.monotonic() - began
    assert done.returncode == 2, done.stdout + done.stderr
    return took_s, done.stderr


@pytest.mark.parametrize(("token", "said"), [("", "this user has no token"), ("f" * 64, "not that cluster's")])
def test_a_token_that_is_missing_or_another_clusters_is_told_in_a_line_within_five_seconds(
    cluster: RayHosts, token: str, said: str
) -> None:
    took_s, errors = refused(cluster, token)
    print(f"{said}: {took_s:.1f} s")
    (line,) = errors.splitlines()
    assert said in line and "RAY_AUTH_TOKEN_PATH" in line, errors
    assert took_s < 5.0
    assert not run_dir_of(cluster, "none").exists()


def test_a_node_without_this_llamarl_takes_no_part_and_disturbs_no_job_on_the_others() -> None:
    hide = f"mkdir /tmp/none && touch /tmp/none/__init__.py && mount --bind /tmp/none {Path(llamarl.__file__).parent}"
    with ray_hosts(2, "10.83.0", before={1: hide}) as made:

        def dry_run(*words: str) -> tuple[int, str]:
            command = made.llamarl(
                "train", "tiny", "--cluster", "auto", "--dry-run", "--run.dir", "/tmp/no_run", *words
            )
            done = subprocess.run(command, capture_output=True, text=True, timeout=120.0)
            return done.returncode, done.stdout + done.stderr

        status, said = dry_run()
        assert status == 0 and "left out: n1, which does not say what it is" in said, said
        assert "No module named" in said, said
        status, said = dry_run("--on", "trainer=n1")
        assert status == 2 and "hosts.on.trainer: n1 can take no part" in said


def listening(cluster: RayHosts) -> list[tuple[str, int]]:
    """All TCP ports that are open to other nodes."""
    found = set()
    for host in cluster.hosts:
        words = ["ip", "netns", "exec", host.name, "ss", "-Htln"]
        for line in subprocess.check_output(words, text=True).splitlines():
            address, _, port = line.split()[3].rpartition(":")
            if not address.startswith(("127.", "[::1]")):
                found.add((host.address, int(port)))
    return sorted(found)


def test_strangers_get_in_nowhere_while_a_job_runs_and_change_no_bit(cluster: RayHosts) -> None:
    with tempfile.TemporaryDirectory() as folder:
        train(None, Path(folder) / "one", *TINY)
        controller = begin(cluster, "visited", *TINY, "--on", "generator=n0", "--on", "trainer=n1")
        ports = listening(cluster)
        assert len(ports) > 4
        for number in range(10_000):
            address, port = ports[number % len(ports)]
            with socket.socket() as stranger:
                stranger.settimeout(2.0)
                try:
                    stranger.connect((address, port))
                    if number % 7 == 0:
                        stranger.sendall(os.urandom(1 + secrets.randbelow(300)))
                except OSError:
                    continue
            if controller.poll() is not None:
                break
        visited = number + 1
        for token in ("", "f" * 64):
            refused(cluster, token)
        _, errors = controller.communicate(timeout=250.0)
        assert controller.returncode == 0, errors
        print(f"{visited} connections to {len(ports)} ports")
        assert not re.search("Traceback", errors), errors
        assert_same_run(Path(folder) / "one", run_dir_of(cluster, "visited"))
    wait_for_none_left(cluster.hosts)
