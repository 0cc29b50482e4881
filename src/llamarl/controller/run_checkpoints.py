"""When a run's state is saved, and the proving of what was saved."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from llamarl.checkpoint.config import CheckpointConfig
from llamarl.checkpoint.storage import CheckpointStore
from llamarl.controller.run_folder import RunFolder
from llamarl.observability.events import EventLog
from llamarl.observability.recorder import Recorder
from llamarl.running_time import running_s

__all__ = ["RunCheckpoints"]


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
    ) -> None:
        """
        Args:
            num_ticks: Of the run; after the last one a checkpoint may be due too.
            description: What each checkpoint says of its run.
        """
        self._events = events
        self._folder = folder
        self._store = store
        self._config = config
        self._num_ticks = num_ticks
        self._description = description
        self._recorder = recorder
        self._folders: dict[int, Path] = {}
        self._required: set[int] = set()
        self._unsaved: set[int] = set()
        """Ticks that are to be saved by the clock's wish and are not yet."""
        self._since_s: float | None = None
        """When the last checkpoint was written, or the job stood ready; on ``running_s``."""
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._finishing: list[Future[object]] = []

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

    def on_saved(self, tick: int) -> None:
        self._raise_failures(wait=False)
        self._unsaved.discard(tick)
        self._since_s = running_s()
        self._recorder.sync()
        self._events.sync()
        self._finishing.append(self._thread.submit(self._finish, tick))

    def _finish(self, tick: int) -> None:
        self._folder.check()
        self._store.finish(tick, self._description)

    def close(self) -> None:
        """Return when the last checkpoint is proved.

        Raises:
            CheckpointError: One could not be finished.
        """
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
