"""Two monotonic clocks that began at different times: how far one is ahead of the other. Pure.

    sent ──────▶ there (host's clock) ──────▶ received        ahead = there - (sent + received) / 2, wrong by at most half the way

Of several pings the quickest is the one to believe. The clocks of two hosts run apart by some tens
of microseconds a second, so it is measured again each minute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["EVERY_S", "PINGS", "Offset", "Ping", "best_offset"]

PINGS = 5
EVERY_S = 60.0


@dataclass(frozen=True)
class Ping:
    """One question for the time and its answer, in seconds."""

    sent_s: float
    there_s: float
    received_s: float


@dataclass(frozen=True)
class Offset:
    """How to read a host's clock here."""

    ahead_s: float = 0.0
    """The host's ``time.monotonic`` less the controller's."""
    within_s: float = 0.0
    """It may be wrong by so much."""

    def here_s(self, there_s: float) -> float:
        """A time of the host's on the controller's clock."""
        return there_s - self.ahead_s


def best_offset(pings: Sequence[Ping]) -> Offset:
    """From the quickest of ``pings``, of which there is at least one."""
    best = min(pings, key=lambda ping: ping.received_s - ping.sent_s)
    return Offset(
        ahead_s=best.there_s - (best.sent_s + best.received_s) / 2, within_s=(best.received_s - best.sent_s) / 2
    )
