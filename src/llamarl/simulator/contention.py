"""Roles that share one machine slow each other: a virtual clock on which the speed of a tick depends on who else works.

    work of a tick (seconds alone) ──▶ runs at 1 / slowdown(role, everyone at work) ──▶ longer while others work

Between two events the set of working roles does not change, so every tick advances in a straight line; the clock jumps
from event to event. With no slow-down this is ``VirtualClockRuntime``.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from llamarl.errors import DeadlineExceeded, ExecutorFailed, PlanError
from llamarl.runtime.base import Order, Report
from llamarl.simulator.virtual_clock import Snapshots, TimedStep, VirtualClockRuntime

__all__ = ["Contention", "SharedMachineRuntime"]


@dataclass(frozen=True, kw_only=True)
class Contention:
    """What working at the same time costs on one machine."""

    cores: int
    threads: Mapping[str, int]
    """Threads of each role while it works; a role that is not named needs no core."""
    slowdown: Mapping[str, float] = field(default_factory=dict)
    """Role -> how many times as long its work takes beside another role, on cores of their own: shared memory and caches."""

    def __post_init__(self) -> None:
        if self.cores < 1:
            raise PlanError(f"cores must be at least 1, got {self.cores}")
        for name, factor in self.slowdown.items():
            if not 1.0 <= factor < 100.0:
                raise PlanError(f"slow-down of {name!r} beside another role must be 1 to 100, got {factor}")

    def factor(self, role: str, working: Collection[str]) -> float:
        """How many times as long the work of ``role`` takes while ``working`` (itself included) work.

        Threads beyond the cores take turns; beside any other role that computes, memory is shared too.
        """
        if role not in self.threads:
            return 1.0
        busy = [name for name in working if name in self.threads]
        turns = max(1.0, sum(self.threads[name] for name in busy) / self.cores)
        return turns * (self.slowdown.get(role, 1.0) if len(busy) > 1 else 1.0)


@dataclass
class _Running:
    order: Order
    step: TimedStep
    start_s: float
    left_s: float
    """Work yet to do, in seconds alone."""


class SharedMachineRuntime(VirtualClockRuntime):
    """A virtual clock whose ticks slow one another. Takes what ``VirtualClockRuntime`` takes, and the contention."""

    def __init__(
        self,
        contention: Contention,
        *,
        latency_s: Mapping[str, float] | None = None,
        start_s: float = 0.0,
        fail_at_s: float = float("inf"),
        snapshots: Snapshots | None = None,
    ) -> None:
        super().__init__(latency_s=latency_s, start_s=start_s, fail_at_s=fail_at_s, snapshots=snapshots)
        self._contention = contention
        self._running: list[_Running] = []  # in order of firing, which breaks ties

    def _begin(self, order: Order, step: TimedStep, start: float) -> None:
        self._running.append(_Running(order, step, start, step.duration_s))

    def wait(self, deadline_s: float) -> Report:
        assert self._running, "wait without an order out: it could never end"
        until = min(self._fail_at_s, self._clock + deadline_s)
        while True:
            working = [r for r in self._running if r.start_s <= self._clock]
            names = [r.order.executor for r in working]
            factors = [self._contention.factor(name, names) for name in names]
            ends = [self._clock + r.left_s * f for r, f in zip(working, factors, strict=True)]
            begins = [r.start_s for r in self._running if r.start_s > self._clock]
            event = min([*ends, *begins])
            if self._news and self._news[0][0] < min(event, until):
                self._advance(working, factors, self._news[0][0])
                self._revise()
                continue
            if event > until:
                self._clock = max(self._clock, until)
                out = ", ".join(f"{r.order.executor!r} works on tick {r.order.tick}" for r in self._running[:4])
                if until == self._fail_at_s:
                    raise ExecutorFailed(f"a simulated failure at {until:g} s, while {out}")
                raise DeadlineExceeded(f"nobody reported within {deadline_s:g} virtual seconds; out: {out}")
            done = next((r for r, end in zip(working, ends, strict=True) if end <= event), None)
            self._advance(working, factors, event)
            if done is not None:
                self._running.remove(done)
                return self._report(done)

    def _advance(self, working: Sequence[_Running], factors: Sequence[float], to: float) -> None:
        for r, factor in zip(working, factors, strict=True):
            r.left_s = max(0.0, r.left_s - (to - self._clock) / factor)
        self._clock = to

    def _revise(self) -> None:
        """Hand out the earliest news, which arrives now. The executor is told the work it has done, in seconds alone."""
        _, _, executor, payload = heapq.heappop(self._news)
        for r in self._running:
            if r.order.executor == executor:
                done_s = r.step.duration_s - r.left_s
                r.step = self._revised(r.order, done_s, payload)
                r.left_s = max(0.0, r.step.duration_s - done_s)
                return

    def close(self) -> None:
        super().close()
        self._running.clear()

    def _report(self, done: _Running) -> Report:
        lasted = self._clock - done.start_s
        stretch = lasted / done.step.duration_s if done.step.duration_s else 1.0
        return Report(
            executor=done.order.executor,
            tick=done.order.tick,
            outputs=self._tokens(done.step, self._clock),
            metrics=done.step.metrics,
            started_s=done.start_s,
            finished_s=self._clock,
            spans=tuple(
                (label, done.start_s + a * stretch, done.start_s + b * stretch) for label, a, b in done.step.spans
            ),
        )
