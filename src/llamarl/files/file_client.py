"""The controller's end: one host's files, by calls of its agent.

    fetch   host's run folder ─▶ a folder here         send   a file here ─▶ host's run folder         provide   content ─▶ host

Files travel in pieces, each with its checksum, and count when the whole is proved. All calls block; any thread.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from llamarl.checkpoint.snapshot import FileRecord, checksum_bytes
from llamarl.errors import TransferError
from llamarl.files.host_files import FarFile
from llamarl.files.incoming_file import PIECE_BYTES, IncomingFile
from llamarl.files.safe_folder import SafeFolder

__all__ = ["FileClient"]

_HURRY_S = 3.0
_SLOWEST_BYTES_PER_S = 20e6
"""At which a host reads or flushes what one answer is about: a model of 15 GB from a disk of 125 MB/s takes two minutes."""


class FileClient:
    """See the module.

    Args:
        host: As the user calls it, for messages.
        ask: Calls a method of the :class:`llamarl.files.host_files.HostFiles` there: its result, what
            went wrong, and whether that is a file that is missing. Raises ``ConnectionError`` when its
            agent is gone.
        stall_s: Longest wait for one answer, beyond the time that the host may take for the bytes that it reads for it.
    """

    def __init__(self, host: str, ask: Callable[..., Future[tuple[Any, str, bool]]], *, stall_s: float) -> None:
        self.host = host
        self._ask_host, self._stall_s = ask, stall_s

    def open_run(self, run_id: str) -> tuple[str, Path]:
        """Make the host a run folder of its own: its handle, and its path there."""
        handle, folder = self._ask("", "open_run", run_id)
        return str(handle), Path(folder)

    def forget(self, run: str) -> None:
        """Remove all that the host keeps for the run."""
        self._ask("", "forget", run)

    def leave(self, run: str) -> None:
        """Have the host keep it for a day, though nobody asks for it any more."""
        self._ask("", "leave", run)

    def remove(self, run: str, path: str) -> None:
        """A file or folder of its run folder."""
        self._ask(path, "remove", run, path)

    def list_files(self, run: str, *, skip: Sequence[str] = ()) -> list[FarFile]:
        """Every file in the host's run folder, but those under the names ``skip``."""
        return list(self._ask("", "list_files", run, list(skip)))

    def fetch(
        self, run: str, path: str, into: SafeFolder, record: FileRecord | None, *, name: str | None = None
    ) -> FileRecord:
        """Bring a file of the host's run folder; it is on the disk when this returns.

        Args:
            into: Folder here.
            record: What it must hold; None takes it as it is.
            name: Of the file in ``into``; None: ``path``.

        Returns:
            What came, with ``path``.

        Raises:
            TransferError: It is not there, not as it was written, the disk here is full, or the host cannot be reached.
        """
        try:
            with IncomingFile(into.root / ".incoming", record) as coming:
                while record is None or coming.num_bytes < record.num_bytes:
                    data, checksum, num_bytes = self._ask(path, "read", run, path, coming.num_bytes)
                    if record is not None and num_bytes != record.num_bytes:
                        raise TransferError(f"it is torn: {num_bytes} bytes, {record.num_bytes} were written")
                    if checksum_bytes(data) != checksum:
                        raise TransferError("its bytes changed on the way")
                    if not data:
                        break
                    coming.write(data)
                place, found = coming.finish()
                into.put(place, name if name is not None else path)
                return FileRecord(path=path, num_bytes=found.num_bytes, xxh3_128=found.xxh3_128)
        except TransferError as error:
            raise self._named(error, path) from error
        except OSError as error:
            where = f"{os.fspath(error.filename)}: " if error.filename else ""
            raise TransferError(f"host {self.host}: {path}: {where}{error.strerror or error}") from error

    def send(self, source: Path, record: FileRecord, run: str, *, as_object: bool = False) -> None:
        """Put a file into the host's run folder under the record's path, or among its objects.

        Raises:
            TransferError: It is not what the record says, the host's disk is full, or the host cannot be reached.
        """
        path = record.path
        try:
            with open(source, "rb", buffering=0) as data:
                number = self._ask(path, "begin", run, record)
                while piece := data.read(PIECE_BYTES):
                    self._ask(path, "add", number, piece, checksum_bytes(piece))
            self._ask(path, "finish", number, run, record, as_object, num_bytes=record.num_bytes)
        except OSError as error:
            raise TransferError(f"host {self.host}: {path}: {source}: {error.strerror or error}") from error

    def holds(self, path: Path, files: Sequence[FileRecord]) -> Path | None:
        """Where the host has the same bytes already: under the same path, or in its own Hugging
        Face cache; None: nowhere."""
        found = self._ask("", "holds", str(path), list(files), num_bytes=_bytes_of(files))
        return Path(found) if found else None

    def lacks(self, files: Sequence[FileRecord]) -> list[FileRecord]:
        """Those whose content the host does not have, each content once."""
        lacking = self._ask("", "lacks", list(files), num_bytes=_bytes_of(files))
        return [files[position] for position in lacking]

    def place(self, run: str, files: Sequence[FileRecord]) -> Path:
        """A folder there of contents that it has, under the records' paths."""
        return Path(self._ask("", "place", run, list(files)))

    def same(self, path: Path, files: Sequence[tuple[str, int, int]]) -> bool:
        """Whether the host has files of the same sizes and times of writing, (path, bytes, ns), below the same path."""
        return bool(self._ask("", "same", str(path), list(files)))

    def hurry(self) -> None:
        """From now on wait a few seconds for an answer, at most."""
        self._stall_s = min(self._stall_s, _HURRY_S)

    def _ask(self, path: str, method: str, *arguments: Any, num_bytes: int = 0) -> Any:
        began_s = time.monotonic()
        limit_s = self._stall_s + num_bytes / _SLOWEST_BYTES_PER_S
        try:
            result, trouble, missing = self._ask_host(method, *arguments).result(limit_s)
        except TimeoutError as error:
            waited_s = time.monotonic() - began_s
            raise self._named(TransferError(f"no answer for {waited_s:.0f} s"), path) from error
        except ConnectionError as error:
            raise self._named(TransferError(f"its agent is gone ({error})"), path) from error
        if trouble:
            raise self._named(TransferError(trouble, missing=missing), path)
        return result

    def _named(self, error: TransferError, path: str) -> TransferError:
        if str(error).startswith(f"host {self.host}"):
            return error
        return TransferError(f"host {self.host}{': ' + path if path else ''}: {error}", missing=error.missing)


def _bytes_of(files: Sequence[FileRecord]) -> int:
    return sum(record.num_bytes for record in files)
