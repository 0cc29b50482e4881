"""What one rank writes: its states, beside the ticks that follow where the executor does so, and
what it reports of them.

executor.save ─▶ written now, or a future ─▶ flushed, size and checksum taken where it was written ─▶ the next report
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from llamarl.checkpoint.snapshot import FileRecord
from llamarl.checkpoint.storage import saving
from llamarl.checkpoint.written import files_below, record_files
from llamarl.errors import CheckpointError, DeadlineExceeded
from llamarl.executors.base import Executor
from llamarl.running_time import wait_for

__all__ = ["RankSaves", "rank_folder", "record_products"]

T = TypeVar("T")


class RankSaves:
    """The states of one rank on their way to the disk.

    Args:
        limit_s: Longest wait for one of them.
        again: The executor was brought up before in this run: a state that is begun may have been begun then.
    """

    def __init__(self, executor: str, rank: int, *, limit_s: float, again: bool = False) -> None:
        self._executor, self._rank, self._limit_s, self._again = executor, rank, limit_s, again
        self._writing: dict[int, tuple[Path, Future[tuple[FileRecord, ...]]]] = {}
        """Tick -> folder and what is being written there, beside the ticks that follow."""
        self._written: dict[int, tuple[FileRecord, ...]] = {}
        """Tick -> what was written there, not yet reported."""
        self._unwritten: dict[int, str] = {}
        """Tick -> why its state could not be written, not yet reported."""

    @property
    def writing(self) -> tuple[int, ...]:
        """Ticks whose state is still being written."""
        return tuple(sorted(self._writing))

    def take(self) -> Mapping[int, tuple[FileRecord, ...]]:
        """Ticks whose state is written since this was last asked -> the files, relative to the checkpoint."""
        taken, self._written = self._written, {}
        return taken

    def take_unwritten(self) -> Mapping[int, str]:
        """Ticks whose state could not be written since this was last asked -> why."""
        taken, self._unwritten = self._unwritten, {}
        return taken

    def begin(self, executor: Executor, tick: int, checkpoint: Path) -> None:
        """Have the executor save its state into ``checkpoint``. If the disk does not take it, that
        is noted, and the job goes on."""
        folder = rank_folder(checkpoint, self._executor, self._rank)

        def record(beside: Any) -> tuple[FileRecord, ...]:
            more = beside if isinstance(beside, (list, tuple)) else ()  # a save may end in what write_text returns
            return record_files(checkpoint, [*files_below(folder), *more])

        def make_room() -> None:
            """At once: what this tick writes into the run's folder may need what a failed save has taken."""
            with contextlib.suppress(OSError):
                self._clear(folder)

        with self._noting(tick, folder, make_room):
            if not checkpoint.parent.is_dir():  # made again, it would be the folder of no run
                raise CheckpointError(f"{checkpoint.parent} is not there any more")
            with self._noting(tick, folder):
                if self._again:
                    self._clear(folder)
                folder.mkdir(parents=True)
            pending = executor.save(
                folder, tick
            )  # also where that failed: ranks that write together wait for each other
            if isinstance(pending, Future):
                self._writing[tick] = folder, _then(pending, record, make_room)
            else:
                self._written[tick] = record(pending)

    def _clear(self, folder: Path) -> None:
        """Remove what has been begun: this rank's own part, and on rank 0 the files of all ranks beside it. The
        others write there only together with it."""
        if folder.exists():
            shutil.rmtree(folder)
        if self._rank == 0 and folder.parent.is_dir():
            for beside in folder.parent.iterdir():
                if not beside.name.startswith("rank_"):
                    for path in files_below(beside) if beside.is_dir() else [beside]:
                        path.unlink()

    @contextlib.contextmanager
    def _noting(self, tick: int, folder: Path, then: Callable[[], None] = lambda: None) -> Iterator[None]:
        """A disk's failure becomes a word in the next report."""
        try:
            with saving(folder):
                yield
        except CheckpointError as error:
            self._unwritten.setdefault(tick, error.cause)
            then()

    def finish(self, *, wait: bool) -> None:
        """Note the states that are written, and those that could not be.

        Raises:
            DeadlineExceeded: ``wait``, and it takes too long.
        """
        for tick, (folder, pending) in list(self._writing.items()):
            if not wait and not pending.done():
                continue
            if not wait_for(partial(_done, pending), self._limit_s):
                raise DeadlineExceeded(
                    f"executor {self._executor!r}, rank {self._rank}: the state after tick {tick} is not yet "
                    f"written to {folder.parent} after {self._limit_s:g} s: is the disk gone? If it is slow, raise deadlines.step_s"
                )
            del self._writing[tick]
            with self._noting(tick, folder):
                self._written[tick] = pending.result()


def rank_folder(checkpoint: Path, executor: str, rank: int) -> Path:
    """A rank's own part of a checkpoint."""
    return checkpoint / executor / f"rank_{rank}"


def record_products(run_dir: Path | None, files: Iterable[Path]) -> tuple[FileRecord, ...]:
    """What a tick has written into the run's folder, flushed.

    Raises:
        CheckpointError: The disk is full or gone, or a file is not in that folder.
    """
    if run_dir is None:
        return ()
    for path in files:
        if not path.is_relative_to(run_dir):
            raise CheckpointError(f"StepResult.files names {path}, which is not in the run's folder {run_dir}")
    with saving(run_dir):
        return record_files(run_dir, files)


def _done(pending: Future[Any], within_s: float) -> bool:
    return bool(wait_for_futures([pending], timeout=within_s).done)


def _then(pending: Future[Any], work: Callable[[Any], T], on_failure: Callable[[], None]) -> Future[T]:
    """What ``work`` makes of a future's result, on the thread that has come to it; the future's failure is its own."""
    after: Future[T] = Future()

    def go_on(done: Future[Any]) -> None:
        try:
            after.set_result(work(done.result()))
        except BaseException as error:  # handed on to whoever asks for the result
            on_failure()
            after.set_exception(error)

    pending.add_done_callback(go_on)
    return after
