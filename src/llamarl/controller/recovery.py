"""What to do when processes die: which executors are brought up again, from which state, and which
tick they do again. Pure.

    deaths ─▶ Recovery.decide(marking, deaths) ─▶ Redo: executor, incarnation, state after tick k - 1, order of tick k
                                               └▶ text: why the run ends instead

A tick that has *counted* never counts again: a report counts when it is of the executor's present
incarnation and what it names (its tokens, the state after it) is held outside of the process that
made it. Whatever else a dead process did is as if it had not been: its tick is in ``marking.busy``
still, its input tokens lie on their edges, and the state before it is held. So the answer to any
set of deaths is the same for each executor that lost a process, in whatever moment it did: bring it
up anew, whole, with the state after the last tick that counted, and give it the order that was out,
if one was.

Where the state is in checkpoints alone (trainer, critic), that state is made again first: the
executor begins with the last checkpoint and repeats the ticks since then, from what it read then,
which is held. Nobody hears of what these make; the marking does not move. docs/survival.md proves
that all this ends in the same marking and the same bits; tests explore every interleaving of deaths
with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llamarl.controller.marking import Firing, Marking
from llamarl.runtime.base import Death

__all__ = ["MAX_CRASHES", "MAX_KILLS", "Recovery", "Redo"]

MAX_CRASHES = 2
MAX_KILLS = 3
"""The same death at the same tick ends the run when it comes so often: of its own accord, or by a
signal from outside."""


@dataclass(frozen=True, kw_only=True)
class Redo:
    """An executor to bring up again, whole."""

    executor: str
    incarnation: int
    """Of its new processes; what the earlier ones still say is ignored."""
    restart: int
    """How often it has been brought up again, this time included."""
    first_tick: int
    """It is given the state after the tick before this one, which is that of the run's beginning if there is none."""
    next_tick: int
    """That counts. Those from ``first_tick`` to here are repeated before it."""
    firing: Firing | None
    """The order that was out, with what its input tokens are now; None: it waited for one."""
    death: Death
    """What is answered by this."""

    def describe(self) -> str:
        """For the console."""
        death = self.death
        ticks = self.next_tick - self.first_tick + (self.firing is not None)
        last = self.first_tick + ticks - 1
        again = f", tick{'s' if ticks > 1 else ''} {'' if ticks < 2 else f'{self.first_tick} to '}{last} done again"
        return (
            f"{self.executor!r} rank {death.rank} died ({death.doing}): {death.cause}; brought up again "
            f"(restart {self.restart}){again if ticks else ''}"
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
        window_s: Seconds over which restarts are counted.
    """

    def __init__(self, *, max_restarts: int, window_s: float = 3600.0) -> None:
        self._max_restarts = max_restarts
        self._window_s = window_s
        self._incarnations: dict[str, int] = {}
        self._restarts: dict[str, int] = {}
        self._attempts: list[_Attempt] = []

    def incarnation(self, executor: str) -> int:
        """Of its present processes; 0 at first."""
        return self._incarnations.get(executor, 0)

    @property
    def num_restarts(self) -> Mapping[str, int]:
        """Executor -> how often it was brought up again after a death; those that never were are left out."""
        return dict(self._restarts)

    def decide(
        self, marking: Marking, deaths: Sequence[Death], *, replaceable: Mapping[str, int], now_s: float
    ) -> tuple[Redo, ...] | str:
        """What brings the job back after processes have died together.

        Args:
            marking: As it is, with the ticks of the dead as busy as they were.
            replaceable: Executors of which all that others may still read of them is held outside
                of their processes -> first tick that they can begin with: their next one where the
                state before it is held, else the one after their last checkpoint, where what they
                have read since is held.
            now_s: On any clock that goes on.

        Returns:
            One ``Redo`` for each executor that has lost a process of its present incarnation and is
            still needed, in the graph's order; or why the run ends, in words. Then nothing is
            remembered.
        """
        of_now = (death for death in reversed(deaths) if death.incarnation == self.incarnation(death.executor))
        fresh = {death.executor: death for death in of_now}  # the first of each
        lost = [
            fresh[spec.name] for spec in marking.graph.executors if spec.name in fresh and marking.is_needed(spec.name)
        ]
        attempts = [_Attempt(now_s, marking.done_ticks[death.executor], death) for death in lost]
        if lost and (why := self._why_not(attempts, replaceable, now_s)):
            return why
        self._attempts += attempts
        return tuple(self._redo(marking, death, replaceable[death.executor]) for death in lost)

    def follow(self, marking: Marking, executor: str, cause: Death, *, replaceable: Mapping[str, int]) -> Redo | str:
        """What to do with an executor that was reading a token which went with another one's
        process: it lives, and is brought up again all the same, as what it reads will never be
        whole. No attempt of its own.

        Returns:
            What to do, or why the run ends, in words.
        """
        if executor not in replaceable:
            return f"{executor!r} was reading what went with {cause.executor!r}, and what it held is not held elsewhere"
        death = Death(
            executor=executor,
            incarnation=self.incarnation(executor),
            doing=f"tick {marking.done_ticks[executor]}",
            cause=f"what it was reading went with {cause.executor!r}",
        )
        return self._redo(marking, death, replaceable[executor])

    def _redo(self, marking: Marking, death: Death, first_tick: int) -> Redo:
        name = death.executor
        self._restarts[name] = self._restarts.get(name, 0) + 1
        self._incarnations[name] = self.incarnation(name) + 1
        return Redo(
            executor=name,
            incarnation=self._incarnations[name],
            restart=self._restarts[name],
            first_tick=first_tick,
            next_tick=marking.done_ticks[name],
            firing=marking.refire(name),
            death=death,
        )

    def _why_not(self, attempts: Sequence[_Attempt], replaceable: Mapping[str, int], now_s: float) -> str:
        """Why these deaths end the run; empty: they do not."""
        if not self._max_restarts:
            return "recovery.max_restarts is 0: a death ends the run"
        for attempt in attempts:
            name = attempt.death.executor
            if name not in replaceable:
                return f"{name!r} is not brought up again: its host is gone, or what it held is not held elsewhere"
        same = next((attempt for attempt in attempts if self._repeats(attempt)), None)
        if same is not None:
            often = "third" if same.death.from_outside else "second"
            why = f"the same death at the same tick for the {often} time: it would come again"
        elif self._recent(now_s) + len(attempts) > self._max_restarts:
            why = f"more than recovery.max_restarts = {self._max_restarts} restarts within {self._window_s:g} s"
        else:
            return ""
        lines = [attempt.line(now_s) for attempt in (*self._attempts, *attempts)]
        return "\n".join([f"{why}. Deaths of this run:", *lines])

    def _recent(self, now_s: float) -> int:
        return sum(now_s - attempt.at_s <= self._window_s for attempt in self._attempts)

    def _repeats(self, attempt: _Attempt) -> bool:
        """Whether it would come again. A crash of its own accord, once repeated, will be. A signal
        from outside may meet the same tick twice by chance; but the kernel, too, sends one, where
        memory runs out, and would do so each time."""
        earlier = sum(_same(attempt, one) for one in self._attempts)
        return earlier >= (MAX_KILLS if attempt.death.from_outside else MAX_CRASHES) - 1


def _same(one: _Attempt, other: _Attempt) -> bool:
    mine, theirs = one.death, other.death
    return (mine.executor, one.tick, mine.doing, mine.cause) == (
        theirs.executor,
        other.tick,
        theirs.doing,
        theirs.cause,
    )
