"""The one program: start the executors, fire whoever is ready, wait with a deadline, move handles, take checkpoints.

    Marking (pure: who may fire) ◀──▶ loop ◀──▶ Runtime (where executors live) ; observers hear every report

No payload passes through here: an order and a report carry handles, a few hundred bytes each. (Over
hosts the runtime holds copies of what a tick makes: ``runtime/copy_to_controller.py``.)

The standard job at tick k, with s = ``schedule.max_staleness``; nobody waits for anything else:

    generator   consumes       weights version max(0, k - s)
                produces       completions of tick k
                waits for      the trainer's tick k - s - 1, and room for s + 1 batches on its channel
                unblocked by   the trainer's report
    reward      consumes       completions of tick k
                produces       scored groups of tick k: every response has a score or a failure
                waits for      the generator's tick k
                unblocked by   the generator's report
    reference,  consume        the groups of tick k from whoever stands before them
    critic      produce        the same groups with reference log-probs, with values
                wait for       that one's tick k
                unblocked by   its report
    trainer     consumes       the groups of tick k, with all that is known of them
                produces       weights version k + 1; on ``eval_weights`` only versions that are due
                waits for      the last of these stations' tick k, and a free slot for the version
                unblocked by   its report, or the generator's for the slot
    evaluator   consumes       the version after tick k, where it is due; nothing at other ticks
                produces       metrics
                waits for      the trainer's tick k
                unblocked by   the trainer's report

``standard_graph.py`` makes this graph from ``llamarl.roles``; ``marking.py`` is the rule by which any graph fires.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from llamarl.channels.base import ChannelSpec
from llamarl.checkpoint.snapshot import FileRecord
from llamarl.checkpoint.written import writer_name
from llamarl.controller.config import DeadlineConfig
from llamarl.controller.graph import Graph
from llamarl.controller.marking import Marking, before_the_first_tick
from llamarl.controller.orders import Orders, SavedTicks
from llamarl.controller.replacing import Replacing
from llamarl.controller.stragglers import Stragglers
from llamarl.errors import DeadlineExceeded, RunStopped
from llamarl.executors.base import ExecutorSpec
from llamarl.runtime.base import Death, News, ProcessesDied, Report, Rescales, Restarts, Runtime

__all__ = ["Checkpoints", "Journal", "Observer", "Scaling", "run_graph"]


class Journal(Protocol):
    """Notes what counts where it outlives the controller."""

    def append(self, report: Report) -> None:
        """A report that has counted."""
        ...

    def saved(self, tick: int) -> None:
        """A checkpoint of the state after ``tick`` is finished."""
        ...


class Scaling(Protocol):
    """Who asks for another number of ranks of an executor."""

    def due(self, marking: Marking, replaceable: Callable[[], Mapping[str, int]]) -> ExecutorSpec | None:
        """The executor, not at work, that is to be started anew with other ranks now; None: nobody."""
        ...


class Observer(Protocol):
    """Hears what happened; decides nothing."""

    def on_report(self, report: Report) -> None: ...


class Checkpoints(SavedTicks, Protocol):
    """When a tick is saved, where, and what to do when all executors have saved it."""

    def overdue(self) -> bool:
        """Whether the clock asks for one more, at the next tick that can still be saved."""
        ...

    def require(self, tick: int) -> None:
        """Save the state after ``tick`` too, a tick that no executor has begun."""
        ...

    def on_saved(self, tick: int, written: Mapping[str, Sequence[FileRecord]]) -> None:
        """Every executor's state after ``tick`` is written: rank's name -> its files of it, for all
        ranks that told of any."""
        ...

    def on_unsaved(self, tick: int, why: str) -> None:
        """Every executor has passed ``tick`` and has written its state, or could not: this one is given up."""
        ...

    def finished(self, *, wait: bool = False) -> tuple[int, Path] | None:
        """Tick and folder of the newest checkpoint of this run that is proved and under its final name.

        Args:
            wait: First let those be proved of which ``on_saved`` has told.
        """
        ...


def run_graph(
    graph: Graph,
    runtime: Runtime,
    *,
    num_ticks: int,
    seed: int,
    run_dir: Path | None = None,
    first_tick: int = 0,
    load_from: Path | None = None,
    deadlines: DeadlineConfig | None = None,
    checkpoints: Checkpoints | None = None,
    observers: Sequence[Observer] = (),
    needs: Callable[[ChannelSpec, int], int] | None = None,
    replacing: Replacing | None = None,
    journal: Journal | None = None,
    scaling: Scaling | None = None,
    stragglers: Stragglers | None = None,
) -> None:
    """Run every executor of ``graph`` from ``first_tick`` to ``num_ticks``, then return. The caller closes the runtime.

    Args:
        needs: Where decisions are known beforehand (a replay): see ``Marking``.
        journal: Gets each report that counts.
        replacing: Brings executors up again whose processes died, where the runtime can; None: a death ends the run.
        stragglers: Says which ticks take too long, where there is ``replacing``; whoever is at one
            is ended and does it again.
        scaling: Asked before orders are given, where there is ``replacing``.

    Raises:
        ExecutorFailed: An executor raised, or its process died and was not brought up again.
        DeadlineExceeded: A setup or a tick took too long; the message says who waited for whom.
        RunStopped: An executor asked for the job to stop; everyone has saved the same tick before.
    """
    deadlines = deadlines or DeadlineConfig()
    start = partial(
        runtime.start,
        graph.executors,
        graph.channels,
        run_dir=run_dir,
        seed=seed,
        first_tick=first_tick,
        load_from=load_from,
        deadline_s=deadlines.setup_s,
    )
    restarts = runtime if replacing is not None and isinstance(runtime, Restarts) else None
    if restarts is None or replacing is None:
        ready = start()
    else:
        ready = replacing.set_up(
            start, restarts, before_the_first_tick(graph, first_tick, num_ticks), deadlines.setup_s
        )
    initial = {name: tokens for report in ready.values() for name, tokens in report.initial_tokens.items()}
    marking = Marking(graph, first_tick=first_tick, num_ticks=num_ticks, initial_tokens=initial, needs=needs)
    resumed = runtime.resumed() if isinstance(runtime, Restarts) else ()
    marking.go_on((report.executor, report.tick, report.outputs) for report in resumed)
    for report in resumed:
        for observer in observers:
            observer.on_report(report)
    orders = Orders(runtime, marking, checkpoints)
    saves = _Saves(graph)
    for name, done in marking.done_ticks.items():
        if done > first_tick and not any(report.executor == name and report.journal for report in resumed):
            orders.again(name, first_tick)
    stop = ""
    while not marking.finished:
        if checkpoints and checkpoints.overdue() and (cut := _next_cut(marking)) < marking.num_ticks:
            checkpoints.require(cut)
        if scaling is not None and replacing is not None and isinstance(runtime, Rescales):
            spec = scaling.due(marking, runtime.replaceable)
            if spec is not None:
                replacing.rescale(runtime, spec, marking.done_ticks[spec.name])
                saves.again(spec.name, marking.done_ticks[spec.name])
                if stragglers is not None:
                    stragglers.restarted(spec.name, marking.done_ticks[spec.name])
        for firing in marking.ready():
            orders.give(firing)
        try:
            limits_s = {}
            if stragglers is not None and restarts is not None and replacing is not None and replacing.has_room():
                limits_s = stragglers.limits_s(marking.busy, restarts.replaceable())
            report = _wait(runtime, marking, orders, deadlines.step_s, limits_s)
        except (ProcessesDied, _NoAnswer) as error:
            if restarts is None or replacing is None:
                raise
            deaths = error.deaths if isinstance(error, ProcessesDied) else (error.as_death(restarts),)
            _tell_of_checkpoints(restarts, checkpoints, journal, wait=True)
            readers = error.readers if isinstance(error, ProcessesDied) else ()
            for redo in replacing.bring_back(restarts, marking, error, deaths, orders.ages_s(), readers=readers):
                saves.again(redo.executor, redo.first_tick)
                orders.again(redo.executor, redo.first_tick)
                if stragglers is not None:
                    stragglers.restarted(redo.executor, redo.next_tick)
            continue
        has_counted = report.tick < marking.done_ticks[report.executor]
        if has_counted:
            for name, handles in report.outputs.items():
                marking.put_back(name, report.tick, handles)
        else:
            report = report if replacing is None else replacing.with_recovery_metrics(report)
            if stragglers is not None:
                stragglers.note(marking.busy[report.executor], report.finished_s - report.started_s)
            marking.complete(report.executor, report.tick, report.outputs)
            if journal is not None:
                journal.append(report)
            for observer in observers:
                observer.on_report(report)
        orders.next_order(report.executor)
        _tell_sinks(graph, runtime, marking, report)
        if checkpoints and not report.at_start:
            if checkpoints.due(report.tick):
                saves.begin(report)
            for tick, written in saves.complete(report).items():
                if why := saves.why_unsaved(tick):
                    checkpoints.on_unsaved(tick, why)
                else:
                    checkpoints.on_saved(tick, written)
            if restarts is not None:
                _tell_of_checkpoints(restarts, checkpoints, journal)
        if report.stop and not stop and not has_counted:
            stop = report.stop
            last = _next_cut(marking)
            if last < marking.num_ticks:  # else the job is at its end anyway
                marking.num_ticks = last + 1
                if checkpoints:
                    checkpoints.require(last)
    if stop:
        raise RunStopped(f"{stop}\nEvery executor went on to tick {marking.num_ticks - 1} and stopped there.")


def _tell_sinks(graph: Graph, runtime: Runtime, marking: Marking, report: Report) -> None:
    """Those at work hear of new tokens that they may take now or fetch ahead; the others find them
    in their next order."""
    for channel in graph.outputs[report.executor]:
        tells = (channel.latest or channel.fetched_ahead) and channel.name in report.outputs
        if tells and channel.sink in marking.busy:
            handles = report.outputs[channel.name]
            runtime.tell(News(executor=channel.sink, channel=channel.name, source_tick=report.tick, handles=handles))


class _Saves:
    """Which executors have yet to pass a saved tick, or are still writing their state of it."""

    def __init__(self, graph: Graph) -> None:
        self._names = {executor.name for executor in graph.executors}
        self._missing: dict[int, set[str]] = {}
        self._writing: dict[int, set[str]] = {}
        self._written: dict[int, dict[str, dict[str, Sequence[FileRecord]]]] = {}
        """Tick -> executor -> rank's name -> its files."""
        self._unsaved: dict[int, dict[str, str]] = {}
        """Tick -> executor -> why it could not write its state."""

    def begin(self, report: Report) -> None:
        """An executor has passed a tick that is saved."""
        self._missing.setdefault(report.tick, set(self._names)).discard(report.executor)
        self._writing.setdefault(report.tick, set()).add(report.executor)

    def again(self, executor: str, first_tick: int) -> None:
        """An executor repeats its ticks from this one on: of those that are not saved yet it writes
        its state anew. One that it was still to write of an earlier tick is lost."""
        for tick in self._missing:
            if tick < first_tick and executor in self._writing[tick]:
                self._writing[tick].discard(executor)
                self._unsaved.setdefault(tick, {})[executor] = f"{executor} ended before its state was written"
            if tick >= first_tick:
                self._missing[tick].add(executor)
                self._writing[tick].discard(executor)
                self._written.get(tick, {}).pop(executor, None)
                self._unsaved.get(tick, {}).pop(executor, None)

    def why_unsaved(self, tick: int) -> str:
        """Of a tick that is complete: why somebody's state of it is not written; empty if all are."""
        return next(iter(self._unsaved.pop(tick, {}).values()), "")

    def complete(self, report: Report) -> dict[int, dict[str, Sequence[FileRecord]]]:
        """Ticks of which, with this report, every executor's state is written, or could not be,
        each once, oldest first -> rank's name -> its files, as far as ranks have told of them."""
        for tick, ranks in report.saved.items():
            named = {writer_name(report.executor, rank): files for rank, files in ranks.items()}
            self._written.setdefault(tick, {}).setdefault(report.executor, {}).update(named)
        for tick, why in report.unsaved.items():
            self._unsaved.setdefault(tick, {})[report.executor] = why
        for tick, names in self._writing.items():
            if tick not in report.saving:
                names.discard(report.executor)
        done = [tick for tick in sorted(self._missing) if not self._missing[tick] and not self._writing[tick]]
        for tick in done:
            del self._missing[tick], self._writing[tick]
        return {
            tick: {name: files for ranks in self._written.pop(tick, {}).values() for name, files in ranks.items()}
            for tick in done
        }


def _next_cut(marking: Marking) -> int:
    """The next tick after which all states can be saved, although nobody was told before: no
    executor has begun it, and the tokens that lie on the delayed edges of that cut are all made
    after their sources are told, so these can keep them."""
    unfired = {name: done + (name in marking.busy) for name, done in marking.done_ticks.items()}
    kept = [unfired[channel.source] + channel.delay - 1 for channel in marking.graph.channels if channel.delay]
    return max([*unfired.values(), *kept])


def _tell_of_checkpoints(
    runtime: Restarts, checkpoints: Checkpoints | None, journal: Journal | None, *, wait: bool = False
) -> None:
    """What is in a checkpoint needs not be held any more."""
    if checkpoints is not None and (done := checkpoints.finished(wait=wait)) is not None:
        runtime.saved(*done)
        if journal is not None:
            journal.saved(done[0])


class _NoAnswer(DeadlineExceeded):
    """An executor has not answered to an order in time."""

    def __init__(self, message: str, executor: str, tick: int, limit_s: float) -> None:
        super().__init__(message)
        self.executor, self.tick, self.limit_s = executor, tick, limit_s

    def as_death(self, runtime: Restarts) -> Death:
        """It is ended, and counts as having died."""
        return runtime.overdue(self.executor, f"tick {self.tick}", self.limit_s)


def _wait(
    runtime: Runtime, marking: Marking, orders: Orders, step_s: float, limits_s: Mapping[str, float] = {}
) -> Report:
    """The next report; the limit runs from the order whose time is over first.

    Args:
        limits_s: Executors that have less than ``step_s`` for the tick at which they are.
    """
    limits = {name: min(step_s, limits_s.get(name, step_s)) for name in orders.since_s}
    late = min(limits, key=lambda name: orders.since_s[name] + limits[name])
    try:
        return runtime.wait(max(0.0, orders.since_s[late] + limits[late] - runtime.now()))
    except DeadlineExceeded as error:
        age, tick = runtime.now() - orders.since_s[late], orders.tick[late]
        key = "deadlines.step_s" if limits[late] == step_s else "recovery.straggler_multiple x the median"
        raise _NoAnswer(
            f"the controller waited {age:.0f} s for {late!r} to finish tick {tick} "
            f"(limit {key} = {limits[late]:g} s). {error}\nWho waits for whom:\n{marking.describe()}\n"
            f"Raise deadlines.step_s if this tick is merely slow; else look at {late!r}'s output above.",
            late,
            tick,
            limits[late],
        ) from error
