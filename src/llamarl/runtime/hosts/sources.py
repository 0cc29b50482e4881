"""Where workers come from: they run already, or this job starts them by ssh or by Slurm's srun and ends them.

What starts a worker hands it a fresh key on its standard input and keeps that open: with its end, however this process ended, the
worker ends. No key stands on a command line or in an environment.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shlex
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llamarl.errors import ConfigError
from llamarl.runtime.config import HostsConfig, Worker, parse_worker, parse_workers
from llamarl.runtime.hosts.keys import key_file
from llamarl.runtime.hosts.worker_program import READY
from llamarl.transports.run_key import new_key, read_key

__all__ = ["Workers", "open_workers", "start_by_ssh", "why_ended"]

_READY_S = 90.0
_SCONTROL_S = 60.0
_END_S = 10.0
_SAID_S = 0.5
_SSH = ("ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=8")
_SRUN = ("srun", "--overlap", "--ntasks-per-node=1", "--cpu-bind=none", "--kill-on-bad-exit=1")


@dataclass
class Starter:
    """A program that starts workers elsewhere and ends them with itself: an ssh, an srun."""

    process: subprocess.Popen[bytes]
    said: deque[str] = field(default_factory=lambda: deque(maxlen=30))
    """What it printed last on stderr, which is printed here too."""
    saying: threading.Thread | None = None

    def why_ended(self) -> str:
        """Once it has."""
        if self.saying is not None:
            self.saying.join(_SAID_S)
        line: Sequence[str] = self.process.args  # type: ignore[assignment]
        return why_ended(line, self.process.wait(), list(self.said))


@dataclass
class Workers:
    """Daemons that a job may use."""

    workers: list[Worker]
    key: bytes = field(repr=False)
    started: list[Starter] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    """Hosts whose workers could not be started -> why."""

    def close(self) -> None:
        """End those that this job has started. Idempotent."""
        _end(self.started)
        self.started = []


def open_workers(config: HostsConfig, environment: Mapping[str, str] = os.environ) -> Workers:
    """The workers that a configuration names; started where it says so.

    Raises:
        ConfigError: There is no key for those that run, or Slurm starts none.
    """
    if config.start == "running":
        path = key_file(config.key)
        if not path.exists():
            raise ConfigError(
                f"hosts.key: there is no {path}; copy it from a host on which `llamarl worker` runs, which has made one: "
                f"scp -p HOST:{path} {path}"
            )
        return Workers(parse_workers(config.workers), read_key(path))
    made = Workers([], new_key())
    if config.start == "ssh":
        start_by_ssh(made, config, config.workers)
        return made
    return _by_srun(_command(config), made.key, environment)


def _command(config: HostsConfig) -> list[str]:
    return [*shlex.split(config.command), "--key", "-", *_flags(config)]


def _end(starters: Sequence[Starter]) -> None:
    processes = [starter.process for starter in starters]
    for process in processes:
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
    until = time.monotonic() + _END_S
    for process in processes:
        try:
            process.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _flags(config: HostsConfig) -> list[str]:
    flags = {
        "--port-range": config.port_range,
        "--tls-cert": config.tls_cert,
        "--tls-key": config.tls_key,
        "--tls-ca": config.tls_ca,
    }
    return [word for flag, value in flags.items() if value for word in (flag, value)]


def start_by_ssh(made: Workers, config: HostsConfig, names: Sequence[str]) -> None:
    """Have ssh start the workers of these hosts, and add them to ``made``; of those that fail, what began there is ended."""
    starters: dict[str, Starter] = {}
    made.failed = {}
    try:
        for name in names:
            starters[name] = _start([*_SSH, parse_worker(name).address, shlex.join(_command(config))], made.key)
            made.started.append(starters[name])
        until = time.monotonic() + _READY_S
        for name, starter in starters.items():
            try:
                (where,) = _ready(starter, 1, until)
            except ConfigError as error:
                made.failed[name] = f"host {name}: {error}"
            else:
                made.workers.append(Worker(name, str(where["address"]), int(where["port"])))
    except BaseException:
        made.close()
        raise
    useless = [starters[name] for name in made.failed]
    made.started = [starter for starter in made.started if starter not in useless]
    _end(useless)


def _by_srun(command: Sequence[str], key: bytes, environment: Mapping[str, str]) -> Workers:
    nodes = environment.get("SLURM_JOB_NODELIST")
    if not nodes:
        raise ConfigError(
            "--hosts slurm: this is no Slurm allocation (SLURM_JOB_NODELIST is not set); run it inside sbatch or salloc, or name the "
            "hosts"
        )
    names = _node_names(nodes)
    made = Workers([], key)
    try:
        made.started.append(_start([*_SRUN, f"--nodes={len(names)}", f"--ntasks={len(names)}", *command], key))
        ready = _ready(made.started[0], len(names), time.monotonic() + _READY_S)
        for where in sorted(ready, key=lambda one: int(one["node"])):
            made.workers.append(Worker(names[int(where["node"])], str(where["address"]), int(where["port"])))
    except BaseException:
        made.close()
        raise
    return made


def _node_names(nodes: str) -> list[str]:
    """What a list such as ``a[1-3]`` names."""
    asked = ["scontrol", "show", "hostnames", nodes]
    try:
        listed = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=_SCONTROL_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        why = getattr(error, "strerror", None) or f"no answer within {_SCONTROL_S:g} s"
        raise ConfigError(f"--hosts slurm: `{shlex.join(asked)}`: {why}") from error
    if listed.returncode or not listed.stdout.split():
        raise ConfigError(f"--hosts slurm: `{shlex.join(asked)}` failed: {listed.stderr.strip()}")
    return listed.stdout.split()


def why_ended(line: Sequence[str], code: int, said: Sequence[str]) -> str:
    """Why there is no worker where ``line`` was to start some, with what to do about it.

    Args:
        said: The last lines that it printed on stderr.
    """
    lines = list(dict.fromkeys(text.strip() for text in said if text.strip()))
    lacking = [text for text in lines if "No such file" in text or "not found" in text]  # several hosts speak at once
    heard = ": " + "; ".join(lacking[:1] or lines[-4:]) if lines else ""
    if line[0] == "ssh" and code == 255:
        host = line[-2]
        return f"ssh cannot log in{heard} (`ssh -o BatchMode=yes {host} true` must succeed without asking for anything)"
    program = line[-1] if line[0] == "ssh" else shlex.join(line)
    if code in (126, 127) or lacking:
        return (
            f"`{program}` cannot be run there{heard} (if the program has another path there, name it by hosts.command)"
        )
    return f"`{program}` ended with code {code} before its worker listened{heard}"


def _start(line: Sequence[str], key: bytes) -> Starter:
    try:
        process = subprocess.Popen(
            line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, process_group=0
        )
    except OSError as error:
        raise ConfigError(f"cannot run {line[0]}: {error.strerror}") from error
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended: its exit code is told
        process.stdin.write(key.hex().encode() + b"\n")
        process.stdin.flush()
    starter = Starter(process)
    starter.saying = threading.Thread(target=_hand_on, args=(process, starter.said), name="llamarl-said", daemon=True)
    starter.saying.start()
    return starter


def _ready(starter: Starter, count: int, until: float) -> list[dict[str, Any]]:
    """What ``count`` workers below ``starter`` say of themselves; what else is printed, a message of the day, is passed over."""
    process = starter.process
    assert process.stdout is not None
    found: list[dict[str, Any]] = []
    buffer = b""
    fd = process.stdout.fileno()
    while len(found) < count:
        if not select.select([fd], [], [], max(0.0, until - time.monotonic()))[0]:
            raise ConfigError(
                f"{count - len(found)} of {count} workers did not say within {_READY_S:g} s that they listen"
            )
        data = os.read(fd, 1 << 16)
        if not data:
            raise ConfigError(starter.why_ended())
        *lines, buffer = (buffer + data).split(b"\n")
        for line in lines:
            _, begins, rest = line.decode(errors="replace").partition(READY)
            if begins:
                found.append(json.loads(rest))
    threading.Thread(target=_drain, args=(fd,), name="llamarl-workers", daemon=True).start()
    return found


def _drain(fd: int) -> None:
    """Nobody reads what a worker prints later; it must not wait for that."""
    with contextlib.suppress(OSError):
        while os.read(fd, 1 << 16):
            continue


def _hand_on(process: subprocess.Popen[bytes], said: deque[str]) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        text = line.decode(errors="replace")
        said.append(text)
        with contextlib.suppress(OSError, ValueError):  # nobody reads here any more: it must not wait for that
            print(text, end="", file=sys.stderr, flush=True)
