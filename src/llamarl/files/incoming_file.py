"""A file that is on its way: it lies beside its place until every byte is proved.

IncomingFile(folder, record) ─▶ write, write .. ─▶ finish: size, checksum, flush ─▶ a whole file, to be moved
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from pathlib import Path

import xxhash

from llamarl.checkpoint.snapshot import FileRecord
from llamarl.errors import TransferError

__all__ = ["PIECE_BYTES", "IncomingFile"]

PIECE_BYTES = 8 << 20
"""Most bytes of a file that either end holds at a time."""


class IncomingFile:
    """Takes a file's bytes in order. A context: what was not moved at its end is removed.

    Args:
        folder: On the disk where the file will lie; made if missing.
        record: What is expected; its path is not used. None: unknown.

    Raises:
        TransferError: The disk has no room for it.
        OSError: As the system reports.
    """

    def __init__(self, folder: Path, record: FileRecord | None) -> None:
        self._record = record
        folder.mkdir(parents=True, exist_ok=True)
        if record is not None and record.num_bytes > shutil.disk_usage(folder).free:
            raise _no_space(folder, record.num_bytes)
        self._path = folder / f"new-{secrets.token_hex(8)}"
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._digest = xxhash.xxh3_128()
        self.num_bytes = 0
        """That have come."""

    def write(self, data: bytes | memoryview) -> None:
        """The next bytes.

        Raises:
            TransferError: The disk is full.
            OSError: As the system reports.
        """
        rest = memoryview(data)
        self._digest.update(rest)
        try:
            while rest:
                count = os.write(self._descriptor, rest)
                self.num_bytes += count
                rest = rest[count:]
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            full = _no_space(self._path.parent, len(rest))
            os.ftruncate(self._descriptor, 0)  # it takes room that others need
            raise full from error

    def finish(self) -> tuple[Path, FileRecord]:
        """The whole file, on the disk under a name that nobody else uses, and what it holds; move it from there.

        Raises:
            TransferError: It is not what was expected.
        """
        found = FileRecord(path="", num_bytes=self.num_bytes, xxh3_128=self._digest.hexdigest())
        wanted = self._record
        if wanted is not None and (found.num_bytes, found.xxh3_128) != (wanted.num_bytes, wanted.xxh3_128):
            raise TransferError(
                f"it was altered: {found.num_bytes} bytes with checksum {found.xxh3_128} came, "
                f"{wanted.num_bytes} with {wanted.xxh3_128} were written"
            )
        os.fsync(self._descriptor)
        return self._path, found

    def __enter__(self) -> IncomingFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)
        self._path.unlink(missing_ok=True)


def _no_space(folder: Path, needed: int) -> TransferError:
    return TransferError(
        f"no space left in {folder}: {needed / 1e6:.1f} MB more are needed, {shutil.disk_usage(folder).free / 1e6:.1f} MB "
        "are free; free some and resume the run"
    )
