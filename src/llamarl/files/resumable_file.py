"""A file that is on its way: kept beside its place until every byte is proved, and gone on with
after a broken connection.

ResumableFile(folder, record) ─▶ offset: what is here already ─▶ write, write .. ─▶ finish: size, checksum, flush ─▶ a whole file
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
from pathlib import Path
from types import TracebackType

import xxhash

from llamarl.checkpoint.snapshot import FileRecord
from llamarl.errors import TransferError

__all__ = ["PIECE_BYTES", "ResumableFile", "free_bytes", "no_space"]

PIECE_BYTES = 8 << 20
"""Most bytes of a file that either end holds at a time."""


class ResumableFile:
    """Takes a file's bytes in order, from ``offset`` on. A context: what is not finished is kept, for the next try.

    Args:
        folder: On the disk where the file will lie; made if missing.
        record: What is expected; its path is not used. None: unknown, and each try begins anew.

    Raises:
        TransferError: The disk has no room for it.
        OSError: As the system reports.
    """

    def __init__(self, folder: Path, record: FileRecord | None) -> None:
        self._record = record
        folder.mkdir(parents=True, exist_ok=True)
        name = f"new-{secrets.token_hex(8)}" if record is None else f"{record.xxh3_128}-{record.num_bytes}"
        self._path, self._descriptor = _open_alone(folder, name)
        self._digest = xxhash.xxh3_128()
        self.offset = 0
        try:
            if record is not None:
                self._take_up(record.num_bytes)
                if record.num_bytes - self.offset > (free := free_bytes(folder)):
                    raise no_space(folder, record.num_bytes - self.offset, free)
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def _take_up(self, expected: int) -> None:
        """Go on after what an earlier try has left."""
        if os.fstat(self._descriptor).st_size > expected:
            os.ftruncate(self._descriptor, 0)
        while chunk := os.read(self._descriptor, PIECE_BYTES):
            self._digest.update(chunk)
            self.offset += len(chunk)

    def write(self, data: bytes | memoryview) -> None:
        """The next bytes.

        Raises:
            TransferError: The disk is full; what is not this file's is removed.
            OSError: As the system reports.
        """
        rest = memoryview(data)
        self._digest.update(rest)
        try:
            while rest:
                count = os.write(self._descriptor, rest)
                self.offset += count
                rest = rest[count:]
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            self.drop()  # it takes room that others need
            raise no_space(self._path.parent, len(rest), free_bytes(self._path.parent)) from error

    def finish(self) -> tuple[Path, FileRecord]:
        """The whole file, on the disk under a name that nobody else uses, and what it holds; move it from there.

        Raises:
            TransferError: It is not what was expected; then it is removed.
        """
        found = FileRecord(path="", num_bytes=self.offset, xxh3_128=self._digest.hexdigest())
        if self._record is not None and (found.num_bytes, found.xxh3_128) != (
            self._record.num_bytes,
            self._record.xxh3_128,
        ):
            self.drop()
            raise TransferError(
                f"it was altered: {found.num_bytes} bytes with checksum {found.xxh3_128} came, "
                f"{self._record.num_bytes} with {self._record.xxh3_128} were written"
            )
        os.fsync(self._descriptor)
        return self._path, found

    def drop(self) -> None:
        """Forget what came."""
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)

    def __enter__(self) -> ResumableFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        if self._record is None:
            self.drop()  # after a success it has been moved


def _open_alone(folder: Path, name: str) -> tuple[Path, int]:
    """A file that nobody else writes: the one under ``name``, or where somebody does, one of our own."""
    for candidate in (folder / name, folder / f"{name}-{secrets.token_hex(8)}"):
        descriptor = os.open(candidate, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return candidate, descriptor
        except OSError as error:
            if error.errno in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):  # a file system without locks
                return candidate, descriptor
            os.close(descriptor)
    raise OSError(errno.EAGAIN, f"{folder / name} is held by others")


def free_bytes(folder: Path) -> int:
    """Bytes that this user may still write there."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def no_space(folder: Path, needed: int, free: int) -> TransferError:
    return TransferError(
        f"no space left in {folder}: {needed / 1e6:.1f} MB more are needed, {free / 1e6:.1f} MB are free; free some and resume "
        "the run"
    )
