"""Between the controller's loop and the checkpoints: which tick's states are saved, and when all of a tick are written.

clock or stop ─▶ the next tick that all can still save ─▶ Checkpoints.require
firing ────────▶ Saving.order: where its state goes, which saved ticks come ─▶ runtime
report ────────▶ Saving.note: every executor has passed the tick, and its state is written ─▶ on_saved, or on_unsaved

Ctrl-C has two steps (``StopRequest``): the first has the job end at the next tick that all executors can save, the
second at once.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Protocol

from llamarl.checkpoint.snapshot import FileRecord
from llamarl.checkpoint.written import writer_name
from llamarl.controller.graph import Graph
from llamarl.controller.marking import Firing, Marking
from llamarl.runtime.base import Order, Report

__all__ = ["Checkpoints", "Saving", "StopRequest"]


class Checkpoints(Protocol):
    """When a tick is saved, where, and what to do when all executors have saved it."""

    def due(self, tick: int) -> bool:
        """Whether the state after ``tick`` is saved, as far as it is decided."""
        ...

    def folder_for(self, tick: int) -> Path | None:
        """Folder for the state after ``tick``, or None if this tick is not saved."""
        ...

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


class Saving:
    """Knows which executors have yet to pass a saved tick, or are still writing their state of it.

    Args:
        checkpoints: None: nothing is saved.
    """

    def __init__(self, graph: Graph, checkpoints: Checkpoints | None = None) -> None:
        self._graph = graph
        self._checkpoints = checkpoints
        self._missing: dict[int, set[str]] = {}
        self._writing: dict[int, set[str]] = {}
        self._written: dict[int, dict[str, dict[str, Sequence[FileRecord]]]] = {}
        """Tick -> executor -> rank's name -> its files."""
        self._unsaved: dict[int, dict[str, str]] = {}
        """Tick -> executor -> why it could not write its state."""

    def order(self, firing: Firing, num_ticks: int) -> Order:
        """Make the order of a firing in a job of ``num_ticks``: with what its executor has to save."""
        due, tick = self._checkpoints, firing.tick
        reach = max((channel.delay for channel in self._graph.outputs[firing.executor]), default=0)
        ahead = range(tick, min(tick + reach, num_ticks))  # a token that it makes may still lie on an edge then
        return Order(
            executor=firing.executor,
            tick=tick,
            inputs=firing.inputs,
            later=firing.later,
            save_to=due.folder_for(tick) if due else None,
            flush_saves=tick == num_ticks - 1,
            saves=tuple(number for number in ahead if due.due(number)) if due else (),
        )

    def heed_the_clock(self, marking: Marking) -> None:
        """Have the next tick saved that can be, if the clock asks for one."""
        if self._checkpoints and self._checkpoints.overdue() and (cut := _next_cut(marking)) < marking.num_ticks:
            self._checkpoints.require(cut)

    def end_early(self, marking: Marking) -> bool:
        """Have the job end with the next tick that all can save; False if that is no sooner than its end."""
        last, whole = _next_cut(marking), marking.num_ticks
        if last < whole:
            marking.num_ticks = last + 1
            if self._checkpoints:
                self._checkpoints.require(last)
        return marking.num_ticks < whole

    def end_after(self, marking: Marking, last: int) -> None:
        """Have the job end with tick ``last``, that no executor has begun."""
        assert last >= _next_cut(marking), f"tick {last} has begun: {marking.describe()}"
        marking.num_ticks = min(marking.num_ticks, last + 1)
        if self._checkpoints:
            self._checkpoints.require(last)

    def note(self, report: Report) -> None:
        """Tell the checkpoints of each tick that is complete with this report, oldest first."""
        if self._checkpoints is None or report.at_start:
            return
        if self._checkpoints.due(report.tick):
            everyone = {executor.name for executor in self._graph.executors}
            self._missing.setdefault(report.tick, everyone).discard(report.executor)
            self._writing.setdefault(report.tick, set()).add(report.executor)
        self._note_files(report)
        for tick in [tick for tick in sorted(self._missing) if not self._missing[tick] and not self._writing[tick]]:
            del self._missing[tick], self._writing[tick]
            written = self._written.pop(tick, {}).values()
            if why := next(iter(self._unsaved.pop(tick, {}).values()), ""):
                self._checkpoints.on_unsaved(tick, why)
            else:
                self._checkpoints.on_saved(tick, {name: files for ranks in written for name, files in ranks.items()})

    def _note_files(self, report: Report) -> None:
        for tick, ranks in report.saved.items():
            named = {writer_name(report.executor, rank): files for rank, files in ranks.items()}
            self._written.setdefault(tick, {}).setdefault(report.executor, {}).update(named)
        for tick, why in report.unsaved.items():
            self._unsaved.setdefault(tick, {})[report.executor] = why
        for tick, names in self._writing.items():
            if tick not in report.saving:
                names.discard(report.executor)

    def redo(self, executor: str, first_tick: int) -> None:
        """Note that an executor repeats its ticks from this one on: of those that are not saved yet
        it writes its state anew. One that it was still to write of an earlier tick is lost."""
        for tick in self._missing:
            if tick < first_tick and executor in self._writing[tick]:
                self._writing[tick].discard(executor)
                self._unsaved.setdefault(tick, {})[executor] = f"{executor} ended before its state was written"
            if tick >= first_tick:
                self._missing[tick].add(executor)
                self._writing[tick].discard(executor)
                self._written.get(tick, {}).pop(executor, None)
                self._unsaved.get(tick, {}).pop(executor, None)

    def finished(self, *, wait: bool = False) -> tuple[int, Path] | None:
        """Give what ``Checkpoints.finished`` does; None where nothing is saved."""
        return self._checkpoints.finished(wait=wait) if self._checkpoints else None


def _next_cut(marking: Marking) -> int:
    """The next tick after which all states can be saved, although nobody was told before: no
    executor has begun it, and the tokens that lie on the delayed edges of that cut are all made
    after their sources are told, so these can keep them."""
    unfired = {name: done + (name in marking.busy) for name, done in marking.done_ticks.items()}
    kept = [unfired[channel.source] + channel.delay - 1 for channel in marking.graph.channels if channel.delay]
    return max([*unfired.values(), *kept])


_STOPPING = "stopping after the next tick that can be saved; Ctrl-C once more stops at once"


class StopRequest:
    """Whether the user has asked for the job to stop, while a ``with`` block lasts in the main thread;
    elsewhere, and where somebody else handles Ctrl-C, nothing changes.

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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
            os.write(2, f"\n{_STOPPING}\n".encode())  # a stream may be in the middle of a line
