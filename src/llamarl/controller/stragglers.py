"""Which rank takes too long at a tick, compared with earlier ticks of its executor.

seconds of the last ticks ─▶ median x recovery.straggler_multiple ─▶ the limit of the tick that is out, after which its
executor is ended and does the tick again, as after any death

Only executors whose state before the tick is held are ended, so no other tick is repeated (trainer
and critic never are), and none for being slow at a tick that follows a start of their processes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median

from llamarl.controller.marking import Firing

__all__ = ["LEAST_S", "MIN_TICKS", "WINDOW", "Stragglers"]

MIN_TICKS = 3
"""Ticks that must have been seen before any is said to take too long."""
WINDOW = 20
"""How many of the last ones are looked at."""
LEAST_S = 10.0
"""Seconds below which no tick takes too long."""


class Stragglers:
    """Knows how long ticks of each executor usually take.

    Args:
        multiple: Of the median; a tick that takes longer takes too long.
        least_s: See ``LEAST_S``.
    """

    def __init__(self, *, multiple: float, least_s: float = LEAST_S) -> None:
        self._multiple, self._least_s = multiple, least_s
        self._seen: dict[tuple[str, bool], deque[float]] = {}
        self._started: dict[str, int] = {}
        """Executor -> the first tick that its present processes count: it includes their start."""

    def note(self, firing: Firing, seconds: float) -> None:
        """Remember how long a tick took."""
        self._seen.setdefault(_kind(firing), deque(maxlen=WINDOW)).append(seconds)

    def restarted(self, executor: str, tick: int) -> None:
        """Let an executor take its time at the tick with which its new processes begin."""
        self._started[executor] = tick

    def limits_s(self, busy: Mapping[str, Firing], replaceable: Mapping[str, int]) -> dict[str, float]:
        """Executor -> seconds after which its tick takes too long, for those that may be ended for it.

        Args:
            busy: Executor -> the tick that is out.
            replaceable: Executor -> the first tick that it would do again.
        """
        limits = {}
        for name, firing in busy.items():
            seen = self._seen.get(_kind(firing), ())
            if len(seen) >= MIN_TICKS and replaceable.get(name) == firing.tick > self._started.get(name, -1):
                limits[name] = max(self._least_s, self._multiple * median(seen))
        return limits


def _kind(firing: Firing) -> tuple[str, bool]:
    """Tell ticks with nothing to read apart, such as those of an evaluator between two evaluations."""
    return firing.executor, any(handle is not None for handles in firing.inputs.values() for handle in handles)
