"""Which tick's states are saved, when all of a tick are written, and the proving of what was written.

clock or stop ─▶ the next tick that all can still save ─▶ Checkpoints.require
firing ────────▶ Saving.order: where its state goes, which saved ticks come ─▶ runtime
report ────────▶ Saving.note: every executor has passed the tick, and its state is written ─▶ on_saved, or on_unsaved

``Saving`` decides, and is pure. ``RunCheckpoints`` is what it asks in a run on disk; a run on a virtual clock has its own.

report ─┬─ files ────▶ thread: fetch from hosts with a folder of their own, prove ──────────────▶ RUN/rollouts, RUN/trained
        └─ on_saved ─▶ thread: fetch, CheckpointStore.finish: every file that a rank wrote is there ▶ RUN/checkpoints/tick_N
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from llamarl.checkpoint.snapshot import FileRecord
from llamarl.checkpoint.written import silent_ranks, why_not_whole, writer_name
from llamarl.controller.graph import Graph
from llamarl.controller.marking import Firing, Marking
from llamarl.errors import CheckpointError
from llamarl.plural import plural
from llamarl.running_time import running_s
from llamarl.runtime.base import Order, Report
from llamarl.settings.checkpoint import CheckpointConfig

if TYPE_CHECKING:
    from llamarl.checkpoint.mirror import Mirror
    from llamarl.checkpoint.storage import CheckpointStore
    from llamarl.controller.recorder import Recorder
    from llamarl.controller.run_folder import RunFolder
    from llamarl.files.host_folders import HostFolders

__all__ = ["Checkpoints", "RunCheckpoints", "Saving"]


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
        last_tick: Says by a report that counts, once, with which tick the job is to end sooner than
            planned; None: with its own.
    """

    def __init__(
        self,
        graph: Graph,
        checkpoints: Checkpoints | None = None,
        last_tick: Callable[[Report], int | None] = lambda report: None,
    ) -> None:
        self.asked: Callable[[], bool] = lambda: False
        """Whether the user has asked, since this was last called, for the job to end, with a checkpoint."""
        self._last_tick = last_tick
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

    def heed_the_user(self, marking: Marking) -> bool:
        """Have the job end early where the user has asked for it: then True."""
        return self.asked() and self.end_early(marking)

    def heed(self, report: Report, marking: Marking) -> None:
        """Have the job end sooner than planned where a report that counts shows that it is to."""
        if (last := self._last_tick(report)) is not None:
            self.end_after(marking, last)

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


class RunCheckpoints:
    """Connects the controller's question "is this tick saved?" with the store, which proves and renames on a thread:
    reading every byte again must not hold up the job."""

    def __init__(
        self,
        store: CheckpointStore,
        config: CheckpointConfig,
        num_ticks: int,
        description: Mapping[str, Any],
        recorder: Recorder,
        folder: RunFolder,
        ranks: Mapping[str, int],
        far: HostFolders | None = None,
        mirror: Mirror | None = None,
    ) -> None:
        """
        Args:
            ranks: Executor -> number of its ranks: each must tell of its state.
            far: Where some of them have a run folder of their own.
            mirror: Is told of each that is finished.
            num_ticks: Of the run; after the last one a checkpoint may be due too.
            description: What each checkpoint says of its run.
        """
        self._folder = folder
        self._store = store
        self._config = config
        self._num_ticks = num_ticks
        self._description = description
        self._ranks = ranks
        self._far = far
        self._mirror = mirror
        self._recorder = recorder
        self._folders: dict[int, Path] = {}
        self._required: set[int] = set()
        self._unsaved: set[int] = set()
        """Ticks that are to be saved by the clock's wish and are not yet."""
        self._since_s: float | None = None
        """When the last checkpoint was written, or the job stood ready; on ``running_s``."""
        self._given_up: dict[int, str] = {}
        """Ticks that are not saved although they are due -> why."""
        self._failed: list[int] = []
        """Ticks of which the checkpoints have failed since the last good one."""
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._finishing: list[tuple[int | None, Future[object]]] = []
        """What the thread is at, in order, with the tick where it is a checkpoint."""
        self._last: tuple[int, Path] | None = None
        """Newest one that is proved."""

    def due(self, tick: int) -> bool:
        return tick in self._required or self._config.is_due(tick, self._num_ticks)

    def overdue(self) -> bool:
        every_s = 60.0 * self._config.every_minutes
        if self._since_s is None:
            self._since_s = running_s()
        return every_s > 0 and not self._unsaved and running_s() - self._since_s >= every_s

    def require(self, tick: int) -> None:
        self._required.add(tick)
        self._unsaved.add(tick)

    def pin(self, tick: int | None) -> None:
        """Keep the checkpoint of a tick, however many follow it, and no other one for this reason."""
        self._store.pinned = tick

    def shorten(self, num_ticks: int) -> None:
        """The run has only so many ticks: without the checkpoint of its last one it has failed."""
        self._num_ticks = num_ticks

    def folder_for(self, tick: int) -> Path | None:
        """
        Raises:
            CheckpointError: None can be begun there, and too many have failed before.
        """
        if not self.due(tick) or tick in self._given_up:
            return None
        if tick not in self._folders:
            self._folder.check()
            try:
                self._folders[tick] = self._store.begin(tick)
            except CheckpointError as error:
                self._given_up[tick] = error.cause
                return None
        return self._folders[tick]

    def on_report(self, report: Report) -> None:
        """Prove the files that a tick has written into the run's folder.

        Raises:
            CheckpointError: One of an earlier report is not there as it was written, or too many
                checkpoints have failed.
        """
        self._look(wait=False)
        if report.files:
            written = {writer_name(report.executor, rank): files for rank, files in report.files.items()}
            self._finishing.append((None, self._thread.submit(self._prove, report.tick, written)))
        for text in self._mirror.news() if self._mirror is not None else ():
            self._recorder.warn(report.tick, "mirror", text)

    def on_unsaved(self, tick: int, why: str) -> None:
        """
        Raises:
            CheckpointError: Too many have failed before.
        """
        self._look(wait=False)
        self._give_up(tick, why)

    def on_saved(self, tick: int, written: Mapping[str, Sequence[FileRecord]]) -> None:
        self._look(wait=False)
        if tick in self._given_up:
            self._give_up(tick, self._given_up[tick])
            return
        if silent := silent_ranks(self._ranks, written):
            raise CheckpointError(
                f"the checkpoint of tick {tick} is not whole: {', '.join(silent)} told of no state, not even of an empty one"
            )
        self._unsaved.discard(tick)
        self._since_s = running_s()
        self._recorder.sync()
        self._finishing.append((tick, self._thread.submit(self._finish, tick, written)))

    def finished(self, *, wait: bool = False) -> tuple[int, Path] | None:
        """Tick and folder of the newest checkpoint that this run has finished.

        Raises:
            CheckpointError: ``wait``, and too many have failed.
        """
        if wait:
            self._look(wait=True)
        return self._last

    def _prove(self, tick: int, written: Mapping[str, Sequence[FileRecord]]) -> None:
        self._folder.check()
        if self._far is not None:
            self._far.fetch(written, self._folder.path)
        wrong = why_not_whole(self._folder.path, written, patience_s=self._store.patience_s)
        if wrong:
            self._folder.check()  # a folder that was moved has lost them all
            raise CheckpointError(
                f"{self._folder.path} does not hold what was written into it at tick {tick}:\n"
                + "\n".join(f"  - {line}" for line in wrong)
            )

    def _finish(self, tick: int, written: Mapping[str, Sequence[FileRecord]]) -> None:
        self._folder.check()
        if self._far is not None:
            self._far.fetch(written, self._folders[tick])
            self._far.sweep()
        self._last = tick, self._store.finish(tick, written, self._description).path
        if self._mirror is not None:
            self._mirror.wake()

    def close(self) -> None:
        """Return when the last checkpoint is proved, and everything that hosts have written is here. They are still up.

        Raises:
            CheckpointError: The one after the last tick could not be finished: no other one will be.
        """
        if self._far is not None:
            self._finishing.append((None, self._thread.submit(self._far.sweep)))
        self._look(wait=True)
        self.flush()
        if (last := self._num_ticks - 1) in self._given_up:
            raise CheckpointError(
                f"the last of {plural(self._num_ticks, 'tick')} is done, but the checkpoint after it could not be written: "
                f"{self._given_up[last]}. {self._kept()}. Free some space or make the folder writable, then resume the run"
            )

    def flush(self) -> None:
        """Return when nothing is being proved any more, well or ill; what was begun and not finished is removed."""
        self._thread.shutdown(wait=True)
        if self._folder.identity.change():
            return  # what lies under these names now is not ours to remove
        for tick in self._folders:
            self._store.abort(tick)

    def _look(self, *, wait: bool) -> None:
        """Take what the thread has done.

        Raises:
            CheckpointError: A record of the run is not there as it was written, or too many checkpoints have failed.
        """
        while self._finishing and (wait or self._finishing[0][1].done()):
            tick, future = self._finishing.pop(0)
            try:
                future.result()
            except CheckpointError as error:
                if tick is None or error.mistake:
                    raise
                self._give_up(tick, error.cause)
            except OSError as error:
                raise CheckpointError(f"what was written into {self._folder.path} cannot be read: {error}") from error
            else:
                if tick is not None:
                    self._failed.clear()

    def _give_up(self, tick: int, why: str) -> None:
        """This one will not come; the next that is due is tried."""
        self._given_up[tick] = why
        self._unsaved.discard(tick)
        self._since_s = running_s()
        self._folder.check()
        self._store.abort(tick)
        if self._far is not None and tick in self._folders:
            self._finishing.append((None, self._thread.submit(self._drop_there, self._far, self._folders[tick])))
        self._note_failure(tick, why)

    def _drop_there(self, far: HostFolders, folder: Path) -> None:
        with contextlib.suppress(CheckpointError):  # a host that is gone ends the job by another way
            far.fetch({}, folder)

    def _note_failure(self, tick: int, why: str) -> None:
        self._failed.append(tick)
        most = self._config.max_failed
        if len(self._failed) > most:
            raise CheckpointError(
                f"{plural(len(self._failed), 'checkpoint')} in a row could not be written (checkpoint.max_failed = {most}), the "
                f"last one of tick {tick}: {why}. {self._kept()}. The run ends, so that no more is at stake: free some space or "
                f"make the folder writable, then resume it"
            )
        if tick == self._num_ticks - 1:
            return  # ``close`` tells of it
        self._recorder.warn(
            tick,
            "checkpoint",
            f"the checkpoint of tick {tick} could not be written: {why}. {self._kept()}. The run goes on: this is "
            f"failure {len(self._failed)} of {most} in a row that it goes on after (checkpoint.max_failed)",
        )

    def _kept(self) -> str:
        try:
            newest = next(reversed(self._store.list()), None)
        except OSError as error:
            return f"Those before cannot be read ({error.strerror})"
        return f"The last good one is {newest.name}" if newest is not None else "There is none before it"
