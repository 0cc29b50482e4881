"""A rank's process on another host, under Monarch: ``python -m llamarl.runtime.monarch_worker``, and its two actors.

    RankActor          ─▶ one thread of its own ─▶ Obedient ─▶ Worker
    DiagnosticsActor   serves news and stack dumps while that thread works or hangs

Before Monarch's own main takes over, Ctrl-C is ignored (it is the controller's business) and output goes to the pipes that the
controller reads, if it runs on the same machine.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import multiprocessing
import os
import random
import signal
import socket
import sys

from monarch.actor import Actor, endpoint

from llamarl.runtime.commands import EXECUTOR_THREAD, Obedient

__all__ = ["OUTPUT_PREFIX", "DiagnosticsActor", "Hello", "RankActor", "main"]

OUTPUT_PREFIX = "LLAMARL_OUTPUT_PREFIX"
"""Environment variable: path prefix of the named pipes ``.stdout`` and ``.stderr``. On another machine they are not there, and
output goes where Monarch's host process sends its own (a Slurm job's log, say)."""

Hello = tuple[int, str, int]
"""pid, an address of the host, and a port that is free there."""

_obedient = Obedient()
"""Of this process: both actors reach it."""


class RankActor(Actor):
    """Runs orders one after another on a thread of its own, so that all calls to an executor come from one thread."""

    def __init__(self) -> None:
        self._thread = concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix=EXECUTOR_THREAD)

    @endpoint
    async def hello(self) -> Hello:
        """Who and where this process is."""
        return os.getpid(), _address(), _free_port()

    @endpoint
    async def command(self, blob: bytes) -> bytes:
        """See :meth:`Obedient.obey`."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, _obedient.obey, blob)


class DiagnosticsActor(Actor):
    """Answers on the process's event loop while the executor's thread works or hangs."""

    @endpoint
    async def tell(self, blob: bytes) -> bytes:
        """See :meth:`Obedient.tell`."""
        return _obedient.tell(blob)

    @endpoint
    async def where(self) -> str:
        """See :meth:`Obedient.where`."""
        return _obedient.where()


def main() -> None:
    """Never returns."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    prefix = os.environ.pop(OUTPUT_PREFIX, "")
    if os.path.exists(f"{prefix}.stdout"):
        for stream, fd in (("stdout", 1), ("stderr", 2)):
            pipe = os.open(f"{prefix}.{stream}", os.O_WRONLY)
            os.dup2(pipe, fd)
            os.close(pipe)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    multiprocessing.set_start_method("spawn", force=True)  # Monarch runs threads: a plain fork may deadlock
    from monarch._src.actor.bootstrap_main import invoke_main

    invoke_main()


def _address() -> str:
    """An address at which other hosts reach this one; the loopback where the host's name leads nowhere."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"


def _free_port() -> int:
    """A port below the range from which the kernel serves outgoing connections, so none of them can take it."""
    for _ in range(100):
        port = random.SystemRandom().randrange(20000, 32000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise AssertionError("no free port among 100 tried between 20000 and 32000")


if __name__ == "__main__":
    main()
