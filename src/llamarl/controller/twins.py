"""A tick that takes too long is started a second time beside the first; the first report wins.

nothing heard, a tick straggles ─▶ room? ─▶ runtime.begin_twin: new processes, state before the tick, the same order
report of either ───────────────────────▶ settle ─▶ runtime.keep: the other one is ended, then the tick counts
death of one while the other works ─────▶ outlived ─▶ runtime.keep: the other one is the executor

Both are the same function of the same inputs, so which is first decides no bit. A tick is started a second time once at most, so that
every death of such a pair but the first is one for ``recovery.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

from llamarl.controller.graph import Graph
from llamarl.controller.marking import Firing, Marking
from llamarl.controller.orders import Orders
from llamarl.controller.recovery import Recovery
from llamarl.controller.stragglers import Stragglers
from llamarl.roles import ROLES
from llamarl.runtime.base import Death, Report, RunsTwins
from llamarl.runtime.placement import ColocatedGroup

__all__ = ["Twins", "never_twice"]


@dataclass
class _Count:
    begun: int = 0
    won: int = 0


def never_twice(graph: Graph, colocated: ColocatedGroup | None) -> dict[str, str]:
    """Executors whose ticks are not started a second time though their kind's may be -> why. Pure.

    Args:
        graph: Placed. Trainer and critic, which compute as groups and have their states in checkpoints, are no kind that may.
    """
    found = {}
    for spec in graph.executors:
        reads = graph.inputs[spec.name]
        if (role := ROLES.get(spec.name)) is not None and role.optimizer:
            continue
        if spec.device.startswith("cuda"):
            found[spec.name] = "it is on GPUs, and a second attempt is made on CPUs alone, which would give other bits"
        elif colocated is not None and spec.name in colocated.members:
            found[spec.name] = "it takes turns with others (schedule.colocated), whose cores and memory it has"
        elif any(channel.latest for channel in reads):
            found[spec.name] = "it takes the newest weights (schedule.weights), so that two attempts need not agree"
    return found


class Twins:
    """Of one run.

    Args:
        room: Executor, and those that have twins now -> why there is no room for one more; empty: there is.
        tell: Gets a tick and a line for people.
    """

    def __init__(
        self,
        recovery: Recovery,
        stragglers: Stragglers,
        room: Callable[[str, Sequence[str]], str],
        tell: Callable[[int, str], None],
    ) -> None:
        self._recovery, self._stragglers, self._room, self._tell = recovery, stragglers, room, tell
        self._looked_at: dict[str, int] = {}
        """Executor -> the last tick of which it was decided whether it is started a second time."""
        self._told: set[str] = set()
        """Executors for which there was no room, which is told once."""
        self._began_s: dict[str, float] = {}
        """Executor with a twin -> when the order of the first went out, on the runtime's clock."""
        self._counts: dict[str, _Count] = {}

    def listen(self, runtime: RunsTwins, marking: Marking, orders: Orders, until_s: float) -> None:
        """Return when something is heard, or at ``until_s`` on the runtime's clock; start ticks a second time meanwhile."""
        while True:
            due = self._due(runtime, marking, orders)
            next_s = min([until_s, *due.values()])
            if runtime.heard_within(max(0.0, next_s - runtime.now())) or runtime.now() >= until_s:
                return
            for name, at_s in due.items():
                if at_s <= runtime.now():
                    self.begin(runtime, marking, orders, name)

    def begin(self, runtime: RunsTwins, marking: Marking, orders: Orders, executor: str) -> None:
        """Start a second attempt at the tick that an executor is at, if there is room; once a tick."""
        tick = marking.busy[executor].tick
        self._looked_at[executor] = tick
        seconds = runtime.now() - orders.since_s[executor]
        what = f"{executor!r} has been at tick {tick} for {seconds:.1f} s"
        with_twins = [spec.name for spec in marking.graph.executors if self._recovery.twin(spec.name) is not None]
        if why := self._room(executor, with_twins):
            if executor not in self._told:
                self._told.add(executor)
                self._tell(tick, f"{what}, and is not started a second time: {why}")
            return
        self._began_s[executor] = orders.since_s[executor]
        self._counts.setdefault(executor, _Count()).begun += 1
        on = runtime.begin_twin(executor, incarnation=self._recovery.begin_twin(executor))
        self._tell(tick, f"{what}: it is started a second time{on and f' on {on}'}, and who is ready first counts")

    def settle(self, runtime: RunsTwins, marking: Marking, report: Report) -> Report:
        """A report of an executor at work, before its tick counts: whose it is goes on, the other is ended first."""
        name = report.executor
        self._stragglers.note(_kind(marking.busy[name]), report.finished_s - report.started_s)
        twin = self._recovery.twin(name)
        if twin is None:
            return report
        runtime.keep(name, report.incarnation)
        self._recovery.keep(name, report.incarnation)
        count, began_s = self._counts[name], self._began_s.pop(name)
        spans = report.spans
        won = report.incarnation == twin
        if won:
            count.won += 1
            spans = (("first attempt", min(began_s, report.started_s), report.started_s), *spans)
        self._tell(report.tick, f"{name!r}: the {'second' if won else 'first'} attempt is ready and counts")
        metrics = {f"recovery/{name}_twins": float(count.begun), f"recovery/{name}_twin_wins": float(count.won)}
        return replace(report, metrics={**report.metrics, **metrics}, spans=spans)

    def outlived(
        self, runtime: RunsTwins, marking: Marking, orders: Orders, deaths: Sequence[Death], *, now_s: float
    ) -> None:
        """Where one of two attempts has died, the other goes on alone; such deaths are then of nobody's present processes.

        Args:
            now_s: As of ``Recovery.decide``.
        """
        for name, incarnation in self._recovery.outlived(marking, deaths, now_s=now_s).items():
            second = incarnation == self._recovery.twin(name)
            runtime.keep(name, incarnation)
            self._recovery.keep(name, incarnation)
            if second:
                orders.renew(name)
            cause = next(death.cause for death in deaths if death.executor == name)
            which = ("first", "second") if second else ("second", "first")
            tick = marking.done_ticks[name]
            self._tell(tick, f"{name!r}: the {which[0]} attempt has ended ({cause}), the {which[1]} goes on")

    def begun_anew(self, marking: Marking, executors: Iterable[str]) -> None:
        """They were brought up again: the tick that they do now takes longer, and is not started a second time."""
        for name in executors:
            self._looked_at[name] = marking.done_ticks[name]

    def _due(self, runtime: RunsTwins, marking: Marking, orders: Orders) -> dict[str, float]:
        """Executors at work -> when their tick takes too long."""
        due = {}
        for name, firing in marking.busy.items():
            after_s = self._stragglers.after_s(_kind(firing))
            if after_s is None or name not in orders.since_s or self._looked_at.get(name, -1) >= firing.tick:
                continue
            if runtime.may_have_twin(name):
                due[name] = orders.since_s[name] + after_s
        return due


def _kind(firing: Firing) -> Hashable:
    """Ticks at which there is nothing to read take no time, such as those of an evaluator between two evaluations."""
    reads = any(handle is not None for handles in firing.inputs.values() for handle in handles)
    return firing.executor, reads
