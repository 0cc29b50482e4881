"""Files that ranks say they have written, and whether they are there.

    rank: writes, record_files (flush, size, checksum) ── FileRecord ──▶ controller: why_not_whole (re-reads, with patience)

A checkpoint counts by what was *written*, not by what its reader happens to see: in a folder that
is not the writer's, or that a network file system shows late, a listing alone would call a
checkpoint whole that lacks a rank's state.
"""

from __future__ import annotations

import errno
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

from llamarl.checkpoint.snapshot import FileRecord, checksum_file

__all__ = [
    "files_below",
    "is_inside",
    "look_at",
    "record_files",
    "silent_ranks",
    "sync_folder",
    "sync_path",
    "what_is_wrong",
    "why_not_whole",
    "write_synced",
    "writer_name",
]

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0


def writer_name(executor: str, rank: int) -> str:
    """How messages call one rank."""
    return f"{executor} rank {rank}"


def record_files(root: Path, paths: Iterable[Path]) -> tuple[FileRecord, ...]:
    """Flush files to the disk, and say what they hold: called by whoever has just written them,
    while they are in its memory.

    Args:
        root: What the records' paths are relative to; its folders down to the files are flushed too.

    Raises:
        ValueError: A path lies outside of ``root``.
        OSError: As the system reports.
    """
    records, folders = [], set[Path]()
    for path in sorted(set(paths)):
        relative = path.relative_to(root)
        sync_path(path)
        records.append(FileRecord.of(relative.as_posix(), path))
        folders.update(root / parent for parent in relative.parents)
    for folder in sorted(folders, reverse=True):
        sync_folder(folder)
    return tuple(records)


def files_below(folder: Path) -> Iterator[Path]:
    """Every file below, in a fixed order."""
    for parent, folders, files in os.walk(folder):
        folders.sort()
        for name in sorted(files):
            yield Path(parent) / name


def is_inside(path: str) -> bool:
    """Whether a record's path names a file below its root."""
    parts = PurePosixPath(path).parts
    return bool(parts) and "\0" not in path and not path.startswith("/") and not {"..", "."} & set(path.split("/"))


def what_is_wrong(record: FileRecord, num_bytes: int | None, checksum: str | None) -> str:
    """Empty if a file is the one that was written.

    Args:
        num_bytes: Of the file that is there; None if none is.
        checksum: Of its bytes; None if it was not taken.
    """
    if num_bytes is None:
        return f"{record.path} is missing"
    if num_bytes != record.num_bytes:
        return f"{record.path} is torn: {num_bytes} bytes, {record.num_bytes} were written"
    if checksum is not None and checksum != record.xxh3_128:
        return f"{record.path} was altered: its checksum differs from the one written"
    return ""


def silent_ranks(ranks: Mapping[str, int], written: Mapping[str, Sequence[FileRecord]]) -> list[str]:
    """Ranks that have said nothing of their state, not even that it has no files.

    Args:
        ranks: Executor -> number of its ranks.
        written: Rank's name -> its files.
    """
    names = [writer_name(name, rank) for name, count in ranks.items() for rank in range(count)]
    return [name for name in names if name not in written]


def why_not_whole(folder: Path, written: Mapping[str, Sequence[FileRecord]], *, patience_s: float) -> list[str]:
    """What is wrong with the files that ranks say they have written into ``folder``; empty if every byte is there.

    Args:
        written: Rank's name -> its files.
        patience_s: How long a file may take to be seen as it was written; 0 on a disk of this machine.

    Raises:
        OSError: A file is there and cannot be read.
    """
    records: dict[str, tuple[str, FileRecord]] = {}
    troubles = []
    for writer, files in written.items():
        for record in files:
            if not is_inside(record.path):
                troubles.append(f"{writer} names {record.path!r}, which is no file of this folder")
                continue
            if records.setdefault(record.path, (writer, record))[1] != record:
                troubles.append(f"{record.path} was written by {records[record.path][0]} and by {writer}, differently")
    pause_s, until, left = _FIRST_PAUSE_S, math.inf, list(records.values())
    while True:
        wrong = [(writer, record, text) for writer, record in left if (text := look_at(folder, record))]
        until = min(until, time.monotonic() + patience_s)  # from the first look on, which reads terabytes for minutes
        if not wrong or time.monotonic() >= until:
            return troubles + [f"{text} (written by {writer})" for writer, _, text in wrong]
        left = [(writer, record) for writer, record, _ in wrong]
        for parent in sorted({(folder / record.path).parent for _, record in left}):
            if parent.is_dir():
                os.listdir(parent)  # opening a folder makes a network file system ask its server again
        time.sleep(min(pause_s, max(0.0, until - time.monotonic())))
        pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)


def look_at(folder: Path, record: FileRecord, *, checksums: bool = True) -> str:
    """What is wrong with one file; empty if it is the one that was written.

    Args:
        checksums: Read every byte; False compares sizes alone.

    Raises:
        OSError: It is there and cannot be read.
    """
    path = folder / record.path
    if not path.is_file():  # reading a pipe would wait for its other end
        return what_is_wrong(record, None, None)
    num_bytes = path.stat().st_size
    if num_bytes != record.num_bytes or not checksums:
        return what_is_wrong(record, num_bytes, None)
    return what_is_wrong(record, *checksum_file(path))


def sync_folder(path: Path) -> None:
    """Flush a folder's entries to the disk, where its file system knows how: a folder shared with a virtual machine may not."""
    try:
        sync_path(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise


def sync_path(path: Path, flags: int = os.O_RDONLY) -> None:
    """Flush a file to the disk."""
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_synced(path: Path, data: bytes) -> None:
    """Write a file and flush it to the disk."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
