"""One rank's process on this machine: started with a socket to it, waited for, its end told in words.

Used by the controller (:mod:`llamarl.runtime.local`) and by the agent on a node of a cluster
(:mod:`llamarl.runtime.ray.host_agent`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping

__all__ = ["Killed", "Stores", "cause_of_death", "gone", "is_stopped", "start_rank"]

_POLL_S = 0.002


def start_rank(
    label: str, environment: Mapping[str, str], stdout: int, stderr: int
) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Start guard and rank; the caller's end of the socket to the rank, and the guard.

    The kernel counts the thread that calls this as the child's parent: the child ends with it.

    Args:
        label: For who looks at ``ps``.
        environment: All of it. What torch reads when it is imported must be there from the start.
        stdout: Write end of a pipe; stays the caller's to close, as does ``stderr``.

    Raises:
        OSError: The system gives no process.
    """
    ours, theirs = socket.socketpair()
    try:
        process = subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "llamarl.runtime.rank_process"),
                *(str(theirs.fileno()), str(os.getpid()), label),
            ],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            pass_fds=[theirs.fileno()],
            env=dict(environment),
            process_group=0,  # what a terminal sends to the controller is not for its ranks
        )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return ours, process


async def gone(process: subprocess.Popen[bytes], reading: asyncio.Task[None]) -> None:
    """Return when ``process`` has ended and is reaped.

    Args:
        reading: Reads the socket to it, and so ends with it, or soon before.
    """
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
        self._made: list[tuple[str, int]] = []
        """Paths and their descriptors (-1: a real file)."""

    def new(self, name: str) -> str:
        """An ``init_method`` of ``torch.distributed`` for ranks on this machine."""
        self._made.append(_new_store(name))
        return f"file://{self._made[-1][0]}"

    def close(self) -> None:
        """Give them back."""
        for path, fd in self._made:
            if fd >= 0:
                os.close(fd)
            else:
                shutil.rmtree(os.path.dirname(path), ignore_errors=True)
        self._made = []


def _new_store(name: str) -> tuple[str, int]:
    try:
        fd = os.memfd_create(f"llamarl-{name}")
        path = f"/proc/{os.getpid()}/fd/{fd}"
        os.stat(path)
        return path, fd
    except (AttributeError, OSError):  # macOS, a sandbox without /proc: a folder that only this user may enter
        return os.path.join(tempfile.mkdtemp(prefix="llamarl-"), "store"), -1


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
