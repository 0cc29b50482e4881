"""Which policy version the generator serves, and from which decode step on.

    before each engine step:  Moment (tick, step, version served, newest there is) ─▶ SwapPolicy ─▶ version to serve

A policy sees plain numbers and returns one. The plain one decides live and is all of ``schedule.weights = "latest"``;
``Logged`` decides as an event log says, which makes a run that repeats. It also says when replies
of environments joined (``engine/joining.py``). What a tick decided is a ``TickEvent``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from llamarl.engine.joining import Join
from llamarl.errors import EventLogError
from llamarl.observability.events import REPLAY_FILE, TickEvent, ranges, read_events
from llamarl.types import Group

__all__ = ["Logged", "Moment", "SwapPolicy", "digest_of", "swap_policy", "tick_event"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What is known before an engine step."""

    tick: int
    step: int
    """Engine steps of this tick so far."""
    serving: int
    """Version in use; at step 0 that of the tick before."""
    newest: int
    """Newest version that has arrived; never older than ``serving``."""


class SwapPolicy:
    """Takes every version, and every reply of an environment, as soon as it is there."""

    def choose(self, moment: Moment) -> int:
        """The version to serve from this step on: ``moment.serving``, or a later one that has arrived."""
        return moment.newest

    def joins(self, tick: int) -> Sequence[Join] | None:
        """Before which steps of a tick replies of environments join; None: as soon as they have arrived."""
        return None

    def check(self, event: TickEvent) -> None:
        """Hear what a finished tick came to.

        Raises:
            EventLogError: It is not what the log says.
        """


class Logged(SwapPolicy):
    """Repeats the decisions of one rank.

    Args:
        events: Tick -> what that rank decided.
    """

    def __init__(self, events: Mapping[int, TickEvent], source: Path) -> None:
        self._events = events
        self._source = source

    def choose(self, moment: Moment) -> int:
        version = dict(self._of(moment.tick).swaps).get(moment.step, moment.serving)
        assert version <= moment.newest, f"{moment}: the log wants version {version}"
        return version

    def joins(self, tick: int) -> Sequence[Join] | None:
        return [Join(*join) for join in self._of(tick).joins]

    def check(self, event: TickEvent) -> None:
        logged = self._of(event.tick)
        for name in ("steps", "swaps", "joins", "delivered", "digest"):
            if getattr(logged, name) != getattr(event, name):
                raise EventLogError(
                    f"the replay parts from {self._source} at tick {event.tick}, generator rank {event.rank}: {name} "
                    f"was {getattr(logged, name)!r}, is {getattr(event, name)!r}. Bits depend on processor, thread "
                    f"counts and library versions, and on reward time limits: replay where the run was made"
                )

    def _of(self, tick: int) -> TickEvent:
        event = self._events.get(tick)
        if event is None:
            raise EventLogError(f"{self._source} holds no decisions of tick {tick}")
        return event


def swap_policy(run_dir: Path | None, rank: int, *, num_ticks: int) -> SwapPolicy:
    """``Logged`` in a run that repeats another one (its folder holds that one's log), else a plain ``SwapPolicy``."""
    if run_dir is None or not (run_dir / REPLAY_FILE).exists():
        return SwapPolicy()
    path = run_dir / REPLAY_FILE
    events = read_events(path, num_ticks=num_ticks)
    return Logged({tick: event for (tick, r), event in events.items() if r == rank}, path)


def tick_event(
    tick: int,
    rank: int,
    swaps: Sequence[tuple[int, int]],
    steps: int,
    groups: Sequence[Group],
    joins: Sequence[Join] = (),
) -> TickEvent:
    """What a finished tick decided and came to."""
    return TickEvent(
        tick=tick,
        rank=rank,
        swaps=tuple(swaps),
        steps=steps,
        delivered=ranges([group.prompt.index for group in groups]),
        digest=digest_of(groups),
        joins=tuple((join.step, join.prompt_index, join.sample_index, join.turn) for join in joins),
    )


def digest_of(groups: Sequence[Group]) -> str:
    """64 bits over every token with its log-probability and version."""
    digest = xxhash.xxh3_64()
    for response in (response for group in groups for response in group.responses):
        for values in (response.tokens, response.behavior_logprobs, response.policy_versions):
            digest.update(np.ascontiguousarray(values).tobytes())
    return digest.hexdigest()
