"""Between the controller's loop, the rule and the runtime: executors that have died are brought up
again, and it is told.

deaths ─▶ runtime.stop ─▶ tokens that were not whole leave the marking ─▶ Recovery.decide ─┬▶ Redo: runtime.replace ─▶ Orders.again
                          └▶ who reads them: Recovery.follow ──────────────────────────────┴▶ why not: the error, with the reason
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from llamarl.controller.marking import Marking
from llamarl.controller.recovery import Recovery, Redo
from llamarl.errors import DeadlineExceeded, ExecutorFailed, LlamaRLError
from llamarl.executors.base import ExecutorSpec
from llamarl.runtime.base import Death, ProcessesDied, Report, Rescales, Restarts, SetupReport

__all__ = ["Replacing"]


class Replacing:
    """Of one run.

    Args:
        tell: Called with each replacement as it begins.
    """

    def __init__(self, recovery: Recovery, tell: Callable[[Redo], None] = lambda redo: None) -> None:
        self._recovery = recovery
        self._tell = tell
        self._lost: dict[str, tuple[float, float]] = {}
        """Executor whose next report tells of it -> when its lost work began, and when it died; on
        ``time.monotonic``."""
        self._moved: dict[str, float] = {}
        """Executor that was given other ranks, and whose next report tells of it -> when; on ``time.monotonic``."""

    def set_up(
        self, start: Callable[[], Mapping[str, SetupReport]], runtime: Restarts, marking: Marking, deadline_s: float
    ) -> Mapping[str, SetupReport]:
        """Start the job; whoever dies meanwhile begins once more, as the others go on.

        Args:
            start: ``runtime.start``.
            marking: Of the job before its first tick; it does not move.
            deadline_s: For all to stand ready, anew after each death.

        Raises:
            LlamaRLError: As ``start``, or as ``bring_back``.
        """
        while True:
            try:
                return start()
            except ProcessesDied as error:
                self.bring_back(runtime, marking, error, error.deaths, {})
                start = partial(runtime.stand, deadline_s)

    def bring_back(
        self,
        runtime: Restarts,
        marking: Marking,
        error: LlamaRLError,
        deaths: Sequence[Death],
        ages_s: Mapping[str, float],
        *,
        readers: Sequence[str] = (),
    ) -> tuple[Redo, ...]:
        """Have everyone who died, or does not answer, brought up again, and who was reading what went with them.

        Args:
            error: That tells of it.
            ages_s: How long the order of each that is at work has been out.
            readers: Who failed because of that.

        Returns:
            What each is to repeat and to do.

        Raises:
            LlamaRLError: The run ends: ``error`` with the reason.
        """
        now_s = time.monotonic()
        dead = [death for death in deaths if death.incarnation == self._recovery.incarnation(death.executor)]
        following: dict[str, Death] = {name: dead[0] for name in readers if dead}
        to_stop = [*{death.executor: death for death in dead}.items(), *following.items()]
        stopped = {name for name, _ in to_stop}
        for name, death in to_stop:
            for channel, tick in sorted(runtime.stop(name)):
                sink = marking.withdraw(channel, tick)
                if sink and sink not in stopped:
                    following[sink] = death
                    stopped.add(sink)
                    to_stop.append((sink, death))
        replaceable = runtime.replaceable()
        decided = self._recovery.decide(marking, deaths, replaceable=replaceable, now_s=now_s)
        if isinstance(decided, str):
            raise _ended(error, decided)
        redos = list(decided)
        for sink, death in following.items():
            follower = self._recovery.follow(marking, sink, death, replaceable=replaceable)
            if isinstance(follower, str):
                raise _ended(error, follower)
            redos.append(follower)
        for redo in redos:
            name = redo.executor
            began_s = self._lost.get(name, (now_s - ages_s.get(name, 0.0), 0.0))[0]
            self._lost[name] = began_s, now_s
            self._tell(redo)
            runtime.replace(name, incarnation=redo.incarnation, first_tick=redo.first_tick)
        return tuple(redos)

    def has_room(self) -> bool:
        """Whether one more death would be answered by a restart."""
        return self._recovery.has_room(time.monotonic())

    def rescale(self, runtime: Rescales, spec: ExecutorSpec, first_tick: int) -> None:
        """Start an executor that is not at work anew, with other ranks and the state after ``first_tick - 1``."""
        self._moved[spec.name] = time.monotonic()
        runtime.rescale(spec, incarnation=self._recovery.renew(spec.name), first_tick=first_tick)

    def with_recovery_metrics(self, report: Report) -> Report:
        """The report, with what a replacement has cost where it is the first after one."""
        moved_s = self._moved.pop(report.executor, None)
        if moved_s is not None:
            spans = (("scale", min(moved_s, report.started_s), report.started_s), *report.spans)
            report = replace(report, spans=spans)
        lost = self._lost.pop(report.executor, None)
        if lost is None:
            return report
        began_s, died_s = lost
        name = report.executor
        metrics = {
            f"recovery/{name}_restarts": float(self._recovery.num_restarts[name]),
            f"recovery/{name}_lost_s": max(0.0, report.started_s - began_s),
        }
        span = ("restart", min(died_s, report.started_s), report.started_s)
        return replace(report, metrics={**report.metrics, **metrics}, spans=(span, *report.spans))


def _ended(error: LlamaRLError, why: str) -> LlamaRLError:
    kind = DeadlineExceeded if isinstance(error, DeadlineExceeded) else ExecutorFailed
    return kind(f"{error}\nNot brought up again: {why}")
