"""``llamarl cluster up`` on machines that ssh reaches, by Ray's own launcher; then a job, then ``down``."""

import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from namespace_hosts import why_not
from ray_hosts import why_no_ray
from ssh_hosts import PROGRAMS, SshHosts, ssh_hosts

from llamarl.cli import cluster
from llamarl.cli.cluster import description_of_cluster
from llamarl.cli.main import main

_WHY_NOT = why_not(*PROGRAMS, "rsync") or why_no_ray()

SHORT = (
    *("--run.num_ticks", "2", "--checkpoint.every", "2", "--evaluation.every", "2", "--evaluation.num_prompts", "4"),
    *("--schedule.prompts_per_step", "4", "--generator.sampling.max_new_tokens", "8"),
)


def llamarl(hosts: SshHosts, folder: Path, *words: str, limit_s: float = 300.0) -> subprocess.CompletedProcess[str]:
    command = hosts.as_user([sys.executable, "-m", "llamarl.cli.main", *words])
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=limit_s)


def raylets(hosts: SshHosts) -> list[int]:
    return [sum("raylet/raylet" in words for words in host.commands().values()) for host in hosts.hosts]


def test_the_description_is_one_that_ray_takes() -> None:
    import ray
    from jsonschema import Draft7Validator

    schema = json.loads((Path(ray.__file__).parent / "autoscaler" / "ray-schema.json").read_text())
    made = description_of_cluster(["a", "10.0.0.2", "c"], user="me", key="/k", bin_dir="/venv/bin")
    assert [error.message for error in Draft7Validator(schema).iter_errors(made)] == []
    assert made["provider"] == {"type": "local", "head_ip": "a", "worker_ips": ["10.0.0.2", "c"]}
    head, worker = made["head_start_ray_commands"][-1], made["worker_start_ray_commands"][-1]
    assert all("RAY_AUTH_MODE=token /venv/bin/ray start" in command for command in (head, worker))
    health = {"initial_delay_ms": 1000, "period_ms": 800, "timeout_ms": 2000, "failure_threshold": 3}
    assert {f"RAY_health_check_{name}={value}" for name, value in health.items()} <= set(head.split())


@pytest.mark.parametrize(
    ("head", "known", "flags"),
    [
        ("a", "127.0.1.1 STREAM a\n127.0.1.1 DGRAM", "--node-name=a"),
        ("a", "127.0.1.1 STREAM a\n10.0.0.2 STREAM\n10.0.0.3 STREAM", "--node-name=a --node-ip-address=10.0.0.2"),
        ("10.0.0.2", "127.0.1.1 STREAM a", "--node-ip-address=10.0.0.2"),
    ],
)
def test_a_head_is_known_by_an_address_that_others_reach_whatever_its_machine_calls_it(
    head: str, known: str, flags: str, tmp_path: Path
) -> None:
    for name, said in (("getent", shlex.quote(known)), ("ray", '"$@"')):
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\nprintf '%s\\n' {said}\n")
        program.chmod(0o755)
    made = description_of_cluster([head, "b"], user="me", bin_dir=str(tmp_path))
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", "-c", made["head_start_ray_commands"][-1]]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert [word for word in done.stdout.split() if word.startswith("--node")] == flags.split()
    assert f"--address={head}:6379" in made["worker_start_ray_commands"][-1].split(), "as b knows it"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["up"], "which machines?"),
        (["up", "a,a"], "a is named twice"),
        (["up", "a,-oProxyCommand=x"], "is no name or address"),
        (["up", "a.invalid,b.invalid"], "a.invalid is not known here"),
        (["down", "--file", "nowhere.yaml"], "no file nowhere.yaml"),
    ],
)
def test_a_mistake_is_told_before_anything_is_started(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["cluster", *words]) == 2
    assert told in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_description_that_was_changed_is_kept_and_one_of_another_kind_is_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cluster, "_TOKEN", tmp_path / "token")
    monkeypatch.setattr(subprocess, "run", lambda words, **_: subprocess.CompletedProcess(words, 0))
    (tmp_path / "token").touch()
    assert main(["cluster", "up", "localhost"]) == main(["cluster", "up", "localhost"]) == 0
    changed = "# mine\n" + Path("cluster.yaml").read_text()
    Path("cluster.yaml").write_text(changed.replace('"max_workers": 0', '"max_workers": 1'))
    assert main(["cluster", "up", "localhost"]) == 2
    assert Path("cluster.yaml").read_text().startswith("# mine")
    Path("cluster.yaml").write_text("provider: {type: aws}  # of a cloud\n")
    assert main(["cluster", "down"]) == 2
    told = capsys.readouterr().err
    assert "cluster.yaml is there already and describes other machines, or was changed" in told
    assert "cluster.yaml describes no machines that ssh reaches, as llamarl cluster up does: KeyError('auth')" in told


def test_the_token_is_nobody_elses_from_its_first_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token, umasks = tmp_path / "token", []

    def run(words: list[str], umask: int = 0o022, **_: object) -> subprocess.CompletedProcess[bytes]:
        if words[1] == "get-auth-token":
            umasks.append(umask)
            token.touch()
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cluster, "_TOKEN", token)
    monkeypatch.setattr(subprocess, "run", run)
    assert main(["cluster", "up", "localhost"]) == 0
    assert umasks == [0o077]


def test_without_ray_it_says_what_to_install(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert main(["cluster", "up", "a,b"]) == 2
    assert "pip install 'llamarl[cluster]'" in capsys.readouterr().err


@pytest.mark.cluster
@pytest.mark.timeout(600)
@pytest.mark.skipif(bool(_WHY_NOT), reason=f"ssh on namespaces: {_WHY_NOT}")
def test_a_cluster_comes_up_over_ssh_runs_a_job_and_ends() -> None:
    with tempfile.TemporaryDirectory(prefix="llamarl-ssh-", dir="/var/tmp") as made:
        folder = Path(made)
        folder.chmod(0o755)
        with ssh_hosts(folder, 2) as hosts:
            head, worker = (host.address for host in hosts.hosts)
            up = llamarl(hosts, folder, "cluster", "up", f"{head},{worker}", "--key", str(folder / "login"))
            assert up.returncode == 0, up.stdout + up.stderr
            assert (hosts.home / ".ray" / "auth_token").stat().st_mode & 0o77 == 0
            until = time.monotonic() + 90
            while raylets(hosts) != [1, 1]:
                assert time.monotonic() < until, (raylets(hosts), up.stdout[-2000:])
                time.sleep(0.5)
            command = f"RAY_AUTH_MODE=token {Path(sys.executable).parent}/llamarl train RECIPE --cluster auto"
            assert f"then: ssh {head} {command}" in up.stdout
            more = [*SHORT, "--run.dir", "/tmp/run", "--on", "trainer=1"]
            job = ["ssh", "-i", str(folder / "login"), head, command.replace("RECIPE", "tiny"), *more]
            done = subprocess.run(hosts.as_user(job), capture_output=True, text=True, timeout=240)
            assert done.returncode == 0, done.stdout + done.stderr
            assert f"trainer on {worker}" in done.stdout
            down = llamarl(hosts, folder, "cluster", "down")
            assert down.returncode == 0, down.stdout + down.stderr
            until = time.monotonic() + 30
            while raylets(hosts) != [0, 0]:
                assert time.monotonic() < until, (raylets(hosts), down.stdout + down.stderr)
                time.sleep(0.5)
