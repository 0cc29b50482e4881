"""Between the controller's loop, the rule and the runtime: executors that have died are brought up again, and it is told.

ProcessesDied ─▶ Recovery.decide ─┬▶ Redo: runtime.replace, the order that was out again ─▶ the loop goes on
                                  └▶ why not: ExecutorFailed, as it would have been, with the reason
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from llamarl.controller.marking import Marking
from llamarl.controller.recovery import Recovery, Redo
from llamarl.errors import ExecutorFailed
from llamarl.runtime.base import Order, ProcessesDied, Report, Restarts

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
        """Executor whose next report tells of it -> when its lost work began, and when it died; on ``time.monotonic``."""

    def bring_back(
        self,
        runtime: Restarts,
        marking: Marking,
        error: ProcessesDied,
        orders: Mapping[str, Order],
        ages_s: Mapping[str, float],
    ) -> dict[str, Order]:
        """Have everyone who died brought up again.

        Args:
            orders: Executor -> the order that is out, of those at work.
            ages_s: How long each has been out.

        Returns:
            Executor -> the order to send once more.

        Raises:
            ExecutorFailed: The run ends.
        """
        now_s = time.monotonic()
        decided = self._recovery.decide(marking, error.deaths, replaceable=runtime.replaceable(), now_s=now_s)
        if isinstance(decided, str):
            raise ExecutorFailed(f"{error}\nNot brought up again: {decided}") from None
        again = {}
        for redo in decided:
            name = redo.executor
            began_s = self._lost.get(name, (now_s - ages_s.get(name, 0.0), 0.0))[0]
            self._lost[name] = began_s, now_s
            self._tell(redo)
            runtime.replace(name, incarnation=redo.incarnation, first_tick=redo.first_tick)
            if redo.firing is not None:
                again[name] = replace(orders[name], inputs=redo.firing.inputs, later=redo.firing.later)
        return again

    def told_of(self, report: Report) -> Report:
        """The report, with what a replacement has cost where it is the first after one."""
        lost = self._lost.pop(report.executor, None)
        if lost is None:
            return report
        began_s, died_s = lost
        name = report.executor
        metrics = {
            f"recovery/{name}_restarts": float(self._recovery.incarnation(name)),
            f"recovery/{name}_lost_s": max(0.0, report.started_s - began_s),
        }
        span = ("restart", min(died_s, report.started_s), report.started_s)
        return replace(report, metrics={**report.metrics, **metrics}, spans=(span, *report.spans))
