"""Ctrl-C in two steps: the first has the job end at the next tick that all executors can save, the second at once."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType

__all__ = ["StopRequest"]

_STOPPING = b"\nstopping after the next tick that can be saved; Ctrl-C once more stops at once\n"


class StopRequest:
    """Whether the user has asked for the job to stop, while a ``with`` block lasts in the main thread;
    elsewhere, and where somebody else handles Ctrl-C, nothing changes."""

    def __init__(self) -> None:
        self._asked = False

    def __enter__(self) -> StopRequest:
        self._handles = (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        )
        if self._handles:
            signal.signal(signal.SIGINT, self._ask)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._handles:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def take(self) -> bool:
        """Whether the user has asked since this was last asked."""
        asked, self._asked = self._asked, False
        return asked

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.write(2, _STOPPING)  # a stream may be in the middle of a line
