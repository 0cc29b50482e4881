"""What to do when processes die: which executors are brought up again, from which state, and which tick they do again. Pure.

    deaths ─▶ Recovery.decide(marking, deaths) ─▶ Redo: executor, incarnation, state after tick k - 1, order of tick k
                                               └▶ text: why the run ends instead

A tick that has *counted* is never done again: a report counts when it is of the executor's present incarnation and what it names
(its tokens, the state after it) is held outside of the process that made it. Whatever else a dead process did is as if it had not
been: its tick is in ``marking.busy`` still, its input tokens lie on their edges, and the state before it is held. So the answer to
any set of deaths is the same for each executor that lost a process, in whatever moment it did: bring it up anew, whole, with the
state after the last tick that counted, and give it the order that was out, if one was. docs/survival.md proves that this ends in the
same marking and the same bits; tests explore every interleaving of deaths with it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from llamarl.controller.marking import Firing, Marking
from llamarl.runtime.base import Death

__all__ = ["Recovery", "Redo"]


@dataclass(frozen=True, kw_only=True)
class Redo:
    """An executor to bring up again, whole."""

    executor: str
    incarnation: int
    """Of its new processes; what the earlier ones still say is ignored."""
    first_tick: int
    """Its next tick. It is given the state after the tick before, which is that of the run's beginning if none has counted."""
    firing: Firing | None
    """The order that was out, with what its input tokens are now; None: it waited for one."""
    death: Death
    """What is answered by this."""

    def describe(self) -> str:
        """For the console."""
        death, again = self.death, "" if self.firing is None else f", tick {self.firing.tick} is done again"
        return (
            f"{self.executor!r} rank {death.rank} died ({death.doing}): {death.cause}; brought up again "
            f"(restart {self.incarnation}){again}"
        )


@dataclass(frozen=True)
class _Attempt:
    at_s: float
    tick: int
    death: Death

    def line(self, now_s: float) -> str:
        died = f"{self.death.executor!r} rank {self.death.rank}, {self.death.doing} (next tick {self.tick})"
        return f"  {max(0.0, now_s - self.at_s):.0f} s ago: {died}: {self.death.cause}"


class Recovery:
    """The rule, and the memory that it needs.

    Args:
        max_restarts: Most of them within ``window_s``; 0: a death ends the run.
        window_s: Seconds.
    """

    def __init__(self, *, max_restarts: int, window_s: float) -> None:
        self._max_restarts = max_restarts
        self._window_s = window_s
        self._incarnations: dict[str, int] = {}
        self._attempts: list[_Attempt] = []

    def incarnation(self, executor: str) -> int:
        """Of its present processes; 0 at first."""
        return self._incarnations.get(executor, 0)

    @property
    def num_restarts(self) -> Mapping[str, int]:
        """Executor -> how often it was brought up again; those that never were are left out."""
        return self._incarnations

    def counts(self, executor: str, incarnation: int, *, held: bool) -> bool:
        """Whether a report is taken.

        Args:
            held: Whether its tokens, and the state after its tick, outlive the process that made them.
        """
        return held and incarnation == self.incarnation(executor)

    def decide(
        self, marking: Marking, deaths: Sequence[Death], *, replaceable: Collection[str], now_s: float
    ) -> tuple[Redo, ...] | str:
        """What brings the job back after processes have died together.

        Args:
            marking: As it is, with the ticks of the dead as busy as they were.
            replaceable: Executors of which the state after their last tick that counted, and all that others may still read of
                them, is held outside of their processes.
            now_s: On any clock that goes on.

        Returns:
            One ``Redo`` for each executor that has lost a process of its present incarnation, in the graph's order; or why the
            run ends, in words. Then nothing is remembered.
        """
        fresh = {death.executor: death for death in reversed(deaths) if self._is_of_now(death)}  # the first of each
        lost = [fresh[spec.name] for spec in marking.graph.executors if spec.name in fresh]
        attempts = [_Attempt(now_s, marking.done_ticks[death.executor], death) for death in lost]
        if lost and (why := self._why_not(attempts, replaceable, now_s)):
            return why
        self._attempts += attempts
        redo = []
        for death in lost:
            self._incarnations[death.executor] = self.incarnation(death.executor) + 1
            redo.append(
                Redo(
                    executor=death.executor,
                    incarnation=self._incarnations[death.executor],
                    first_tick=marking.done_ticks[death.executor],
                    firing=marking.refire(death.executor),
                    death=death,
                )
            )
        return tuple(redo)

    def _is_of_now(self, death: Death) -> bool:
        return death.incarnation == self.incarnation(death.executor)

    def _why_not(self, attempts: Sequence[_Attempt], replaceable: Collection[str], now_s: float) -> str:
        """Why these deaths end the run; empty: they do not."""
        if not self._max_restarts:
            return "recovery.max_restarts is 0: a death ends the run"
        for attempt in attempts:
            name = attempt.death.executor
            if name not in replaceable:
                return f"{name!r} is not brought up again: what it held is not held elsewhere"
        same = [
            attempt
            for attempt in attempts
            if any(_same(attempt, earlier) for earlier in self._attempts)
        ]  # fmt: skip
        recent = [attempt for attempt in self._attempts if now_s - attempt.at_s <= self._window_s]
        if same:
            why = "the same death at the same tick for the second time: it would come a third time"
        elif len(recent) + len(attempts) > self._max_restarts:
            why = (
                f"more than recovery.max_restarts = {self._max_restarts} restarts within "
                f"recovery.window_s = {self._window_s:g} s"
            )
        else:
            return ""
        lines = [attempt.line(now_s) for attempt in (*self._attempts, *attempts)]
        return "\n".join([f"{why}. Deaths of this run:", *lines])


def _same(one: _Attempt, other: _Attempt) -> bool:
    mine, theirs = one.death, other.death
    return (mine.executor, one.tick, mine.doing, mine.cause) == (
        theirs.executor,
        other.tick,
        theirs.doing,
        theirs.cause,
    )
