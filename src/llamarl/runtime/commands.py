"""What passes between the controller and a rank, and who obeys it there.

    controller                                    rank's process
    command_blob(..., "run", Order) ─▶ COMMAND ─▶ executor's thread: Obedient.obey ─▶ Worker
    RankReport or RankFailure       ◀─ COMMAND ◀─
    News                            ─▶ TELL    ─▶ diagnostics thread: Worker.tell, while the executor works
    stack of the executor's thread  ◀─ WHERE   ◀─ diagnostics thread, while the executor works or hangs
    how far its tick has come       ◀─ PROGRESS ◀─ diagnostics thread, while the executor works

An executor's exception travels as a value (``RankFailure``). How the bytes get there is the link's
business: frames on a socket (:mod:`llamarl.runtime.local`).
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Any

import cloudpickle

from llamarl.progress import told
from llamarl.runtime.worker import Worker, capture, stack_of

__all__ = ["EXECUTOR_THREAD", "HEAD", "Kind", "Obedient", "command_blob", "frame"]

EXECUTOR_THREAD = "llamarl-executor"
HEAD = struct.Struct("!BQ")
"""Before each frame on a socket: its kind, and the bytes that follow."""


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


def frame(kind: Kind, blob: bytes) -> bytes:
    """``blob`` as it goes over a socket."""
    return HEAD.pack(kind, len(blob)) + blob


def command_blob(executor: str, rank: int, doing: str, method: str, argument: Any) -> bytes:
    """An order to :class:`Obedient`: ``setup``, ``run`` or ``close``. ``doing`` names it in a failure: ``tick 3``.

    The argument is pickled inside the pickle: one that cannot be read in the worker is then reported like any failure.
    """
    return cloudpickle.dumps((executor, rank, doing, method, cloudpickle.dumps(argument)))


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
