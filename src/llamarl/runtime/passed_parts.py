"""Parts of a tick on their way from the ranks that made them to those who may work ahead on them (``schedule.parts``).

    source's rank, inside its tick            controller's io thread                   sink's ranks, between two ticks
    Worker.send_part ─▶ PART: PartMade ─────▶ PartsHeard: of all ranks? ─▶ PartOrder ─▶ Worker.take_part

Nobody waits for a part, and the marking, the journal and the repeating of ticks know nothing of it: what a part holds comes again
with the whole tick, which decides (``tick_parts.py``). Commands to a rank are obeyed in order, so a part that comes while the tick
before is at work is taken after it, and before its own tick.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from llamarl.channels.base import ChannelSpec, Handle

__all__ = ["PartMade", "PartOrder", "PartsHeard", "parts_channel"]


@dataclass(frozen=True, kw_only=True)
class PartMade:
    """A rank has sent its share of a part."""

    executor: str
    """The sink."""
    channel: str
    tick: int
    part: int
    handle: Handle


@dataclass(frozen=True, kw_only=True)
class PartOrder:
    """Work ahead on this, if it is next."""

    channel: str
    tick: int
    part: int
    handles: tuple[Handle, ...]
    """One a source rank."""


def parts_channel(channel: ChannelSpec, num_parts: int) -> ChannelSpec:
    """The channel on which the parts of a channel's tokens go: its slots hold those of as many ticks as lie on it and of the one that is
    being made. One that is read too late is found out, and passed over."""
    return replace(channel, capacity=num_parts * (channel.capacity + 1) - 1, kept=False)


class PartsHeard:
    """Which shares of parts are there. Pure.

    Args:
        num_ranks: Executor -> its ranks now.
    """

    def __init__(self, num_ranks: Callable[[str], int]) -> None:
        self._num_ranks = num_ranks
        self._shares: dict[tuple[str, int], dict[tuple[int, int], dict[int, Handle]]] = {}
        """Channel and incarnation of its source -> tick and part -> rank -> its share."""

    def hear(self, source: str, rank: int, incarnation: int, made: PartMade) -> PartOrder | None:
        """Take what a rank has told; the order if that was the last of the part's shares."""
        of_source = self._shares.setdefault((made.channel, incarnation), {})
        for other in [place for place in of_source if place[0] < made.tick]:
            del of_source[other]
        shares = of_source.setdefault((made.tick, made.part), {})
        shares[rank] = made.handle
        if len(shares) < self._num_ranks(source):
            return None
        del of_source[made.tick, made.part]
        handles = tuple(shares[rank] for rank in sorted(shares))
        return PartOrder(channel=made.channel, tick=made.tick, part=made.part, handles=handles)
