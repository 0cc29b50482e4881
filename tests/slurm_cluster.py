"""A Slurm cluster on one machine, from Debian's packages: munged and slurmctld here, a slurmd on each of some namespace hosts.

Everything that it writes lies in one folder, or in the hosts' own /tmp; it is ended, and nothing of it is left. Linux, as root.
"""

import os
import re
import secrets
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from namespace_hosts import NamespaceHost, bare_hosts

__all__ = ["PROGRAMS", "SlurmCluster", "slurm_cluster"]

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol")
_NET = "10.88.0"
_UP_S = 60.0
_FIRST = 'trap \'kill %1; wait; exit\' TERM; "$0" "$@" & wait'
"""As a host's first process does: it reaps orphans, which slurmd would leave as zombies."""
_PORTS = {"SlurmctldPort": 26817, "SlurmdPort": 26818}


@dataclass
class SlurmCluster:
    """It takes jobs."""

    hosts: list[NamespaceHost]
    environment: Mapping[str, str]
    """For Slurm's commands."""

    def submit(self, script: Path, environment: Mapping[str, str], *arguments: str) -> int:
        """``sbatch`` in the script's folder; the job's number.

        Args:
            environment: Of the submitting shell, which Slurm hands on to the job.
            arguments: Of the script.
        """
        done = self._command(
            ["sbatch", "--parsable", script.name, *arguments], cwd=script.parent, environment=environment
        )
        return int(done.split(";")[0])

    def cancel(self, job: int) -> None:
        self._command(["scancel", str(job)])

    def requeue(self, job: int) -> None:
        """As happens when a node is lost."""
        self._command(["scontrol", "requeue", str(job)])

    def state(self, job: int) -> dict[str, str]:
        """What ``scontrol show job`` says of it, such as ``JobState`` and ``ExitCode``."""
        shown = self._command(["scontrol", "show", "job", str(job)])
        return dict(word.split("=", 1) for word in shown.split() if "=" in word)

    def wait(self, job: int, limit_s: float) -> dict[str, str]:
        """Until it has ended, whatever its end; its last state."""
        until = time.monotonic() + limit_s
        while (state := self.state(job))["JobState"] in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"):
            assert time.monotonic() < until, state
            time.sleep(0.2)
        return state

    def _command(
        self, words: Sequence[str], cwd: Path | None = None, environment: Mapping[str, str] | None = None
    ) -> str:
        done = subprocess.run(
            words,
            cwd=cwd,
            env={**(environment or os.environ), **self.environment},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
        return done.stdout


@contextmanager
def slurm_cluster(folder: Path, count: int) -> Iterator[SlurmCluster]:
    """``count`` nodes, all idle.

    Args:
        folder: Empty, and the same folder on every host: not below /tmp, which is each host's own.
    """
    folder.chmod(0o755)  # munged wants its socket within everybody's reach
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o400)
    munge = {name: f"{folder}/munge.{name}" for name in ("socket", "pid", "log", "seed")}
    conf, names = folder / "slurm.conf", folder / "hosts"
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    (folder / "state").mkdir()
    with ExitStack() as stack:
        munged = ["munged", "-F", "--force", f"--key-file={key}", f"--socket={munge['socket']}"]
        munged += [f"--pid-file={munge['pid']}", f"--log-file={munge['log']}", f"--seed-file={munge['seed']}"]
        stack.enter_context(_daemon(munged, folder / "munged.out"))
        hosts = stack.enter_context(
            bare_hosts(
                count,
                lambda name, _: ["bash", "-c", _FIRST, "slurmd", "-D", "-f", str(conf), "-N", name],
                _NET,
                before=f"while ! grep -qs PartitionName {conf}; do sleep 0.1; done; mkdir -p /tmp/slurm/spool; "
                f"mount --bind {names} /etc/hosts; mount -t tmpfs tmpfs /sys/fs/cgroup; mkdir /sys/fs/cgroup/freezer; "
                "mount -t cgroup -o freezer cgroup /sys/fs/cgroup/freezer",
            )
        )
        names.write_text("127.0.0.1 localhost\n" + "".join(f"{host.address} {host.name}\n" for host in hosts))
        conf.write_text(_configuration(folder, munge["socket"], hosts))
        environment = {"SLURM_CONF": str(conf)}
        stack.enter_context(_daemon(["slurmctld", "-D", "-f", str(conf)], folder / "slurmctld.out"))
        cluster = SlurmCluster(hosts, environment)
        until = time.monotonic() + _UP_S
        while _idle(environment) < count:
            assert time.monotonic() < until, (folder / "slurmctld.log").read_text()[-4000:]
            time.sleep(0.2)
        yield cluster


def _configuration(folder: Path, munge_socket: str, hosts: Sequence[NamespaceHost]) -> str:
    settings = {
        "ClusterName": "llamarl",
        "SlurmctldHost": f"{socket.gethostname()}({_NET}.254)",
        **_PORTS,
        "SlurmUser": "root",
        "SlurmdUser": "root",
        "AuthType": "auth/munge",
        "CredType": "cred/munge",
        "AuthInfo": f"socket={munge_socket}",
        "StateSaveLocation": folder / "state",
        "SlurmctldPidFile": folder / "slurmctld.pid",
        "SlurmctldLogFile": folder / "slurmctld.log",
        "SlurmdSpoolDir": "/tmp/slurm/spool",
        "SlurmdPidFile": "/tmp/slurm/slurmd.pid",
        "SlurmdLogFile": "/tmp/slurm/slurmd.log",
        "ProctrackType": "proctrack/cgroup",  # daemons of a job end with it, as on clusters that people have
        "TaskPlugin": "task/none",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core",
        "MpiDefault": "none",
        "ReturnToService": 2,
        "KillWait": 5,
    }
    lines = [f"{name}={value}" for name, value in settings.items()]
    lines += [f"NodeName={one.name} NodeAddr={one.address} CPUs={os.cpu_count()} State=UNKNOWN" for one in hosts]
    nodes = ",".join(one.name for one in hosts)
    lines.append(f"PartitionName=all Nodes={nodes} Default=YES MaxTime=INFINITE OverSubscribe=NO State=UP")
    return "\n".join(lines) + "\n"


def _idle(environment: Mapping[str, str]) -> int:
    shown = subprocess.run(
        ["scontrol", "show", "nodes"], env={**os.environ, **environment}, capture_output=True, text=True, timeout=60
    )
    return len(re.findall(r"State=IDLE\s", shown.stdout))


@contextmanager
def _daemon(command: Sequence[str], output: Path) -> Iterator[None]:
    with output.open("wb") as file:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(15.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
