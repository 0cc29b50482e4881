"""Main module of the process from which ranks are forked: ``python -P -m
llamarl.runtime.fork_server REQUESTS CONTROLLER MODULES``.

    controller ══ label, 3 descriptors ═▶ fork server ── forks ──▶ guard ── forks ──▶ rank
               ◀═ started, pid ══════════ (has imported torch, transformers, the executors; runs none of them)
               ◀═ ended, pid, code ══════

What every rank would import for itself, three to five seconds of a core each, is imported once; the
memory of it is shared. The server has one thread and never computes, so a fork of it is as good as
a process that has imported the same. Its environment is that of its ranks: ranks with another
number of threads have another server (``OMP_NUM_THREADS`` is read when torch is imported).

``REQUESTS`` is an inherited descriptor, one end of a pair of packet sockets. Linux only.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import struct
import sys
from collections.abc import Iterable
from typing import NoReturn

from llamarl.process_tree import end_process, end_with_parent

__all__ = ["ANSWER", "ENDED", "REFUSED", "STARTED", "main", "serve_controller"]

STARTED, ENDED, REFUSED = 0, 1, 2
ANSWER = struct.Struct("<iii")
"""Kind, pid (of the guard), exit code (minus the signal)."""


def main() -> None:
    """Serve until the controller closes its end. Returns in a rank, when its executor is closed."""
    serve_controller(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3].strip().split(","))


def serve_controller(
    requests: int, controller: int, modules: Iterable[str] = (), *, owns_environment: bool = False
) -> None:
    """What :func:`main` does, also in a fork of the controller (runtime/fork_here.py).

    Args:
        requests: Descriptor of this end of the pair of packet sockets.
        controller: pid of the process that started this one.
        modules: To import first.
        owns_environment: Whether the memory in which this process got its environment is read no more.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(controller)
    for module in modules:
        # A rank meets the same error when it imports its executor, and says so where it is heard.
        with contextlib.suppress(Exception):
            importlib.import_module(module)
    gc.collect()
    gc.freeze()  # what is collected later does not touch, and so copy, the pages that are shared
    serve(socket.socket(fileno=requests), owns_environment=owns_environment)


def serve(requests: socket.socket, *, owns_environment: bool = False) -> None:
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
        if (threads := len(os.listdir("/proc/self/task"))) > 1:
            requests.send(ANSWER.pack(REFUSED, threads, 0))
        elif pid := os.fork():
            guards.add(pid)
            requests.send(ANSWER.pack(STARTED, pid, 0))
        else:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for fd in (awake, wake):
                os.close(fd)
            server = os.getppid()
            requests.close()
            control, stdout, stderr = descriptors
            return _become_rank(label.decode(), control, stdout, stderr, server, owns_environment)
        for fd in descriptors:
            os.close(fd)


def _tell_of_ended(requests: socket.socket, guards: set[int]) -> None:
    for guard in list(guards):
        pid, status = os.waitpid(guard, os.WNOHANG)
        if pid:
            guards.remove(guard)
            try:
                requests.send(ANSWER.pack(ENDED, guard, os.waitstatus_to_exitcode(status)))
            except OSError:  # the controller is gone
                os._exit(0)


def _become_rank(label: str, control: int, stdout: int, stderr: int, server: int, owns_environment: bool) -> None:
    """In a fork: what a process started by itself would find. Returns in the rank when its executor is closed."""
    from llamarl.runtime import rank_process

    os.setpgid(0, 0)
    for pipe, fd in ((stdout, 1), (stderr, 2)):
        os.dup2(pipe, fd)
        os.close(pipe)
    _show_as(["-P", "-m", rank_process.__name__, str(control), str(server), label], owns_environment)
    rank_process.become(control, server)


def _show_as(arguments: list[str], owns_environment: bool) -> None:
    """What ``ps`` shows of this process: its command line lies in its own memory, and is written over there."""
    import ctypes

    with contextlib.suppress(OSError, ValueError, IndexError):  # only how it looks
        with open("/proc/self/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
        start, end, after, last = (int(fields[n]) for n in (45, 46, 47, 48))  # of the arguments; of the environment
        words = [part.encode() for part in [sys.executable, *arguments]]
        shown = b"\0".join(words) + b"\0"
        if owns_environment and len(shown) > end - start and after == end:
            # The kernel reads on into the environment where the arguments do not end with a zero, up to the first one.
            shown, end = b" ".join(words), last
        if 0 < start < end:
            ctypes.memmove(start, shown[: end - start - 1].ljust(end - start, b"\0"), end - start)


def _wake(number: int, frame: object) -> None:
    """What counts is the byte that arrives through the wake-up pipe."""


def _main() -> NoReturn:
    main()
    end_process(0)
    sys.exit()


if __name__ == "__main__":
    _main()
