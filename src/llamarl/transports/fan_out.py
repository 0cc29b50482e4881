"""Who reads a buffer from whom, so that its owner sends few copies however many hosts want it. Pure.

    owner ─▶ host 0 ─▶ host 1 ─▶ ... ─▶ host 255        each passes a block on as soon as it has proved it
                                          ├─▶ host 256 ─▶ ...
                                          └─▶ host 257 ─▶ ...        below the chain two readers a host

A chain keeps every link busy in one direction with one copy: R hosts take the time of one and that
of a block for each host between. That beats a tree, whose inner hosts send two copies, until the
chain has as many hosts as a version has blocks; from there on a binary tree adds the logarithm of
what remains. Hosts are seated in the order in which they ask, so nobody has to know how many come,
and whom a host reads from is always seated before it.

A reader that was brought up again, or came later, may be told of a copy whose process has ended. It
says so, and all are seated anew: processes that pass on end together, as those of one executor do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["CHAIN", "Answer", "Seat", "hops", "reads_from", "take_seat"]

CHAIN = 256
"""Hosts that read one from another before the tree begins."""


@dataclass(frozen=True)
class Seat:
    """One host that passes on what it reads."""

    space: str
    mirror: str
    """Where its copy lies, in words that its readers understand."""


@dataclass(frozen=True)
class Answer:
    """What a process that asked for a seat shall do."""

    relays: bool
    """It reads for its host, and passes on; otherwise another process of its space does."""
    mirror: str
    """Whose copy it reads: of the host before it, or of its own host; empty: the owner's buffer."""


def reads_from(seat: int) -> int | None:
    """The seat whose copy ``seat`` reads; None: the owner's own buffer."""
    if seat == 0:
        return None
    if seat < CHAIN:
        return seat - 1
    return CHAIN - 1 + (seat - CHAIN) // 2


def hops(seat: int) -> int:
    """Links between the owner and ``seat``."""
    count, at = 1, reads_from(seat)
    while at is not None:
        count, at = count + 1, reads_from(at)
    return count


def take_seat(seats: Sequence[Seat], newcomer: Seat, gone: str = "") -> tuple[list[Seat], Answer]:
    """The seats with ``newcomer``, who is the next if nobody of its space sits yet, and what it shall do.

    Args:
        gone: The copy that it was told of before, and that is not there any more; empty: it was told of none.
    """
    if gone and any(seat.mirror == gone for seat in seats):  # else somebody has said so already
        seats = ()
    for seat in seats:
        if seat.space == newcomer.space:
            return list(seats), Answer(False, seat.mirror)
    before = reads_from(len(seats))
    return [*seats, newcomer], Answer(True, "" if before is None else seats[before].mirror)
