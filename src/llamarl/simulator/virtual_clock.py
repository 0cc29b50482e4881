"""A runtime on a virtual clock: the controller's loop runs as it is, and a tick takes as long as its executor says.

    fire(order) ─▶ executor.step says how long ─▶ heap of finish times ─▶ wait() jumps to the earliest

Time passes only in ``wait``. Ties are broken by the order of firing, so a simulation repeats exactly. A channel may have
a latency: its token is on the way that long, and the sink's tick begins when the last of its inputs has arrived. Where executors
are far away, orders and reports take time too, and so does reading a payload at the start of a tick.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from llamarl.channels.base import ChannelSpec
from llamarl.errors import DeadlineExceeded, ExecutorFailed
from llamarl.executors.base import ExecutorContext, ExecutorSpec
from llamarl.import_path import resolve
from llamarl.runtime.base import News, Order, Report, SetupReport

__all__ = ["RevisingExecutor", "Snapshots", "TimedStep", "VirtualClockRuntime", "VirtualExecutor"]

Snapshots = dict[tuple[Path, str], Any]
"""(folder, executor) -> state. A virtual checkpoint lies in memory; its folder is only a name."""

AHEAD = "ahead"
"""Label of spans in which a part of a tick was done before the tick itself came."""


@dataclass(frozen=True, kw_only=True)
class TimedStep:
    """What one virtual firing made, and how long it took."""

    duration_s: float
    outputs: Mapping[str, Any] = field(default_factory=dict)
    """One payload a channel that leaves the executor."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    spans: tuple[tuple[str, float, float], ...] = ()
    """(label, start, end), seconds after the start of the tick."""
    parts_s: tuple[float, ...] = ()
    """Seconds after the start of the tick at which each part of its outputs is there, in order; none: all are at the end."""
    ahead_s: tuple[float, ...] = ()
    """Of ``duration_s``, what each part of the inputs takes, in order. It may be done before the tick's order comes, once the part is
    there and the tick before is done."""


class VirtualExecutor(Protocol):
    """An executor that only takes time. Made by ``factory(config, context)`` as every executor."""

    def initial_token(self, channel: str, source_tick: int) -> Any: ...

    def step(self, tick: int, inputs: Mapping[str, Any]) -> TimedStep: ...

    def save(self) -> Any:
        """State after the last step; later steps must not change what was returned."""
        ...

    def load(self, state: Any) -> None: ...


@runtime_checkable
class RevisingExecutor(VirtualExecutor, Protocol):
    """One with a ``latest`` in-channel. Its ``step`` gets the newest token that has arrived when the tick begins."""

    def revise(self, elapsed_s: float, payload: Any) -> TimedStep:
        """A newer token has arrived so many seconds into the tick: the tick as it now will be, from its start."""
        ...


@dataclass(frozen=True)
class _Token:
    """Handle of a payload that arrives at ``ready_s``."""

    payload: Any
    ready_s: float
    parts_ready_s: tuple[float, ...] = ()
    """When each of its parts arrives, in order."""


@dataclass(frozen=True)
class _Firing:
    """A tick under way."""

    order: Order
    step: TimedStep
    started_s: float
    work_from_s: float
    """When its payloads have been read, and what was begun ahead is done."""
    ahead: tuple[tuple[float, float], ...] = ()
    """From when to when each part was done that was begun before."""

    @property
    def finished_s(self) -> float:
        return self.work_from_s + self.step.duration_s


def _rest_of(step: TimedStep, done_s: Sequence[float]) -> TimedStep:
    """A tick of which some parts are done: its other parts follow, then the rest, and it hands on each part when it is done.

    Args:
        done_s: When each of them was done, in seconds after the rest begins, so at most 0.
    """
    left_s, ready = 0.0, list(done_s)
    for part_s in step.ahead_s[len(done_s) :]:
        left_s += part_s
        ready.append(left_s)
    duration_s = step.duration_s - sum(step.ahead_s[: len(done_s)])
    spans = tuple((label, start, max(start, end - step.duration_s + duration_s)) for label, start, end in step.spans)
    return replace(step, duration_s=max(0.0, duration_s), parts_s=tuple(ready), spans=spans)


class VirtualClockRuntime:
    """The Protocol of ``runtime/base.py`` without time, processes or payloads.

    Args:
        latency_s: Channel -> seconds that a token is on the way; 0 where not named.
        message_s: Executor -> seconds of an order, and of a report; 0 where not named.
        pull_s: Channel -> seconds of the sink's tick in which it reads its payload; 0 where not named.
        start_s: Where the clock stands at first.
        fail_at_s: The job dies at this moment, as if a process of it did.
        snapshots: Where virtual checkpoints lie; hand the same one to the runtime that resumes.
    """

    def __init__(
        self,
        *,
        latency_s: Mapping[str, float] | None = None,
        message_s: Mapping[str, float] | None = None,
        pull_s: Mapping[str, float] | None = None,
        start_s: float = 0.0,
        fail_at_s: float = float("inf"),
        snapshots: Snapshots | None = None,
    ) -> None:
        self._latency_s = dict(latency_s or {})
        self._message_s = dict(message_s or {})
        self._pull_s = dict(pull_s or {})
        self._clock = start_s
        self._fail_at_s = fail_at_s
        self._snapshots: Snapshots = {} if snapshots is None else snapshots
        self._executors: dict[str, VirtualExecutor] = {}
        self._out: list[tuple[float, int, _Firing]] = []  # by when the controller hears of their end
        self._fired = 0
        self._free_s: dict[str, float] = {}
        """Executor -> end of its last tick."""
        self._news: list[tuple[float, int, str, Any]] = []
        self._told = 0

    def start(
        self,
        executors: Sequence[ExecutorSpec],
        channels: Sequence[ChannelSpec],
        *,
        run_dir: Path | None,
        seed: int,
        first_tick: int,
        load_from: Path | None,
        deadline_s: float,
    ) -> Mapping[str, SetupReport]:
        """Make the executors; takes no time."""
        assert not self._executors, "start is called once"
        reports = {}
        for spec in executors:
            context = ExecutorContext(
                name=spec.name, rank=0, num_ranks=spec.num_ranks, device=spec.device, run_dir=run_dir, seed=seed
            )
            executor = self._executors[spec.name] = resolve(spec.factory)(spec.config, context)
            if load_from is not None:
                executor.load(self._snapshots[load_from, spec.name])
            initial = {
                c.name: {
                    tick: (_Token(executor.initial_token(c.name, tick), self._clock),)
                    for tick in range(first_tick - c.delay, first_tick)
                }
                for c in channels
                if c.source == spec.name
            }
            reports[spec.name] = SetupReport(executor=spec.name, initial_tokens=initial)
        return reports

    def fire(self, order: Order) -> None:
        """Begin a tick when the order and the last of its inputs have arrived."""
        tokens = {name: handles[0] for name, handles in order.inputs.items()}
        arrived = self._clock + self._message_s.get(order.executor, 0.0)
        start = max([arrived, *(token.ready_s for token in tokens.values())])
        executor = self._executors[order.executor]
        for name, later in order.later.items():
            for _, handles in sorted(later.items()):
                if handles[0].ready_s <= start:
                    tokens[name] = handles[0]
                else:
                    self._announce(order.executor, handles[0])
        step = executor.step(order.tick, {name: token.payload for name, token in tokens.items()})
        assert step.duration_s >= 0, f"{order.executor} tick {order.tick}: duration {step.duration_s}"
        if order.save_to is not None:
            self._snapshots[order.save_to, order.executor] = executor.save()
        work_from = start + sum(self._pull_s.get(name, 0.0) for name in order.inputs)
        arrivals = next((token.parts_ready_s for token in tokens.values() if token.parts_ready_s), ())
        ahead = self._done_ahead(order.executor, step.ahead_s, arrivals, before_s=start)
        if ahead:
            work_from = max(work_from, ahead[-1][1])
        if step.ahead_s:
            step = _rest_of(step, [end - work_from for _, end in ahead])
        self._push(_Firing(order, step, start, work_from, ahead), self._fired)
        self._fired += 1

    def _done_ahead(
        self, executor: str, seconds: Sequence[float], arrivals: Sequence[float], *, before_s: float
    ) -> tuple[tuple[float, float], ...]:
        """Parts that are begun before the tick's order comes, one after the other: from when to when. Far from each other, executors
        get a tick whole."""
        at = self._free_s.get(executor, self._clock)
        done: list[tuple[float, float]] = []
        for part_s, arrived_s in zip(seconds, arrivals, strict=False):
            begin = max(at, arrived_s)
            if begin >= before_s or self._pull_s or self._message_s:
                break
            at = begin + part_s
            done.append((begin, at))
        return tuple(done)

    def _push(self, firing: _Firing, number: int) -> None:
        told_s = firing.finished_s + self._message_s.get(firing.order.executor, 0.0)
        heapq.heappush(self._out, (told_s, number, firing))

    def tell(self, news: News) -> None:
        """The token arrives when its latency is over; an executor that is then at work revises its tick."""
        token = news.handles[0]
        self._announce(news.executor, token)

    def _announce(self, executor: str, token: _Token) -> None:
        heapq.heappush(self._news, (max(self._clock, token.ready_s), self._told, executor, token.payload))
        self._told += 1

    def _revise(self) -> None:
        """Hand out the earliest news."""
        at, _, executor, payload = heapq.heappop(self._news)
        for place, (_, fired, firing) in enumerate(self._out):
            if firing.order.executor == executor:
                sink = self._executors[executor]
                assert isinstance(sink, RevisingExecutor), f"{executor!r} has a latest channel and no revise"
                if at > firing.finished_s:
                    return  # the tick has ended, and its report is on the way
                step = sink.revise(max(0.0, at - firing.work_from_s), payload)
                if firing.order.save_to is not None:
                    self._snapshots[firing.order.save_to, executor] = sink.save()
                del self._out[place]
                heapq.heapify(self._out)
                self._push(replace(firing, step=step), fired)
                return

    def wait(self, deadline_s: float) -> Report:
        """Jump to the earliest finish."""
        assert self._out, "wait without an order out: it could never end"
        while self._news and self._news[0][0] < min(self._out[0][0], self._fail_at_s, self._clock + deadline_s):
            self._revise()
        told, _, firing = self._out[0]
        order, step, finish = firing.order, firing.step, firing.finished_s
        until = min(self._fail_at_s, self._clock + deadline_s)
        if told > until:
            self._clock = max(self._clock, until)
            if until == self._fail_at_s:
                raise ExecutorFailed(f"a simulated failure at {until:g} s, while {self._describe_out()}")
            raise DeadlineExceeded(
                f"nobody reported within {deadline_s:g} virtual seconds; out: {self._describe_out()}"
            )
        heapq.heappop(self._out)
        self._clock = told
        self._free_s[order.executor] = finish
        return Report(
            executor=order.executor,
            tick=order.tick,
            outputs=self._tokens(step, firing),
            metrics=step.metrics,
            started_s=firing.started_s,
            finished_s=finish,
            spans=(
                *((AHEAD, begin, end) for begin, end in firing.ahead),
                *((label, firing.work_from_s + a, firing.work_from_s + b) for label, a, b in step.spans),
            ),
        )

    def _tokens(self, step: TimedStep, firing: _Firing) -> dict[str, tuple[_Token, ...]]:
        """The outputs of a tick that has ended, each with its time on the way."""
        found: dict[str, tuple[_Token, ...]] = {}
        for name, payload in step.outputs.items():
            late = self._latency_s.get(name, 0.0)
            parts = tuple(firing.work_from_s + at + late for at in step.parts_s)
            found[name] = (_Token(payload, firing.finished_s + late, parts),)
        return found

    def now(self) -> float:
        """Virtual seconds."""
        return self._clock

    def close(self) -> None:
        """Forget everything. Idempotent."""
        self._executors.clear()
        self._out.clear()
        self._news.clear()

    def _describe_out(self) -> str:
        return ", ".join(
            f"{order.executor!r} works on tick {order.tick}"
            for order in (f.order for *_, f in sorted(self._out, key=lambda out: out[:2])[:4])
        )
