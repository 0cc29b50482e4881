"""The worker process's end of the Monarch runtime: two actors in each process.

RankActor  ─▶ one thread of its own ─▶ Worker ─▶ executor        Witness: answers while that thread is stuck
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import random
import socket
from typing import Any

import cloudpickle
from monarch.actor import Actor, endpoint

from llamarl.runtime.process_watch import process_space
from llamarl.runtime.worker import Worker, capture, stack_of

__all__ = ["Hello", "RankActor", "Witness", "command_blob"]

_EXECUTOR_THREAD = "llamarl-executor"
_workers: list[Worker] = []
"""The worker of this process, once there is one: both actors reach it."""

Hello = tuple[int, str, str, int]
"""pid, the space in which it holds, an address of the host, and a port that is free there."""


def command_blob(executor: str, rank: int, doing: str, method: str, argument: Any) -> bytes:
    """An order to :class:`RankActor`. ``doing`` names it in a failure: ``tick 3``.

    The argument is pickled inside the pickle: one that cannot be read in the worker is then reported like any failure.
    """
    return cloudpickle.dumps((executor, rank, doing, method, cloudpickle.dumps(argument)))


class RankActor(Actor):
    """Runs orders one after another on a thread of its own, so that all calls to an executor come from one thread."""

    def __init__(self) -> None:
        self._thread = concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix=_EXECUTOR_THREAD)
        self._worker: Worker | None = None

    @endpoint
    async def hello(self) -> Hello:
        """Who and where this process is."""
        return os.getpid(), process_space(), _address(), _free_port()

    @endpoint
    async def command(self, blob: bytes) -> bytes:
        """Obey a :func:`command_blob`; the reply is a pickled result or ``RankFailure``."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._command, blob)

    def _command(self, blob: bytes) -> bytes:
        executor, rank, doing, method, argument = cloudpickle.loads(blob)
        try:
            argument = cloudpickle.loads(argument)
            if method == "setup":
                self._worker = Worker(argument)
                _workers.append(self._worker)
                return cloudpickle.dumps(self._worker.setup())
            if method == "close":
                return cloudpickle.dumps(self._worker.close() if self._worker is not None else ())
            assert method == "run" and self._worker is not None, f"{method} before setup"
            return cloudpickle.dumps(self._worker.run(argument))
        except BaseException as error:  # also SystemExit: an executor does not decide that its process ends
            return cloudpickle.dumps(capture(executor, rank, doing, error))


class Witness(Actor):
    """Hears and answers on the process's event loop while the executor's thread works or hangs."""

    @endpoint
    async def tell(self, blob: bytes) -> None:
        """Hand pickled ``News`` to this process's worker."""
        for worker in _workers:
            worker.tell(cloudpickle.loads(blob))

    @endpoint
    async def where(self) -> str:
        """The calls that the executor's thread is in now."""
        return stack_of(_EXECUTOR_THREAD)


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
