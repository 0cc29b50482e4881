"""What a host keeps for the jobs of controllers that share no folder with it.

    BASE/runs/HANDLE/run/       the run's folder, as the ranks here see it: empty at first, brought to the controller's as it fills
    BASE/runs/HANDLE/content/   models, data and code that the plan of the run names, by content: links to objects
    BASE/objects/               each file's bytes once, read-only, under its checksum and size; the oldest go beyond a limit
    BASE/incoming/              what is on its way
    BASE/taken_over/HANDLE/     the folder of a run that this host went on with when its controller was gone; stays

A run's folder goes when its controller says so; when its controller has hung up without a word (``forget_those_left``); and a day
after it was last used where the controller has said that something in it is still to be fetched, or nobody knows what became of it.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import re
import secrets
import shutil
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llamarl.checkpoint.shared_folder import FolderAnswer, FolderQuestion, answer
from llamarl.checkpoint.snapshot import FileRecord, checksum_bytes, checksum_file
from llamarl.errors import TransferError
from llamarl.files.below import Below
from llamarl.files.partial import Partial
from llamarl.user_folders import cache_folder

__all__ = ["HostFiles", "StandBy", "default_base", "records_from"]

_RUN_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_HANDLE = re.compile(r"[A-Za-z0-9_-]{1,64}\.[0-9a-f]{16}")
_SUM = re.compile(r"[0-9a-f]{32}")
_UNUSED_S = 86_400.0
_MOST_OBJECT_BYTES = 200 << 30


@dataclass(frozen=True, kw_only=True)
class StandBy:
    """How to go on with a run whose controller is gone."""

    words: tuple[str, ...]
    """For ``llamarl train --resume``."""
    after_s: float


def default_base() -> Path:
    """Where a host keeps these things unless told otherwise: ``$XDG_CACHE_HOME/llamarl/worker``."""
    return cache_folder() / "worker"


class HostFiles:
    """See the module. Any thread.

    Args:
        base: A folder of this user alone; made when it is needed.
        max_object_bytes: Of models, data and code that are kept for the next run.
    """

    def __init__(self, base: Path, *, max_object_bytes: int = _MOST_OBJECT_BYTES) -> None:
        self.base = base
        self._max_object_bytes = max_object_bytes
        self._locks: dict[str, int] = {}
        self._stand_by: dict[str, StandBy] = {}
        self._used_s: dict[str, float] = {}
        """Runs that were opened here, and when their controllers last asked for something of them; without those that they left."""

    # -- a run's folder --

    def share(self, question: FolderQuestion, host: str) -> FolderAnswer:
        """Whether this host sees the controller's own folder: then none of the rest is needed for the run."""
        return answer(question, host)

    def open_run(self, run_id: str) -> tuple[str, Path]:
        """An empty run folder, and a handle by which the controller calls it from now on.

        Raises:
            TransferError: The id is no plain name.
            OSError: As the system reports.
        """
        if not _RUN_ID.fullmatch(run_id):
            raise TransferError(f"{run_id!r:.100} is no name of a run")
        self._forget_unused()
        handle = f"{run_id}.{secrets.token_hex(8)}"
        folder = self._runs / handle
        self._make_base()
        (folder / "run" / "checkpoints").mkdir(parents=True)
        (folder / "run" / ".run_id").write_text(f"{run_id}\n", encoding="utf-8")
        self._used_s[handle] = time.monotonic()
        self._use(handle)
        return handle, folder / "run"

    def run(self, handle: str) -> Below:
        """The files of a run's folder.

        Raises:
            TransferError: There is none of that name.
        """
        return Below(self._folder(handle) / "run")

    def forget(self, handle: str) -> None:
        """Remove all that is kept for a run; objects stay."""
        folder = self._folder(handle)
        self._used_s.pop(handle, None)
        self._stand_by.pop(handle, None)
        lock = self._locks.pop(handle, None)
        shutil.rmtree(folder)
        if lock is not None:
            os.close(lock)

    def keeps(self, handle: str) -> bool:
        """Whether there is such a run."""
        return bool(_HANDLE.fullmatch(handle)) and (self._runs / handle).is_dir()

    def stand_by(self, handle: str, how: StandBy) -> None:
        """The run is to be gone on with here, should its controller be gone.

        Raises:
            TransferError: There is no such run.
        """
        self._folder(handle)
        self._stand_by[handle] = how

    def patience_s(self, handles: Collection[str]) -> float | None:
        """How long to wait for the controllers of these runs, at most; None where this host stands by for none of them."""
        waits = [how.after_s for handle, how in self._stand_by.items() if handle in handles]
        return max(waits, default=None)

    def take_over(self, handles: Collection[str], *, since_s: float) -> list[tuple[Path, StandBy]]:
        """The folders of those runs for which this host stands by, that nobody has asked for since ``since_s`` on the monotonic clock,
        and whose controller has not come back under another handle: moved to where they stay."""
        taken = []
        for handle, how in list(self._stand_by.items()):
            used_s = self._used_s.get(handle, math.inf)
            if handle not in handles or used_s > since_s:
                continue
            run_id = handle.rpartition(".")[0]
            if any(
                other != handle and other.rpartition(".")[0] == run_id and self._used_s[other] > used_s
                for other in self._used_s
            ):
                continue  # it was started again, and said so
            place = self.base / "taken_over" / handle
            place.parent.mkdir(exist_ok=True)
            os.rename(self._runs / handle / "run", place)
            self.forget(handle)
            taken.append((place, how))
        return taken

    def leave(self, handle: str) -> None:
        """Keep what lies in a run's folder for a day: its user has been told to fetch it."""
        self._folder(handle)
        self._used_s.pop(handle, None)
        self.let_go([handle])

    def let_go(self, handles: Collection[str]) -> None:
        """Whoever used these runs may never come back: a day after their last use they may go. Using one again holds it again."""
        for handle in handles:
            if (lock := self._locks.pop(handle, None)) is not None:
                os.close(lock)

    def forget_those_left(self, handles: Collection[str] | None = None, *, since_s: float = math.inf) -> None:
        """Forget runs whose controller is gone without a word.

        Args:
            handles: Of these; None: of all that were opened here.
            since_s: Those only that nobody has asked for since, on the monotonic clock.
        """
        for handle, used_s in list(self._used_s.items()):
            if used_s <= since_s and (handles is None or handle in handles):
                with contextlib.suppress(OSError, TransferError):  # a day later it goes all the same
                    self.forget(handle)

    def partial(self, record: FileRecord | None) -> Partial:
        """Take up a file on its way here."""
        self._make_base()
        return Partial(self.base / "incoming", record)

    # -- content --

    def holds(self, path: str, files: Sequence[FileRecord]) -> str:
        """Where the folder of ``files``, or the one file with an empty path, lies here byte for byte: under ``path``, or as the
        same snapshot in the Hugging Face cache of this host; empty where in neither. More may lie beside them."""
        places = [Path(path), *_in_own_hub_cache(path)]
        return next((str(place) for place in places if self._lie_at(place, files)), "")

    def _lie_at(self, root: Path, files: Sequence[FileRecord]) -> bool:
        for record in files:
            file = root / record.path if record.path else root
            try:
                if not file.is_file() or file.stat().st_size != record.num_bytes:
                    return False
                if checksum_file(file)[1] != record.xxh3_128:
                    return False
            except OSError:
                return False
        return bool(files)

    def same(self, path: str, seen: Sequence[tuple[str, int, int]]) -> bool:
        """Whether files of the same sizes and times of writing, to the nanosecond, lie here: then they are the same, or copies.

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

    def keep(self, partial: Path, record: FileRecord) -> None:
        """Make a proved file an object; the oldest others give way to it."""
        self._objects.mkdir(parents=True, exist_ok=True)
        os.chmod(partial, 0o444)
        Below(self._objects).put(partial, _object_name(record))
        self._stamp(record)
        self._make_room(_object_name(record))

    def place(self, handle: str, files: Sequence[FileRecord]) -> Path:
        """The folder of ``files`` for a run: links to objects.

        Raises:
            TransferError: An object is lacking, or there is no such run.
            OSError: As the system reports.
        """
        listing = "\n".join(f"{r.path}\0{r.num_bytes}\0{r.xxh3_128}" for r in files)
        folder = self._folder(handle) / "content" / checksum_bytes(listing.encode("utf-8", "surrogatepass"))
        folder.mkdir(parents=True, exist_ok=True)
        for record in files:
            if not self._proved(record):
                raise TransferError(f"{record.path} is not here: send it first")
            Below(folder).put(self._objects / _object_name(record), record.path, link=True)
            self._stamp(record)
        return folder

    # -- within --

    def _make_base(self) -> None:
        """Nobody else can look below it."""
        self.base.parent.mkdir(parents=True, exist_ok=True)
        self.base.mkdir(exist_ok=True, mode=0o700)

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
        self._use(handle)
        return folder

    def _use(self, handle: str) -> None:
        """Hold the run's lock, so that nobody forgets it, and note the time."""
        if handle not in self._locks:
            lock = os.open(self._runs / handle / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            with contextlib.suppress(OSError):  # a file system without locks: the time stamp protects it
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._locks[handle] = lock
        os.utime(self._runs / handle / ".lock")
        if handle in self._used_s:
            self._used_s[handle] = time.monotonic()

    def _forget_unused(self) -> None:
        """Runs whose controllers never said that they are over."""
        for folder in self._runs.iterdir() if self._runs.is_dir() else ():
            lock = folder / ".lock"
            with contextlib.suppress(OSError):
                if not _HANDLE.fullmatch(folder.name) or time.time() - lock.stat().st_mtime < _UNUSED_S:
                    continue
                with open(lock, "r+b") as held:
                    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder)

    def _proved(self, record: FileRecord) -> bool:
        """Whether an object holds it. Its bytes are read once, and again whenever its time stamp has changed."""
        if not _SUM.fullmatch(record.xxh3_128):
            raise TransferError(f"{record.xxh3_128!r:.50} is no checksum")
        path = self._objects / _object_name(record)
        try:
            if self._stamp_path(record).read_text(encoding="ascii") == _stamp_of(path):
                return True
        except OSError:
            pass  # not stamped yet, or not there
        try:
            if checksum_file(path) == (record.num_bytes, record.xxh3_128):
                self._stamp(record)
                return True
            path.unlink()
        except FileNotFoundError:
            pass
        return False

    def _stamp_path(self, record: FileRecord) -> Path:
        return self._objects / f".{_object_name(record)}.proved"

    def _stamp(self, record: FileRecord) -> None:
        """Note that an object was proved and used now."""
        self._stamp_path(record).write_text(_stamp_of(self._objects / _object_name(record)), encoding="ascii")

    def _make_room(self, newest: str) -> None:
        """Remove the objects that were not used for the longest time, beyond the limit; what runs link to lives on there."""
        found = []
        for path in self._objects.iterdir():
            if not path.name.startswith("."):
                with contextlib.suppress(OSError):
                    stamp = self._objects / f".{path.name}.proved"
                    used_s = stamp.stat().st_mtime if stamp.exists() else 0.0
                    found.append((path.name == newest, used_s, path, path.stat().st_size))
        excess = sum(size for *_, size in found) - self._max_object_bytes
        for _, _, path, size in sorted(found):
            if excess <= 0 or path.name == newest:
                return
            path.unlink(missing_ok=True)
            (self._objects / f".{path.name}.proved").unlink(missing_ok=True)
            excess -= size


def _in_own_hub_cache(path: str) -> list[Path]:
    """The place of a snapshot of another host's Hugging Face cache in this one's: ``models--x/snapshots/COMMIT`` and what
    follows are the same everywhere."""
    parts = Path(path).parts
    at = next((i for i, part in enumerate(parts[:-1]) if parts[i + 1] == "snapshots" and "--" in part), None)
    if at is None:
        return []
    home = os.environ.get("HF_HOME") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache"), "huggingface"
    )
    return [Path(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub"), *parts[at:])]


def _object_name(record: FileRecord) -> str:
    return f"{record.xxh3_128}-{record.num_bytes}"


def _stamp_of(path: Path) -> str:
    found = path.stat()
    return f"{found.st_size} {found.st_mtime_ns}"


def records_from(plain: Any) -> tuple[FileRecord, ...]:
    """What came as [[path, bytes, checksum], ..].

    Raises:
        TransferError: It is something else.
    """
    try:
        return tuple(FileRecord(path=str(p), num_bytes=int(n), xxh3_128=str(x)) for p, n, x in plain)
    except (TypeError, ValueError) as error:
        raise TransferError(f"no list of files: {error}") from error
