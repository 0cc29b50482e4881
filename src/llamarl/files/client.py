"""The controller's end: one host's files, over a connection that is dialled again where it breaks.

    fetch   host's run folder ─▶ a folder here         send   a file here ─▶ host's run folder         provide   content ─▶ host

What was half way goes on where it stopped. All calls block and come from one thread at a time; each wait for a byte has a limit.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from llamarl.checkpoint.shared_folder import FolderAnswer, FolderQuestion
from llamarl.checkpoint.snapshot import FileRecord
from llamarl.errors import TransferError
from llamarl.files.below import Below
from llamarl.files.frames import SocketFrames
from llamarl.files.partial import CHUNK_BYTES, Partial
from llamarl.files.service import STALL_S

__all__ = ["FarFile", "FileClient"]

_TRIES = 4
_PAUSE_S = 0.2
_HURRY_S = 3.0
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class FarFile:
    """One file in a host's run folder."""

    path: str
    num_bytes: int
    mtime_ns: int


class FileClient:
    """See the module.

    Args:
        host: As the user calls it, for messages.
        dial: A new connection to its worker that has proved the key and is for files.
    """

    def __init__(self, host: str, dial: Callable[[], socket.socket], *, stall_s: float = STALL_S) -> None:
        self.host = host
        self._dial, self._stall_s = dial, stall_s
        self._tries = _TRIES
        self._frames: SocketFrames | None = None

    def share(self, question: FolderQuestion) -> FolderAnswer:
        """What the host finds in the controller's run folder."""
        plain = {"do": "share", "folder": question.folder, "name": question.name, "host": self.host}
        found = self._ask(plain)
        return FolderAnswer(read=str(found["read"]), wrote=str(found["wrote"]), trouble=str(found["trouble"]))

    def open_run(self, run_id: str) -> tuple[str, Path]:
        """Make the host a run folder of its own: its handle, and its path there."""
        found = self._ask({"do": "open", "run_id": run_id})
        return str(found["run"]), Path(found["folder"])

    def forget(self, run: str) -> None:
        """Remove all that the host keeps for the run."""
        self._ask({"do": "forget", "run": run})

    def keeps(self, run: str) -> bool:
        """Whether the host has the run folder still."""
        return bool(self._ask({"do": "keeps", "run": run})["keeps"])

    def stand_by(self, run: str, words: Sequence[str], after_s: float) -> None:
        """Have the host go on with the run by itself, if this process is gone without having said ``forget``.

        Args:
            words: For ``llamarl train --resume``.
            after_s: Seconds without a connection of ours.
        """
        self._ask({"do": "stand_by", "run": run, "words": list(words), "after_s": after_s})

    def leave(self, run: str) -> None:
        """Have the host keep it for a day, though nobody asks for it any more. A host to which the connection is lost is not dialled
        for that: it does not know what became of us."""
        if self._frames is not None:
            self._ask({"do": "leave", "run": run})

    def remove(self, run: str, path: str) -> None:
        """A file or folder of its run folder."""
        self._ask({"do": "remove", "run": run, "path": path})

    def list_files(self, run: str, *, skip: Sequence[str] = ()) -> list[FarFile]:
        """Every file in the host's run folder, but those under the names ``skip``."""
        found = self._ask({"do": "list", "run": run, "skip": list(skip)})
        return [FarFile(path=str(p), num_bytes=int(n), mtime_ns=int(t)) for p, n, t in found["files"]]

    def fetch(
        self, run: str, path: str, into: Below, record: FileRecord | None, *, name: str | None = None
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

        def once(frames: SocketFrames) -> FileRecord:
            with Partial(into.root / ".incoming", record) as partial:
                frames.ask({"do": "get", "run": run, "path": path, "offset": partial.offset})
                head = _checked(frames.answer())
                if record is not None and head["bytes"] != record.num_bytes:
                    self._drop()  # its bytes are on their way, and nobody wants them
                    raise TransferError(f"it is torn: {head['bytes']} bytes, {record.num_bytes} were written")
                if head["offset"] != partial.offset:
                    raise ConnectionError("the peer does not keep to the protocol: another offset")
                try:
                    while data := frames.data():
                        partial.write(data)
                except TransferError:
                    self._drop()
                    raise
                tail = _checked(frames.answer())
                place, found = partial.finish()
                if found.xxh3_128 != tail["xxh3_128"]:
                    partial.drop()
                    raise ConnectionError("its bytes changed on the way")
                into.put(place, name if name is not None else path)
                return FileRecord(path=path, num_bytes=found.num_bytes, xxh3_128=found.xxh3_128)

        return self._again(once, path)

    def send(self, source: Path, record: FileRecord, *, run: str | None) -> None:
        """Put a file into the host's run folder under the record's path, or with ``run`` None among its contents.

        Raises:
            TransferError: It is not what the record says, the host's disk is full, or the host cannot be reached.
        """
        file = [record.path, record.num_bytes, record.xxh3_128]
        question = {"do": "keep", "file": file} if run is None else {"do": "put", "run": run, "file": file}

        def once(frames: SocketFrames) -> None:
            with open(source, "rb", buffering=0) as data:
                frames.ask(question)
                data.seek(int(_checked(frames.answer())["offset"]))
                buffer = memoryview(bytearray(CHUNK_BYTES))
                while count := data.readinto(buffer):
                    frames.send(buffer[:count])
            frames.send(b"")
            _checked(frames.answer())

        self._again(once, record.path)

    def holds(self, path: Path, files: Sequence[FileRecord]) -> Path | None:
        """Where the host has the same bytes already: under the same path, or in its own Hugging Face cache; None: nowhere."""
        found = str(self._ask({"do": "holds", "path": str(path), "files": _plain(files)})["holds"])
        return Path(found) if found else None

    def lacks(self, files: Sequence[FileRecord]) -> list[FileRecord]:
        """Those whose content the host does not have, each content once."""
        return [files[int(position)] for position in self._ask({"do": "lacks", "files": _plain(files)})["lacks"]]

    def place(self, run: str, files: Sequence[FileRecord]) -> Path:
        """A folder there of contents that it has, under the records' paths."""
        return Path(self._ask({"do": "place", "run": run, "files": _plain(files)})["folder"])

    def same(self, path: Path, files: Sequence[tuple[str, int, int]]) -> bool:
        """Whether the host has files of the same sizes and times of writing, (path, bytes, ns), below the same path."""
        return bool(self._ask({"do": "same", "path": str(path), "files": [list(one) for one in files]})["same"])

    def hurry(self) -> None:
        """From now on, try once, and wait a few seconds for an answer. Any thread."""
        self._tries, self._stall_s = 1, min(self._stall_s, _HURRY_S)
        if (frames := self._frames) is not None:
            with contextlib.suppress(OSError):  # it has been closed since
                frames.wait_no_longer_than(self._stall_s)

    def close(self) -> None:
        """Hang up."""
        self._drop()

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        def once(frames: SocketFrames) -> dict[str, Any]:
            frames.ask(question)
            return _checked(frames.answer())

        return self._again(once, "")

    def _again(self, work: Callable[[SocketFrames], T], path: str) -> T:
        """Do it, over a new connection where the old one breaks; a few times."""
        for left in reversed(range(_TRIES)):
            left = min(left, self._tries - 1)
            try:
                if self._frames is None:
                    self._frames = SocketFrames(self._dial(), self._stall_s)
                return work(self._frames)
            except TransferError as error:
                text = f"host {self.host}{': ' + path if path else ''}: {error}"
                raise TransferError(text, missing=error.missing) from error
            except (ConnectionError, TimeoutError, EOFError) as error:
                self._drop()
                if not left:
                    raise TransferError(
                        f"host {self.host}{': ' + path if path else ''}: the connection for files is lost: {error}"
                    ) from error
                time.sleep(_PAUSE_S * (_TRIES - left))
            except OSError as error:
                self._drop()
                where = f"{os.fspath(error.filename)}: " if error.filename else ""
                raise TransferError(
                    f"host {self.host}{': ' + path if path else ''}: {where}{error.strerror or error}"
                ) from error
            except (KeyError, TypeError, ValueError) as error:
                self._drop()
                raise TransferError(
                    f"host {self.host}: its worker answers otherwise than expected: {error!r}"
                ) from error
        raise AssertionError("unreachable")

    def _drop(self) -> None:
        if self._frames is not None:
            self._frames.close()
            self._frames = None


def _checked(answer: dict[str, Any]) -> dict[str, Any]:
    if "error" in answer:
        raise TransferError(str(answer["error"]), missing=bool(answer.get("missing")))
    return answer


def _plain(files: Sequence[FileRecord]) -> list[list[Any]]:
    return [[record.path, record.num_bytes, record.xxh3_128] for record in files]
