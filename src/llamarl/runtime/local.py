"""Ranks as processes of this machine: plain children, or forks of one, with an inherited socket each.

    controller                     socket pair                    guard and rank (runtime/rank_process.py)
    LocalLink.command ─▶ frames ══════════════════════════════▶   executor's thread
    LocalLink.where   ─▶        ══════════════════════════════▶   diagnostics thread
    ended             ◀─ pidfd of the guard                       guard: ends as its rank ended, within milliseconds

Nothing listens: there is no path, port or name that another process could connect to. Nothing lies
in a folder either: the file in which the ranks of a process group meet is memory of the controller
(a memfd, ``/proc/PID/fd/N``), which only its user may open. Gloo and NCCL, which do listen, are
bound to the loopback.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Sequence

from llamarl.determinism import rank_environment
from llamarl.executors.base import ExecutorSpec
from llamarl.runtime.children import Child, Stores, cause_of_death, is_stopped, start_rank
from llamarl.runtime.commands import Link
from llamarl.runtime.fork_server import ForkServer, fork_server, shared_modules, shares_imports
from llamarl.runtime.output import OutputReader
from llamarl.runtime.worker import WorkerPlan

__all__ = ["LocalLauncher", "LocalLink"]

_DRAIN_S = 0.2
"""After a death: how long to read what the rank said before it."""


class LocalLink(Link):
    """The :class:`llamarl.runtime.commands.Link` to a child process.

    Args:
        control: The controller's end of the socket pair.
        child: The guard.
    """

    def __init__(self, control: socket.socket, child: Child) -> None:
        super().__init__(child.pid)
        self._control = control
        self._child = child

    async def open(self) -> None:
        """Begin to read and to watch."""
        reader, self._writer = await asyncio.open_unix_connection(sock=self._control)
        self._watching = asyncio.create_task(self._watch(asyncio.create_task(self.read(reader))))

    def kill(self, *, at_once: bool = False) -> None:
        self._child.signal(
            signal.SIGKILL
            if at_once
            else signal.SIGTERM  # the guard, if asked, kills the rank with all that it started
        )

    async def stopped(self) -> bool:
        return is_stopped(self.pid)

    def _write(self, data: bytes) -> None:
        self._writer.write(data)

    async def _watch(self, reading: asyncio.Task[None]) -> None:
        """Wait for the process to end, let what it said before be read, tell those who wait for more."""
        code = await self._child.code()
        cause = cause_of_death(code)
        await asyncio.wait({reading}, timeout=_DRAIN_S)
        reading.cancel()
        self._writer.close()
        self._end(cause)


class LocalLauncher:
    """Implements :class:`llamarl.runtime.ranks.Launcher` on this machine.

    Args:
        specs: All executors that it will start. What several ranks import is imported once, by a
            fork server for each number of threads.
    """

    def __init__(self, specs: Sequence[ExecutorSpec] = ()) -> None:
        self._links: list[LocalLink] = []
        self._stores = Stores()
        self._specs = tuple(specs)
        self._servers: dict[int, ForkServer | None] = {}

    async def start(
        self, plans: Sequence[WorkerPlan], labels: Sequence[str], output: OutputReader
    ) -> tuple[list[LocalLink], str]:
        rendezvous = self._stores.new(plans[0].spec.name) if len(plans) > 1 else ""
        links: list[LocalLink] = []
        try:
            for plan, label in zip(plans, labels, strict=True):
                links.append(await self._start_one(plan, label, output))
        except BaseException:  # nobody else knows of those that have begun
            for link in links:
                link.kill(at_once=True)
            raise
        return links, rendezvous

    async def stop(self) -> None:
        await asyncio.gather(*(link.ended for link in self._links))
        await asyncio.gather(*(server.stop() for server in self._servers.values() if server is not None))

    def close(self) -> None:
        for server in self._servers.values():
            if server is not None:
                server.kill()
        self._stores.close()

    async def _start_one(self, plan: WorkerPlan, label: str, output: OutputReader) -> LocalLink:
        server = self._server(plan.spec.threads) if shares_imports(plan.spec) else None
        pipes = {stream: output.pipe(label, stream) for stream in ("stdout", "stderr")}
        try:
            started = await start_rank(server, label, rank_environment(plan.spec.threads), **pipes)
        finally:
            for pipe in pipes.values():
                os.close(pipe)
        link = LocalLink(*started)
        await link.open()
        self._links.append(link)
        return link

    def _server(self, threads: int) -> ForkServer | None:
        if threads not in self._servers:
            modules = shared_modules(self._specs, threads)
            self._servers[threads] = fork_server(modules, rank_environment(threads))
        return self._servers[threads]
