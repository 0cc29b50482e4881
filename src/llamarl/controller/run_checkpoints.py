"""When a run's state is saved, and the proving of what was saved.

report ─┬─ files ────▶ thread: fetch from hosts with a folder of their own, prove ──────────────▶ RUN/rollouts, RUN/model ..
        └─ all saved ▶ thread: fetch, CheckpointStore.finish: every file that a rank wrote is there ▶ RUN/checkpoints/tick_N
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from llamarl.checkpoint.config import CheckpointConfig
from llamarl.checkpoint.snapshot import FileRecord
from llamarl.checkpoint.storage import CheckpointStore
from llamarl.checkpoint.written import silent_ranks, why_not_whole, writer_name
from llamarl.controller.run_folder import RunFolder
from llamarl.errors import CheckpointError
from llamarl.observability.events import EventLog
from llamarl.observability.recorder import Recorder
from llamarl.running_time import running_s
from llamarl.runtime.base import Report

__all__ = ["FarFiles", "RunCheckpoints"]


class FarFiles(Protocol):
    """What ranks write on hosts that do not share the run's folder. All calls come from one thread."""

    def fetch(self, written: Mapping[str, Sequence[FileRecord]], below: Path) -> None:
        """Bring files into the run's folder, on its disk when this returns; those of ranks that share it are left alone.

        Args:
            written: Rank's name -> its files.
            below: The folder that the records' paths are relative to, as the controller names it.

        Raises:
            CheckpointError: A file is not there, is not as it was written, or the disk here is full; names file and host.
        """
        ...

    def sweep(self) -> None:
        """Bring whatever else lies in the run's folder on those hosts, but checkpoints, and is not here yet or has grown.

        Raises:
            CheckpointError: As ``fetch``.
        """
        ...


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
        events: EventLog,
        folder: RunFolder,
        ranks: Mapping[str, int],
        far: FarFiles | None = None,
    ) -> None:
        """
        Args:
            ranks: Executor -> number of its ranks: each must tell of its state.
            far: Where some of them have a run folder of their own.
            num_ticks: Of the run; after the last one a checkpoint may be due too.
            description: What each checkpoint says of its run.
        """
        self._events = events
        self._folder = folder
        self._store = store
        self._config = config
        self._num_ticks = num_ticks
        self._description = description
        self._ranks = ranks
        self._far = far
        self._recorder = recorder
        self._folders: dict[int, Path] = {}
        self._required: set[int] = set()
        self._unsaved: set[int] = set()
        """Ticks that are to be saved by the clock's wish and are not yet."""
        self._since_s: float | None = None
        """When the last checkpoint was written, or the job stood ready; on ``running_s``."""
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._finishing: list[Future[object]] = []
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

    def folder_for(self, tick: int) -> Path | None:
        if not self.due(tick):
            return None
        if tick not in self._folders:
            self._folder.check()
            self._folders[tick] = self._store.begin(tick)
        return self._folders[tick]

    def on_report(self, report: Report) -> None:
        """Prove the files that a tick has written into the run's folder.

        Raises:
            CheckpointError: One of an earlier report is not there as it was written.
        """
        self._raise_failures(wait=False)
        if report.files:
            written = {writer_name(report.executor, rank): files for rank, files in report.files.items()}
            self._finishing.append(self._thread.submit(self._prove, report.tick, written))

    def on_saved(self, tick: int, written: Mapping[str, Sequence[FileRecord]]) -> None:
        self._raise_failures(wait=False)
        if silent := silent_ranks(self._ranks, written):
            raise CheckpointError(
                f"the checkpoint of tick {tick} is not whole: {', '.join(silent)} told of no state, not even of an empty one"
            )
        self._unsaved.discard(tick)
        self._since_s = running_s()
        self._recorder.sync()
        self._events.sync()
        self._finishing.append(self._thread.submit(self._finish, tick, written))

    def finished(self, *, wait: bool = False) -> tuple[int, Path] | None:
        """Tick and folder of the newest checkpoint that this run has finished.

        Raises:
            CheckpointError: ``wait``, and one cannot be finished.
        """
        if wait:
            self._raise_failures(wait=True)
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

    def close(self) -> None:
        """Return when the last checkpoint is proved, and everything that hosts have written is here. They are still up.

        Raises:
            CheckpointError: One could not be finished.
        """
        if self._far is not None:
            self._finishing.append(self._thread.submit(self._far.sweep))
        self.settle()
        self._raise_failures(wait=True)

    def settle(self) -> None:
        """Return when nothing is being proved any more, well or ill; what was begun and not finished is removed."""
        self._thread.shutdown(wait=True)
        if self._folder.identity.change():
            return  # what lies under these names now is not ours to remove
        for tick in self._folders:
            self._store.abort(tick)

    def _raise_failures(self, *, wait: bool) -> None:
        while self._finishing and (wait or self._finishing[0].done()):
            self._finishing.pop(0).result()
