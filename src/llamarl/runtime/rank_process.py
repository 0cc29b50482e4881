"""Main module of a rank's process: ``python -P -m llamarl.runtime.rank_process CONTROL CONTROLLER NAME``.

    guard          waits for the end of the rank or of the controller, and ends what the rank leaves behind
    └─ rank        main thread          obeys orders, one after another: all calls to an executor come from it
                   diagnostics thread   reads the control socket, answers for the executor while it works or hangs

``CONTROL`` is the number of an inherited file descriptor, one end of a socket pair: nothing listens
anywhere, so nobody but the controller can talk to a rank. ``CONTROLLER`` is the pid of the process
that must be the parent (for a rank that was forked, its fork server, which ends with the
controller); ``NAME`` is for who looks at ``ps``. Nothing above :func:`serve` imports anything
large: the guard would hold it too.

A rank may start processes of its own (reward workers, tools), and these may detach themselves from
their parent. The kernel ends a child with its parent if asked to, but not the children of that
child. So a rank's process is two: the guard, which imports nothing, and the rank, forked from it.
The guard is the "subreaper" of all that comes below it: a process whose parent ends becomes the
guard's child, wherever it tried to hide. It sleeps until one of these happens, then kills what is
left and ends as the rank ended (same exit code, same signal):

- the rank ended
- the controller's end of the control socket is closed: the controller ended, in whatever way
- SIGTERM, from the controller or from the kernel (``PR_SET_PDEATHSIG``)

If the guard itself is killed the kernel kills the rank. Without Linux's calls (macOS) the rank's
process group is killed, and what has left the group gets away.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import socket
import sys
import traceback
from typing import NoReturn

from llamarl.process_tree import adopt_orphans, end_process, end_with_parent, kill_descendants, reap

__all__ = ["become", "divide", "main", "serve"]


def divide(control: int, controller: int) -> None:
    """Fork this process, which must have one thread: returns in the rank, never in the guard.

    Args:
        control: File descriptor of the control socket. The guard does not read it.
        controller: pid of the process that started this one, or forked it.
    """
    adopt_orphans()
    end_with_parent(controller, signal.SIGTERM)
    awake, wake = os.pipe()
    for fd in (awake, wake):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    handled = {number: signal.signal(number, _wake) for number in (signal.SIGCHLD, signal.SIGTERM)}
    guard = os.getpid()
    rank = os.fork()
    if rank:
        try:
            _guard(rank, control, awake)
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


def _guard(rank: int, control: int, awake: int) -> NoReturn:
    with contextlib.suppress(OSError):
        os.setpgid(rank, rank)  # the rank does the same: whoever comes first
    poll = select.poll()
    poll.register(control, 0)  # only that the other end is gone
    poll.register(awake, select.POLLIN)
    code, asked = None, False
    while code is None and not asked:
        for fd, _ in poll.poll():
            asked = asked or fd == control or signal.SIGTERM in os.read(awake, 4096)
        code = reap(rank)
    killed = kill_descendants(rank)
    _end_like(killed if code is None else code)


def _end_like(code: int | None) -> NoReturn:
    """With the rank's exit code, or by the signal that ended it (negative). None: nothing could end it."""
    if code is not None and code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the rank has written its own
        with contextlib.suppress(OSError):  # SIGKILL has no handler to reset
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(1 if code is None else code)


def _wake(number: int, frame: object) -> None:
    """What counts is the byte that arrives through the wake-up pipe."""


def main() -> None:
    """Become guard and rank; returns in the rank when its executor is closed."""
    become(int(sys.argv[1]), int(sys.argv[2]))
    end_process(0)


def become(control: int, parent: int) -> None:
    """What :func:`main` does, also in a process that was forked for it (runtime/fork_server.py).

    Args:
        parent: pid of the process that started this one.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to many; it is the controller's business
    os.set_inheritable(control, False)
    divide(control, parent)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    serve(socket.socket(fileno=control))


def serve(control: socket.socket) -> None:
    """Obey what comes through ``control`` until the executor is closed. Its end ends this process at once."""
    import multiprocessing
    import queue
    import threading

    from llamarl.runtime.commands import EXECUTOR_THREAD, HEAD, Kind, Obedient, frame

    multiprocessing.set_start_method("spawn", force=True)  # threads run here: a plain fork may deadlock
    threading.main_thread().name = EXECUTOR_THREAD
    orders: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    sending = threading.Lock()

    def send(kind: Kind, blob: bytes) -> None:
        try:
            with sending:
                control.sendall(frame(kind, blob))
        except OSError:  # the controller is gone, and with it everybody who could be told
            os._exit(1)

    obedient = Obedient()

    def listen() -> None:
        with control.makefile("rb") as stream:
            while len(head := stream.read(HEAD.size)) == HEAD.size:
                kind, size = HEAD.unpack(head)
                blob = stream.read(size)
                if kind == Kind.COMMAND:
                    orders.put(blob)
                else:
                    send(kind, obedient.answer(kind, blob))
        os._exit(1)

    send(Kind.HELLO, str(os.getpid()).encode())
    threading.Thread(target=listen, name="llamarl-diagnostics", daemon=True).start()
    while not obedient.closed:
        send(Kind.COMMAND, obedient.obey(orders.get()))


if __name__ == "__main__":
    main()
