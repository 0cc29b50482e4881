"""The batch script of examples/cluster, word for word, on a Slurm cluster that is made for it (``make test-slurm``)."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from namespace_hosts import why_not
from ray_hosts import why_no_ray
from same_run import assert_same_run
from slurm_cluster import PROGRAMS, SlurmCluster, slurm_cluster

_WHY_NOT = why_not(*PROGRAMS) or why_no_ray()
pytestmark = [
    pytest.mark.slurm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(_WHY_NOT), reason=f"Slurm on namespaces: {_WHY_NOT}"),
]

SCRIPT = Path(__file__).parents[2] / "examples" / "cluster" / "job.sbatch"
SHORT = (
    *("tiny", "--run.num_ticks", "4", "--checkpoint.every", "2", "--evaluation.every", "2"),
    *("--evaluation.num_prompts", "8", "--schedule.prompts_per_step", "4", "--generator.sampling.max_new_tokens", "24"),
)
LONG = (*SHORT, "--run.num_ticks", "100000", "--checkpoint.every", "100000")
RUN_S = 280.0
GONE_S = 15.0


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """On every host at the same path, as a cluster's shared folder is."""
    with tempfile.TemporaryDirectory(prefix="llamarl-slurm-", dir="/var/tmp") as made:
        folder = Path(made)
        folder.chmod(0o755)
        (folder / "home").mkdir()
        (folder / "home" / "venv").symlink_to(sys.prefix)
        (folder / "job.sbatch").write_bytes(SCRIPT.read_bytes())
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
    with slurm_cluster(folder / "slurm", 4) as made:
        yield made


def output(folder: Path, job: int) -> str:
    path = folder / f"slurm-{job}.out"
    return path.read_text() if path.exists() else ""


def wait_for_nothing_left(cluster: SlurmCluster, limit_s: float = GONE_S) -> float:
    """No process on any host but Slurm's own; the seconds that it took."""
    began = time.monotonic()
    while left := {host.name: found for host in cluster.hosts if (found := jobs_processes(host.commands()))}:
        assert time.monotonic() - began < limit_s, left
        time.sleep(0.1)
    return time.monotonic() - began


def jobs_processes(commands: Mapping[int, str]) -> list[str]:
    return [words for words in commands.values() if "slurmd" not in words or "slurmstepd" in words]


def test_two_jobs_at_once_give_the_bits_of_one_machine_and_leave_nothing(
    cluster: SlurmCluster, folder: Path, environment: Mapping[str, str]
) -> None:
    jobs = [cluster.submit(folder / "job.sbatch", environment, *SHORT) for _ in range(2)]
    states = [cluster.wait(job, RUN_S) for job in jobs]
    for job, state in zip(jobs, states, strict=True):
        assert (state["JobState"], state["ExitCode"]) == ("COMPLETED", "0:0"), output(folder, job)
    assert states[0]["NodeList"] != states[1]["NodeList"]
    print(f"after two jobs all was gone in {wait_for_nothing_left(cluster):.1f} s")
    one = [sys.executable, "-m", "llamarl.cli.main", "train", *SHORT, "--run.dir", "runs/one"]
    done = subprocess.run(one, cwd=folder, capture_output=True, text=True, timeout=RUN_S)
    assert done.returncode == 0, done.stdout + done.stderr
    for job in jobs:
        assert "tcp" in output(folder, job), "executors lie on both nodes"
        assert_same_run(folder / "runs" / "one", folder / "runs" / str(job))


def test_a_job_that_llamarl_refuses_fails(cluster: SlurmCluster, folder: Path, environment: Mapping[str, str]) -> None:
    job = cluster.submit(folder / "job.sbatch", environment, *SHORT, "--run.num_tick", "4")
    state = cluster.wait(job, RUN_S)
    assert (state["JobState"], state["ExitCode"]) == ("FAILED", "2:0"), output(folder, job)
    assert "num_ticks" in output(folder, job)
    wait_for_nothing_left(cluster)


def test_a_requeued_job_goes_on_with_its_run_and_scancel_leaves_nothing(
    cluster: SlurmCluster, folder: Path, environment: Mapping[str, str]
) -> None:
    job = cluster.submit(folder / "job.sbatch", environment, *LONG)
    wait_for_ticks(cluster, folder, job, 2)
    cluster.requeue(job)
    before = ticks(folder, job)
    wait_for_ticks(cluster, folder, job, before + 2)
    assert "resume" in output(folder, job)
    cluster.cancel(job)
    print(f"after scancel all was gone in {wait_for_nothing_left(cluster):.1f} s")
    assert cluster.wait(job, 2 * GONE_S)["JobState"] == "CANCELLED"


def ticks(folder: Path, job: int) -> int:
    metrics = folder / "runs" / str(job) / "metrics.jsonl"
    return len(metrics.read_text().splitlines()) if metrics.exists() else 0


def wait_for_ticks(cluster: SlurmCluster, folder: Path, job: int, count: int) -> None:
    until = time.monotonic() + RUN_S
    while ticks(folder, job) < count:
        assert time.monotonic() < until, output(folder, job)
        assert cluster.state(job)["JobState"] in ("PENDING", "RUNNING", "COMPLETING"), output(folder, job)
        time.sleep(0.2)
