"""``RUN/journal``: each tick that has counted since the last checkpoint, so that a run whose controller died goes on from there.

    report (handles name memory that the controller holds) ─▶ append ─▶ queue ─▶ thread ─▶ RUN/journal/000000000042
    a checkpoint is finished ─▶ what it contains is removed                     read_journal ─▶ the same reports, in new memory

One file a report: its metrics, spans and events; the state after it, where its executor tells of one; its tokens on data channels. Not
the weights: those are made again by repeating the trainer's ticks. Files are numbered in the order in which reports counted, and
each says how long it is and proves every byte; so what is read is a beginning of what counted, up to the first file that is torn
or missing. Nothing is flushed: it survives the controller, and of a machine's death as much as the disk has by then.

What is read is plain data. A token is decoded by whoever reads it, so nothing is taken that names anything but our own records and
arrays: a run's folder may come from somebody else.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import queue
import shutil
import struct
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from llamarl.channels.data import DataHandle, names_plain_values
from llamarl.checkpoint.snapshot import FileRecord
from llamarl.plural import plural
from llamarl.runtime.base import Report
from llamarl.runtime.kept_states import KeptState
from llamarl.transports.checksum import digest
from llamarl.transports.segments import HEADER_BYTES, Segment, SegmentHandle

__all__ = ["JOURNAL_FOLDER", "Journal", "Record", "Resumed", "read_journal", "records_of", "remove_journal"]

JOURNAL_FOLDER = "journal"

_MAGIC = b"lrljrnl1"
_HEAD = struct.Struct("<8sQQ")
"""Magic, bytes of the header, their digest."""
_MAX_BACKLOG_BYTES = 256 << 20
_MAX_HEADER_BYTES = 64 << 20


class Journal:
    """Appends. One thread writes, in order.

    Args:
        run_id: Of the run: the files of another one in this folder are not read.
        weights: Channels whose tokens are not noted.
        number: Of the next file.
        tell: Called once, with why, if it cannot go on: the run does, and a resume then begins at the last checkpoint.
    """

    def __init__(
        self,
        run_dir: Path,
        run_id: str,
        *,
        weights: Collection[str] = (),
        number: int = 0,
        tell: Callable[[str], None] = print,
    ) -> None:
        self.folder = run_dir / JOURNAL_FOLDER
        self._run_id = run_id
        self._weights = frozenset(weights)
        self._tell = tell
        self._number = number
        self._ticks: dict[Path, int] = {path: tick for path, tick in _ticks_in(self.folder)}
        self._backlog = 0
        self._off = ""
        self._saved = -1
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write_all, name="llamarl-journal", daemon=True)
        self._thread.start()

    def append(self, report: Report) -> None:
        """Note a report that has counted, whose handles name memory that this process holds; returns at once."""
        if self._off:
            return
        try:
            header, held = _plain(report, self._run_id, self._weights)
        except ValueError as error:
            self._stop(str(error))
            return
        blobs = [(os.dup(handle.fd), handle.size if nbytes is None else nbytes) for handle, nbytes in held]
        self._backlog += sum(size for _, size in blobs)
        path, self._number = self.folder / f"{self._number:012d}", self._number + 1
        if self._backlog > _MAX_BACKLOG_BYTES:
            self._stop("the disk is too slow for it")
        self._work.put(lambda: self._write(path, report.tick, header, blobs))

    def saved(self, tick: int) -> None:
        """A checkpoint of the state after ``tick`` is finished."""
        if tick > self._saved:
            self._saved = tick
            self._work.put(lambda: self._remove(tick))

    def close(self, *, done: bool) -> None:
        """Return when all is written. Idempotent.

        Args:
            done: The run has reached its end: there is nothing to go on from.
        """
        if self._thread.is_alive():
            self._work.put(None)
            self._thread.join(60.0)
        if done or self._off:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _stop(self, why: str) -> None:
        if not self._off:
            self._off = why
            self._work.put(lambda: shutil.rmtree(self.folder, ignore_errors=True))  # the disk may need the room
            self._tell(f"the journal of ticks ends here: {why}. A resume begins at the last checkpoint")

    def _write_all(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except OSError as error:
                self._stop(f"{self.folder}: {error.strerror}")

    def _write(self, path: Path, tick: int, header: dict[str, Any], blobs: Sequence[tuple[int, int]]) -> None:
        try:
            if self._off:
                return
            with contextlib.ExitStack() as stack:
                mapped = [stack.enter_context(mmap.mmap(fd, HEADER_BYTES + n, prot=mmap.PROT_READ)) for fd, n in blobs]
                views = [stack.enter_context(memoryview(one)[HEADER_BYTES:]) for one in mapped]
                sizes = [[view.nbytes, digest(view)] for view in views]
                head = json.dumps({**header, "blobs": sizes}).encode()
                self.folder.mkdir(exist_ok=True)
                with open(path, "wb") as file:
                    file.write(_HEAD.pack(_MAGIC, len(head), digest(head)) + head)
                    for view in views:
                        file.write(view)
            self._ticks[path] = tick
        finally:
            self._backlog -= sum(size for _, size in blobs)
            for fd, _ in blobs:
                os.close(fd)

    def _remove(self, tick: int) -> None:
        for path in [path for path, of_tick in self._ticks.items() if of_tick <= tick]:
            path.unlink(missing_ok=True)
            del self._ticks[path]


@dataclass(frozen=True)
class Record:
    """One file, proved."""

    path: Path
    number: int
    header: Mapping[str, Any]
    offset: int
    """Of its first blob."""

    @property
    def executor(self) -> str:
        return str(self.header["executor"])

    @property
    def tick(self) -> int:
        return int(self.header["tick"])

    @property
    def files(self) -> dict[int, tuple[FileRecord, ...]]:
        """What its tick had written into the run's folder, by rank."""
        return {
            int(rank): tuple(FileRecord(path=path, num_bytes=size, xxh3_128=checksum) for path, size, checksum in files)
            for rank, files in self.header["files"].items()
        }

    @property
    def tells_states(self) -> bool:
        """Whether each rank's state after the tick is in it."""
        return bool(self.header["journal"]) and all(state is not None for state in self.header["journal"])

    def blob(self, number: int) -> bytes:
        """One of its pieces."""
        sizes = [size for size, _ in self.header["blobs"]]
        with open(self.path, "rb") as file:
            file.seek(self.offset + sum(sizes[:number]))
            return file.read(sizes[number])

    def report(self, segments: list[Segment], *, tokens: Iterable[str], states: bool) -> Report:
        """The report, with handles that name new memory of this process.

        Args:
            segments: Gets that memory, to be closed when others hold it.
            tokens: Channels whose tokens are wanted; the others' are None.
            states: Whether the states are wanted.

        Raises:
            ValueError: A token holds something else than plain records.
        """
        header, wanted = self.header, set(tokens)

        def memory(number: int) -> SegmentHandle:
            data = self.blob(number)
            segment = Segment(max(1, len(data)))
            segment.bytes[: len(data)] = np.frombuffer(data, np.uint8)
            segments.append(segment)
            return segment.handle

        outputs: dict[str, tuple[DataHandle | None, ...]] = {}
        for name, ranks in header["outputs"].items():
            handles: list[DataHandle | None] = []
            for one in ranks:
                if one is None or name not in wanted:
                    handles.append(None)
                    continue
                names_plain_values(self.blob(one["blob"]), int(one["num_parts"]))
                handles.append(
                    DataHandle(
                        channel=name,
                        tick=self.tick,
                        source_rank=int(one["source_rank"]),
                        sequence=int(one["sequence"]),
                        slot=int(one["slot"]),
                        address=memory(one["blob"]),
                        pid=os.getpid(),
                        num_parts=int(one["num_parts"]),
                        table_checksum=int(one["table_checksum"]),
                    )
                )
            outputs[name] = tuple(handles)
        kept = header["journal"] if states else []
        return Report(
            executor=self.executor,
            tick=self.tick,
            outputs=outputs,
            metrics=header["metrics"],
            started_s=header["started_s"],
            finished_s=header["finished_s"],
            spans=tuple((label, start, end) for label, start, end in header["spans"]),
            failures=header["failures"],
            events=tuple(header["events"]),
            files=self.files,
            journal=tuple(KeptState(memory(one["blob"]), int(one["nbytes"]), int(one["checksum"])) for one in kept),
            controller_bytes=int(header["controller_bytes"]),
        )


@dataclass(frozen=True)
class Resumed:
    """Where a run goes on, beyond its checkpoint."""

    reports: tuple[Report, ...] = ()
    """In the order in which they counted."""
    segments: list[Segment] = field(default_factory=list)
    """The memory that they name; whoever holds them may close it."""
    next_number: int = 0
    """Of the journal's next file."""

    @property
    def last_tick(self) -> int:
        """Of anybody; -1 if there is none."""
        return max((report.tick for report in self.reports), default=-1)

    def release(self) -> None:
        """Close the memory, once others hold it."""
        for segment in self.segments:
            segment.close()

    def describe(self, run_dir: Path) -> str:
        """For the console."""
        done = {report.executor: report.tick + 1 for report in self.reports}
        places = ", ".join(f"{name} after {plural(ticks, 'tick')}" for name, ticks in done.items())
        return f"{run_dir} goes on from its journal: {places}; nothing of these is generated or judged anew"


def read_journal(run_dir: Path, run_id: str) -> list[Record]:
    """What counted, in order, up to the first file that is torn, altered or missing."""
    found: list[Record] = []
    for path in _files(run_dir / JOURNAL_FOLDER):
        record = _read(path, run_id)
        if record is None or (found and record.number != found[-1].number + 1):
            break
        found.append(record)
    return found


def records_of(records: Sequence[Record], *, after_tick: int, before_tick: int) -> list[Record]:
    """Those of the ticks between two. Whatever a tick needs is of its own number or an earlier one, so this, too, is a state that
    the job can be in.

    Returns:
        None at all where an executor's ticks do not begin with the first of them, or have a gap.
    """
    chosen = [record for record in records if after_tick < record.tick < before_tick]
    following: dict[str, int] = {}
    for record in chosen:
        if record.tick != following.setdefault(record.executor, after_tick + 1) or record.header["stop"]:
            return []
        following[record.executor] += 1
    return chosen


def remove_journal(run_dir: Path, keep: Sequence[Record] = ()) -> int:
    """Remove all files but those that are kept; the number of the next one."""
    kept = {record.path for record in keep}
    for path in _files(run_dir / JOURNAL_FOLDER):
        if path not in kept:
            path.unlink()
    return max((record.number for record in keep), default=-1) + 1


def _plain(
    report: Report, run_id: str, weights: Collection[str]
) -> tuple[dict[str, Any], list[tuple[SegmentHandle, int | None]]]:
    """What is written of a report before its pieces, and what these are (None: the whole segment).

    Raises:
        ValueError: It names memory that is not held here.
    """
    held: list[tuple[SegmentHandle, int | None]] = []

    def place(handle: Any, nbytes: int | None) -> int:
        if not isinstance(handle, SegmentHandle) or handle.path or handle.pid != os.getpid():
            raise ValueError(f"what {report.executor!r} made at tick {report.tick} is not held by the controller")
        held.append((handle, nbytes))
        return len(held) - 1

    outputs = {}
    for name, handles in report.outputs.items():
        if name not in weights:
            outputs[name] = [
                handle
                and {
                    "source_rank": handle.source_rank,
                    "sequence": handle.sequence,
                    "slot": handle.slot,
                    "num_parts": handle.num_parts,
                    "table_checksum": handle.table_checksum,
                    "blob": place(handle.address, None),
                }
                for handle in handles
            ]
    states = [
        state
        and {"nbytes": state.nbytes, "checksum": state.checksum, "blob": place(state.segment, max(1, state.nbytes))}
        for state in report.journal
    ]
    header = {
        "run": run_id,
        "executor": report.executor,
        "tick": report.tick,
        "outputs": outputs,
        "journal": states,
        "metrics": dict(report.metrics),
        "started_s": report.started_s,
        "finished_s": report.finished_s,
        "spans": [list(span) for span in report.spans],
        "stop": report.stop,
        "failures": dict(report.failures),
        "events": [dict(event) for event in report.events],
        "files": {rank: [[f.path, f.num_bytes, f.xxh3_128] for f in files] for rank, files in report.files.items()},
        "controller_bytes": report.controller_bytes,
    }
    return header, held


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.name.isdecimal()) if folder.is_dir() else []


def _ticks_in(folder: Path) -> list[tuple[Path, int]]:
    found = []
    for path in _files(folder):
        header = _header(path)
        if header is not None:
            found.append((path, int(header[0]["tick"])))
    return found


def _header(path: Path) -> tuple[dict[str, Any], int] | None:
    """Header and its end; None if it is torn."""
    try:
        with open(path, "rb") as file:
            magic, size, checksum = _HEAD.unpack(file.read(_HEAD.size))
            head = file.read(min(size, _MAX_HEADER_BYTES))
            if magic != _MAGIC or len(head) != size or digest(head) != checksum:
                return None
            header = json.loads(head)
    except (OSError, ValueError, struct.error):
        return None
    return header, _HEAD.size + size


def _read(path: Path, run_id: str) -> Record | None:
    found = _header(path)
    if found is None or found[0].get("run") != run_id:
        return None
    record = Record(path, int(path.name), *found)
    try:
        if any(
            len(data := record.blob(i)) != n or digest(data) != proof
            for i, (n, proof) in enumerate(record.header["blobs"])
        ):
            return None
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return record
