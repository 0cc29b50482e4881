"""Short jobs of the tiny model on a cluster, by the command line, and what must not be left of them."""

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from namespace_hosts import NamespaceHost, why_not
from ray_hosts import RayHosts, why_no_ray

__all__ = [
    "ON_A_CLUSTER",
    "SMALL",
    "begin",
    "controllers",
    "left_on",
    "run_dir_of",
    "train",
    "wait_for_none_left",
    "words_of",
]

_WHY_NOT = why_no_ray() or why_not()
ON_A_CLUSTER = [
    pytest.mark.cluster,
    pytest.mark.skipif(bool(_WHY_NOT), reason=f"a cluster on namespaces: {_WHY_NOT}"),
    pytest.mark.timeout(900),
]
"""What tests of such jobs are marked with."""

SMALL = (
    *("--run.num_ticks", "4", "--checkpoint.every", "2", "--evaluation.every", "2", "--evaluation.num_prompts", "8"),
    *("--schedule.prompts_per_step", "4", "--generator.sampling.max_new_tokens", "24"),
)
LIMIT_S = 280.0
GONE_S = 10.0


def run_dir_of(cluster: RayHosts, name: str) -> Path:
    """A run's folder on the first node, as seen from outside; the other nodes do not see it."""
    return cluster.hosts[0].root / "tmp" / name


def words_of(cluster: RayHosts | None, run_dir: Path | str, *words: str) -> list[str]:
    """A command: on this machine, or on a cluster from its first node, where ``run_dir`` is a name below ``/tmp``."""
    if cluster is None:
        return [sys.executable, "-m", "llamarl.cli.main", "train", *words, "--run.dir", str(run_dir)]
    return cluster.llamarl("train", *words, "--run.dir", f"/tmp/{run_dir}", "--cluster", "auto")


def train(cluster: RayHosts | None, run_dir: Path | str, *words: str) -> subprocess.CompletedProcess[str]:
    """To its end, which must be a good one."""
    done = subprocess.run(words_of(cluster, run_dir, *words), capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def begin(cluster: RayHosts, name: str, *words: str) -> subprocess.Popen[str]:
    """A long job that has done its first tick."""
    controller = subprocess.Popen(
        words_of(cluster, name, *words), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    metrics, until = run_dir_of(cluster, name) / "metrics.jsonl", time.monotonic() + 120.0
    while not (metrics.is_file() and metrics.read_text()):
        assert controller.poll() is None and time.monotonic() < until, controller.communicate(timeout=5)[1]
        time.sleep(0.1)
    return controller


def controllers(host: NamespaceHost) -> list[int]:
    """Of jobs that were begun on a host."""
    return [
        pid for pid, words in host.commands().items() if "llamarl.cli.main train" in words and "nsenter" not in words
    ]


def wait_for_none_left(hosts: Sequence[NamespaceHost], *, limit_s: float = GONE_S) -> float:
    """No process of a job on any host, and no file of one; the seconds that it took."""
    began = time.monotonic()
    while left := {host.name: found for host in hosts if (found := left_on(host))}:
        assert time.monotonic() - began < limit_s, left
        time.sleep(0.1)
    return time.monotonic() - began


def left_on(host: NamespaceHost) -> list[str]:
    """Processes and files of jobs that are on a host now, but for the run's folder and what is kept for the next job."""
    marks = ("llamarl", "HostAgent", "rm -rf")
    running = [words for words in host.commands().values() if any(mark in words for mark in marks)]
    kept = [path for path in host.files() if "/llamarl/node/runs/" in path]
    return running + kept + [path for path in host.files() if path.startswith("/dev/shm/") and "plasma" not in path]
