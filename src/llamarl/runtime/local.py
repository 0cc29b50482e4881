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
import collections
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence

from llamarl.runtime.commands import HEAD, Kind, frame
from llamarl.runtime.determinism import environment
from llamarl.runtime.output import OutputReader
from llamarl.runtime.rank_plans import LOOPBACK
from llamarl.runtime.worker import WorkerPlan

__all__ = ["LocalLauncher", "LocalLink", "cause_of_death"]

_DRAIN_S = 0.2
"""After a death: how long to read what the rank said before it."""
_POLL_S = 0.002


class LocalLink:
    """Implements :class:`llamarl.runtime.ranks.Link` for a child process.

    Args:
        control: The controller's end of the socket pair.
        process: The guard.
    """

    def __init__(self, control: socket.socket, process: subprocess.Popen[bytes]) -> None:
        self.pid = process.pid
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._control = control
        self._process = process
        self._waiting: dict[Kind, collections.deque[asyncio.Future[bytes]]] = collections.defaultdict(collections.deque)
        self._greeted = False

    async def open(self) -> None:
        """Begin to read and to watch."""
        reader, self._writer = await asyncio.open_unix_connection(sock=self._control)
        self._watching = asyncio.create_task(self._watch(asyncio.create_task(self._read(reader))))

    async def command(self, blob: bytes) -> bytes:
        return await self._ask(Kind.COMMAND, blob)

    async def tell(self, blob: bytes) -> bytes:
        return await self._ask(Kind.TELL, blob)

    async def where(self) -> str:
        if not self._greeted:
            return "start of its process"
        return (await self._ask(Kind.WHERE, b"")).decode()

    def kill(self, *, at_once: bool = False) -> None:
        if at_once:
            self._process.kill()
        else:
            self._process.terminate()  # to the guard, which kills the rank with all that it started

    async def _ask(self, kind: Kind, blob: bytes) -> bytes:
        """Answers of one kind come in the order of the questions."""
        if self.ended.done():
            raise ConnectionResetError(self.ended.result())
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[kind].append(answer)
        self._writer.write(frame(kind, blob))
        return await answer

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):  # the end of the socket, which _watch explains
            while True:
                number, size = HEAD.unpack(await reader.readexactly(HEAD.size))
                blob = await reader.readexactly(size)
                if number == Kind.HELLO:
                    self._greeted, self.pid = True, int(blob)
                    continue
                answer = self._waiting[Kind(number)].popleft()
                if not answer.done():  # who asked may have given up
                    answer.set_result(blob)

    async def _watch(self, reading: asyncio.Task[None]) -> None:
        """Wait for the process to end, let what it said before be read, tell those who wait for more."""
        await _gone(self._process, reading)
        await asyncio.wait({reading}, timeout=_DRAIN_S)
        reading.cancel()
        self._writer.close()
        cause = cause_of_death(self._process.returncode)
        self.ended.set_result(cause)
        for answer in (answer for answers in self._waiting.values() for answer in answers):
            if not answer.done():
                answer.set_exception(ConnectionResetError(cause))


async def _gone(process: subprocess.Popen[bytes], reading: asyncio.Task[None]) -> None:
    """Return when ``process`` has ended and is reaped; ``reading`` ends with it, or soon before."""
    try:
        pidfd = os.pidfd_open(process.pid)
    except (AttributeError, OSError):  # macOS, an old kernel, a sandbox
        await asyncio.wait({reading})
    else:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(pidfd, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)
    while process.poll() is None:
        await asyncio.sleep(_POLL_S)


class LocalLauncher:
    """Implements :class:`llamarl.runtime.ranks.Launcher` on this machine."""

    def __init__(self) -> None:
        self._links: list[LocalLink] = []
        self._stores: list[tuple[str, int]] = []
        """Paths of the files in which ranks meet, and their descriptors (-1: a real file)."""

    async def start(
        self, plans: Sequence[WorkerPlan], labels: Sequence[str], output: OutputReader
    ) -> tuple[list[LocalLink], str]:
        rendezvous = ""
        if len(plans) > 1:
            self._stores.append(_new_store(plans[0].spec.name))
            rendezvous = f"file://{self._stores[-1][0]}"
        links = [self._spawn(plan, label, output) for plan, label in zip(plans, labels, strict=True)]
        self._links += links
        for link in links:
            await link.open()
        return links, rendezvous

    async def stop(self) -> None:
        await asyncio.gather(*(link.ended for link in self._links))

    def close(self) -> None:
        for path, fd in self._stores:
            if fd >= 0:
                os.close(fd)
            else:
                shutil.rmtree(os.path.dirname(path), ignore_errors=True)
        self._stores = []

    def _spawn(self, plan: WorkerPlan, label: str, output: OutputReader) -> LocalLink:
        """Start one process. On the io thread: the kernel counts the thread that starts a child as the child's parent."""
        ours, theirs = socket.socketpair()
        pipes = {stream: output.pipe(label, stream) for stream in ("stdout", "stderr")}
        module = ["-P", "-m", "llamarl.runtime.rank_process"]
        try:
            process = subprocess.Popen(
                [sys.executable, *module, str(theirs.fileno()), str(os.getpid()), label],
                stdin=subprocess.DEVNULL,
                stdout=pipes["stdout"],
                stderr=pipes["stderr"],
                pass_fds=[theirs.fileno()],
                env=_environment(os.environ, plan.spec.threads),
                process_group=0,  # what a terminal sends to the controller is not for its ranks
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
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


def _new_store(name: str) -> tuple[str, int]:
    try:
        fd = os.memfd_create(f"llamarl-{name}")
        path = f"/proc/{os.getpid()}/fd/{fd}"
        os.stat(path)
        return path, fd
    except (AttributeError, OSError):  # macOS, a sandbox without /proc: a folder that only this user may enter
        return os.path.join(tempfile.mkdtemp(prefix="llamarl-"), "store"), -1


def cause_of_death(returncode: int) -> str:
    """What ended a process, in words.

    Args:
        returncode: As ``subprocess`` tells it: the exit code, or minus the signal.
    """
    if returncode >= 0:
        return f"its process exited with code {returncode}"
    number = -returncode
    name = signal.Signals(number).name if number in set(signal.Signals) else "unknown"
    hint = "; the kernel does this when memory runs out" if number == signal.SIGKILL else ""
    return f"its process was killed by signal {number} ({name}{hint})"
