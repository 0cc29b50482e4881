"""The one program: start the executors, fire whoever is ready, wait with a deadline, move handles, take checkpoints.

    Marking (pure: who may fire) ◀──▶ loop ◀──▶ Runtime (where executors live) ; observers hear every report

No payload passes through here: an order and a report carry handles, a few hundred bytes each. (Over
hosts the runtime holds copies of what a tick makes: ``runtime/tick_log.py``.)

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

``graph.py`` makes this graph from ``llamarl.roles``; ``marking.py`` is the rule by which any graph fires.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Protocol

from llamarl.controller.marking import Marking
from llamarl.controller.saving import Saving
from llamarl.errors import DeadlineExceeded, RunStopped
from llamarl.runtime.base import JobStart, News, Report, Runtime
from llamarl.settings.job import DeadlineConfig

__all__ = ["Observer", "StopRequest", "run_graph"]


class Observer(Protocol):
    """Hears what happened; decides nothing."""

    def on_report(self, report: Report) -> None: ...


def run_graph(
    marking: Marking,
    runtime: Runtime,
    *,
    seed: int,
    run_dir: Path | None = None,
    load_from: Path | None = None,
    deadlines: DeadlineConfig | None = None,
    saving: Saving | None = None,
    observers: Sequence[Observer] = (),
) -> None:
    """Run every executor of the marking's graph to its last tick, then return. The caller closes the runtime.

    Args:
        marking: Before its first tick.
        runtime: What its processes' deaths mean is its own affair: see ``controller/surviving.py``.
        load_from: Folder of the checkpoint after the tick before the first; None: there is none.
        saving: None: nothing is saved, and the job ends with its last tick.

    Raises:
        KeyboardInterrupt: They did, and everyone has saved the same tick before.
        ExecutorFailed: An executor raised, or its process died and was not brought up again.
        DeadlineExceeded: A setup or a tick took too long; the message says who waited for whom.
        RunStopped: An executor asked for the job to stop; everyone has saved the same tick before.
    """
    graph, deadlines = marking.graph, deadlines or DeadlineConfig()
    saving = saving or Saving(graph)
    job = JobStart(
        executors=graph.executors,
        channels=graph.channels,
        run_dir=run_dir,
        seed=seed,
        first_tick=marking.first_tick,
        load_from=load_from,
        deadline_s=deadlines.setup_s,
    )
    ready = runtime.start(job)
    marking.begin({name: tokens for report in ready.values() for name, tokens in report.initial_tokens.items()})
    marking.advance_by((report.executor, report.tick, report.outputs) for report in runtime.counted())

    def tell(report: Report) -> None:
        for observer in observers:
            observer.on_report(report)
        saving.heed(report, marking)

    for report in runtime.counted():
        tell(report)
    stop, by_user = "", False
    while not marking.finished:
        if not stop and saving.heed_the_user(marking):
            by_user = True
        saving.heed_the_clock(marking)
        for firing in marking.ready():
            runtime.fire(saving.order(firing, marking.num_ticks))
        try:
            report = runtime.wait(deadlines.step_s)
        except DeadlineExceeded as error:
            raise _explained(error, marking, deadlines.step_s) from error
        counts = report.tick == marking.done_ticks[report.executor]  # else it is one that was done again
        if counts:
            marking.complete(report.executor, report.tick, report.outputs)
            tell(report)
        _tell_sinks(runtime, marking, report)
        saving.note(report)
        if counts and report.stop and not stop:
            stop = report.stop
            saving.end_early(marking)
    if stop:
        raise RunStopped(f"{stop}\nEvery executor went on to tick {marking.num_ticks - 1} and stopped there.")
    if by_user:
        raise KeyboardInterrupt


def _tell_sinks(runtime: Runtime, marking: Marking, report: Report) -> None:
    """Those at work hear of new tokens that they may take now or fetch ahead; the others find them
    in their next order."""
    for channel in marking.graph.outputs[report.executor]:
        tells = (channel.latest or channel.fetched_ahead) and channel.name in report.outputs
        if tells and channel.sink in marking.busy:
            handles = report.outputs[channel.name]
            runtime.tell(News(executor=channel.sink, channel=channel.name, source_tick=report.tick, handles=handles))


def _explained(error: DeadlineExceeded, marking: Marking, step_s: float) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"{error}\nWho waits for whom:\n{marking.describe()}\n"
        f"Raise deadlines.step_s = {step_s:g} if this tick is merely slow; else look at the output above."
    )


_STOPPING = "stopping after the next tick that can be saved; Ctrl-C once more stops at once"


class StopRequest:
    """Whether the user has asked for the job to stop, while a ``with`` block lasts in the main thread;
    elsewhere, and where somebody else handles Ctrl-C, nothing changes. The first Ctrl-C has the job end
    at the next tick that all executors can save, the second at once.

    Args:
        show: Given the words that say so, whether it shows them; called in the handler, so it may set
            something and no more. Else they go to standard error.
    """

    def __init__(self, show: Callable[[str], bool] = lambda words: False) -> None:
        self._show = show
        self._asked = False

    def __enter__(self) -> StopRequest:
        self._handles = (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        )
        if self._handles:
            signal.signal(signal.SIGINT, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        if self._handles:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def take(self) -> bool:
        """Whether the user has asked since this was last asked."""
        asked, self._asked = self._asked, False
        return asked

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if not self._show(_STOPPING):
            with contextlib.suppress(OSError):  # the same Ctrl-C has ended who reads it: `| tee`
                os.write(2, f"\n{_STOPPING}\n".encode())  # a stream may be in the middle of a line
