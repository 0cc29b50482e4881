"""``RUN/journal``: each tick that has counted since the last checkpoint, so that a run whose
controller died goes on from there.

    report (handles name memory that the controller holds) ─▶ append ─▶ queue ─▶ thread ─▶ RUN/journal/000000000042
    a checkpoint is finished ─▶ what it contains is removed                     read_journal ─▶ the same reports, in new memory

One file a report: its metrics, spans and events; the state after it, where its executor tells of
one; its tokens on data channels. Not the weights: those are made again by repeating the trainer's
ticks. Files are numbered in the order in which reports counted, and each says how long it is and
proves every byte; so what is read is a beginning of what counted, up to the first file that is torn
or missing. Nothing is flushed: it survives the controller, and of a machine's death as much as the
disk has by then.

What is read may come from a stranger, with checksums that fit: each header is validated, each token
decoded once as its readers will decode it (:mod:`llamarl.channels.plain_values`) and its samples
looked at (:mod:`llamarl.channels.samples`), and what does not hold is refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import mmap
import os
import queue
import shutil
import struct
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field, TypeAdapter

from llamarl.channels.base import ChannelSpec
from llamarl.channels.data import DataHandle, check_token
from llamarl.channels.samples import ANY, Limits, check_part
from llamarl.checkpoint.snapshot import FileRecord
from llamarl.errors import FileError
from llamarl.plural import plural
from llamarl.reading import open_regular
from llamarl.runtime.base import Report
from llamarl.runtime.kept_states import KeptState
from llamarl.transports.checksum import digest
from llamarl.transports.segments import HEADER_BYTES, Segment, SegmentHandle

__all__ = [
    "JOURNAL_FOLDER",
    "Journal",
    "Record",
    "Resumed",
    "Token",
    "parse_header",
    "read_journal",
    "records_of",
    "remove_journal",
]

JOURNAL_FOLDER = "journal"

_MAGIC = b"lrljrnl2"
_HEAD = struct.Struct("<8sQQ")
"""Magic, bytes of the header, their digest."""
_MAX_BACKLOG_BYTES = 256 << 20
MAX_PIECES = 1 << 12
"""Of one file: each is a file that is open twice while it is read."""
_MAX_HEADER_BYTES = 64 << 20
_Count = Annotated[int, Field(ge=0, lt=1 << 40)]
_Checksum = Annotated[int, Field(ge=0, lt=1 << 64)]
_Time = Annotated[float, Field(ge=-1e12, le=1e12, allow_inf_nan=False)]


@dataclass(frozen=True, kw_only=True)
class Token:
    """One source rank's share of one token of a data channel."""

    source_rank: _Count
    sequence: _Count
    slot: _Count
    num_parts: _Count
    table_checksum: _Checksum
    blob: _Count


@dataclass(frozen=True, kw_only=True)
class _State:
    """One rank's state after the tick."""

    nbytes: _Count
    checksum: _Checksum
    blob: _Count


@dataclass(frozen=True, kw_only=True)
class Header:
    """What a file says of itself, as JSON, before its pieces."""

    run: str
    executor: str
    tick: _Count
    outputs: dict[str, list[Token | None]]
    """Channel -> one a source rank."""
    journal: list[_State | None]
    metrics: dict[str, float]
    started_s: _Time
    finished_s: _Time
    spans: list[tuple[str, _Time, _Time]]
    stop: str
    failures: dict[str, _Count]
    events: list[dict[str, Any]]
    files: dict[_Count, list[tuple[str, _Count, str]]]
    controller_bytes: _Count
    blobs: Annotated[list[tuple[_Count, _Checksum]], Field(max_length=MAX_PIECES)] = field(default_factory=list)
    """Bytes and checksum of each piece."""

    def check(self) -> None:
        """Raises ValueError if it names a piece that it does not list, or more of one than there is."""
        tokens = [token.blob for of_ranks in self.outputs.values() for token in of_ranks if token is not None]
        states = [state for state in self.journal if state is not None]
        if any(number >= len(self.blobs) for number in (*tokens, *(state.blob for state in states))):
            raise ValueError(f"it names a piece that is none of its {len(self.blobs)}")
        if any(state.nbytes > self.blobs[state.blob][0] for state in states):
            raise ValueError("a state is longer than its piece")


_HEADER = TypeAdapter(Header)


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
            header, held = _header_of(report, self._run_id, self._weights)
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

    def _write(self, path: Path, tick: int, header: Header, blobs: Sequence[tuple[int, int]]) -> None:
        try:
            if self._off:
                return
            with contextlib.ExitStack() as stack:
                mapped = [stack.enter_context(mmap.mmap(fd, HEADER_BYTES + n, prot=mmap.PROT_READ)) for fd, n in blobs]
                views = [stack.enter_context(memoryview(one)[HEADER_BYTES:]) for one in mapped]
                sizes = [(view.nbytes, digest(view)) for view in views]
                head = json.dumps(dataclasses.asdict(dataclasses.replace(header, blobs=sizes))).encode()
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
    header: Header
    offset: int
    """Of its first blob."""

    @property
    def executor(self) -> str:
        return self.header.executor

    @property
    def tick(self) -> int:
        return self.header.tick

    @property
    def files(self) -> dict[int, tuple[FileRecord, ...]]:
        """What its tick had written into the run's folder, by rank."""
        return {
            rank: tuple(FileRecord(path=path, num_bytes=size, xxh3_128=checksum) for path, size, checksum in files)
            for rank, files in self.header.files.items()
        }

    @property
    def tells_states(self) -> bool:
        """Whether each rank's state after the tick is in it."""
        return bool(self.header.journal) and all(state is not None for state in self.header.journal)

    def blob(self, number: int) -> bytes:
        """One of its pieces."""
        with open_regular(self.path) as file:
            file.seek(self.offset + sum(size for size, _ in self.header.blobs[:number]))
            return file.read(self.header.blobs[number][0])

    def report(
        self, segments: list[Segment], *, tokens: Sequence[ChannelSpec], states: bool, limits: Limits = ANY
    ) -> Report:
        """The report, with handles that name new memory of this process.

        Args:
            segments: Gets that memory, to be closed when others hold it.
            tokens: Channels whose tokens are wanted; the others' are None.
            states: Whether the states are wanted.
            limits: Of the run's samples.

        Raises:
            ValueError: A token holds something else than plain values, or samples that nobody can have drawn.
        """
        header, wanted = self.header, {channel.name: channel for channel in tokens}

        def memory(number: int) -> SegmentHandle:
            data = self.blob(number)
            segment = Segment(max(1, len(data)))
            segment.bytes[: len(data)] = np.frombuffer(data, np.uint8)
            segments.append(segment)
            return segment.handle

        outputs: dict[str, tuple[DataHandle | None, ...]] = {}
        for name, tokens_of_ranks in header.outputs.items():
            handles: list[DataHandle | None] = []
            for token in tokens_of_ranks:
                if token is None or name not in wanted:
                    handles.append(None)
                    continue
                try:
                    for part in check_token(self.blob(token.blob), token.num_parts, token.table_checksum):
                        check_part(part, wanted[name], self.tick, limits)
                except ValueError as error:
                    raise ValueError(f"{self.path}: {error}") from error
                handles.append(
                    DataHandle(
                        channel=name,
                        tick=self.tick,
                        source_rank=token.source_rank,
                        sequence=token.sequence,
                        slot=token.slot,
                        address=memory(token.blob),
                        pid=os.getpid(),
                        num_parts=token.num_parts,
                        table_checksum=token.table_checksum,
                    )
                )
            outputs[name] = tuple(handles)
        kept = [state for state in header.journal if state is not None] if states else []
        return Report(
            executor=self.executor,
            tick=self.tick,
            outputs=outputs,
            metrics=header.metrics,
            started_s=header.started_s,
            finished_s=header.finished_s,
            spans=tuple(header.spans),
            failures=header.failures,
            events=tuple(header.events),
            files=self.files,
            journal=tuple(KeptState(memory(state.blob), state.nbytes, state.checksum) for state in kept),
            controller_bytes=header.controller_bytes,
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
    """Those of the ticks between two. Whatever a tick needs is of its own number or an earlier one,
    so this, too, is a state that the job can be in.

    Returns:
        None at all where an executor's ticks do not begin with the first of them, or have a gap.
    """
    chosen = [record for record in records if after_tick < record.tick < before_tick]
    following: dict[str, int] = {}
    for record in chosen:
        if record.tick != following.setdefault(record.executor, after_tick + 1) or record.header.stop:
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


def _header_of(
    report: Report, run_id: str, weights: Collection[str]
) -> tuple[Header, list[tuple[SegmentHandle, int | None]]]:
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

    outputs = {
        name: [
            handle
            and Token(
                source_rank=handle.source_rank,
                sequence=handle.sequence,
                slot=handle.slot,
                num_parts=handle.num_parts,
                table_checksum=handle.table_checksum,
                blob=place(handle.address, None),
            )
            for handle in handles
        ]
        for name, handles in report.outputs.items()
        if name not in weights
    }
    states = [
        state and _State(nbytes=state.nbytes, checksum=state.checksum, blob=place(state.segment, max(1, state.nbytes)))
        for state in report.journal
    ]
    header = Header(
        run=run_id,
        executor=report.executor,
        tick=report.tick,
        outputs=outputs,
        journal=states,
        metrics=dict(report.metrics),
        started_s=report.started_s,
        finished_s=report.finished_s,
        spans=list(report.spans),
        stop=report.stop,
        failures=dict(report.failures),
        events=[dict(event) for event in report.events],
        files={rank: [(f.path, f.num_bytes, f.xxh3_128) for f in files] for rank, files in report.files.items()},
        controller_bytes=report.controller_bytes,
    )
    return header, held


def _files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.name.isdecimal() and not path.is_dir())


def _ticks_in(folder: Path) -> list[tuple[Path, int]]:
    return [(path, found[0].tick) for path in _files(folder) if (found := _read_header(path)) is not None]


def _read_header(path: Path) -> tuple[Header, int] | None:
    """Header and its end; None if it is torn, or not of ours."""
    try:
        with open_regular(path, max_bytes=_MAX_HEADER_BYTES + _MAX_BACKLOG_BYTES) as file:
            magic, size, checksum = _HEAD.unpack(file.read(_HEAD.size))
            head = file.read(min(size, _MAX_HEADER_BYTES))
            if magic != _MAGIC or len(head) != size or digest(head) != checksum:
                return None
            header = parse_header(head)
            if _HEAD.size + size + sum(num_bytes for num_bytes, _ in header.blobs) != os.fstat(file.fileno()).st_size:
                return None
    except (FileError, ValueError, struct.error):
        return None
    return header, _HEAD.size + size


def parse_header(head: bytes) -> Header:
    """Parse and validate.

    Raises:
        ValueError: It is no header.
    """
    try:
        plain = json.loads(head)
        json.dumps(plain, ensure_ascii=False).encode()  # half a surrogate pair is text that nobody can write
        header: Header = _HEADER.validate_python(plain)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    header.check()
    return header


def _read(path: Path, run_id: str) -> Record | None:
    found = _read_header(path)
    if found is None or found[0].run != run_id:
        return None
    record = Record(path, int(path.name), *found)
    try:
        with open_regular(path) as file:
            file.seek(record.offset)
            if any(digest(file.read(size)) != proof for size, proof in record.header.blobs):
                return None
    except FileError:
        return None
    return record
