"""Main module of a rank's process: ``python -P -m llamarl.runtime.rank_process CONTROL CONTROLLER NAME``.

    guard          see llamarl.process_tree
    └─ rank        main thread          obeys orders, one after another: all calls to an executor come from it
                   diagnostics thread   reads the control socket, answers for the executor while it works or hangs

``CONTROL`` is the number of an inherited file descriptor, one end of a socket pair: nothing listens
anywhere, so nobody but the controller can talk to a rank. ``CONTROLLER`` is the pid of the process
that must be the parent (for a rank that was forked, its fork server, which ends with the
controller); ``NAME`` is for who looks at ``ps``. Nothing above :func:`serve` imports anything
large: the guard would hold it too.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys

from llamarl.process_tree import divide, end_process, show_as

__all__ = ["become", "main", "serve"]

_PIECE_BYTES = 1 << 20


def main() -> None:
    """Become guard and rank; returns in the rank when its executor is closed."""
    become(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
    end_process(0)


def become(control: int, parent: int, name: str) -> None:
    """What :func:`main` does, also in a process that was forked for it (runtime/fork_server.py).

    Args:
        control: Descriptor of the control socket.
        parent: pid of the process that started this one.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to many; it is the controller's business
    os.set_inheritable(control, False)
    show_as(name)
    divide(control, parent)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    serve(socket.socket(fileno=control))


def serve(control: socket.socket) -> None:
    """Obey what comes through ``control`` until the executor is closed. Its end ends this process at once."""
    import multiprocessing
    import queue
    import threading

    from llamarl.frames import Frames, frame
    from llamarl.runtime.commands import EXECUTOR_THREAD, Kind, Obedient

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
        frames = Frames()
        with contextlib.suppress(OSError):  # as good as its end
            while piece := control.recv(_PIECE_BYTES):
                for number, blob in frames.feed(piece):
                    kind = Kind(number)
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
