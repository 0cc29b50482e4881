"""Hosts without rights: ``llamarl worker`` programs on the loopback, each in a space of its own, so that nothing is shared memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from llamarl.runtime.config import Worker
from llamarl.runtime.hosts.connection import WorkerKey
from llamarl.runtime.hosts.worker_program import READY

KEY = bytes(range(32))


@dataclass
class LoopbackHost:
    """One worker program."""

    worker: Worker
    process: subprocess.Popen[str]

    def kill(self) -> None:
        """As when its host loses power, but that its kernel still says so."""
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def loopback_hosts(
    names: str,
    *flags: str,
    key: bytes = KEY,
    before: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator[list[LoopbackHost]]:
    """A worker for each letter of ``names``; none is left afterwards.

    Args:
        before: Words of a command that runs the worker.
        environment: On top of this process's; ``{name}`` in a value is the worker's letter.
    """
    hosts: list[LoopbackHost] = []
    try:
        for name in names:
            process = subprocess.Popen(
                [*before, sys.executable, "-m", "llamarl.cli.main", "worker", "--key", "-", "--bind", "127.0.0.1"]
                + ["--space", name, *flags],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={
                    **os.environ,
                    **{variable: value.format(name=name) for variable, value in (environment or {}).items()},
                },
            )
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(key.hex() + "\n")
            process.stdin.flush()
            hosts.append(LoopbackHost(Worker(name, "127.0.0.1", 0), process))
        for host in hosts:
            assert host.process.stdout is not None
            line = host.process.stdout.readline()
            assert line.startswith(READY), line
            host.worker = Worker(host.worker.name, "127.0.0.1", int(json.loads(line[len(READY) :])["port"]))
        yield hosts
    finally:
        for host in hosts:
            assert host.process.stdin is not None and host.process.stdout is not None
            host.process.stdin.close()
        for host in hosts:
            host.process.wait(60.0)  # it gives a successor 30 s to stop
            host.process.stdout.close()  # type: ignore[union-attr]


def workers(hosts: Sequence[LoopbackHost]) -> list[Worker]:
    """Where they listen."""
    return [host.worker for host in hosts]


def worker_key(key: bytes = KEY, silence_s: float = 30.0) -> WorkerKey:
    """By which they may be used."""
    return WorkerKey(key, silence_s=silence_s)
