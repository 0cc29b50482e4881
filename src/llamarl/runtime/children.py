"""The processes of ranks on one machine as those see them who start them: the controller
(:mod:`llamarl.runtime.local`), and the agent on a node of a cluster (:mod:`llamarl.runtime.hosts.agent`).

``PlainChild`` is a new Python that imports everything anew. The other kind is a fork of
:mod:`llamarl.runtime.fork_server`, which has imported it. Both are a guard (llamarl/process_tree.py),
whose end is told in words. Everything here runs on the io thread, but ``signal``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import socket
import subprocess
from collections.abc import Mapping
from typing import Protocol

from llamarl.linux_calls import new_memory, pidfd_open
from llamarl.process_tree import spawn
from llamarl.runtime.fork_server import ForkServer

__all__ = ["Child", "Killed", "PlainChild", "Stores", "cause_of_death", "is_stopped", "raise_open_files", "start_rank"]

_POLL_S = 0.002
_MOST_FILES = 1 << 16


def raise_open_files() -> int:
    """How many files this process may have open, now that it has asked for as many as it may: a shell gives 1,024, and the
    pipes of a hundred ranks on other hosts are 400, what they made that is held as many again. Who starts ranks asks for
    them: a thousand generators keep a connection each to every shard of the trainer."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return _MOST_FILES if soft == resource.RLIM_INFINITY else soft


class Child(Protocol):
    """A guard."""

    pid: int

    async def code(self) -> int | None:
        """Return when it has ended and is buried: its exit code, or minus the signal; None: it went
        with the process that had forked it."""
        ...

    def signal(self, number: int) -> None:
        """Any thread; of a child that has ended nobody is reached."""
        ...


class PlainChild:
    """A process that this one has started."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.pid = process.pid
        self._process = process

    async def code(self) -> int | None:
        pidfd = pidfd_open(self._process.pid)
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(pidfd, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)
        while self._process.poll() is None:
            await asyncio.sleep(_POLL_S)
        return self._process.returncode

    def signal(self, number: int) -> None:
        self._process.send_signal(number)


async def start_rank(
    server: ForkServer | None, label: str, environment: Mapping[str, str], stdout: int, stderr: int
) -> tuple[socket.socket, Child]:
    """Start guard and rank; this process's end of the socket to the rank, and the guard.

    Args:
        server: Whose fork it is to be, where that forks; None: a process of its own.
        label: For who looks at ``ps``.
        environment: Of a process of its own.
        stdout: Write end of a pipe; stays the caller's to close, as does ``stderr``.

    Raises:
        OSError: The system gives no process.
    """
    ours, theirs = socket.socketpair()
    child: Child | None = None
    try:
        with theirs:
            if server is not None:
                child = await server.fork(label, theirs.fileno(), stdout, stderr)
            if child is None:
                module, streams = "llamarl.runtime.rank_process", {"stdout": stdout, "stderr": stderr}
                child = PlainChild(spawn(module, [theirs.fileno()], label, environment=environment, **streams))
    finally:
        if child is None:
            ours.close()
    return ours, child


def is_stopped(pid: int) -> bool:
    """Whether a process was stopped by a signal, and waits to be told to go on; or a child of its own was.

    Of a rank that has not said who it is, no more is known than its guard: the rank is its child.
    """
    return any(_state(one) in ("T", "t") for one in (pid, *_children(pid)))


def _state(pid: int) -> str:
    with contextlib.suppress(OSError, IndexError):  # it has ended, or nothing can tell
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return stat.read().rpartition(b")")[2].split()[0].decode()
    return ""


def _children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        with open(f"/proc/{pid}/task/{pid}/children", "rb") as children:
            return [int(child) for child in children.read().split()]
    return []


class Stores:
    """Files in which the ranks of process groups meet: memory of this process, which only its user may open."""

    def __init__(self) -> None:
        self._made: list[int] = []

    def new(self, name: str) -> str:
        """An ``init_method`` of ``torch.distributed`` for ranks on this machine."""
        self._made.append(new_memory(f"llamarl-{name}"))
        return f"file:///proc/{os.getpid()}/fd/{self._made[-1]}"

    def close(self) -> None:
        """Give them back."""
        for fd in self._made:
            os.close(fd)
        self._made = []


class Killed(str):
    """The cause of a death, in words, where somebody else sent the signal: processes do not send
    these to themselves."""


def cause_of_death(returncode: int | None) -> str:
    """What ended a process, in words; ``Killed`` where that was SIGKILL or SIGTERM.

    Args:
        returncode: As ``subprocess`` tells it: the exit code, or minus the signal. None: it went
            with the process that had forked it.
    """
    if returncode is None:
        return "the process that had forked it has ended, and it with that"
    if returncode >= 0:
        return f"its process exited with code {returncode}"
    number = -returncode
    name = signal.Signals(number).name if number in set(signal.Signals) else "unknown"
    hint = "; the kernel does this when memory runs out" if number == signal.SIGKILL else ""
    told = f"its process was killed by signal {number} ({name}{hint})"
    return Killed(told) if number in (signal.SIGKILL, signal.SIGTERM) else told
