"""What a run leaves in its folder, and whose folder it is. Checkpoints are there whole or not at all, whatever ends
the process and whenever.

    begin(9)                       executors write                       finish(9, what each rank says it wrote)
    tick_000009.partial/  ──────▶  tick_000009.partial/trainer/rank_0 …  ──▶  prove and sync every file, write the manifest,
                                                                              rename to tick_000009, sync the parent, prune

A name without a suffix is a finished checkpoint; the rename is the one moment at which it comes to
be, and everything that it names lies on the disk before. Suffixes mark what a killed process may
leave, and ``clean`` deals with each:

    .partial    being written: removed
    .replaced   an older checkpoint of the same tick, moved aside for a new one: put back if the new one did not arrive
    .deleted    being removed: removed

A checkpoint is proved (``verify``) before anything is loaded from it. Several may be in progress at once, because a
generator passes tick c before the trainer does.

    RUN/.run_id   random, made with the run; a run that is resumed keeps it

Whoever writes into the folder notes its ``RunIdentity`` when it starts and asks again before it writes: a folder may be
moved, removed or started over under a running job, and data of one run never comes to lie in two places, nor data of two
runs in one.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llamarl.checkpoint.snapshot import MANIFEST, Checkpoint, FileRecord, Manifest, checksum_file
from llamarl.checkpoint.written import files_below, sync_folder, sync_path, what_is_wrong, why_not_whole, write_synced
from llamarl.determinism import platform_facts
from llamarl.errors import CheckpointError, RunFolderLost
from llamarl.reading import read_bytes
from llamarl.settings.checkpoint import CheckpointConfig

__all__ = ["RUN_ID_FILE", "CheckpointStore", "RunIdentity", "being_written", "save_failed", "saving"]

RUN_ID_FILE = ".run_id"
_NAME = re.compile(r"tick_(\d{6,})(\.partial|\.replaced|\.deleted)?")


def being_written(tick: int) -> str:
    """What the folder of a checkpoint is called that is not finished."""
    return f"tick_{tick:06d}.partial"


class CheckpointStore:
    """The checkpoints of one run. One process writes; any may read."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        config: CheckpointConfig | None = None,
        *,
        patience_s: float = 0.0,
        platform: Mapping[str, str] | None = None,
    ) -> None:
        """
        Args:
            folder: ``RUN/checkpoints``; it is made when the first checkpoint begins.
            patience_s: How long a file that another host has written may take to be seen in ``folder``.
            platform: Of the hosts whose ranks write (``joint_facts``); None: of this machine.
        """
        self.folder = Path(folder)
        self.config = config if config is not None else CheckpointConfig()
        self.patience_s = patience_s
        self._platform = platform
        self.pinned: int | None = None
        """Tick of one that stays, however old."""

    # -- writing ----------------------------------------------------------------------------------------------------

    def begin(self, tick: int) -> Path:
        """An empty folder in which each executor rank writes ``<executor>/rank_<n>/...`` after its own tick ``tick``.

        Raises:
            CheckpointError: The disk is full or not writable; the message says what to do.
        """
        partial = self.folder / being_written(tick)
        with self._failing(f"cannot begin checkpoint {self._path(tick).name}", partial):
            if partial.exists():  # this tick was begun before and never finished
                shutil.rmtree(partial)
            partial.mkdir(parents=True)
        return partial

    def finish(
        self, tick: int, written: Mapping[str, Sequence[FileRecord]], metadata: Mapping[str, Any] | None = None
    ) -> Checkpoint:
        """Make the checkpoint that ``begin`` opened real, then remove those beyond ``config.keep``.

        Call it when every rank has written. Returns after the disk has it.

        Args:
            written: Who wrote -> its files, relative to the folder that ``begin`` made. These and no others make the
                checkpoint: each must be there, byte for byte, and none besides.
            metadata: What the run says of itself, plain JSON values (``Manifest.run``).

        Raises:
            CheckpointError: Nothing was begun, a file is missing, altered or nobody's, or the disk failed; then the
                unfinished folder is removed and earlier checkpoints are as they were.
        """
        partial, final, replaced = self._path(tick, ".partial"), self._path(tick), self._path(tick, ".replaced")
        if not partial.is_dir():
            raise CheckpointError(f"cannot finish checkpoint {final}: it was not begun, or {partial.name} was removed")
        try:
            with self._failing(f"cannot finish checkpoint {final.name}", partial):
                files = self._prove_written(final.name, partial, written)
                manifest = Manifest(
                    tick=tick, files=files, platform=self._platform or platform_facts(), run=dict(metadata or {})
                )
                write_synced(partial / MANIFEST, manifest.to_bytes())
                sync_folder(partial)
                if final.exists():
                    if replaced.exists():
                        shutil.rmtree(replaced)
                    os.rename(final, replaced)
                os.rename(partial, final)
                sync_folder(self.folder)
                sync_folder(self.folder.parent)  # the folder itself may be as new as its first checkpoint
        except CheckpointError:
            self.abort(tick)
            with contextlib.suppress(OSError):  # where the disk refuses that too, ``clean`` does it
                if replaced.exists() and not final.exists():
                    os.rename(replaced, final)
            raise
        shutil.rmtree(replaced, ignore_errors=True)  # what cannot be removed now is removed by the next clean()
        self._prune(tick)
        return Checkpoint(path=final, manifest=manifest)

    def abort(self, tick: int) -> None:
        """Drop a checkpoint that was begun. Never fails: what cannot be removed now is removed by ``clean``."""
        shutil.rmtree(self._path(tick, ".partial"), ignore_errors=True)

    def clean(self, after_tick: int | None = None) -> tuple[str, ...]:
        """Remove what a killed run left; call it once, before a run starts or goes on.

        Args:
            after_tick: If given, the run goes on from this checkpoint: later ones belong to a
                future that will be computed anew, and are removed too.

        Returns:
            Names of the folders that were removed or put back.

        Raises:
            CheckpointError: The folder is not writable.
        """
        touched = []
        with self._failing("cannot tidy the checkpoints", self.folder):
            for tick, suffix, path in self._entries():
                if suffix == ".replaced" and not self._path(tick).exists():
                    os.rename(path, self._path(tick))
                elif suffix:
                    shutil.rmtree(path)
                elif after_tick is None or tick <= after_tick:
                    continue
                else:
                    self._remove(path)
                touched.append(path.name)
        return tuple(touched)

    # -- reading ----------------------------------------------------------------------------------------------------

    def list(self) -> tuple[Path, ...]:
        """Finished checkpoints, oldest first, not yet proved."""
        return tuple(path for _, suffix, path in self._entries() if not suffix)

    def ticks(self) -> tuple[int, ...]:
        """Those of ``list``."""
        return tuple(tick for tick, suffix, _ in self._entries() if not suffix)

    def load(self, tick: int | None = None) -> Checkpoint:
        """The checkpoint of ``tick``, or the newest, proved.

        Raises:
            CheckpointError: There is none, or it is torn or altered; the message offers the last good one.
        """
        paths = self.list()
        if not paths:
            raise CheckpointError(f"{self.folder} holds no finished checkpoint: start the run anew")
        path = paths[-1] if tick is None else self._path(tick)
        if path not in paths:
            raise CheckpointError(f"{self.folder} holds no {path.name}; it holds {', '.join(p.name for p in paths)}")
        return self.verify(path)

    def verify(self, path: str | os.PathLike[str]) -> Checkpoint:
        """Prove that a checkpoint is byte for byte what was written.

        Raises:
            CheckpointError: A file is missing, torn, altered or not of the checkpoint. The message names the file and
                the last good checkpoint.
        """
        path = Path(path)
        try:
            return _prove(path)
        except (ValueError, OSError) as error:
            good = self._good_among(tuple(p for p in self.list() if p != path))
            if good is None:
                advice = "no other checkpoint of this run is good: start it anew, or restore the folder from a copy"
            else:
                advice = f"the last good one is {good.path.name}: to go on from it, remove {path} and resume again"
            if isinstance(error, OSError):  # which says nothing of what was written
                advice = f"resume again when its disk can be read. If it never can: {advice}"
            raise CheckpointError(f"checkpoint {path} is refused: {error}; {advice}") from error

    # -- within -----------------------------------------------------------------------------------------------------

    def _prove_written(
        self, name: str, folder: Path, written: Mapping[str, Sequence[FileRecord]]
    ) -> tuple[FileRecord, ...]:
        """Every file that was written, each once; all of them and their folders are on the disk."""
        wrong = why_not_whole(folder, written, patience_s=self.patience_s)
        damaged = bool(wrong)
        records = {record.path: record for files in written.values() for record in files}
        for path in files_below(folder):
            if _relative(folder, path) not in records:
                wrong.append(
                    f"{_relative(folder, path)} was written by no rank that says so: an executor's save must return what it writes "
                    f"beside its own folder"
                )
        if wrong:
            raise CheckpointError(
                f"cannot finish checkpoint {name}: {folder} does not hold what was written:\n"
                + "\n".join(f"  - {line}" for line in wrong)
                + f"\nFinished checkpoints are untouched ({self._names()}).",
                cause=f"{folder} does not hold what was written: " + "; ".join(wrong),
                mistake=not damaged,
            )
        for path in files_below(folder):
            sync_path(path)
        for parent, _, _ in os.walk(folder, topdown=False):
            sync_folder(Path(parent))
        return tuple(sorted(records.values(), key=lambda record: record.path))

    def _path(self, tick: int, suffix: str = "") -> Path:
        return self.folder / f"tick_{tick:06d}{suffix}"

    def _entries(self) -> tuple[tuple[int, str, Path], ...]:
        """(tick, suffix, path) of what is ours in the folder, in order of ticks; other files are left alone."""
        try:
            with os.scandir(self.folder) as entries:
                named = [(match, one) for one in entries if (match := _NAME.fullmatch(one.name))]
                found = [(int(match[1]), match[2] or "", Path(one.path)) for match, one in named if one.is_dir()]
        except (FileNotFoundError, NotADirectoryError):  # another error is no answer: a run would begin anew
            return ()
        return tuple(sorted(found))

    def _good_among(self, paths: tuple[Path, ...]) -> Checkpoint | None:
        for path in reversed(paths):
            with contextlib.suppress(ValueError, OSError):  # a bad one is passed over: the question is which is good
                return _prove(path)
        return None

    def _prune(self, newest: int) -> None:
        """Remove the oldest beyond ``keep``, never ``pinned``, ``newest`` (just proved) or what lies after it."""
        if self.config.keep == 0:
            return
        with self._failing("cannot remove an old checkpoint", self.folder):
            for _, suffix, path in self._entries():
                if suffix == ".deleted":  # of which something was still open
                    shutil.rmtree(path, ignore_errors=True)
            held = [path for tick, suffix, path in self._entries() if not suffix and tick <= newest]
            for path in held[: -self.config.keep]:
                if self.pinned is None or path != self._path(self.pinned):
                    self._remove(path)

    def _remove(self, path: Path) -> None:
        """Rename first: a half removed folder must not look like a checkpoint."""
        doomed = path.with_name(path.name + ".deleted")
        if doomed.exists():
            shutil.rmtree(doomed)
        os.rename(path, doomed)
        _remove_all(doomed)

    @contextlib.contextmanager
    def _failing(self, what: str, where: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise save_failed(what, where, error, self._names()) from error

    def _names(self) -> str:
        """Names of the finished checkpoints, for messages."""
        try:
            return ", ".join(path.name for path in self.list()) or "none"
        except OSError as error:
            return f"unreadable ({error.strerror})"


def _remove_all(folder: Path) -> None:
    """Remove a folder. On NFS a file that this machine has open, as a mirror has what it sends, stays under a name of the
    client's until it is closed, and so do its folders: that is no failure.

    Raises:
        OSError: Something else stays.
    """
    failed: list[OSError] = []
    for parent, folders, files in os.walk(folder, topdown=False):
        for path in (os.path.join(parent, name) for name in (*files, *folders)):
            try:
                os.rmdir(path) if os.path.isdir(path) and not os.path.islink(path) else os.unlink(path)
            except OSError as error:
                failed.append(error)
    if not failed:
        os.rmdir(folder)
    elif any(not path.name.startswith(".nfs") for path in files_below(folder)):
        raise failed[0]


@contextlib.contextmanager
def saving(folder: str | os.PathLike[str], what: str = "the state of an executor") -> Iterator[None]:
    """Put around the writing of a state, or of a model made of one: a disk's failure becomes a ``CheckpointError``
    that says what to do.

    Libraries report a full disk in errors of their own (safetensors, torch), so any error while no
    space is left counts.

    Raises:
        CheckpointError: The disk is full or not writable.
    """
    path = Path(folder)
    try:
        yield
    except OSError as error:
        raise save_failed(f"cannot save {what}", path, error) from error
    except CheckpointError:
        raise
    except Exception as error:
        if "No space left" in str(error) or _free_bytes(path) == 0:
            raise save_failed(f"cannot save {what}", path, error) from error
        raise


def save_failed(what: str, where: Path, error: BaseException, held: str = "") -> CheckpointError:
    """What failed, where, why, how much space there is, what to do.

    Args:
        held: Names of the finished checkpoints.
    """
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    free = _free_bytes(where)
    space = "" if free is None else f", {free / 1e6:.1f} MB free there"
    kept = f" Finished checkpoints are untouched ({held})." if held else " Finished checkpoints are untouched."
    cause = f"{where}: {reason}{space}"
    return CheckpointError(
        f"{what}: {cause}.{kept} Free some space or make the folder writable "
        f"(or set checkpoint.keep lower), then resume the run.",
        cause=cause,
    )


def _free_bytes(path: Path) -> int | None:
    """Bytes that this user may still write near ``path``; None if nothing can tell."""
    for folder in (path, *path.parents):
        with contextlib.suppress(OSError):
            return shutil.disk_usage(folder).free
    return None


def _prove(path: Path) -> Checkpoint:
    """Raises ValueError or OSError whose text names the file that is wrong."""
    if not path.is_dir():
        raise ValueError("there is no such folder")
    if not (path / MANIFEST).is_file():
        raise ValueError(f"{MANIFEST} is missing")
    try:
        manifest = Manifest.from_bytes(read_bytes(path / MANIFEST))
    except ValueError as error:
        raise ValueError(f"{MANIFEST} {error}") from error
    match = _NAME.fullmatch(path.name)
    if match and int(match[1]) != manifest.tick:
        raise ValueError(f"{MANIFEST} is of tick {manifest.tick}: the folder was renamed")
    present = {_relative(path, file) for file in files_below(path)} - {MANIFEST}
    for record in manifest.files:
        if record.path in present and not (path / record.path).is_file():  # reading a pipe would wait for its other end
            raise ValueError(f"{record.path} is no file")
        num_bytes = (path / record.path).stat().st_size if record.path in present else None
        if wrong := what_is_wrong(record, num_bytes, None):
            raise ValueError(wrong)
    extra = sorted(present - {record.path for record in manifest.files})
    if extra:
        raise ValueError(f"{extra[0]} was added: the manifest does not know it")
    for record in manifest.files:
        if wrong := what_is_wrong(record, *checksum_file(path / record.path)):
            raise ValueError(wrong)
    return Checkpoint(path=path, manifest=manifest)


def _relative(folder: Path, file: Path) -> str:
    return file.relative_to(folder).as_posix()


@dataclass(frozen=True)
class RunIdentity:
    """What tells one run's folder from every other."""

    path: Path
    device: int
    inode: int
    run_id: str
    """Empty in a folder that has none."""

    @classmethod
    def of(cls, run_dir: str | os.PathLike[str]) -> RunIdentity:
        """That of the folder which is there now.

        Raises:
            OSError: There is none.
        """
        path = Path(run_dir)
        found = os.stat(path)
        try:
            run_id = (path / RUN_ID_FILE).read_text(encoding="utf-8", errors="replace").strip()
        except FileNotFoundError:
            run_id = ""
        return cls(path=path, device=found.st_dev, inode=found.st_ino, run_id=run_id)

    def change(self) -> str:
        """What has become of the folder since, as the end of a sentence; empty if nothing, or if nothing can tell."""
        try:
            now = RunIdentity.of(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return "is not there any more"
        except OSError:  # out of reach is not gone: whoever writes waits for it, or says why it cannot
            return ""
        if now == self:
            return ""
        if (now.device, now.inode) == (self.device, self.inode) and not now.run_id:
            return "was emptied"
        return "is another folder now" if now.run_id in ("", self.run_id) else "holds another run now"

    def check(self) -> None:
        """Call it before each write.

        Raises:
            RunFolderLost: The folder is gone, or another one.
        """
        change = self.change()
        if change:
            raise RunFolderLost(f"the run's folder {self.path} {change}: nothing more is written")
