"""Hosts of a trial: workers on the loopback that the trial starts, or those of the user, whose links alone can be cut.

--hosts 3        OwnHosts: ranks are killed and stopped there as here; a cut kills a worker and all below it, at once
--hosts a,b,c    GivenHosts: a cut ends what connects the controller with a worker (:mod:`tools.chaos.forwarder`); its ranks are
                 nobody's to kill from here
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from llamarl.errors import ConfigError
from llamarl.runtime.config import parse_workers
from llamarl.runtime.hosts.worker_program import READY
from llamarl.transports.run_key import new_key
from tools.chaos.forwarder import Forwarder
from tools.chaos.plan import Blow, Target
from tools.chaos.processes import Reach, descendants, strike_processes, targets

__all__ = ["GivenHosts", "Host", "OwnHosts", "hosts_for", "why_not_these_hosts"]

_END_S = 20.0


class Host(Protocol):
    """What a trial knows of one."""

    @property
    def name(self) -> str:
        """By which the run names it."""
        ...

    def cut(self) -> None: ...


class GivenHosts:
    """Implements :class:`tools.chaos.processes.Reach`. The last host that is left is not cut off.

    Args:
        above: Processes of this machine below which ranks of the run are too.
        more: Further words for ``llamarl train``.
    """

    def __init__(self, hosts: Sequence[Host], *, above: Sequence[int] = (), more: Sequence[str] = ()) -> None:
        self._left, self._above, self._more = list(hosts), above, list(more)

    def there(self, controller: int) -> list[Target]:
        found = targets(controller, self._above)
        if not found or len(self._left) < 2:
            return found
        return found + [Target(name=f"host {host.name}", is_host=True) for host in self._left]

    def strike(self, blow: Blow, victims: Sequence[Target]) -> str:
        if blow.kind != "cut":
            return strike_processes(blow, victims)
        for target in victims:
            host = next(one for one in self._left if f"host {one.name}" == target.name)
            self._left.remove(host)
            host.cut()
        return "cut off"

    def words(self, *, resumed: bool) -> list[str]:
        return ["--hosts", ",".join(host.name for host in self._left), *self._more]


class _OwnHost:
    """One worker program on the loopback, in a space of its own: no memory is shared with it."""

    def __init__(self, space: str, key: bytes, folder: Path) -> None:
        self.name = ""
        self._cache = folder / f"worker-{space}"
        words = ["worker", "--key", "-", "--bind", "127.0.0.1", "--space", space]
        with open(folder / f"worker-{space}.log", "wb") as said:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "llamarl.cli.main", *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                env={**os.environ, "XDG_CACHE_HOME": str(self._cache)},
                process_group=0,
            )
        assert self.process.stdin is not None
        self.process.stdin.write(key.hex().encode() + b"\n")
        self.process.stdin.flush()

    def stand(self) -> None:
        """Wait until it listens, or has ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline().decode()
        if not line.startswith(READY):
            raise ConfigError(f"a worker on this machine did not come up: {line.strip() or 'it has ended'}")
        self.name = f"127.0.0.1:{json.loads(line[len(READY) :])['port']}"

    def cut(self) -> None:
        below = descendants(self.process.pid)
        for pid in (self.process.pid, *below):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def end(self) -> None:
        """With all that it has started."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.cut()
        self.process.stdout.close()
        shutil.rmtree(self._cache, ignore_errors=True)


class OwnHosts(GivenHosts):
    """Workers that this process has started: what runs below them is struck too."""

    def __init__(self, hosts: Sequence[_OwnHost], key: Path) -> None:
        super().__init__(hosts, above=[host.process.pid for host in hosts], more=["--hosts.key", str(key)])


def why_not_these_hosts(hosts: str, *, kills: int, hangs: int, cuts: int) -> str:
    """Why a trial cannot strike so on ``--hosts HOSTS``; empty: it can."""
    if not hosts:
        return "--cuts: there is nothing to cut off on one machine; name hosts by --hosts N or --hosts a,b,c" * bool(
            cuts
        )
    given = not hosts.isdecimal()
    try:
        count = len(parse_workers(hosts.split(","))) if given else int(hosts)
    except ValueError as error:
        return f"--hosts: {error}"
    if count < 1 + bool(cuts):
        return f"--hosts {hosts}: expected {1 + bool(cuts)} or more of them"
    if cuts >= count:
        return f"--cuts {cuts} with {count} hosts: one must be left to take the place of the others; add {cuts + 1 - count}, or cut fewer"
    if given and hangs:
        return (
            "--hangs: ranks on hosts of your own cannot be stopped from here; let --hosts N start some on this machine"
        )
    return ""


@contextmanager
def hosts_for(hosts: str, folder: Path) -> Iterator[Reach]:
    """The hosts of ``--hosts``, ready for runs; what was started for them has ended afterwards.

    Args:
        folder: For keys, caches and output of workers that are started.

    Raises:
        ConfigError: One of them does not answer.
    """
    if hosts.isdecimal():
        with _own(int(hosts), folder) as own:
            yield own
        return
    forwarders: list[Forwarder] = []
    try:
        for worker in parse_workers(hosts.split(",")):
            forwarders.append(Forwarder(worker))
        yield GivenHosts(forwarders)
    finally:
        for forwarder in forwarders:
            forwarder.cut()


@contextmanager
def _own(count: int, folder: Path) -> Iterator[OwnHosts]:
    key, file = new_key(), folder / "worker.key"
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as out:
        out.write(key.hex() + "\n")
    hosts: list[_OwnHost] = []
    try:
        for number in range(count):
            hosts.append(_OwnHost(f"chaos{number}", key, folder))
        for host in hosts:
            host.stand()
        yield OwnHosts(hosts, file)
    finally:
        for host in hosts:
            host.end()
        file.unlink(missing_ok=True)
