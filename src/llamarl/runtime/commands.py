"""What passes between the controller and a rank, who asks, and who obeys.

    controller: Link                              rank's process
    command_blob(..., "run", Order) ─▶ COMMAND ─▶ executor's thread: Obedient.obey ─▶ Worker
    RankReport or RankFailure       ◀─ COMMAND ◀─
    News                            ─▶ TELL    ─▶ diagnostics thread: Worker.tell, while the executor works
    stack of the executor's thread  ◀─ WHERE   ◀─ diagnostics thread, while the executor works or hangs
    how far its tick has come       ◀─ PROGRESS ◀─ diagnostics thread, while the executor works

An executor's exception travels as a value (``RankFailure``). All are frames (llamarl/frames.py) on
bytes in order: a socket pair (:mod:`llamarl.runtime.local`), or what the agent of the rank's host
carries (:mod:`llamarl.runtime.hosts.launcher`).
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
from enum import IntEnum

import cloudpickle

from llamarl.frames import Frames, frame
from llamarl.progress import told
from llamarl.runtime.worker import Worker, capture, stack_of

__all__ = ["EXECUTOR_THREAD", "Kind", "Link", "Obedient", "command_blob"]

EXECUTOR_THREAD = "llamarl-executor"
_PIECE_BYTES = 1 << 18


class Kind(IntEnum):
    """Of a frame."""

    HELLO = 0
    """From the rank, once: its pid."""
    COMMAND = 1
    """To the rank a :func:`command_blob`; from it the pickled result or ``RankFailure``."""
    TELL = 2
    """To the rank: pickled ``News``. From it: a pickled ``RankFailure`` if it could not be handed over, else empty."""
    WHERE = 3
    """To the rank: empty. From it: the calls that the executor's thread is in, as text."""
    PROGRESS = 4
    """To the rank: empty. From it: how far its tick has come, as text (``llamarl.progress``)."""


def command_blob(executor: str, rank: int, doing: str, method: str, argument: bytes) -> bytes:
    """An order to :class:`Obedient`: ``setup``, ``run`` or ``close``. ``doing`` names it in a failure: ``tick 3``.

    The argument is pickled, once for all ranks: one that cannot be read in the worker is then reported like any failure.
    """
    return cloudpickle.dumps((executor, rank, doing, method, argument))


class Link:
    """The way to one rank's process; all on the io thread, but ``kill``. Subclasses write, read, watch and kill."""

    host = ""
    """Where the process is, as the user calls it; empty: on this machine."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Done when the process has ended: its cause, in words."""
        self._waiting: dict[Kind, collections.deque[asyncio.Future[bytes]]] = collections.defaultdict(collections.deque)
        self._greeted = False

    async def stopped(self) -> bool:
        """Whether the process waits since a signal has stopped it; False where nobody can tell. May never return."""
        raise NotImplementedError

    def kill(self, *, at_once: bool = False) -> None:
        """End the process and its children, if this machine can; ``at_once`` without asking its guard. Any thread."""
        raise NotImplementedError

    def _write(self, data: bytes) -> None:
        raise NotImplementedError

    def here_s(self, there_s: float) -> float:
        """A time on the ``time.monotonic`` of the rank's machine on that of this one."""
        return there_s

    async def command(self, blob: bytes) -> bytes:
        """Have a :func:`command_blob` carried out; the reply. Raises if the process ends before."""
        return await self._ask(Kind.COMMAND, blob)

    async def tell(self, blob: bytes) -> bytes:
        """Hand over pickled ``News`` while the executor works; a pickled ``RankFailure`` if it went wrong there."""
        return await self._ask(Kind.TELL, blob)

    async def where(self) -> str:
        """What the executor's thread is doing, in words. May never return."""
        if not self._greeted:
            return "start of its process"
        return (await self._ask(Kind.WHERE, b"")).decode()

    async def progress(self) -> str:
        """How far its tick has come, in words; empty: it does not say. May never return."""
        return (await self._ask(Kind.PROGRESS, b"")).decode() if self._greeted else ""

    async def _ask(self, kind: Kind, blob: bytes) -> bytes:
        """Answers of one kind come in the order of the questions."""
        if self.ended.done():
            raise ConnectionResetError(self.ended.result())
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[kind].append(answer)
        self._write(frame(kind, blob))
        return await answer

    async def read(self, reader: asyncio.StreamReader) -> None:
        frames = Frames()
        with contextlib.suppress(OSError):  # the end of the socket, which whoever watches explains
            while piece := await reader.read(_PIECE_BYTES):
                for number, blob in frames.feed(piece):
                    self._take(Kind(number), blob)

    def _take(self, kind: Kind, blob: bytes) -> None:
        if kind == Kind.HELLO:
            self._greeted, self.pid = True, int(blob)
            return
        answer = self._waiting[kind].popleft()
        if not answer.done():  # who asked may have given up
            answer.set_result(blob)

    def _end(self, cause: str) -> None:
        """The process has ended: tell those who wait for it, and those who wait for more of it."""
        if self.ended.done():
            return
        self.ended.set_result(cause)
        for answer in (answer for answers in self._waiting.values() for answer in answers):
            if not answer.done():
                answer.set_exception(ConnectionResetError(cause))


class Obedient:
    """Carries out commands in a rank's process."""

    def __init__(self) -> None:
        self._worker: Worker | None = None
        self._who = ("?", 0, "start of its process")
        self.closed = False
        """Whether the last order has been carried out."""

    def obey(self, blob: bytes) -> bytes:
        """Obey a :func:`command_blob`; the reply is a pickled result or ``RankFailure``. All calls
        come from one thread."""
        executor, rank, doing, method, argument = cloudpickle.loads(blob)
        self._who = executor, rank, doing
        try:
            argument = cloudpickle.loads(argument)
            if method == "setup":
                self._worker = Worker(argument)
                return cloudpickle.dumps(self._worker.setup())
            if method == "close":
                self.closed = True
                return cloudpickle.dumps(self._worker.close() if self._worker is not None else ())
            assert method == "run" and self._worker is not None, f"{method} before setup"
            return cloudpickle.dumps(self._worker.run(argument))
        except BaseException as error:  # also SystemExit: an executor does not decide that its process ends
            return cloudpickle.dumps(capture(executor, rank, doing, error))

    def tell(self, blob: bytes) -> bytes:
        """Hand over pickled ``News``, on any thread; returns a pickled ``RankFailure`` if that failed, else nothing."""
        try:
            if self._worker is not None:
                self._worker.tell(cloudpickle.loads(blob))
            return b""
        except Exception as error:
            return cloudpickle.dumps(capture(*self._who, error))

    def where(self) -> str:
        """The calls that the executor's thread is in now. On any thread."""
        return stack_of(EXECUTOR_THREAD)

    def answer(self, kind: Kind, blob: bytes) -> bytes:
        """What the diagnostics thread says to a frame of a kind other than COMMAND."""
        if kind == Kind.TELL:
            return self.tell(blob)
        return (told() if kind == Kind.PROGRESS else self.where()).encode()
