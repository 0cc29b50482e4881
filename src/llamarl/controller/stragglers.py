"""When a tick takes too long, compared with what ticks of its executor usually take. Pure.

seconds of an executor's last ticks ─▶ median ─▶ times recovery.straggler_multiple, and a floor ─▶ seconds after which a tick straggles
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from statistics import median

__all__ = ["MIN_TICKS", "WINDOW", "Stragglers", "straggles_after_s"]

MIN_TICKS = 3
"""Ticks that must have been seen before any is said to take too long."""
WINDOW = 20
"""How many of the last ones are looked at."""


def straggles_after_s(seconds: Sequence[float], *, multiple: float, least_s: float) -> float | None:
    """Seconds after which a tick takes too long; None: too few have been seen.

    Args:
        seconds: Of earlier ticks of its kind, oldest first.
        multiple: Of their median.
        least_s: Below this no tick takes too long.
    """
    if len(seconds) < MIN_TICKS:
        return None
    return max(least_s, multiple * median(seconds[-WINDOW:]))


class Stragglers:
    """What ticks usually take, by kind: those of one executor, with and without something to read.

    Args:
        multiple, least_s: See :func:`straggles_after_s`.
    """

    def __init__(self, *, multiple: float, least_s: float) -> None:
        self._multiple, self._least_s = multiple, least_s
        self._seen: dict[Hashable, deque[float]] = {}

    def note(self, kind: Hashable, seconds: float) -> None:
        """A tick has counted."""
        self._seen.setdefault(kind, deque(maxlen=WINDOW)).append(seconds)

    def usual_s(self, kind: Hashable) -> float:
        """The median of those that have been noted, of which there is one at least."""
        return median(self._seen[kind])

    def after_s(self, kind: Hashable) -> float | None:
        """Seconds after which a tick of this kind takes too long; None: that is not known yet."""
        return straggles_after_s([*self._seen.get(kind, ())], multiple=self._multiple, least_s=self._least_s)
