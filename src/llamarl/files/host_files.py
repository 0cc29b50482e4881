"""What a host keeps for the jobs of controllers that share no folder with it.

    BASE/runs/HANDLE/run/       the run's folder, as the ranks here see it: empty at first, brought to the controller's as it fills
    BASE/runs/HANDLE/content/   models, data and code that the plan of the run names, by content: links to objects
    BASE/runs/HANDLE/incoming/  what is on its way
    BASE/objects/               each file's bytes once, read-only, under its checksum and size, for the runs to come

A run's folder goes when its controller says so, and with this process, however that ends: a shell
waits for its end and removes the folder. Where the controller has said that something in it is
still to be fetched (``leave``), it goes a day later, with the next run.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import secrets
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import constants

from llamarl.checkpoint.snapshot import FileRecord, checksum_bytes, checksum_file
from llamarl.checkpoint.written import look_at
from llamarl.errors import TransferError
from llamarl.files.incoming_file import PIECE_BYTES, IncomingFile
from llamarl.files.safe_folder import SafeFolder
from llamarl.reading import cache_folder

__all__ = ["FarFile", "HostFiles", "default_base"]

_RUN_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_HANDLE = re.compile(r"[A-Za-z0-9_-]{1,64}\.[0-9a-f]{16}")
_SUM = re.compile(r"[0-9a-f]{32}")
_UNUSED_S = 86_400.0
_LEFT = ".left"
_JANITOR_S = 3.0


@dataclass(frozen=True, kw_only=True)
class FarFile:
    """One file in a host's run folder."""

    path: str
    num_bytes: int
    mtime_ns: int


def default_base() -> Path:
    """Where a host keeps these things unless told otherwise: ``$XDG_CACHE_HOME/llamarl/node``."""
    return cache_folder() / "node"


class HostFiles:
    """See the module. Any thread.

    Args:
        base: A folder of this user alone; made when it is needed.
    """

    def __init__(self, base: Path) -> None:
        self.base = base
        self._janitors: dict[str, subprocess.Popen[bytes]] = {}
        """Run's handle -> the shell that removes its folder when this process is gone."""
        self._coming: dict[int, IncomingFile] = {}
        self._numbers = itertools.count()

    # -- a run's folder --

    def open_run(self, run_id: str) -> tuple[str, Path]:
        """An empty run folder, and a handle by which the controller calls it from now on.

        Raises:
            TransferError: The id is no plain name.
            OSError: As the system reports.
        """
        if not _RUN_ID.fullmatch(run_id):
            raise TransferError(f"{run_id!r:.100} is no name of a run")
        self._forget_old()
        handle = f"{run_id}.{secrets.token_hex(8)}"
        folder = self._runs / handle
        self.base.parent.mkdir(parents=True, exist_ok=True)
        self.base.mkdir(exist_ok=True, mode=0o700)  # nobody else can look below it
        (folder / "run" / "checkpoints").mkdir(parents=True)
        (folder / "run" / ".run_id").write_text(f"{run_id}\n", encoding="utf-8")
        # Its input ends with this process, whatever ends that; a word first tells it to leave the folder. It runs behind a shell that
        # has ended: Ray kills the children of an actor that it ends.
        janitor = 'exec 3<&0; (read -r word <&3 || rm -rf -- "$1") &'
        self._janitors[handle] = subprocess.Popen(
            ["sh", "-c", janitor, "llamarl-janitor", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        with contextlib.suppress(subprocess.TimeoutExpired):  # on a busy machine; it is buried when it is dismissed
            self._janitors[handle].wait(_JANITOR_S)
        return handle, folder / "run"

    def run(self, handle: str) -> SafeFolder:
        """The files of a run's folder.

        Raises:
            TransferError: There is none of that name.
        """
        return SafeFolder(self._folder(handle) / "run")

    def forget(self, handle: str) -> None:
        """Remove all that is kept for a run; objects stay."""
        folder = self._folder(handle)
        self._dismiss(handle)
        shutil.rmtree(folder)

    def leave(self, handle: str) -> None:
        """Keep what lies in a run's folder for a day: its user has been told to fetch it."""
        (self._folder(handle) / _LEFT).touch()
        self._dismiss(handle)

    def list_files(self, handle: str, skip: Sequence[str]) -> list[FarFile]:
        """What lies in a run's folder, but under the names ``skip``."""
        return [FarFile(path=path, num_bytes=size, mtime_ns=ns) for path, size, ns in self.run(handle).walk(skip)]

    def remove(self, handle: str, path: str) -> None:
        """A file or folder of a run's folder."""
        self.run(handle).remove(path)

    def read(self, handle: str, path: str, offset: int) -> tuple[bytes, str, int]:
        """A piece of a file of a run's folder, the piece's checksum, and the size of the whole file."""
        descriptor = self.run(handle).open(path)
        try:
            data = os.pread(descriptor, PIECE_BYTES, offset)
            return data, checksum_bytes(data), os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)

    # -- a file on its way here --

    def begin(self, handle: str, record: FileRecord) -> int:
        """Take up a file, of a run or on its way to be an object: a number for it."""
        number = next(self._numbers)
        self._coming[number] = IncomingFile(self._folder(handle) / "incoming", record)
        return number

    def add(self, number: int, data: bytes, checksum: str) -> None:
        """The next piece."""
        coming = self._coming[number]
        with contextlib.ExitStack() as on_error:
            on_error.push(coming)
            on_error.callback(self._coming.pop, number)
            if checksum_bytes(data) != checksum:
                raise TransferError("its bytes changed on the way")
            coming.write(data)
            on_error.pop_all()

    def finish(self, number: int, handle: str, record: FileRecord, as_object: bool) -> None:
        """It has come: put it into the run's folder, or among the objects."""
        with self._coming.pop(number) as coming:
            place, _ = coming.finish()
            if not as_object:
                self.run(handle).put(place, record.path)
                return
            self._objects.mkdir(parents=True, exist_ok=True)
            os.chmod(place, 0o444)
            SafeFolder(self._objects).put(place, _object_name(record))

    # -- content --

    def holds(self, path: str, files: Sequence[FileRecord]) -> str:
        """Where the folder of ``files``, or the one file with an empty path, lies here byte for
        byte: under ``path``, or as the same snapshot in the Hugging Face cache of this host; empty
        where in neither. More may lie beside them."""
        places = [Path(path), *_in_own_hub_cache(path)]
        return next((str(place) for place in places if self._lie_at(place, files)), "")

    def _lie_at(self, root: Path, files: Sequence[FileRecord]) -> bool:
        try:
            return bool(files) and not any(look_at(root, record) for record in files)
        except OSError:
            return False

    def same(self, path: str, seen: Sequence[tuple[str, int, int]]) -> bool:
        """Whether files of the same sizes and times of writing, to the nanosecond, lie here: then
        they are the same, or copies.

        Args:
            seen: (path below, bytes, ns); for a file its path is empty.
        """
        try:
            found = [os.stat(Path(path) / name if name else path) for name, _, _ in seen]
        except OSError:
            return False
        return bool(seen) and [(f.st_size, f.st_mtime_ns) for f in found] == [(n, t) for _, n, t in seen]

    def lacks(self, files: Sequence[FileRecord]) -> list[int]:
        """Which of ``files``, by position, no object here holds; each content is named once."""
        lacking: dict[str, int] = {}
        for position, record in enumerate(files):
            name = _object_name(record)
            if name not in lacking and not self._proved(record):
                lacking[name] = position
        return list(lacking.values())

    def place(self, handle: str, files: Sequence[FileRecord]) -> Path:
        """The folder of ``files`` for a run: links to objects that ``lacks`` has proved, or that have come since.

        Raises:
            TransferError: There is no such run.
            OSError: As the system reports.
        """
        listing = "\n".join(f"{r.path}\0{r.num_bytes}\0{r.xxh3_128}" for r in files)
        folder = self._folder(handle) / "content" / checksum_bytes(listing.encode("utf-8", "surrogatepass"))
        folder.mkdir(parents=True, exist_ok=True)
        for record in files:
            SafeFolder(folder).put(self._objects / _object_name(record), record.path, link=True)
        return folder

    # -- within --

    @property
    def _runs(self) -> Path:
        return self.base / "runs"

    @property
    def _objects(self) -> Path:
        return self.base / "objects"

    def _folder(self, handle: str) -> Path:
        folder = self._runs / handle
        if not _HANDLE.fullmatch(handle) or not folder.is_dir():
            raise TransferError(f"{handle!r:.100} is no run that is kept here")
        return folder

    def _dismiss(self, handle: str) -> None:
        """Tell the janitor of a run that its folder is not its business any more."""
        if (janitor := self._janitors.pop(handle, None)) is not None:
            assert janitor.stdin is not None
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):  # it was killed, or has not come to read it
                with janitor.stdin:
                    janitor.stdin.write(b"leave\n")
                janitor.wait(_JANITOR_S)

    def _forget_old(self) -> None:
        """Folders that were left a day ago."""
        for left in self._runs.glob(f"*/{_LEFT}"):
            with contextlib.suppress(OSError):
                if time.time() - left.stat().st_mtime > _UNUSED_S:
                    shutil.rmtree(left.parent)

    def _proved(self, record: FileRecord) -> bool:
        """Whether an object holds it: its bytes are read. One that was altered is removed."""
        path = self._objects / _object_name(record)
        if not path.exists():
            return False
        if checksum_file(path) == (record.num_bytes, record.xxh3_128):
            return True
        path.unlink()
        return False


def _in_own_hub_cache(path: str) -> list[Path]:
    """The place of a snapshot of another host's Hugging Face cache in this one's:
    ``models--x/snapshots/COMMIT`` and what follows are the same everywhere."""
    parts = Path(path).parts
    at = next((i for i, part in enumerate(parts[:-1]) if parts[i + 1] == "snapshots" and "--" in part), None)
    if at is None:
        return []
    return [Path(constants.HF_HUB_CACHE, *parts[at:])]


def _object_name(record: FileRecord) -> str:
    if not _SUM.fullmatch(record.xxh3_128):
        raise TransferError(f"{record.xxh3_128!r:.50} is no checksum")
    return f"{record.xxh3_128}-{record.num_bytes}"
