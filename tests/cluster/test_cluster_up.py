"""``llamarl cluster up`` on machines that ssh reaches, by Ray's own launcher; then a job, then ``down``."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from namespace_hosts import why_not
from ray_hosts import why_no_ray
from ssh_hosts import PROGRAMS, SshHosts, ssh_hosts

_WHY_NOT = why_not(*PROGRAMS, "rsync") or why_no_ray()
pytestmark = [pytest.mark.cluster, pytest.mark.skipif(bool(_WHY_NOT), reason=f"ssh on namespaces: {_WHY_NOT}")]


def llamarl(hosts: SshHosts, folder: Path, *words: str, limit_s: float = 300.0) -> subprocess.CompletedProcess[str]:
    command = hosts.as_user([sys.executable, "-m", "llamarl.cli.main", *words])
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=limit_s)


def raylets(hosts: SshHosts) -> list[int]:
    return [sum("raylet/raylet" in words for words in host.commands().values()) for host in hosts.hosts]


def test_a_cluster_comes_up_over_ssh_runs_a_job_and_ends() -> None:
    with tempfile.TemporaryDirectory(prefix="llamarl-ssh-", dir="/var/tmp") as made:
        folder = Path(made)
        folder.chmod(0o755)
        with ssh_hosts(folder, 2) as hosts:
            head, worker = (host.address for host in hosts.hosts)
            up = llamarl(hosts, folder, "cluster", "up", f"{head},{worker}", "--key", str(folder / "login"))
            assert up.returncode == 0, up.stdout + up.stderr
            assert f"ssh {head} llamarl train RECIPE --cluster auto" in up.stdout
            assert (hosts.home / ".ray" / "auth_token").stat().st_mode & 0o77 == 0
            until = time.monotonic() + 90
            while raylets(hosts) != [1, 1]:
                assert time.monotonic() < until, (raylets(hosts), up.stdout[-2000:])
                time.sleep(0.5)
            down = llamarl(hosts, folder, "cluster", "down")
            assert down.returncode == 0, down.stdout + down.stderr
            until = time.monotonic() + 30
            while raylets(hosts) != [0, 0]:
                assert time.monotonic() < until, (raylets(hosts), down.stdout + down.stderr)
                time.sleep(0.5)
