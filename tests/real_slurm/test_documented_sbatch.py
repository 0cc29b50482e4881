"""The batch script of docs/hosts.md, word for word, on a Slurm cluster that is made for it (``make test-slurm``)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from markdown_blocks import blocks_of
from namespace_hosts import why_not
from same_run import assert_same_run
from slurm_cluster import PROGRAMS, SlurmCluster, slurm_cluster

_WHY_NOT = why_not(*PROGRAMS)
pytestmark = [pytest.mark.slurm, pytest.mark.skipif(bool(_WHY_NOT), reason=f"Slurm on namespaces: {_WHY_NOT}")]

REPOSITORY = Path(__file__).parents[2]
SHORT = {"num_ticks": "4", "num_prompts": "8", "prompts_per_step": "4", "max_new_tokens": "24", "every": "2"}
LONG = {**SHORT, "num_ticks": "100000", "every": "100000"}
RUN_S = 150.0
GONE_S = 30.0


def documented() -> str:
    """The page's script."""
    found = [block.text for block in blocks_of(REPOSITORY / "docs" / "hosts.md") if "#SBATCH" in block.text]
    assert len(found) == 1
    return found[0]


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """On every host at the same path, as a cluster's shared folder is."""
    with tempfile.TemporaryDirectory(prefix="llamarl-slurm-", dir="/var/tmp") as made:
        folder = Path(made)
        folder.chmod(0o755)
        (folder / "home").mkdir()
        (folder / "home" / "venv").symlink_to(sys.prefix)
        yield folder


@pytest.fixture(scope="module")
def environment(folder: Path) -> Mapping[str, str]:
    """Of a user's shell, whose environment has been made in the home folder."""
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "LANG", "OMP_NUM_THREADS")}
    kept["PATH"] = os.pathsep.join(path for path in kept["PATH"].split(os.pathsep) if not path.startswith(sys.prefix))
    return {**kept, "HOME": str(folder / "home")}


@pytest.fixture(scope="module")
def cluster(folder: Path) -> Iterator[SlurmCluster]:
    (folder / "slurm").mkdir()
    with slurm_cluster(folder / "slurm", 3) as made:
        yield made


def project(folder: Path, name: str, recipe: Mapping[str, str], more: str = "") -> Path:
    """A folder with the page's script and a recipe of the name that it reads: the tiny one with other numbers."""
    made = folder / name
    (made / "recipes").mkdir(parents=True)
    text = (REPOSITORY / "recipes" / "tiny.toml").read_text()
    for key, value in recipe.items():
        text, count = re.subn(rf"\b{key} = \d+", f"{key} = {value}", text)
        assert count, key
    (made / "recipes" / "tiny.toml").write_text(text)
    script = made / "job.sh"
    script.write_text(documented().rstrip("\n") + more + "\n")
    return script


def output(script: Path, job: int) -> str:
    path = script.parent / f"slurm-{job}.out"
    return path.read_text() if path.exists() else ""


def wait_for_nothing_left(cluster: SlurmCluster, limit_s: float = GONE_S) -> float:
    """No process of ours on any host, and no file in /tmp or /dev/shm of theirs; the seconds that it took."""
    began = time.monotonic()
    while left := {
        host.name: found
        for host in cluster.hosts
        if (found := [words for words in host.commands().values() if "llamarl" in words and "slurm.conf" not in words])
        or (found := [path for path in host.files() if not path.startswith("/tmp/slurm/")])
    }:
        assert time.monotonic() - began < limit_s, left
        time.sleep(0.1)
    return time.monotonic() - began


def test_the_script_runs_as_it_stands_and_gives_the_bits_of_one_machine(
    cluster: SlurmCluster, folder: Path, environment: Mapping[str, str]
) -> None:
    script = project(folder, "short", SHORT)
    job = cluster.submit(script, environment)
    state = cluster.wait(job, RUN_S)
    said = output(script, job)
    assert (state["JobState"], state["ExitCode"]) == ("COMPLETED", "0:0"), said
    names = [host.name for host in cluster.hosts]
    assert re.search(rf"generator on {names[0]}\b.*trainer on {names[2]}\b", said), said
    wait_for_nothing_left(cluster)
    one = [sys.executable, "-m", "llamarl.cli.main", "train", "recipes/tiny.toml", "--run.dir", "runs/one"]
    done = subprocess.run(one, cwd=script.parent, capture_output=True, text=True, timeout=RUN_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_same_run(script.parent / "runs" / "one", script.parent / "runs" / str(job))


def test_scancel_in_the_middle_of_a_run_leaves_nothing(
    cluster: SlurmCluster, folder: Path, environment: Mapping[str, str]
) -> None:
    script = project(folder, "long", LONG)
    job = cluster.submit(script, environment)
    metrics = script.parent / "runs" / str(job) / "metrics.jsonl"
    until = time.monotonic() + RUN_S
    while not (metrics.is_file() and metrics.read_text()):
        assert time.monotonic() < until and cluster.state(job)["JobState"] in ("PENDING", "RUNNING"), output(
            script, job
        )
        time.sleep(0.1)
    assert all(host.ranks() for host in (cluster.hosts[0], cluster.hosts[2]))
    cluster.cancel(job)
    print(f"after scancel all was gone in {wait_for_nothing_left(cluster):.1f} s")
    assert cluster.wait(job, GONE_S)["JobState"] == "CANCELLED"


def test_a_program_that_the_nodes_lack_is_told_within_seconds(
    cluster: SlurmCluster, folder: Path, environment: Mapping[str, str]
) -> None:
    script = project(folder, "missing", SHORT, more=' --hosts.command "/nowhere/llamarl worker"')
    job = cluster.submit(script, environment)
    began = time.monotonic()
    state = cluster.wait(job, 30.0)
    said = output(script, job)
    assert state["JobState"] == "FAILED" and time.monotonic() - began < 30.0
    assert "/nowhere/llamarl" in said and "hosts.command" in said, said
    wait_for_nothing_left(cluster)
