"""The one program: start the executors, fire whoever is ready, wait with a deadline, move handles, take checkpoints.

    Marking (pure: who may fire) ◀──▶ loop ◀──▶ Runtime (where executors live) ; observers hear every report

No payload passes through here: an order and a report carry handles, a few hundred bytes each.

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
from pathlib import Path
from typing import Protocol

from llamarl.channels.base import ChannelSpec
from llamarl.checkpoint.snapshot import FileRecord
from llamarl.checkpoint.written import writer_name
from llamarl.controller.config import DeadlineConfig
from llamarl.controller.graph import Graph
from llamarl.controller.marking import Firing, Marking
from llamarl.controller.replacing import Replacing
from llamarl.errors import DeadlineExceeded, RunStopped
from llamarl.runtime.base import News, Order, ProcessesDied, Report, Restarts, Runtime

__all__ = ["Checkpoints", "Observer", "run_graph"]


class Observer(Protocol):
    """Hears what happened; decides nothing."""

    def on_report(self, report: Report) -> None: ...


class Checkpoints(Protocol):
    """When a tick is saved, where, and what to do when all executors have saved it."""

    def due(self, tick: int) -> bool:
        """Whether the state after ``tick`` is saved, as far as it is decided."""
        ...

    def overdue(self) -> bool:
        """Whether the clock asks for one more, at the next tick that can still be saved."""
        ...

    def folder_for(self, tick: int) -> Path | None:
        """Folder for the state after ``tick``, or None if this tick is not saved."""
        ...

    def require(self, tick: int) -> None:
        """Save the state after ``tick`` too, a tick that no executor has begun."""
        ...

    def on_saved(self, tick: int, written: Mapping[str, Sequence[FileRecord]]) -> None:
        """Every executor's state after ``tick`` is written: rank's name -> its files of it, for all ranks that told of any."""
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
) -> None:
    """Run every executor of ``graph`` from ``first_tick`` to ``num_ticks``, then return. The caller closes the runtime.

    Args:
        needs: Where decisions are known beforehand (a replay): see ``Marking``.
        replacing: Brings executors up again whose processes died, where the runtime can; None: a death ends the run.

    Raises:
        ExecutorFailed: An executor raised, or its process died and was not brought up again.
        DeadlineExceeded: A setup or a tick took too long; the message says who waited for whom.
        RunStopped: An executor asked for the job to stop; everyone has saved the same tick before.
    """
    deadlines = deadlines or DeadlineConfig()
    ready = runtime.start(
        graph.executors,
        graph.channels,
        run_dir=run_dir,
        seed=seed,
        first_tick=first_tick,
        load_from=load_from,
        deadline_s=deadlines.setup_s,
    )
    initial = {name: tokens for report in ready.values() for name, tokens in report.initial_tokens.items()}
    marking = Marking(graph, first_tick=first_tick, num_ticks=num_ticks, initial_tokens=initial, needs=needs)
    fired_at: dict[str, float] = {}
    orders: dict[str, Order] = {}
    saves = _Saves(graph)
    stop = ""
    while not marking.finished:
        if checkpoints and checkpoints.overdue() and (cut := _next_cut(marking)) < marking.num_ticks:
            checkpoints.require(cut)
        for firing in marking.ready():
            save_to = checkpoints.folder_for(firing.tick) if checkpoints else None
            flush_saves = firing.tick == marking.num_ticks - 1
            orders[firing.executor] = Order(
                executor=firing.executor,
                tick=firing.tick,
                inputs=firing.inputs,
                later=firing.later,
                save_to=save_to,
                flush_saves=flush_saves,
                saves=_saves_ahead(graph, marking, firing, checkpoints) if checkpoints else (),
            )
            runtime.fire(orders[firing.executor])
            fired_at[firing.executor] = runtime.now()
        try:
            report = _wait(runtime, marking, fired_at, deadlines.step_s)
        except ProcessesDied as error:
            if replacing is None or not isinstance(runtime, Restarts):
                raise
            ages_s = {name: runtime.now() - at_s for name, at_s in fired_at.items()}
            for name, order in replacing.bring_back(runtime, marking, error, orders, ages_s).items():
                orders[name] = order
                runtime.fire(order)
                fired_at[name] = runtime.now()
            continue
        if replacing is not None:
            report = replacing.told_of(report)
        marking.complete(report.executor, report.tick, report.outputs)
        del fired_at[report.executor]
        _tell_sinks(graph, runtime, marking, report)
        for observer in observers:
            observer.on_report(report)
        if checkpoints:
            if checkpoints.due(report.tick):
                saves.begin(report)
            for tick, written in saves.complete(report).items():
                checkpoints.on_saved(tick, written)
        if report.stop and not stop:
            stop = report.stop
            last = _next_cut(marking)
            if last < marking.num_ticks:  # else the job is at its end anyway
                marking.num_ticks = last + 1
                if checkpoints:
                    checkpoints.require(last)
    if stop:
        raise RunStopped(f"{stop}\nEvery executor went on to tick {marking.num_ticks - 1} and stopped there.")


def _tell_sinks(graph: Graph, runtime: Runtime, marking: Marking, report: Report) -> None:
    """Those at work hear of new tokens that they may take now or fetch ahead; the others find them in their next order."""
    for channel in graph.outputs[report.executor]:
        if (channel.latest or channel.fetched_ahead) and channel.sink in marking.busy:
            handles = report.outputs[channel.name]
            runtime.tell(News(executor=channel.sink, channel=channel.name, source_tick=report.tick, handles=handles))


class _Saves:
    """Which executors have yet to pass a saved tick, or are still writing their state of it."""

    def __init__(self, graph: Graph) -> None:
        self._names = {executor.name for executor in graph.executors}
        self._missing: dict[int, set[str]] = {}
        self._writing: dict[int, set[str]] = {}
        self._written: dict[int, dict[str, Sequence[FileRecord]]] = {}

    def begin(self, report: Report) -> None:
        """An executor has passed a tick that is saved."""
        self._missing.setdefault(report.tick, set(self._names)).discard(report.executor)
        self._writing.setdefault(report.tick, set()).add(report.executor)

    def complete(self, report: Report) -> dict[int, dict[str, Sequence[FileRecord]]]:
        """Ticks of which, with this report, every executor's state is written, each once, oldest first -> rank's name -> its
        files, as far as ranks have told of them."""
        for tick, ranks in report.saved.items():
            named = {writer_name(report.executor, rank): files for rank, files in ranks.items()}
            self._written.setdefault(tick, {}).update(named)
        for tick, names in self._writing.items():
            if tick not in report.saving:
                names.discard(report.executor)
        done = [tick for tick in sorted(self._missing) if not self._missing[tick] and not self._writing[tick]]
        for tick in done:
            del self._missing[tick], self._writing[tick]
        return {tick: self._written.pop(tick, {}) for tick in done}


def _next_cut(marking: Marking) -> int:
    """The next tick after which all states can be saved, although nobody was told before: no executor has begun it, and the
    tokens that lie on the delayed edges of that cut are all made after their sources are told, so these can keep them."""
    unfired = {name: done + (name in marking.busy) for name, done in marking.done_ticks.items()}
    kept = [unfired[channel.source] + channel.delay - 1 for channel in marking.graph.channels if channel.delay]
    return max([*unfired.values(), *kept])


def _saves_ahead(graph: Graph, marking: Marking, firing: Firing, checkpoints: Checkpoints) -> tuple[int, ...]:
    """Ticks from ``firing``'s on that are saved while a token that it makes may still lie on an edge."""
    reach = max((channel.delay for channel in graph.outputs[firing.executor]), default=0)
    ahead = range(firing.tick, min(firing.tick + reach, marking.num_ticks))
    return tuple(tick for tick in ahead if checkpoints.due(tick))


def _wait(runtime: Runtime, marking: Marking, fired_at: Mapping[str, float], step_s: float) -> Report:
    """The next report; the limit runs from the oldest order that is still out."""
    oldest = min(fired_at, key=lambda name: fired_at[name])
    try:
        return runtime.wait(max(0.0, fired_at[oldest] + step_s - runtime.now()))
    except DeadlineExceeded as error:
        age = runtime.now() - fired_at[oldest]
        raise DeadlineExceeded(
            f"the controller waited {age:.0f} s for {oldest!r} to finish tick {marking.busy[oldest].tick} "
            f"(limit deadlines.step_s = {step_s:g} s). {error}\nWho waits for whom:\n{marking.describe()}\n"
            f"Raise deadlines.step_s if this tick is merely slow; else look at {oldest!r}'s output above."
        ) from error
