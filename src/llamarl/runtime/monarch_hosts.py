"""Ranks on other hosts, by Monarch. Nothing else in this package imports it.

Monarch starts the processes, carries the same bytes that a socket carries on one machine, and tells of deaths: after about ten
seconds, and of a silent host after ten minutes. Its sockets ask nobody for a key: whoever reaches them can run code here. So
it takes part only where executors are given hosts, and only for these.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import monarch.actor
import monarch.config
from monarch._rust_bindings.monarch_hyperactor.host_mesh import BootstrapCommand
from monarch.actor import HostMesh, MeshFailure, Point, ProcMesh

from llamarl.runtime.determinism import environment
from llamarl.runtime.monarch_worker import OUTPUT_PREFIX, DiagnosticsActor, Hello, RankActor
from llamarl.runtime.output import OutputReader
from llamarl.runtime.worker import WorkerPlan

__all__ = ["MonarchLauncher", "MonarchLink"]

_LIMITS = {
    "actor_spawn_max_idle": "10m",
    "get_actor_state_max_idle": "10m",
    "get_proc_state_max_idle": "10m",
    "host_spawn_ready_timeout": "10m",
    "mesh_proc_spawn_max_idle": "10m",
    "supervision_watchdog_timeout": "10m",
    "message_delivery_timeout": "1h",
    "mesh_orphan_timeout": "1h",
}
"""Limits after which Monarch takes a silent process for dead, drops a message to it, or ends actors whose controller is not heard of.
By default they are 30 s to 2 minutes, which processes on an overloaded machine exceed, and those of a job that was stopped (Ctrl-Z,
a paused container, a laptop that slept), for its clock goes on."""

_launchers: set[MonarchLauncher] = set()
_numbers = itertools.count()


class MonarchLink:
    """Implements :class:`llamarl.runtime.ranks.Link` by calls of actors."""

    host = ""  # Monarch says where in its own report of a death

    def __init__(self, actor: Any, diagnostics: Any) -> None:
        self.pid = 0
        self.on_part: Callable[[bytes], None] = lambda made: None  # actors tell of none
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._actor, self._diagnostics = actor, diagnostics

    async def hello(self) -> Hello:
        """Return when the process stands."""
        hello: Hello = await self._actor.hello.call_one()
        self.pid = hello[0]
        return hello

    def here_s(self, there_s: float) -> float:
        return there_s

    async def command(self, blob: bytes) -> bytes:
        return bytes(await self._actor.command.call_one(blob))

    async def tell(self, blob: bytes) -> bytes:
        return bytes(await self._diagnostics.tell.call_one(blob))

    async def where(self) -> str:
        return str(await self._diagnostics.where.call_one().as_asyncio())

    async def stopped(self) -> bool:
        """Nobody here can tell."""
        return False

    def kill(self, *, at_once: bool = False) -> None:
        """Nothing here can: its mesh is stopped."""


class MonarchLauncher:
    """Implements :class:`llamarl.runtime.ranks.Launcher` on hosts that Monarch has attached.

    Args:
        hosts: Executor -> the hosts that get its processes, evenly.
    """

    def __init__(self, hosts: Mapping[str, HostMesh]) -> None:
        self._hosts = hosts
        self._number = next(_numbers)
        self._meshes: list[ProcMesh] = []
        self._links: dict[str, list[MonarchLink]] = {}
        self._folder = Path(tempfile.mkdtemp(prefix="llamarl-output-"))
        self._loop: asyncio.AbstractEventLoop | None = None
        _launchers.add(self)
        monarch.actor.unhandled_fault_hook = _on_fault
        monarch.config.configure(**_LIMITS)

    async def start(
        self, plans: Sequence[WorkerPlan], labels: Sequence[str], output: OutputReader
    ) -> tuple[list[MonarchLink], str]:
        self._loop = asyncio.get_running_loop()
        name, host = plans[0].spec.name, self._hosts[plans[0].spec.name]
        hosts = len(host.region.slice())
        assert len(plans) % hosts == 0, f"{name!r}: {len(plans)} ranks cannot be spread evenly over {hosts} hosts"
        prefixes = [self._open_pipes(label, output) for label in labels]
        mesh = host.spawn_procs(
            per_host={"ranks": len(plans) // hosts},
            name=re.sub(r"\W", "_", name),
            bootstrap_command=_bootstrap_commands(plans[0].spec.threads, prefixes),
        )
        self._meshes.append(mesh)
        actors = mesh.spawn(self.mesh_name(name), RankActor).flatten("rank")
        diagnostics = mesh.spawn("diagnostics", DiagnosticsActor).flatten("rank")
        links = [MonarchLink(actors.slice(rank=r), diagnostics.slice(rank=r)) for r in range(len(plans))]
        self._links[name] = links
        (_, address, port), *_ = await asyncio.gather(*(link.hello() for link in links))
        for prefix in prefixes:  # every process has opened its own: nothing is left if this one is killed
            for stream in ("stdout", "stderr"):
                Path(f"{prefix}.{stream}").unlink()
        return links, f"tcp://{address}:{port}"

    async def stop(self) -> None:
        await asyncio.gather(*(mesh.stop() for mesh in self._meshes), return_exceptions=True)

    def close(self) -> None:
        _launchers.discard(self)
        shutil.rmtree(self._folder, ignore_errors=True)

    def mesh_name(self, executor: str) -> str:
        """A name that no other launcher of this process uses, so that Monarch's late reports find the right one."""
        word = re.sub(r"[^a-z0-9]", "", executor.lower())
        return f"{word}j{os.getpid()}r{self._number}n{list(self._hosts).index(executor)}"

    def on_fault(self, mesh_name: str, text: str) -> None:
        """Monarch tells, on a thread of its own, of a failure: a process died."""
        name = next((name for name in self._links if mesh_name.startswith(self.mesh_name(name) + "-")), None)
        if name is None or self._loop is None:
            return
        crashed = re.search(r"crashed_ranks=\[(\d+)", text)  # in the text only
        ended = self._links[name][int(crashed[1]) if crashed else 0].ended
        with contextlib.suppress(RuntimeError):  # the loop has closed: the job has ended
            self._loop.call_soon_threadsafe(_set, ended, f"Monarch reports: {text.strip()}")

    def _open_pipes(self, label: str, output: OutputReader) -> str:
        """Named pipes for one process; returns their common path prefix."""
        prefix = str(self._folder / label.replace("/", "_").replace(" ", "_"))
        for stream in ("stdout", "stderr"):
            os.mkfifo(f"{prefix}.{stream}", 0o600)
            output.read_from(os.open(f"{prefix}.{stream}", os.O_RDONLY | os.O_NONBLOCK), label, stream)
        return prefix


def _bootstrap_commands(threads: int, prefixes: Sequence[str]) -> Any:
    """The command line and environment of each rank; what torch reads at import must be there from the start."""
    shared = {
        **environment(threads),
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(path or os.getcwd() for path in sys.path)),
    }

    def command(point: Point) -> BootstrapCommand:
        own = {OUTPUT_PREFIX: prefixes[point.rank]}
        return BootstrapCommand(sys.executable, None, ["-m", "llamarl.runtime.monarch_worker"], shared | own)

    return command


def _set(ended: asyncio.Future[str], cause: str) -> None:
    if not ended.done():
        ended.set_result(cause)


def _on_fault(failure: MeshFailure) -> None:
    """Takes the place of a hook that would print the cause a second time and end this process without a close."""
    for launcher in list(_launchers):
        launcher.on_fault(failure.mesh_name, str(failure))
