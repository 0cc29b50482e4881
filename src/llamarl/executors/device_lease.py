"""An executor's lease of a device that it shares (``schedule.colocated``): memory taken before the
work, given back after.

    order k ─▶ take: unpark ─▶ the tick's work ─▶ give_back: park ─▶ report k ─▶ the other one's order

The report leaves after the memory is free, and the order for the other executor comes after the
report; so at no time do both hold theirs, with nothing to wait for and no lock.
"""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["DeviceLease"]


class _Parks(Protocol):
    def park(self) -> int: ...
    def unpark(self) -> None: ...


class DeviceLease:
    """Of ``owner``, which has just been set up; it is parked from then on between ticks.

    Args:
        name: The executor's, for the metrics.
        parked: The owner came up without its memory.
    """

    def __init__(self, name: str, owner: _Parks, *, parked: bool = False) -> None:
        self._name = name
        self._owner = owner
        self._spans: list[tuple[str, float, float]] = []
        self._bytes = 0
        if not parked:
            self._bytes = owner.park()

    def take(self) -> None:
        """Before the tick's work."""
        started = time.monotonic()
        self._owner.unpark()
        self._spans = [("unpark", started, time.monotonic())]

    def give_back(self) -> None:
        """After it, when nobody reads the memory any more."""
        started = time.monotonic()
        self._bytes = self._owner.park()
        self._spans.append(("park", started, time.monotonic()))

    @property
    def spans(self) -> tuple[tuple[str, float, float], ...]:
        """Of the tick, for the trace."""
        return tuple(self._spans)

    @property
    def metrics(self) -> dict[str, float]:
        """Of the tick: seconds spent on parking, and the bytes that were given back at its end."""
        return {
            "time/park_s": sum(end - start for _, start, end in self._spans),
            f"memory/{self._name}_parked_bytes": float(self._bytes),
        }
