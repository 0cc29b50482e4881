"""The plans that are on their way through an engine's pipeline stages.

Two stages, waves a b c ..., each some of the sequences; D: the stage takes the draws of the oldest wave, and its sequences can be
in a plan again::

    stage 0   a  b  Da c  Db d  Dc e
    stage 1      a  Da b  Db c  Dc d

On every stage a step begins a wave and, once there are as many as stages, ends the oldest; all are dropped together at the end.
That is a rule by count, so the stages make the same plans however fast each of them is. With one stage a wave ends in the step
that began it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from llamarl.engine.expert_record import Experts
from llamarl.engine.sampler import Draws
from llamarl.engine.scheduler import Member, StepPlan
from llamarl.engine.stage_links import StageLinks

__all__ = ["Wave", "Waves", "sampled_rows"]


@dataclass(frozen=True, slots=True)
class Wave:
    """A plan that this stage has computed."""

    plan: StepPlan
    rows: Sequence[tuple[Member, int]]
    """As ``sampled_rows`` says."""
    experts: Sequence[Experts] | None
    """Of each chunk, where they are noted."""


class Waves:
    """Those that have begun and not ended, oldest first.

    Args:
        most: So many at once; as many as stages.
        links: To the other stages; None: there are none.
    """

    def __init__(self, most: int, links: StageLinks | None) -> None:
        self._most, self._links = most, links
        self._under_way: deque[tuple[Wave, Draws | None]] = deque()

    def __bool__(self) -> bool:
        return bool(self._under_way)

    @property
    def full(self) -> bool:
        """Whether one must end before another begins."""
        return len(self._under_way) >= self._most

    @property
    def drawing(self) -> Collection[int]:
        """Admission numbers of the sequences for which tokens are being drawn."""
        return {member.order for wave, _ in self._under_way for member, _ in wave.rows}

    def begin(self, wave: Wave, draws: Draws | None) -> None:
        """
        Args:
            draws: Of its rows; None on a stage that does not sample, and where there are no rows.
        """
        if draws is not None and self._links is not None:
            self._links.send_draws(draws)
        self._under_way.append((wave, draws))

    def end_oldest(self) -> tuple[Wave, Draws | None]:
        """It with its draws, waited for if another stage makes them; None: it has no rows."""
        wave, draws = self._under_way.popleft()
        if wave.rows and self._links is not None and not self._links.is_last:
            draws = self._links.receive_draws(len(wave.rows))
        if self._links is not None and not self._under_way:
            self._links.finish()  # nothing may be left to send when the last sequence has ended: its process may end too
        return wave, draws

    def drop(self) -> list[Wave]:
        """End all and return them; nobody wants their draws. They will be drawn again, by the same numbers."""
        dropped = []
        while self._under_way:
            dropped.append(self.end_oldest()[0])
        return dropped


def sampled_rows(plan: StepPlan) -> list[tuple[Member, int]]:
    """The rows that are sampled: of which sequence, and how many tokens ahead of those that it has."""
    ahead: dict[int, int] = {}
    rows = []
    for member, _ in plan.samples:
        rows.append((member, ahead.get(member.order, 0)))
        ahead[member.order] = rows[-1][1] + 1
    return rows
