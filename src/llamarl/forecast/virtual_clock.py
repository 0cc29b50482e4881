"""A runtime on a virtual clock: the controller's loop runs as it is, and a tick takes as long as its executor says.

    fire(order) ─▶ executor.step says how long ─▶ heap of finish times ─▶ wait() jumps to the earliest

Time passes only in ``wait``. Ties are broken by the order of firing, so a simulation repeats
exactly. A channel may have a latency: its token is on the way that long, and the sink's tick begins
when the last of its inputs has arrived.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llamarl.errors import DeadlineExceeded, ExecutorFailed
from llamarl.executors.base import ExecutorContext
from llamarl.import_path import resolve
from llamarl.runtime.base import JobStart, News, Order, Report, SetupReport

__all__ = ["Snapshots", "TimedStep", "VirtualClockRuntime", "VirtualExecutor"]

Snapshots = dict[tuple[Path, str], Any]
"""(folder, executor) -> state. A virtual checkpoint lies in memory; its folder is only a name."""


@dataclass(frozen=True, kw_only=True)
class TimedStep:
    """What one virtual firing made, and how long it took."""

    duration_s: float
    outputs: Mapping[str, Any] = field(default_factory=dict)
    """One payload a channel that leaves the executor."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    spans: tuple[tuple[str, float, float], ...] = ()
    """(label, start, end), seconds after the start of the tick."""


class VirtualExecutor:
    """An executor that only takes time. Made by ``factory(config, context)`` as every executor."""

    def __init__(self, config: Any, context: ExecutorContext) -> None:
        self.scenario = config
        self.state: Any = None
        """After the last step. Replaced, never changed, so that it can be kept by its reference."""

    def initial_token(self, channel: str, source_tick: int) -> Any:
        raise ValueError(f"channel {channel!r} has a delay; only weights may have one")

    def step(self, tick: int, inputs: Mapping[str, Any]) -> TimedStep:
        raise NotImplementedError


@dataclass(frozen=True)
class _Token:
    """Handle of a payload that arrives at ``ready_s``."""

    payload: Any
    ready_s: float


@dataclass(frozen=True)
class _Firing:
    """A tick under way."""

    order: Order
    step: TimedStep
    fired_s: float
    started_s: float

    @property
    def finished_s(self) -> float:
        return self.started_s + self.step.duration_s


class VirtualClockRuntime:
    """The Protocol of ``runtime/base.py`` without time, processes or payloads.

    Args:
        latency_s: Channel -> seconds that a token is on the way; 0 where not named.
        start_s: Where the clock stands at first.
        fail_at_s: The job dies at this moment, as if a process of it did.
        snapshots: Where virtual checkpoints lie; hand the same one to the runtime that resumes.
    """

    def __init__(
        self,
        *,
        latency_s: Mapping[str, float] | None = None,
        start_s: float = 0.0,
        fail_at_s: float = float("inf"),
        snapshots: Snapshots | None = None,
    ) -> None:
        self._latency_s = dict(latency_s or {})
        self._clock = start_s
        self._fail_at_s = fail_at_s
        self._snapshots: Snapshots = {} if snapshots is None else snapshots
        self._executors: dict[str, VirtualExecutor] = {}
        self._out: list[tuple[float, int, _Firing]] = []
        self._fired = 0

    def start(self, job: JobStart) -> Mapping[str, SetupReport]:
        """Make the executors; takes no time."""
        assert not self._executors, "start is called once"
        reports = {}
        for spec in job.executors:
            context = ExecutorContext(
                name=spec.name, rank=0, num_ranks=spec.num_ranks, device=spec.device, run_dir=job.run_dir, seed=job.seed
            )
            executor = self._executors[spec.name] = resolve(spec.factory)(spec.config, context)
            if job.load_from is not None:
                executor.state = self._snapshots[job.load_from, spec.name]
            initial = {
                c.name: {
                    tick: (_Token(executor.initial_token(c.name, tick), self._clock),)
                    for tick in range(job.first_tick - c.delay, job.first_tick)
                }
                for c in job.channels
                if c.source == spec.name
            }
            reports[spec.name] = SetupReport(executor=spec.name, initial_tokens=initial)
        return reports

    def counted(self) -> Sequence[Report]:
        """Nothing: no journal is kept."""
        return ()

    def fire(self, order: Order) -> None:
        """Begin a tick when the last of its inputs has arrived."""
        tokens = {name: handles[0] for name, handles in order.inputs.items()}
        start = max([self._clock, *(token.ready_s for token in tokens.values())])
        executor = self._executors[order.executor]
        step = executor.step(order.tick, {name: token.payload for name, token in tokens.items()})
        assert step.duration_s >= 0, f"{order.executor} tick {order.tick}: duration {step.duration_s}"
        if order.save_to is not None:
            self._snapshots[order.save_to, order.executor] = executor.state
        firing = _Firing(order, step, self._clock, start)
        heapq.heappush(self._out, (firing.finished_s, self._fired, firing))
        self._fired += 1

    def tell(self, news: News) -> None:
        """Ignore a version that arrives inside a tick."""

    def wait(self, limit_s: float) -> Report:
        """Jump to the earliest finish."""
        assert self._out, "wait without an order out: it could never end"
        finish, _, firing = self._out[0]
        order, step = firing.order, firing.step
        until = min(self._fail_at_s, min(one.fired_s for *_, one in self._out) + limit_s)
        if finish > until:
            self._clock = max(self._clock, until)
            if until == self._fail_at_s:
                raise ExecutorFailed(f"a simulated failure at {until:g} s")
            raise DeadlineExceeded(f"an order has been out for {limit_s:g} virtual seconds")
        heapq.heappop(self._out)
        self._clock = finish
        return Report(
            executor=order.executor,
            tick=order.tick,
            outputs={
                name: (_Token(payload, finish + self._latency_s.get(name, 0.0)),)
                for name, payload in step.outputs.items()
            },
            metrics=step.metrics,
            started_s=firing.started_s,
            finished_s=finish,
            spans=tuple((label, firing.started_s + a, firing.started_s + b) for label, a, b in step.spans),
        )

    def now(self) -> float:
        """Virtual seconds."""
        return self._clock

    def close(self) -> None:
        """Forget everything. Idempotent."""
        self._executors.clear()
        self._out.clear()
