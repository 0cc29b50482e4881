"""Each executor in processes of its own, one a rank: the runtime of every real run.

    controller's thread       io thread (asyncio)                  process of rank r, on this machine or another
    fire(order) ───────────▶  Ranks: Link.command, a rank each ─▶  executor's thread: Worker.run
    tell(news) ────────────▶         Link.tell ────────────────▶  diagnostics thread, while the executor works
    wait(deadline) ◀─ queue ◀─ reply, or the end of the process ◀─ report or failure, as bytes
    close() ───────────────▶  close, wait, kill ───────────────▶  Worker.close, exit

Who waits for whom, and how long, is the table "Timeouts" of docs/runtime.md.

- ``wait`` sleeps on one queue. A reply, an exception and a death all arrive there the moment they happen: nothing polls.
- An executor's exception travels as a value (``RankFailure``) and is printed once, by whoever ends the job.
- Orders and reports are pickled here, once, so their size is known: ``Report.controller_bytes``.
- Ranks do not see Ctrl-C, which is for the controller, and are killed if the controller dies.
"""

from __future__ import annotations

import atexit
import dataclasses
import queue
import sys
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

from llamarl.channels.base import ChannelKind, ChannelSpec, Handle
from llamarl.errors import DeadlineExceeded, ExecutorFailed, SourceGone
from llamarl.running_time import running_s
from llamarl.runtime.base import Death, JobStart, News, Order, Overdue, ProcessesDied, Report, SetupReport
from llamarl.runtime.children import raise_open_files
from llamarl.runtime.local import LocalLauncher
from llamarl.runtime.rank_plans import (
    combine_reports,
    combine_setups,
    deaths_alone,
    executor_failed,
    few_ranks,
    must_follow_from_a_death,
    plan_workers,
    readers_of_the_dead,
    with_states,
)
from llamarl.runtime.ranks import Answer, Launcher, Rank, Ranks
from llamarl.runtime.tick_log import TickLog, copy_to_controller
from llamarl.runtime.worker import CHANNEL_FACTORY, PULL_DEADLINE_S, RankFailure, RankReport, RankSetup, WorkerPlan
from llamarl.transports.network import Network
from llamarl.transports.segments import Segment

__all__ = ["Places", "ProcessRuntime"]

_FOLLOW_UP_S = 0.3
"""After a first failure, how long to listen for the others that came with it, to name the cause and
not a consequence."""
_DEATH_TOLD_S = 5.0
"""After memory that somebody was reading has gone: how long to listen for the death that this follows from."""
_CLOSE_IDLE_S = 10.0
_CLOSE_BUSY_S = 0.5


@dataclass
class _Out:
    """An order that is out."""

    sent_s: float
    num_bytes: int
    order: Order
    replies: list[RankReport] = field(default_factory=list)
    brought: list[Segment] = field(default_factory=list)
    """Memory of this process that they name, from other hosts."""


class Places(Protocol):
    """Hosts may go while the job runs; others then take their places."""

    def adapt(self, plan: WorkerPlan) -> WorkerPlan:
        """A rank's plan as the host needs it where the rank is now: folders and files have other paths there."""
        ...

    def has_place(self, executor: str) -> bool:
        """Whether it can be brought up again: its hosts are there, or others for those that are not."""
        ...

    def relocate(self, executor: str) -> Sequence[Network]:
        """Give ranks whose hosts are gone other hosts. Where each rank is now."""
        ...

    def prepare(self, executor: str, load_from: Path | None) -> None:
        """Have the hosts of its ranks hold what these read, before they start; any thread.

        Raises:
            ConnectionError: One of them is gone, too.
            LlamaRLError: One cannot take it.
        """
        ...

    def bring_files(self, executor: str, report: RankReport) -> None:
        """Have what a rank has written into the run's folder in the controller's, before its report counts; any thread.

        Raises:
            LlamaRLError: It did not come.
        """
        ...


class ProcessRuntime:
    """The Protocol of ``runtime/base.py`` with processes, which can be brought up again while the others work.

    Args:
        collective_timeout_s: Longest wait of one collective inside an executor's process group.
        channel_factory: Module with ``make_sender`` and ``make_receiver``.
        launchers: Executor -> who starts its processes; those without an entry go to this machine.
        networks: Executor -> where each of its ranks is among the hosts; None: the whole job is on one machine.
        places: The hosts of the job, where some may go and others take their places.
        log: Holds what bringing executors up again needs: their deaths are told as
            ``ProcessesDied``. Where they lie on other hosts, these must reach this process, which
            has joined their network. None: a death ends the job.
    """

    def __init__(
        self,
        *,
        collective_timeout_s: float = 600.0,
        channel_factory: str = CHANNEL_FACTORY,
        launchers: Mapping[str, Launcher] | None = None,
        networks: Mapping[str, Sequence[Network]] | None = None,
        places: Places | None = None,
        log: TickLog | None = None,
    ) -> None:
        self._collective_timeout_s = collective_timeout_s
        self._channel_factory = channel_factory
        self._launchers = launchers or {}
        self._networks = networks
        self._places = places
        self._restarts, self._log = log is not None, log if log is not None else TickLog()
        self._for_ranks: Segment | None = None
        """What ranks of other hosts try to read, to know whether they reach this process."""
        self._plans: dict[str, tuple[WorkerPlan, ...]] = {}
        self._channels: tuple[ChannelSpec, ...] = ()
        self._saved: Path | None = None
        """The newest finished checkpoint of this run, if there is one."""
        self._incarnations: dict[str, int] = {}
        self._ready: dict[str, list[RankSetup]] = {}
        """Executor -> what those of its ranks say that stand ready, until all do."""
        self._first_tick = 0
        self._standing = False
        self._pending: deque[Answer | RankFailure] = deque()
        """Heard, and not yet looked at."""
        self._ranks: Ranks | None = None
        self._here: LocalLauncher | None = None
        """Who starts processes on this machine."""
        self._out: dict[tuple[str, int], _Out] = {}
        self._failed = False
        self._closed = False

    def start(self, job: JobStart) -> Mapping[str, SetupReport]:
        """Bring all executors up, in parallel."""
        assert self._ranks is None, "start is called once"
        raise_open_files()
        if self._restarts:
            job = dataclasses.replace(job, channels=[_with_tokens_of_their_own(channel) for channel in job.channels])
        plans = plan_workers(
            job,
            collective_timeout_s=self._collective_timeout_s,
            channel_factory=self._channel_factory,
            networks=self._networks,
            journal=self._restarts,
        )
        if self._restarts and self._networks is not None:
            self._for_ranks = Segment(1)
            plans = {
                name: tuple(dataclasses.replace(plan, controller=self._for_ranks.handle) for plan in ranks)
                for name, ranks in plans.items()
            }
        self._plans, self._channels, self._first_tick = plans, tuple(job.channels), job.first_tick
        plans = {name: _resumed_plans(ranks, self._log.counted) for name, ranks in plans.items()}
        if self._places is not None:
            plans = {name: tuple(map(self._places.adapt, ranks)) for name, ranks in plans.items()}
        self._ready = {name: [] for name in plans}
        self._failed = (
            True  # until all stand: whatever ends the wait below, Ctrl-C too, leaves a job that cannot close in order
        )
        self._here = here = LocalLauncher([spec for spec in job.executors if spec.name not in self._launchers])
        self._ranks = Ranks(plans, {name: self._launchers.get(name, here) for name in plans})
        if self._for_ranks is not None:
            self._ranks.bring = self._bring
        _running.add(self)
        self._ranks.bring_up()
        return self.stand(job.deadline_s)

    def _bring(self, executor: str, report: RankReport) -> tuple[RankReport, Sequence[Segment]]:
        """What a rank made, to this machine; any thread."""
        if self._places is not None:
            self._places.bring_files(executor, report)
        return copy_to_controller(report, PULL_DEADLINE_S)

    def stand(self, deadline_s: float) -> Mapping[str, SetupReport]:
        """Wait until all executors stand ready; what ``start`` returns. To be called again when those
        that died meanwhile have been replaced; the others have gone on."""
        began = self.now()
        while missing := [name for name, ranks in self._plans.items() if len(self._ready[name]) < len(ranks)]:
            answer = self._next_answer(began + deadline_s - self.now())
            if answer is None:
                raise self._not_ready(missing, began, deadline_s)
            self._ready[answer.executor].append(answer.result)
        self._see_who_reaches_us()
        stand: Mapping[str, SetupReport] = {name: combine_setups(name, setups) for name, setups in self._ready.items()}
        if self._restarts:
            stand = self._hold_what_lies_on_edges(stand, began + deadline_s)
        self._failed, self._standing = False, True
        return stand

    def _see_who_reaches_us(self) -> None:
        """What is held is of use to those alone who reach it."""
        why = {
            f"{name!r} rank {setup.rank}": setup.why_unreached
            for name, setups in self._ready.items()
            for setup in setups
            if setup.why_unreached
        }
        if not why:
            return
        who, first = next(iter(why.items()))
        text = f"{', '.join(why)} cannot read memory of the controller ({who}: {first})"
        if self._log.counted:
            raise ExecutorFailed(
                f"{text}, so this job cannot go on from RUN/journal: remove that, or let them reach it"
            )
        print(
            f"{text}: no process of this job is brought up again. Open hosts.port_range to its hosts, or set "
            "recovery.max_restarts to 0",
            file=sys.stderr,
        )
        assert self._ranks is not None
        self._restarts, self._ranks.bring = False, None

    def _hold_what_lies_on_edges(self, stand: Mapping[str, SetupReport], until: float) -> Mapping[str, SetupReport]:
        journaled = [name for name, setups in self._ready.items() if all(setup.journaled for setup in setups)]
        brought: list[Segment] = []
        if self._for_ranks is not None:
            for name, setups in self._ready.items():
                for number, setup in enumerate(setups):
                    setups[number], copies = copy_to_controller(setup, max(0.0, until - self.now()))
                    brought += copies
                stand = {**stand, name: combine_setups(name, setups)}
        try:
            return self._log.begin(self._channels, stand, journaled, first_tick=self._first_tick)
        except SourceGone:  # a process that stood ready has ended: that is heard within milliseconds, as a failure
            self._next_answer(until - self.now())
            raise DeadlineExceeded(
                "what an executor made at its start is gone, and its process has not ended"
            ) from None
        finally:
            _close_all_of(brought)

    def _not_ready(self, missing: Sequence[str], began: float, limit_s: float) -> DeadlineExceeded | ProcessesDied:
        ready = {name: [setup.rank for setup in self._ready[name]] for name in missing}
        waited = f"controller waited {self.now() - began:.1f} s for executors to stand ready, limit {limit_s:g} s:"
        late = [self._late(name, "setup", began, ready[name]) for name in missing]
        text = "\n".join([waited, *late])
        stopped = [name for name in missing if self._stopped(name, ready[name])]
        if not self._restarts or not stopped:
            return DeadlineExceeded(text)
        return ProcessesDied(text, tuple(self._overdue(name, "setup", limit_s, ready[name]) for name in stopped))

    def fire(self, order: Order) -> None:
        """Send ``order`` to every rank of its executor; returns at once."""
        key = (order.executor, order.tick)
        assert self._ranks is not None and not self._closed, "fire needs a started runtime"
        assert key not in self._out, f"{key} is out already"
        num_bytes = self._ranks.send(order.executor, f"tick {order.tick}", "run", order)
        self._out[key] = _Out(self.now(), num_bytes, order)

    def tell(self, news: News) -> None:
        """Send ``news`` to every rank of a busy executor; returns at once."""
        assert self._ranks is not None, "tell needs a started runtime"
        num_bytes = self._ranks.tell(news.executor, news)
        for (executor, _), out in self._out.items():
            if executor == news.executor:
                out.num_bytes += num_bytes

    def wait(self, limit_s: float) -> Report:
        """The next report.

        Raises:
            ProcessesDied: Processes of executors have ended by themselves.
            Overdue: An order has been out for too long.
        """
        assert self._ranks is not None and self._out, "wait without an order out: it could never end"
        while True:
            first = min(self._out, key=lambda key: self._out[key].sent_s)
            answer = self._next_answer(self._out[first].sent_s + limit_s - self.now())
            if answer is None:
                raise self._overdue_order(*first, limit_s)
            if isinstance(answer.result, RankSetup):  # of one that is brought up again; its order is out, or will be
                continue
            out = self._out[answer.executor, answer.result.tick]
            out.replies.append(answer.result)
            out.brought += answer.brought
            out.num_bytes += answer.num_bytes
            if len(out.replies) == len(self._ranks.of[answer.executor]):
                whole = combine_reports(answer.executor, out.replies, controller_bytes=out.num_bytes)
                whole = dataclasses.replace(whole, incarnation=answer.incarnation)
                report = self._log.take(whole) if self._restarts else whole
                _close_all_of(out.brought)
                if report is not None:  # else its process has died since, which is the next that is heard
                    del self._out[answer.executor, answer.result.tick]
                    return report

    def _overdue_order(self, executor: str, tick: int, limit_s: float) -> Overdue:
        out = self._out[executor, tick]
        age_s = self.now() - out.sent_s
        waited = (
            f"controller waited {age_s:.1f} s for {executor!r} to finish tick {tick}, limit {limit_s:g} s; orders out:"
        )
        late = [
            self._late(name, f"tick {number}", order.sent_s, [report.rank for report in order.replies])
            for (name, number), order in self._out.items()
        ]
        reported = [report.rank for report in out.replies]
        return Overdue("\n".join([waited, *late]), self._overdue(executor, f"tick {tick}", limit_s, reported))

    def progress(self) -> dict[str, str]:
        """Executor -> how far it has come, in words, of those that are at work. Any thread."""
        return self._ranks.progress() if self._ranks is not None else {}

    def counted(self) -> Sequence[Report]:
        """What counted before this controller began, with tokens that are held."""
        return self._log.counted

    def replaceable(self) -> Mapping[str, int]:
        """Executors that can be brought up again -> the first tick that each then does again: its
        next one, or an earlier one where its state lies in a checkpoint alone and what it has read
        since is held. Every token that somebody may still read outlives them."""
        if not self._restarts:
            return {}
        held = self._log.replaceable() if self._standing else dict.fromkeys(self._plans, self._first_tick)
        return {name: tick for name, tick in held.items() if self._places is None or self._places.has_place(name)}

    def _overdue(self, executor: str, doing: str, limit_s: float, reported: Sequence[int]) -> Death:
        assert self._ranks is not None, "nothing is overdue before start"
        late = [rank for rank in self._ranks.of[executor] if rank.rank not in reported] or self._ranks.of[executor]
        stopped = self._stopped(executor, reported)
        told = "it was stopped (SIGSTOP), and" if stopped else "it"
        return Death(
            executor=executor,
            incarnation=self._incarnations.get(executor, 0),
            doing=doing,
            cause=f"{told} gave no answer within {limit_s:g} s (deadlines.{'setup' if doing == 'setup' else 'step'}_s)",
            rank=(stopped or late)[0].rank,
            from_outside=bool(stopped),
        )

    def _stopped(self, executor: str, reported: Sequence[int]) -> list[Rank]:
        assert self._ranks is not None, "nothing is stopped before start"
        return self._ranks.stopped([rank for rank in self._ranks.of[executor] if rank.rank not in reported])

    def stop(self, executor: str) -> frozenset[tuple[str, int]]:
        """End what is left of an executor, within seconds.

        Returns:
            (channel, tick) of its tokens on edges that are not whole: a version of the weights that
            was still being copied, or that lay on another host.
        """
        assert self._ranks is not None, "stop needs a started runtime"
        self._ranks.stop(executor)
        self._out = {key: out for key, out in self._out.items() if key[0] != executor}
        self._failed = not self._standing
        return self._log.torn(executor)

    def replace(self, executor: str, *, incarnation: int, first_tick: int) -> None:
        """Start an executor anew with the state after ``first_tick - 1``; returns at once, and orders
        may follow. What its earlier processes still say is ignored."""
        assert self._ranks is not None and not self._closed, "replace needs a started runtime"
        self._out = {key: out for key, out in self._out.items() if key[0] != executor}
        self._incarnations[executor] = incarnation
        plans = [
            dataclasses.replace(plan, incarnation=incarnation, makes_initial_tokens=not self._standing)
            for plan in self._plans[executor]
        ]
        if not self._standing:
            self._ready[executor] = []
            plans = list(_resumed_plans(tuple(plans), self._log.counted))
        elif states := self._log.states(executor):
            plans = list(with_states(plans, states, first_tick=first_tick))
        elif plans[0].first_tick < first_tick:  # else as the run began
            plans = [dataclasses.replace(plan, first_tick=first_tick, load_from=self._saved) for plan in plans]
        if self._places is None:
            self._ranks.replace(executor, tuple(plans), incarnation)
        else:
            networks = self._places.relocate(executor)
            plans = [dataclasses.replace(plan, network=at) for plan, at in zip(plans, networks, strict=True)]
            prepared = partial(_prepared, self._places, plans)
            self._ranks.replace(executor, tuple(plans), incarnation, prepared=prepared)
        self._failed = not self._standing

    def past_inputs(self, executor: str, tick: int) -> Mapping[str, tuple[Handle, ...]]:
        """What an executor read at a tick that has counted, from ``replaceable`` on."""
        return self._log.inputs(executor, tick)

    def saved(self, tick: int, folder: Path) -> None:
        """A checkpoint is finished: what is held to do earlier ticks again may go."""
        self._saved = folder
        self._log.saved(tick)

    def now(self) -> float:
        """``running_s``: deadlines do not count the time for which this process was stopped."""
        return running_s()

    def close(self) -> None:
        """Close executors, stop processes, kill what is left.

        Takes at most 17 s with idle executors (10 of them for their own ``close``), at most 7.5 s
        after a failure or with orders out; commonly about one.
        """
        if self._ranks is None or self._closed:
            return
        self._closed = True
        _running.discard(self)
        busy = self._failed or bool(self._out)
        self._ranks.end(_CLOSE_BUSY_S if busy else _CLOSE_IDLE_S, orderly=not busy)
        self._log.close()
        _close_all_of([] if self._for_ranks is None else [self._for_ranks])

    def _next_answer(self, timeout_s: float) -> Answer | None:
        """The next answer; None when the time is over. A failure raises, together with those that came with it."""
        until = self.now() + timeout_s
        event = self._next_event(until)
        if event is None:
            self._failed = True
        if event is None or isinstance(event, Answer):
            return event
        self._failed = True
        failures, answers = [event], []
        awaited = must_follow_from_a_death(failures)
        until = self.now() + (_DEATH_TOLD_S if awaited else _FOLLOW_UP_S)
        while (follower := self._next_event(until)) is not None:
            if isinstance(follower, RankFailure):
                failures.append(follower)
                if awaited and not must_follow_from_a_death(failures):
                    awaited, until = False, self.now() + _FOLLOW_UP_S
            else:
                answers.append(follower)
        self._pending.extend(answers)  # they count, should the job go on
        error, deaths = executor_failed(failures), deaths_alone(failures)
        if deaths and self._restarts:
            raise ProcessesDied(str(error), deaths, readers_of_the_dead(failures)) from None
        raise error

    def _next_event(self, until: float) -> Answer | RankFailure | None:
        """Of a present incarnation; None when it is ``until``."""
        assert self._ranks is not None
        while True:
            if self._pending:
                event: Answer | RankFailure = self._pending.popleft()
            else:
                left_s = until - self.now()
                try:
                    event = self._ranks.events.get(timeout=max(0.0, left_s))
                except queue.Empty:
                    if left_s <= 0:
                        return None
                    continue  # this process was stopped: the queue's own clock went on
            if event.incarnation == self._incarnations.get(event.executor, 0):
                return event

    def _late(self, executor: str, doing: str, sent_s: float, reported: Sequence[int]) -> str:
        """Who has not answered, since when, and where it is now."""
        assert self._ranks is not None
        missing = [rank for rank in self._ranks.of[executor] if rank.rank not in reported]
        head = f"{executor!r}, {doing}, out for {self.now() - sent_s:.1f} s: no report from"
        at: dict[str, list[str]] = {}
        for rank, place in zip(missing, self._ranks.where(missing), strict=True):
            at.setdefault(place, []).append(f"{rank.rank} (pid {rank.pid})")
        return "\n".join(f"{head} {few_ranks(ranks)}, which is at: {place}" for place, ranks in at.items())


def _resumed_plans(plans: tuple[WorkerPlan, ...], resumed: Sequence[Report]) -> tuple[WorkerPlan, ...]:
    """Ranks that stand after the last of the ticks that counted, where the state after it is known;
    else as the checkpoint has it."""
    own = [report for report in resumed if report.executor == plans[0].spec.name]
    if not own or not own[-1].journal:
        return plans
    return with_states(plans, own[-1].journal, first_tick=own[-1].tick + 1)


def _prepared(places: Places, plans: Sequence[WorkerPlan]) -> list[WorkerPlan]:
    """Plans for the hosts where ranks are now, which hold what these read."""
    places.prepare(plans[0].spec.name, plans[0].load_from)
    return [places.adapt(plan) for plan in plans]


def _close_all_of(segments: Sequence[Segment]) -> None:
    for segment in segments:
        segment.close()


def _with_tokens_of_their_own(channel: ChannelSpec) -> ChannelSpec:
    """So that they can be held beyond the tick that reads them."""
    data = channel.kind is not ChannelKind.WEIGHTS and not channel.latest
    return dataclasses.replace(channel, kept=True) if data else channel


_running: weakref.WeakSet[ProcessRuntime] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """For a controller that ended without ``close``."""
    for runtime in list(_running):
        runtime.close()
