"""The process between the reward pool and one of its workers: what a judge starts does not outlive the worker.

    pool ──control──▶ guardian ──forks──▶ worker ──▶ whatever its judges start
         ◀──report──     ▲  ▲                │                   │
                         │  └─ their output ─┘                   │
                         └───────── orphans become its children ─┘

The guardian runs none of the user's code. It is a *subreaper*: a process whose parent dies becomes
the guardian's child, be it in a session of its own, forked twice or deaf to every signal but
SIGKILL. So all that a worker ever started stays below the guardian, and is killed, round by round
until nothing is left, as soon as

* the pool says so, by closing its end of the control socket: a sample took too long, or the pool closes;
* the pool's process dies, which closes it too (should another process hold a copy: its parent's number changes);
* the worker ends by itself. How, and the last lines of its output, go to the pool as a report.

The kernel kills the worker if the guardian dies. What the guardian cannot hold: a judge that kills
it, as the same user may, after starting processes that left the worker; processes of another user;
and, on systems other than Linux, processes that left the worker's process group.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import traceback

from llamarl.process_tree import adopt_orphans, end_with_parent, hide_memory, kill_descendants, reap

__all__ = ["MAX_LINES", "OutputTail", "guard"]

MAX_LINES = 8
"""Last lines of a worker's output that go into the cause of a failure."""

_MAX_OUTPUT_BYTES = 8 << 10
_LOOK_S = 1.0


class OutputTail:
    """The end of what was written since the last mark, in bounded memory."""

    def __init__(self, mark: bytes) -> None:
        self._mark = mark
        self._bytes = b""

    def feed(self, chunk: bytes) -> None:
        self._bytes = (self._bytes + chunk).rpartition(self._mark)[2][-_MAX_OUTPUT_BYTES:]

    def lines(self) -> list[str]:
        """The last lines that are not blank at the end."""
        return self._bytes.decode(errors="replace").strip().splitlines()[-MAX_LINES:]


def guard(control: int, pool_pid: int, worker_fd: int) -> tuple[int, bytes]:
    """Fork into a guardian, which never returns, and the worker, which does.

    Args:
        control: The guardian's end of the socket to the pool.
        pool_pid: The process that owns the pool.
        worker_fd: The worker's socket; the guardian closes its copy.

    Returns:
        In the worker: where its output goes, and what to write there for the guardian to forget what came before.
    """
    adopt_orphans()
    guardian = os.getpid()
    mark = b"\0" + os.urandom(16).hex().encode() + b"\0"
    output, worker_output = os.pipe()
    worker = os.fork()
    if worker == 0:
        os.setsid()
        end_with_parent(guardian)
        os.close(control)
        os.close(output)
        os.dup2(worker_output, 1)
        os.dup2(worker_output, 2)
        return worker_output, mark
    try:
        hide_memory()  # its environment is the judges', not the programs' that they run
        os.close(worker_fd)
        os.close(worker_output)
        _watch(worker, control, pool_pid, output, OutputTail(mark))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _watch(worker: int, control: int, pool_pid: int, output: int, tail: OutputTail) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stopping = False

    def stop(*_: object) -> None:
        nonlocal stopping
        stopping = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(output, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    poll = select.poll()
    for fd in (control, output, woken):
        poll.register(fd, select.POLLIN)
    status = reap(worker)
    while status is None and not stopping and os.getppid() == pool_pid:
        for fd, _ in poll.poll(_LOOK_S * 1000):
            if fd == woken:
                os.read(woken, 1 << 12)
            elif fd == control:
                stopping = True
            elif not _drain(output, tail, chunks=1):
                poll.unregister(output)
        status = reap(worker)
    kill_descendants(worker)
    _drain(output, tail, chunks=64)
    report = json.dumps({"status": status, "output": tail.lines()}).encode()
    with contextlib.suppress(OSError):  # nobody waits for it where the pool's process died
        os.write(control, report)


def _drain(output: int, tail: OutputTail, *, chunks: int) -> bool:
    """Take what was written, at most so many pieces; False at its end."""
    with contextlib.suppress(BlockingIOError):
        for _ in range(chunks):
            chunk = os.read(output, 1 << 16)
            if not chunk:
                return False
            tail.feed(chunk)
    return True
