"""The processes of ranks on one machine as those see them who start them: the controller
(:mod:`llamarl.runtime.local`), and the agent on a node of a cluster (:mod:`llamarl.runtime.ray.host_agent`).

``PlainChild`` is a new Python that imports everything anew. ``ForkedChild`` is a fork of
:mod:`llamarl.runtime.fork_server`, which has imported it. Both are a guard (llamarl/process_tree.py),
whose end is told in words. Everything here runs on the io thread, but ``signal``.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

from llamarl.executors.base import ExecutorSpec
from llamarl.process_tree import spawn
from llamarl.runtime.fork_server import ANSWER, ENDED, STARTED, ForkOfThis, fork_this_process, ready

__all__ = [
    "Child",
    "ForkServer",
    "ForkedChild",
    "Killed",
    "PlainChild",
    "Stores",
    "cause_of_death",
    "end_unused_servers",
    "fork_server",
    "is_stopped",
    "shared_modules",
    "shares_imports",
    "start_early",
    "start_rank",
]

_POLL_S = 0.002
_SET_BY_TORCH = {"TORCHINDUCTOR_CACHE_DIR"}
"""Which every process that imports torch sets for itself."""


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
        pidfd = os.pidfd_open(self._process.pid)
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


class ForkedChild:
    """A process that a fork server has forked, and buries."""

    def __init__(self, pid: int, code: asyncio.Future[int | None]) -> None:
        self.pid = pid
        self._code = code
        self._pidfd = os.pidfd_open(pid)  # its number may be another's once the server has buried it

    async def code(self) -> int | None:
        code = await self._code
        fd, self._pidfd = self._pidfd, -1
        os.close(fd)
        return code

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, OSError):
            signal.pidfd_send_signal(self._pidfd, number)


class ForkServer:
    """This process's end of a fork server, which is started at once.

    Args:
        modules: What it imports before it forks.
        environment: Its own, and so that of every fork.
        may_be_a_fork: Whether this process may import them too, to be forked itself.
    """

    def __init__(
        self, modules: Collection[str], environment: Mapping[str, str], *, may_be_a_fork: bool = False
    ) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with theirs:
            self._process: subprocess.Popen[bytes] | ForkOfThis = (
                fork_this_process(theirs.fileno(), environment)
                if may_be_a_fork and ready(modules, environment)
                else spawn("llamarl.runtime.fork_server", [theirs.fileno()], ",".join(modules), environment=environment)
            )
        self._requests = ours
        self._starting: collections.deque[asyncio.Future[int | None]] = collections.deque()
        self._codes: dict[int, asyncio.Future[int | None]] = {}
        self._gone = False
        self._loop: asyncio.AbstractEventLoop | None = None

    async def fork(self, label: str, control: int, stdout: int, stderr: int) -> ForkedChild | None:
        """A rank's process; None if the server cannot fork (a library's thread runs in it) or is gone.

        Args:
            label: For who looks at ``ps``.
            control: Descriptor for the rank; with the other two it stays the caller's to close.
        """
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._requests, self._hear)
        if self._gone:
            return None
        answer: asyncio.Future[int | None] = self._loop.create_future()
        try:
            socket.send_fds(self._requests, [label.encode() or b"?"], [control, stdout, stderr])
        except OSError:
            return None
        self._starting.append(answer)
        pid = await answer
        return None if pid is None else ForkedChild(pid, self._codes[pid])

    async def stop(self) -> None:
        """Let the server end; its forks should have."""
        self._leave()
        while self._process.poll() is None:
            await asyncio.sleep(_POLL_S)

    def kill(self) -> None:
        """End it, and with it all its forks. Any thread."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def _hear(self) -> None:
        try:
            answer = self._requests.recv(ANSWER.size)
        except BlockingIOError:
            return
        except OSError:
            answer = b""
        if not answer:
            self._leave()
            return
        assert self._loop is not None
        kind, pid, code = ANSWER.unpack(answer)
        if kind == ENDED:
            _resolve(self._codes[pid], code)
            return
        if kind == STARTED:
            self._codes[pid] = self._loop.create_future()
        _resolve(self._starting.popleft(), pid if kind == STARTED else None)

    def _leave(self) -> None:
        if not self._gone:
            self._gone = True
            if self._loop is not None:
                self._loop.remove_reader(self._requests)
            self._requests.close()
            for waiting in (*self._starting, *self._codes.values()):
                _resolve(waiting, None)


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


def start_early(
    modules: tuple[str, ...], environment: Mapping[str, str], *, also: Sequence[str] = (), may_be_a_fork: bool = False
) -> None:
    """Start a server for :func:`fork_server` to find: it imports while this process does, or once
    for both where it may be a fork of this one. One that nobody asks for ends with this process.

    Args:
        also: Further modules that it imports; whoever asks need not know of them.
    """
    if modules:
        server = ForkServer([*modules, *also], environment, may_be_a_fork=may_be_a_fork)
        _early[modules] = dict(environment), server


def fork_server(modules: tuple[str, ...], environment: Mapping[str, str]) -> ForkServer | None:
    """A server that has this environment and imports these modules; None where there is nothing to share."""
    if not modules:
        return None
    had, server = _early.pop(modules, ({}, None))
    ours = {name: value for name, value in environment.items() if name in had or name not in _SET_BY_TORCH}
    if server is not None and had == ours:
        return server
    if server is not None:
        server.kill()
    return ForkServer(modules, environment)


def end_unused_servers() -> None:
    """End the servers that were started early and that nobody has asked for, as where the run was refused."""
    while _early:
        _, (_, server) = _early.popitem()
        server.kill()


_early: dict[tuple[str, ...], tuple[dict[str, str], ForkServer]] = {}


def _resolve(future: asyncio.Future[int | None], value: int | None) -> None:
    if not future.done():
        future.set_result(value)


def shared_modules(specs: Iterable[ExecutorSpec], threads: int) -> tuple[str, ...]:
    """What a fork server imports for those of these executors that have ``threads`` threads: our
    own modules, which run nothing when they are imported. A fork may not use a GPU, for its server
    may have asked for one.

    Returns:
        Empty where a server would serve one rank or none.
    """
    ranks = [
        spec.factory.rpartition(":")[0]
        for spec in specs
        for _ in range(spec.num_ranks)
        if spec.threads == threads and shares_imports(spec)
    ]
    return tuple(sorted(set(ranks))) if len(ranks) > 1 else ()


def shares_imports(spec: ExecutorSpec) -> bool:
    """Whether ranks of this executor may be forks."""
    return spec.factory.startswith("llamarl.executors.") and not spec.device.startswith("cuda")


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
        self._made.append(os.memfd_create(f"llamarl-{name}"))
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
