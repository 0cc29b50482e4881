"""Shows how far the executors are while nothing else is said: a thread asks, the console shows."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from llamarl.observability.console import ConsoleReporter

__all__ = ["LiveLines"]

_ENDS_S = 10.0
"""Longest wait for the thread: a question to the ranks is given up before."""


class LiveLines:
    """Asks every second where there is a live display, else after half a minute of silence, until it is closed.

    Args:
        ask: Executor -> what it is at, in words, of those at work; takes a few seconds at most.
    """

    def __init__(self, ask: Callable[[], Mapping[str, str]], console: ConsoleReporter) -> None:
        self._ask, self._console = ask, console
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="llamarl-live-lines", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Say no more. Idempotent."""
        self._closed.set()
        self._thread.join(_ENDS_S)

    def _run(self) -> None:
        while not self._closed.wait(self._console.silence_left_s()):
            if self._console.silence_left_s() <= 0 or self._console.is_live:
                found = self._ask()
                if not self._closed.is_set():
                    self._console.working(found)
