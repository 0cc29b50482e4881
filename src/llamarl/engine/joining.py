"""Before which engine step a reply of an environment joins. Pure.

    exact      the stated number of steps after it was asked for: no clock decides             ``StatedStep``
    latest     the first step at which it has arrived; nobody else waits for it                ``OnArrival``
    a replay   the step that the event log says                                                ``AsLogged``

Whatever joins before one step joins in the order of (prompt, sample); ``StatedStep`` puts the steps
at which they were due before that. ``OnArrival`` decides by the clock, so what it decides is a
``Join``, which the event log keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from llamarl.errors import EventLogError

__all__ = ["AsLogged", "Awaited", "Join", "Key", "OnArrival", "StatedStep"]

Key = tuple[int, int]
"""Prompt index and sample index."""


class Join(NamedTuple):
    """One reply that joined."""

    step: int
    """Engine step of the tick before which it did."""
    prompt_index: int
    sample_index: int
    turn: int
    """Which turn of the episode it answers, from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Awaited:
    """What a rule knows of a sequence that waits for its reply."""

    due: int
    """Step of the run before which it joins, where steps are stated."""
    turn: int
    arrived: Callable[[], bool]


class StatedStep:
    """Counts engine steps over the whole run, and jumps over those in which nobody would write."""

    def __init__(self) -> None:
        self.now = 0

    def stepped(self) -> None:
        self.now += 1

    def choose(self, step: int, awaited: Mapping[Key, Awaited], *, idle: bool) -> Sequence[Key]:
        """Whose replies join before the next engine step, in order; one that has not arrived is waited for.

        Args:
            step: Of the tick, from 0.
            idle: Nobody is left to write. Then at least one is chosen, where there is any.
        """
        if idle and awaited:
            self.now = max(self.now, min(one.due for one in awaited.values()))
        return [key for _, key in sorted((one.due, key) for key, one in awaited.items() if one.due <= self.now)]


class OnArrival:
    """
    Args:
        agree: Of ranks that play the same, what one of them has seen, on all of them.
    """

    def __init__(self, agree: Callable[[Sequence[bool]], Sequence[bool]] = list) -> None:
        self._agree = agree

    def choose(self, step: int, awaited: Mapping[Key, Awaited], *, idle: bool) -> Sequence[Key]:
        keys = sorted(awaited)
        arrived = self._agree([awaited[key].arrived() for key in keys]) if keys else ()
        return [key for key, there in zip(keys, arrived, strict=True) if there]


class AsLogged:
    """Repeats one tick.

    Args:
        joins: Of the tick.
    """

    def __init__(self, joins: Sequence[Join]) -> None:
        self._at: dict[int, list[Join]] = {}
        for join in joins:
            self._at.setdefault(join.step, []).append(join)

    def choose(self, step: int, awaited: Mapping[Key, Awaited], *, idle: bool) -> Sequence[Key]:
        """As ``StatedStep.choose``.

        Raises:
            EventLogError: The log does not fit what waits: the replay has parted from its run.
        """
        joins = self._at.get(step, [])
        if idle and awaited and not joins:
            raise EventLogError(
                f"the replay parts from its log: nobody is left to write at step {step}, and no reply joins"
            )
        for join in joins:
            one = awaited.get((join.prompt_index, join.sample_index))
            if one is None or one.turn != join.turn:
                raise EventLogError(
                    f"the replay parts from its log: at step {step} the reply to turn {join.turn} of sample "
                    f"{join.prompt_index}/{join.sample_index} joined, for which nobody waits"
                )
        return [(join.prompt_index, join.sample_index) for join in joins]
