"""A runtime that stands before the real one and outlives the processes of its executors: it returns reports only.

    loop ─ fire, wait ─▶ SurvivingRuntime ─ fire, wait ─▶ the real runtime
                            │  deaths ─▶ stop ─▶ tokens that were not whole leave the marking ─▶ Recovery.decide ─▶ Redo
                            └─ Redo ───▶ replace ─▶ ticks since its state that have counted are done again ─▶ the order that was out

The marking is the loop's own: tokens that went with a process leave it here, and come back here
once they are made again.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from llamarl.controller.marking import Firing, Marking
from llamarl.controller.recovery import Recovery, Redo
from llamarl.controller.saving import Saving
from llamarl.errors import DeadlineExceeded, ExecutorFailed, LlamaRLError
from llamarl.runtime.base import Death, JobStart, News, Order, Overdue, ProcessesDied, Report, SetupReport

if TYPE_CHECKING:
    from llamarl.runtime.processes import ProcessRuntime
    from llamarl.runtime.tick_log import TickLog

__all__ = ["SurvivingRuntime"]


class SurvivingRuntime:
    """Brings executors up again whose processes died, and has done again what was lost with them.

    Args:
        runtime: The real one.
        marking: Of the loop.
        saving: Of the loop.
        tell: Called with each replacement as it begins.
        log: Writes each report that counts.
    """

    def __init__(
        self,
        runtime: ProcessRuntime,
        marking: Marking,
        recovery: Recovery,
        saving: Saving,
        *,
        tell: Callable[[Redo], None] = lambda redo: None,
        log: TickLog | None = None,
    ) -> None:
        self._runtime, self._marking, self._recovery, self._saving = runtime, marking, recovery, saving
        self._tell, self._log = tell, log
        self._behind: dict[str, int] = {}
        """Executor whose state is older than what has counted, until its repeats begin -> its next
        tick by that state."""
        self._repeat: dict[str, int] = {}
        """Executor -> the tick, of those that have counted, that it repeats next."""
        self._begins: dict[str, int] = {}
        """Executor -> the first tick that it repeats; of earlier ones it makes tokens that are lost."""
        self._since_s: dict[str, float] = {}
        """Executor at work -> when its order was sent, on the runtime's clock."""
        self._lost: dict[str, tuple[float, float]] = {}
        """Executor whose next report tells of it -> when its lost work began, and when it died; on
        ``time.monotonic``."""

    def start(self, job: JobStart) -> Mapping[str, SetupReport]:
        """Start the job; an executor that dies meanwhile begins once more, as the others go on.

        Raises:
            LlamaRLError: As the real runtime, or as ``bring_back``.
        """
        start = partial(self._runtime.start, job)
        while True:
            try:
                ready = start()
                break
            except ProcessesDied as error:
                self._replace(error, error.deaths)
                start = partial(self._runtime.stand, job.deadline_s)
        told = {report.executor for report in self._runtime.counted() if report.journal}
        self._behind = {spec.name: job.first_tick for spec in job.executors if spec.name not in told}
        return ready

    def counted(self) -> Sequence[Report]:
        """What had counted when an earlier controller died."""
        return self._runtime.counted()

    def fire(self, order: Order) -> None:
        """Send an order, once its executor has repeated what it must."""
        self._catch_up()
        if order.executor in self._repeat:
            return  # it follows, as the marking has it then
        self._send(order)

    def tell(self, news: News) -> None:
        """Let a busy executor know."""
        self._runtime.tell(news)

    def wait(self, limit_s: float) -> Report:
        """The next report: of a tick that counts, or of one that is done again, whose tokens lie on their edges then.

        Raises:
            LlamaRLError: As the real runtime, if what died is not brought up again: with the reason.
        """
        self._catch_up()
        while True:
            self._release()
            try:
                report = self._runtime.wait(limit_s)
            except ProcessesDied as error:
                self.bring_back(error, error.deaths, error.readers)
            except Overdue as error:
                self.bring_back(error, (error.death,))
            else:
                return self.take(report)

    def now(self) -> float:
        """Seconds on the real runtime's clock."""
        return self._runtime.now()

    def close(self) -> None:
        """Close the real runtime."""
        self._runtime.close()

    def take(self, report: Report) -> Report:
        """Note a report, and send what its executor has to do again next; with what a replacement
        has cost, where it counts."""
        name = report.executor
        self._since_s.pop(name, None)
        if report.tick < self._marking.done_ticks[name]:
            for channel, handles in report.outputs.items():
                self._marking.put_back(channel, report.tick, handles)
            self._repeat_next(name)
            return report
        report = self._with_costs(report)
        if self._log is not None:
            self._log.append(report)
        return report

    def bring_back(self, error: LlamaRLError, deaths: Sequence[Death], readers: Sequence[str] = ()) -> tuple[Redo, ...]:
        """Bring up again each executor that died, or does not answer, and each that was reading what went with it.

        Args:
            error: That tells of it.
            readers: Executors that failed because of that.

        Returns:
            What each is to repeat and to do; all of it is under way.

        Raises:
            LlamaRLError: The run ends: ``error`` with the reason.
        """
        self._release(wait=True)
        redos = self._replace(error, deaths, readers)
        for redo in redos:
            self._saving.redo(redo.executor, redo.first_tick)
            self._do_again(redo.executor, redo.first_tick)
        return redos

    def _replace(self, error: LlamaRLError, deaths: Sequence[Death], readers: Sequence[str] = ()) -> tuple[Redo, ...]:
        now_s = time.monotonic()
        dead = [death for death in deaths if death.incarnation == self._recovery.incarnation(death.executor)]
        following = self._stop(dead, readers)
        replaceable = self._runtime.replaceable()
        decided = self._recovery.decide(self._marking, deaths, replaceable=replaceable, now_s=now_s)
        if isinstance(decided, str):
            raise _ended(error, decided)
        redos = list(decided)
        for sink, death in following.items():
            follower = self._recovery.follow(self._marking, sink, death, replaceable=replaceable)
            if isinstance(follower, str):
                raise _ended(error, follower)
            redos.append(follower)
        for redo in redos:
            name = redo.executor
            began_s = now_s - (self.now() - self._since_s.pop(name, self.now()))
            self._lost[name] = self._lost.get(name, (began_s, 0.0))[0], now_s
            self._tell(redo)
            self._runtime.replace(name, incarnation=redo.incarnation, first_tick=redo.first_tick)
        return tuple(redos)

    def _stop(self, dead: Sequence[Death], readers: Sequence[str]) -> dict[str, Death]:
        """End what is left of the dead, and of all that were reading what went with them: these ->
        the death that they follow."""
        following = {name: dead[0] for name in readers if dead}
        to_stop = [*{death.executor: death for death in dead}.items(), *following.items()]
        stopped = {name for name, _ in to_stop}
        for name, death in to_stop:
            for channel, tick in sorted(self._runtime.stop(name)):
                sink = self._marking.withdraw(channel, tick)
                if sink and sink not in stopped:
                    following[sink] = death
                    stopped.add(sink)
                    to_stop.append((sink, death))
        return following

    def _catch_up(self) -> None:
        """Have executors whose state is older than what had counted before this controller do the
        ticks since then again."""
        behind, self._behind = self._behind, {}
        for name, first_tick in behind.items():
            if self._marking.done_ticks[name] > first_tick:
                self._do_again(name, first_tick)

    def _do_again(self, executor: str, first_tick: int) -> None:
        """Have an executor with the state before ``first_tick`` repeat the ticks from there that
        have counted, then do the one that was out, if there was one. Before that it makes those
        tokens again which lay on edges when that state was saved, and were lost."""
        lost = (tick for _, tick in self._marking.withdrawn(executor))
        self._begins[executor] = first_tick
        self._repeat[executor] = min([first_tick, *lost])
        self._repeat_next(executor)

    def _repeat_next(self, executor: str) -> None:
        tick = self._repeat[executor]
        if tick < self._marking.done_ticks[executor]:
            self._repeat[executor] = tick + 1
            if tick < self._begins[executor]:
                self._send(Order(executor=executor, tick=tick))
            else:
                inputs = self._runtime.past_inputs(executor, tick)
                self._send(self._saving.order(Firing(executor, tick, inputs, {}), self._marking.num_ticks))
            return
        del self._repeat[executor]
        if (firing := self._marking.refire(executor)) is not None:
            self._send(self._saving.order(firing, self._marking.num_ticks))

    def _send(self, order: Order) -> None:
        self._runtime.fire(order)
        self._since_s[order.executor] = self.now()

    def _release(self, *, wait: bool = False) -> None:
        """Let go of what is held to do ticks again that are in a checkpoint by now."""
        if (done := self._saving.finished(wait=wait)) is not None:
            self._runtime.saved(*done)

    def _with_costs(self, report: Report) -> Report:
        """The report, with what a replacement has cost where it is the first after one."""
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
        return dataclasses.replace(report, metrics={**report.metrics, **metrics}, spans=(span, *report.spans))


def _ended(error: LlamaRLError, why: str) -> LlamaRLError:
    kind = DeadlineExceeded if isinstance(error, DeadlineExceeded) else ExecutorFailed
    return kind(f"{error}\nNot brought up again: {why}")
