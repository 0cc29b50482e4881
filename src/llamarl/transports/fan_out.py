"""Who reads a buffer from whom, so that its owner sends one copy however many hosts want it. Pure.

    owner ─▶ host 0 ─▶ host 1 ─▶ host 2 ─▶ ...        each passes a block on as soon as it has proved it

A chain keeps every link busy in one direction with one copy: R hosts take the time of one and that
of a block for each host between. Hosts join it in the order in which they ask, so nobody has to know
how many come, and whom a host reads from has always joined before it.

A reader that was brought up again, or came later, may be told of a copy whose process has ended. It
says so, and the chain begins anew: processes that pass on end together, as those of one executor do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Answer", "Relay", "join_chain"]


@dataclass(frozen=True)
class Relay:
    """One host that passes on what it reads."""

    space: str
    mirror: str
    """Where its copy lies, in words that its readers understand."""


@dataclass(frozen=True)
class Answer:
    """What a process that asked to join shall do."""

    relays: bool
    """It reads for its host, and passes on; otherwise another process of its space does."""
    mirror: str
    """Whose copy it reads: of the host before it, or of its own host; empty: the owner's buffer."""


def join_chain(chain: Sequence[Relay], newcomer: Relay, gone: str = "") -> tuple[list[Relay], Answer]:
    """Append ``newcomer`` to the chain, unless another process of its space is in it; and say what it shall do.

    Args:
        gone: The copy that it was told of before, and that is not there any more; empty: it was
            told of none.
    """
    if gone and any(relay.mirror == gone for relay in chain):  # else somebody has said so already
        chain = ()
    for relay in chain:
        if relay.space == newcomer.space:
            return list(chain), Answer(False, relay.mirror)
    return [*chain, newcomer], Answer(True, chain[-1].mirror if chain else "")
