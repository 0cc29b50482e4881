"""Ranks as processes of this machine: plain children with an inherited socket each.

    controller                     socket pair                    guard and rank (runtime/rank_process.py)
    LocalLink.command ─▶ frames ══════════════════════════════▶   executor's thread
    LocalLink.where   ─▶        ══════════════════════════════▶   diagnostics thread
    ended             ◀─ pidfd of the guard, or end of socket     guard: ends as its rank ended, within milliseconds

Nothing listens: there is no path, port or name that another process could connect to. Nothing lies in a folder either: the file
in which the ranks of a process group meet is memory of the controller (a memfd, ``/proc/PID/fd/N``), which only its user may
open. Gloo and NCCL, which do listen, are bound to the loopback.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence

from llamarl.runtime.child_process import Stores, cause_of_death, gone, start_rank
from llamarl.runtime.determinism import environment
from llamarl.runtime.framed_link import FramedLink
from llamarl.runtime.output import OutputReader
from llamarl.runtime.rank_plans import LOOPBACK
from llamarl.runtime.worker import WorkerPlan

__all__ = ["LocalLauncher", "LocalLink"]

_DRAIN_S = 0.2
"""After a death: how long to read what the rank said before it."""


class LocalLink(FramedLink):
    """Implements :class:`llamarl.runtime.ranks.Link` for a child process.

    Args:
        control: The controller's end of the socket pair.
        process: The guard.
    """

    def __init__(self, control: socket.socket, process: subprocess.Popen[bytes]) -> None:
        super().__init__(process.pid)
        self._control = control
        self._process = process

    async def open(self) -> None:
        """Begin to read and to watch."""
        reader, self._writer = await asyncio.open_unix_connection(sock=self._control)
        self._watching = asyncio.create_task(self._watch(asyncio.create_task(self.read(reader))))

    def kill(self, *, at_once: bool = False) -> None:
        if at_once:
            self._process.kill()
        else:
            self._process.terminate()  # to the guard, which kills the rank with all that it started

    def _write(self, data: bytes) -> None:
        self._writer.write(data)

    async def _watch(self, reading: asyncio.Task[None]) -> None:
        """Wait for the process to end, let what it said before be read, tell those who wait for more."""
        await gone(self._process, reading)
        await asyncio.wait({reading}, timeout=_DRAIN_S)
        reading.cancel()
        self._writer.close()
        self._end(cause_of_death(self._process.returncode))


class LocalLauncher:
    """Implements :class:`llamarl.runtime.ranks.Launcher` on this machine."""

    def __init__(self) -> None:
        self._links: list[LocalLink] = []
        self._stores = Stores()

    async def start(
        self, plans: Sequence[WorkerPlan], labels: Sequence[str], output: OutputReader
    ) -> tuple[list[LocalLink], str]:
        rendezvous = self._stores.new(plans[0].spec.name) if len(plans) > 1 else ""
        links = [self._spawn(plan, label, output) for plan, label in zip(plans, labels, strict=True)]
        self._links += links
        for link in links:
            await link.open()
        return links, rendezvous

    async def stop(self) -> None:
        await asyncio.gather(*(link.ended for link in self._links))

    def close(self) -> None:
        self._stores.close()

    def _spawn(self, plan: WorkerPlan, label: str, output: OutputReader) -> LocalLink:
        """Start one process. On the io thread: the kernel counts the thread that starts a child as the child's parent."""
        pipes = {stream: output.pipe(label, stream) for stream in ("stdout", "stderr")}
        try:
            ours, process = start_rank(label, _environment(os.environ, plan.spec.threads), **pipes)
        finally:
            for pipe in pipes.values():
                os.close(pipe)
        return LocalLink(ours, process)


def _environment(inherited: Mapping[str, str], threads: int) -> dict[str, str]:
    """What torch and the group libraries read when they are imported must be there from the start."""
    return {
        **inherited,
        **environment(threads),
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(path or os.getcwd() for path in sys.path)),
        **LOOPBACK,
    }
