"""The process from which ranks are forked (``python -P -m llamarl.runtime.fork_server REQUESTS CONTROLLER MODULES``),
and the end of it that the controller holds.

    controller ══ label, 3 descriptors ═▶ fork server ── forks ──▶ guard ── forks ──▶ rank
               ◀═ started, pid ══════════ (has imported torch, transformers, the executors; runs none of them)
               ◀═ ended, pid, code ══════

What every rank would import for itself, three to five seconds of a core each, is imported once; the
memory of it is shared. The server has one thread and never computes, so a fork of it is as good as
a process that has imported the same. Its environment is that of its ranks: ranks with another
number of threads have another server (``OMP_NUM_THREADS`` is read when torch is imported).

``REQUESTS`` is an inherited descriptor, one end of a pair of packet sockets. Linux only.

The server can also be a fork of this process, which then imports once for both:

    llamarl train ── imports torch, transformers, the executors ──┬── forks ──▶ fork server ── forks ──▶ ranks
                                                                  └── goes on with its checks, and controls

Only a process that is ours from beginning to end may be forked: see
:func:`allow_fork_of_this_process`. What the libraries read from the environment when they are
imported must have been there: see :func:`ready`. The rest is given to the fork: its own variables,
no descriptor but the streams and its socket, signals as a new process has them.
"""

from __future__ import annotations

import asyncio
import atexit
import collections
import contextlib
import ctypes
import gc
import importlib
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import traceback
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

from llamarl.linux_calls import pidfd_open, pidfd_send_signal
from llamarl.process_tree import end_process, end_with_parent, spawn

if TYPE_CHECKING:
    from llamarl.executors.base import ExecutorSpec

__all__ = [
    "ForkServer",
    "ForkedChild",
    "allow_fork_of_this_process",
    "end_unused_servers",
    "fork_server",
    "main",
    "read_on_import",
    "ready",
    "shared_modules",
    "shares_imports",
    "start_early",
]

_STARTED, _ENDED, _REFUSED = 0, 1, 2
_ANSWER = struct.Struct("<iii")
"""Kind, pid (of the guard), exit code (minus the signal)."""
_READ_ON_IMPORT = ("OMP_", "MKL_", "GOMP_", "KMP_", "OPENBLAS_", "NUMEXPR_")
_NUMPY = "OPENBLAS_NUM_THREADS"
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8
"""Of ``mallopt``. The C library reads these from the environment when a process begins: without them a
forked trainer, of a vocabulary of 49,152, takes 1.80 s of a core a step instead of 1.45."""
_POLL_S = 0.002
_SET_BY_TORCH = {"TORCHINDUCTOR_CACHE_DIR"}
"""Which every process that imports torch sets for itself."""
_ours = False


# The end of whoever starts ranks.


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
            self._process: subprocess.Popen[bytes] | _ForkOfThis = (
                _fork_this_process(theirs.fileno(), environment)
                if may_be_a_fork and ready(modules, environment)
                else spawn("llamarl.runtime.fork_server", [theirs.fileno()], ",".join(modules), environment=environment)
            )
        self._requests = ours
        self._starting: collections.deque[asyncio.Future[int | None]] = collections.deque()
        self._codes: dict[int, asyncio.Future[int | None]] = {}
        self._gone = False
        self._loop: asyncio.AbstractEventLoop | None = None

    async def fork(self, label: str, control: int, stdout: int, stderr: int) -> ForkedChild | None:
        """A rank's process; None if the server cannot fork (a library's thread runs in it, the system gives no process) or is
        gone.

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
            answer = self._requests.recv(_ANSWER.size)
        except BlockingIOError:
            return
        except OSError:
            answer = b""
        if not answer:
            self._leave()
            return
        assert self._loop is not None
        kind, pid, code = _ANSWER.unpack(answer)
        if kind == _ENDED:
            _resolve(self._codes[pid], code)
            return
        if kind == _STARTED:
            self._codes[pid] = self._loop.create_future()
        _resolve(self._starting.popleft(), pid if kind == _STARTED else None)

    def _leave(self) -> None:
        if not self._gone:
            self._gone = True
            if self._loop is not None:
                self._loop.remove_reader(self._requests)
            self._requests.close()
            for waiting in (*self._starting, *self._codes.values()):
                _resolve(waiting, None)


class ForkedChild:
    """A process that a fork server has forked, and buries."""

    def __init__(self, pid: int, code: asyncio.Future[int | None]) -> None:
        self.pid = pid
        self._code = code
        self._pidfd = pidfd_open(pid)  # its number may be another's once the server has buried it

    async def code(self) -> int | None:
        code = await self._code
        fd, self._pidfd = self._pidfd, -1
        os.close(fd)
        return code

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, OSError):
            pidfd_send_signal(self._pidfd, number)


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


def _resolve(future: asyncio.Future[int | None], value: int | None) -> None:
    if not future.done():
        future.set_result(value)


# The server.


def main() -> None:
    """Serve until the controller closes its end. Returns in a rank, when its executor is closed."""
    serve_controller(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3].split(","))


def serve_controller(requests: int, controller: int, modules: Iterable[str] = ()) -> None:
    """What :func:`main` does, also in a fork of the controller.

    Args:
        requests: Descriptor of this end of the pair of packet sockets.
        controller: pid of the process that started this one.
        modules: To import first.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(controller)
    for module in modules:
        # A rank meets the same error when it imports its executor, and says so where it is heard.
        with contextlib.suppress(Exception):
            importlib.import_module(module)
    gc.collect()
    gc.freeze()  # what is collected later does not touch, and so copy, the pages that are shared
    serve(socket.socket(fileno=requests))


def serve(requests: socket.socket) -> None:
    """Fork a rank for each request; tell of those that have ended. Returns in a rank, when its executor is closed."""
    awake, wake = os.pipe()
    for fd in (awake, wake):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, _wake)
    poll = select.poll()
    poll.register(requests, select.POLLIN)
    poll.register(awake, select.POLLIN)
    guards: set[int] = set()
    while True:
        ready = {fd for fd, _ in poll.poll()}
        if awake in ready:
            os.read(awake, 4096)
            _tell_of_ended(requests, guards)
        if requests.fileno() not in ready:
            continue
        label, descriptors, *_ = socket.recv_fds(requests, 4096, 3)
        if not label:
            os._exit(0)  # the guards are told by the kernel
        try:
            pid = os.fork() if len(os.listdir("/proc/self/task")) == 1 else -1
        except OSError:  # as many processes as a pod or a user may have: what has been forked stays
            pid = -1
        if pid < 0:
            requests.send(_ANSWER.pack(_REFUSED, 0, 0))
        elif pid:
            guards.add(pid)
            requests.send(_ANSWER.pack(_STARTED, pid, 0))
        else:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for fd in (awake, wake):
                os.close(fd)
            server = os.getppid()
            requests.close()
            control, stdout, stderr = descriptors
            return _become_rank(label.decode(), control, stdout, stderr, server)
        for fd in descriptors:
            os.close(fd)


def _tell_of_ended(requests: socket.socket, guards: set[int]) -> None:
    for guard in list(guards):
        pid, status = os.waitpid(guard, os.WNOHANG)
        if pid:
            guards.remove(guard)
            try:
                requests.send(_ANSWER.pack(_ENDED, guard, os.waitstatus_to_exitcode(status)))
            except OSError:  # the controller is gone
                os._exit(0)


def _become_rank(label: str, control: int, stdout: int, stderr: int, server: int) -> None:
    """In a fork: what a process started by itself would find. Returns in the rank when its executor is closed."""
    from llamarl.runtime import rank_process

    os.setsid()
    for pipe, fd in ((stdout, 1), (stderr, 2)):
        os.dup2(pipe, fd)
        os.close(pipe)
    rank_process.become(control, server, label)


def _wake(number: int, frame: object) -> None:
    """What counts is the byte that arrives through the wake-up pipe."""


# The server as a fork of this process.


def allow_fork_of_this_process() -> None:
    """Say that this process runs one command and nothing else, so that it may be forked, and a fork
    of it end by itself."""
    global _ours
    _ours = True
    # numpy's library starts its threads when it is imported, and a process that has threads is not forked
    os.environ.setdefault(_NUMPY, "1")


def read_on_import(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that libraries read once, when they are imported."""
    return {name: value for name, value in environment.items() if name.startswith(_READ_ON_IMPORT)}


def ready(modules: Collection[str], environment: Mapping[str, str]) -> bool:
    """Import what ranks need here; whether this process may then be forked for them.

    What libraries that are not imported yet will read, this process takes from ``environment``.
    """
    if not _ours:
        return False
    wanted = read_on_import(environment)
    if "torch" not in sys.modules:
        os.environ.update(
            {name: value for name, value in wanted.items() if name != _NUMPY or "numpy" not in sys.modules}
        )
    if read_on_import(os.environ) != wanted:
        return False
    for module in modules:
        # A rank meets the same error when it imports its executor, and says so where it is heard.
        with contextlib.suppress(Exception):
            importlib.import_module(module)
    return len(os.listdir("/proc/self/task")) == 1


class _ForkOfThis:
    """A child of this process; like ``subprocess.Popen`` as far as its owner looks."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            with contextlib.suppress(ChildProcessError):
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)  # not buried yet: the number is its own

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


def _fork_this_process(requests: int, environment: Mapping[str, str]) -> _ForkOfThis:
    """Fork a server.

    Args:
        requests: Its end of the pair of sockets, of which the other is this process's.
        environment: Its own, and that of its forks.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    gc.collect()  # what would close descriptors late does it here
    gc.freeze()  # modules: nobody needs to look through them again, here or in a fork
    controller = os.getpid()
    if pid := os.fork():
        return _ForkOfThis(pid)
    _serve_in_a_fork(requests, controller, environment)


def _serve_in_a_fork(requests: int, controller: int, environment: Mapping[str, str]) -> NoReturn:
    code = 1
    try:
        _like_a_new_process(requests, environment)
        serve_controller(requests, controller)  # returns in a rank, when its executor is closed
        atexit._run_exitfuncs()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _like_a_new_process(requests: int, environment: Mapping[str, str]) -> None:
    os.setsid()  # what a terminal sends to the controller is not for its ranks
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2 and fd != requests:
            with contextlib.suppress(OSError):  # that of the listing
                os.close(fd)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.environ.clear()
    os.environ.update(environment)
    with contextlib.suppress(AttributeError, OSError):  # another C library
        libc = ctypes.CDLL(None)
        if environment.get("MALLOC_MMAP_MAX_") == "0":
            libc.mallopt(_M_MMAP_MAX, 0)
        if "MALLOC_TRIM_THRESHOLD_" in environment:
            libc.mallopt(_M_TRIM_THRESHOLD, -1)
        if environment.get("MALLOC_ARENA_MAX") == "1":
            libc.mallopt(_M_ARENA_MAX, 1)


def _main() -> NoReturn:
    main()
    end_process(0)
    sys.exit()


if __name__ == "__main__":
    _main()
