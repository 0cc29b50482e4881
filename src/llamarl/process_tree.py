"""Processes that this one starts, and the guard above each: nothing that it started outlives it.

    parent ──control── guard ── forks ──▶ rank, or worker of a pool ──▶ whatever it starts
                         ▲                                                      │
                         └───────────── orphans become its children ────────────┘

A rank, or a worker that judges, may start processes of its own, and these may detach themselves.
The kernel ends a child with its parent if asked to, but not the children of that child. So each is
two processes: the guard, which runs none of the user's code and imports next to nothing, and what
was forked from it. The guard is the *subreaper* of all that comes below it: a process whose parent
ends becomes the guard's child, in a session of its own or forked twice. It sleeps until one of
these happens, then kills what is left, round by round, and ends as what it guards ended (same exit
code, same signal):

- what it guards ended
- the other end of the control socket is closed: the parent ended, in whatever way
- SIGTERM, by which the parent ends it
- its parent is another: the parent ended, and a copy of the socket is still open somewhere

The kernel kills what is guarded if the guard dies. What a guard cannot hold: a program that kills
it, as the same user may, after starting processes that left the group; and processes of another user.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import resource
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import subprocess

__all__ = ["GUARD", "OutputTail", "adopt_orphans", "divide", "end_process", "end_with_parent", "hide_memory", "spawn"]

GUARD = "llamarl-guard"
"""What ``ps -o comm`` and ``top`` show of a guard."""
MAX_LINES = 8
"""Last lines of a worker's output that go into the cause of a failure."""
_MAX_OUTPUT_BYTES = 8 << 10
_LOOK_S = 1.0
"""Longest time for which a guard does not look whether its parent is still the same."""

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 1, 4, 36
_SWEEP_S = 5.0
"""Longest wait for killed processes to be gone: one that hangs in the kernel must not keep the guard."""


def spawn(
    module: str,
    descriptors: Collection[int],
    *words: str,
    environment: Mapping[str, str],
    stdout: int | None = None,
    stderr: int | None = None,
) -> subprocess.Popen[bytes]:
    """Start ``python -P -m module DESCRIPTORS PARENT WORDS`` in a session of its own: what a
    terminal sends to this process is not for the new one, and it reads no terminal.

    Args:
        descriptors: That it inherits besides the streams; they stay the caller's to close.
        environment: All of it. What torch reads when it is imported must be there from the start.

    Raises:
        OSError: The system gives no process.
    """
    import subprocess  # here: a guard would hold it too

    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *map(str, descriptors), str(os.getpid()), *words],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        pass_fds=tuple(descriptors),
        env=dict(environment),
        start_new_session=True,
    )


class OutputTail:
    """The end of what was written since the last mark, in bounded memory.

    Args:
        fd: What it is read from.
    """

    def __init__(self, mark: bytes, fd: int = -1) -> None:
        self.fd = fd
        self._mark = mark
        self._bytes = b""

    def feed(self, chunk: bytes) -> None:
        self._bytes = (self._bytes + chunk).rpartition(self._mark)[2][-_MAX_OUTPUT_BYTES:]

    def read(self, chunks: int) -> bool:
        """Take what was written, at most so many pieces; False at its end."""
        with contextlib.suppress(BlockingIOError):
            for _ in range(chunks):
                chunk = os.read(self.fd, 1 << 16)
                if not chunk:
                    return False
                self.feed(chunk)
        return True

    def lines(self) -> list[str]:
        """The last lines that are not blank at the end."""
        return self._bytes.decode(errors="replace").strip().splitlines()[-MAX_LINES:]


def divide(control: int, parent: int, *, tail: OutputTail | None = None, others: Collection[int] = ()) -> None:
    """Fork this process, which must have one thread, into a guard and what it guards: returns in
    the latter, never in the guard.

    Args:
        control: Of a socket whose other end the parent holds. The guard reads nothing from it.
        parent: pid of the process that started this one, or forked it.
        tail: Reads what is guarded prints; its last lines are written to ``control`` at the end.
        others: Descriptors that the guard is not to hold.
    """
    adopt_orphans()
    awake, wake = os.pipe()
    for fd in (awake, wake):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    handled = {number: signal.signal(number, _wake) for number in (signal.SIGCHLD, signal.SIGTERM)}
    guard = os.getpid()
    below = os.fork()
    if below:
        try:
            for number in (signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            show_as(GUARD)
            hide_memory()  # the environment is for what is guarded, not for programs that this runs
            for fd in others:
                os.close(fd)
            _guard(below, control, parent, awake, tail)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    signal.set_wakeup_fd(-1)
    for number, handler in handled.items():
        signal.signal(number, handler)
    os.close(awake)
    os.close(wake)
    os.setpgid(0, 0)
    end_with_parent(guard)


def _guard(below: int, control: int, parent: int, awake: int, tail: OutputTail | None) -> NoReturn:
    with contextlib.suppress(OSError):
        os.setpgid(below, below)  # it does the same: whoever comes first
    poll = select.poll()
    poll.register(control, 0)  # only that the other end is gone
    poll.register(awake, select.POLLIN)
    if tail is not None:
        os.set_blocking(tail.fd, False)
        poll.register(tail.fd, select.POLLIN)
    code, asked = None, False
    while code is None and not asked and os.getppid() == parent:
        for fd, _ in poll.poll(_LOOK_S * 1000):
            if tail is not None and fd == tail.fd:
                if not tail.read(1):
                    poll.unregister(fd)
            else:
                asked = asked or fd == control or signal.SIGTERM in os.read(awake, 4096)
        code = reap(below)
    killed = kill_descendants(below)
    if tail is not None:
        tail.read(64)
        with contextlib.suppress(OSError):  # nobody waits for it where the parent ended
            os.write(control, "\n".join(tail.lines()).encode())
    _end_like(killed if code is None else code)


def _end_like(code: int | None) -> NoReturn:
    """With this exit code, or by this signal (negative). None: nothing could end what was guarded."""
    if code is not None and code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # what was guarded has written its own
        with contextlib.suppress(OSError):  # SIGKILL has no handler to reset
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(1 if code is None else code)


def _wake(number: int, frame: object) -> None:
    """What counts is the byte that arrives through the wake-up pipe."""


def show_as(name: str) -> None:
    """Give this process a name of at most 15 bytes for ``ps -o comm`` and ``top``."""
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as comm:
        comm.write(name)


def adopt_orphans() -> None:
    """From now on a process below this one whose parent ends becomes this one's child:
    wherever it tries to hide, be it in a session of its own or forked twice."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when ``parent`` ends; exit now if it has ended.

    The kernel counts the *thread* that started this process as the parent.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # asked after the call above: a death between the two is not missed
        os._exit(1)


def hide_memory() -> None:
    """Keep other processes of this user from reading this one's memory, environment and open files."""
    _prctl(_PR_SET_DUMPABLE, 0)


def reap(pid: int) -> int | None:
    """Bury every child that has ended; the exit code of ``pid`` (negative: the signal) if it was among them."""
    code = None
    with contextlib.suppress(ChildProcessError):
        while True:
            ended, status = os.waitpid(-1, os.WNOHANG)
            if ended == 0:
                break
            if ended == pid:
                code = os.waitstatus_to_exitcode(status)
    return code


def kill_descendants(leader: int) -> int | None:
    """Kill everything below this process, and again what was forked meanwhile, until nothing is left; at most 5 s.

    Args:
        leader: A child.

    Returns:
        The exit code of ``leader``, as :func:`reap` tells it, if it ended now.
    """
    code, until = None, time.monotonic() + _SWEEP_S
    while time.monotonic() < until:
        descendants = _descendants()
        for group in set(descendants.values()):  # at once: none of its members can fork out of it meanwhile
            _kill_group(group)
        for pid in descendants:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        ended = reap(leader)
        code = ended if code is None else code
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            break
        time.sleep(0.002)
    return code


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def _descendants() -> dict[int, int]:
    """Process group of every process below this one."""
    children: dict[int, list[tuple[int, int]]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as stat:
                fields = stat.read().rpartition(b")")[2].split()  # the name before it may hold anything
                children.setdefault(int(fields[1]), []).append((int(name), int(fields[2])))
    found: dict[int, int] = {}
    parents = [os.getpid()]
    while parents:
        below = children.get(parents.pop(), [])
        found.update(below)
        parents += [pid for pid, _ in below]
    return found


def _prctl(option: int, value: int) -> None:
    import ctypes  # here: a program that starts no process needs none of it

    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def end_process(code: int) -> None:
    """End with ``code`` at once: what was registered for the end is done and the streams are
    written out, no module is taken apart, which with torch and transformers takes 0.4 to 1.4 s.

    Returns where Python's own end has something to do: a thread that it would wait for, a stream
    that cannot be written, which it tells of.
    """
    others = (thread for thread in threading.enumerate() if thread is not threading.main_thread())
    if any(not thread.daemon for thread in others):
        return
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            return
    os._exit(code)
