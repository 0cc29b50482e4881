"""The run folders of hosts that do not share the controller's: kept equal to it where it matters, and only there.

    start    the saved state of each rank, and what else ranks read ─▶ the host that it is on now
    tick     reported files ◀─ their host, each with the size and checksum that its rank has told
    saved    every rank's files of the checkpoint ◀─ their hosts; then removed there
    end      whatever else lies there (logs, verdicts, notes) ◀─ every host

The controller's folder is the run. A host's is scratch: nothing in it is needed once the run has ended.
"""

from __future__ import annotations

import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from llamarl.checkpoint.snapshot import FileRecord
from llamarl.checkpoint.written import writer_name
from llamarl.errors import CheckpointError, TransferError
from llamarl.files.file_client import FileClient
from llamarl.files.host_files import FarFile
from llamarl.files.safe_folder import SafeFolder

__all__ = ["FarFolder", "HostFolders", "files_for_ranks", "is_transient", "on_all_hosts", "where_to_put"]

CHECKPOINTS = "checkpoints"
_OURS = (CHECKPOINTS, ".run_id", ".incoming", ".lock")
"""In a run folder, not brought by a sweep."""
_TOLD_S = 3.0
"""After files could not be had of a host: how long to listen whether it is gone."""
OF_HOSTS = "hosts"
"""Below it, in ``RUN/hosts/NAME``, lies what a host wrote under a name that is taken in the controller's folder."""


@dataclass
class FarFolder:
    """One host's."""

    client: FileClient
    handle: str
    """By which the host knows it."""
    path: Path
    """There."""
    brought: dict[str, FarFile | None] = field(default_factory=dict)
    """Path there -> what it was when it was last brought; None: as its rank had told, and so for good."""
    places: dict[str, str] = field(default_factory=dict)
    """Path there -> path here, of what a sweep has brought."""
    gone: threading.Event = field(default_factory=threading.Event)
    """Set when the host is: nothing more comes from there."""
    told: dict[str, FileRecord] = field(default_factory=dict)
    """Path there -> what a rank has told of it, of files that came before its report counted."""


class HostFolders:
    """What ranks write on hosts that do not share the run's folder. ``fetch`` and ``sweep`` are one thread's.

    Args:
        run_dir: The controller's.
        folders: Host's number -> its folder, for hosts that do not share ``run_dir``.
        where: Executor -> the host's number of each of its ranks.
    """

    def __init__(self, run_dir: Path, folders: Mapping[int, FarFolder], where: Mapping[str, Sequence[int]]) -> None:
        self._run_dir, self.folders, self._where = run_dir, folders, where
        self._here = SafeFolder(run_dir)
        self._shared: dict[str, FileRecord] = {}
        """Path -> what a rank that shares ``run_dir`` has told of it in a report: wherever the rank
        is by now, that is here."""
        self._came: set[str] = set()
        """Paths of which a report has told. What another host has under such a name was written by
        an attempt that did not count."""
        shutil.rmtree(run_dir / ".incoming", ignore_errors=True)  # of a run that was killed

    def send_to(self, folder: FarFolder, files: Sequence[FileRecord], root: Path) -> None:
        """Put files of the run's folder into that of a host, before any rank there reads them.

        Args:
            files: Below ``root``.
            root: In the run's folder, or it.

        Raises:
            TransferError: A file is not what its record says, or the host cannot take it; names file and host.
        """
        below = root.relative_to(self._run_dir)
        for record in files:
            folder.client.send(root / record.path, _at(record, (below / record.path).as_posix()), folder.handle)
        for found in folder.client.list_files(folder.handle, skip=_OURS):
            folder.brought[found.path], folder.places[found.path] = found, found.path

    def send_state(self, checkpoint: Path, files: Sequence[FileRecord]) -> None:
        """Send each rank's saved state to whichever host it is on now.

        Args:
            files: Of the checkpoint's manifest.

        Raises:
            CheckpointError: As ``send``.
        """
        for executor in self._where:
            self.send_state_of(executor, checkpoint, files)

    def send_state_of(self, executor: str, checkpoint: Path, files: Sequence[FileRecord]) -> None:
        """Send one executor's saved state, which had been brought here, to the hosts where its
        ranks are now; any thread.

        Args:
            files: Of the checkpoint's manifest.

        Raises:
            CheckpointError: As ``send``.
        """
        below = checkpoint.relative_to(self._run_dir)
        num_ranks = {name: len(hosts) for name, hosts in self._where.items()}

        def to_host(number: int, folder: FarFolder) -> None:
            ranks = [(executor, rank) for rank, host in enumerate(self._where.get(executor, ())) if host == number]
            wanted = files_for_ranks(files, ranks, num_ranks)
            for record in wanted:
                there = _at(record, (below / record.path).as_posix())
                folder.client.send(checkpoint / record.path, there, folder.handle)

        self._on_all(to_host)

    def bring(self, host: int, files: Sequence[FileRecord], below: str = "") -> None:
        """Bring what a rank on a host has written into the run's folder before its report counts; any thread.

        Args:
            host: Its number.
            below: Folder in the run's that the records' paths are relative to.

        Raises:
            TransferError: As ``fetch``.
        """
        folder = self.folders.get(host)
        records = [_at(one, (Path(below) / one.path).as_posix()) for one in files]
        self._came |= {record.path for record in records}
        if folder is None:
            self._shared |= {record.path: record for record in records}
            return
        for record in records:
            folder.client.fetch(folder.handle, record.path, self._here, record)
            folder.brought[record.path], folder.told[record.path] = None, record

    def lose(self, number: int) -> None:
        """A host is gone: nothing of it is waited for. Any thread."""
        if (folder := self.folders.get(number)) is not None:
            folder.gone.set()

    def fetch(self, written: Mapping[str, Sequence[FileRecord]], below: Path) -> None:
        """Bring files into the run's folder, on its disk when this returns; those of ranks that
        share it are left alone. A checkpoint's folder is removed there.

        Args:
            written: Rank's name -> its files.
            below: The folder that the records' paths are relative to, as the controller names it.

        Raises:
            CheckpointError: A file is not there, is not as it was written, or the disk here is
                full; names file and host.
        """
        at = below.relative_to(self._run_dir)
        of_host: dict[int, list[FileRecord]] = {}
        host_of = {
            writer_name(name, rank): host for name, hosts in self._where.items() for rank, host in enumerate(hosts)
        }
        come = [self._shared, *(folder.told for folder in self.folders.values())]
        for writer, records in written.items():
            paths = [(at / one.path).as_posix() for one in records]
            came = [
                any([told.pop(path, None) == _at(one, path) for told in come])  # all of them forget it
                for one, path in zip(records, paths, strict=True)
            ]
            missing = [one for one, is_here in zip(records, came, strict=True) if not is_here]
            if (
                missing and writer in host_of
            ):  # else a rank that is no more: its files came with its reports, or its host shares the folder
                of_host.setdefault(host_of[writer], []).extend(missing)

        def from_host(number: int, folder: FarFolder) -> None:
            if folder.gone.is_set():
                if of_host.get(number):
                    raise TransferError(f"host {folder.client.host} is gone, and what it had not sent")
                return
            for record in of_host.get(number, ()):
                path = (at / record.path).as_posix()
                folder.client.fetch(folder.handle, path, self._here, _at(record, path))
                folder.brought[path] = None
            if at.parts[:1] == (CHECKPOINTS,):
                try:
                    folder.client.remove(folder.handle, at.as_posix())
                except TransferError:
                    if not folder.gone.wait(_TOLD_S):  # of a host that is gone nothing is needed any more
                        raise

        self._on_all(from_host)

    def sweep(self) -> None:
        """Bring whatever else lies in the run's folder on those hosts, but checkpoints, and is not
        here yet or has grown. Raises as ``fetch``."""

        def from_host(number: int, folder: FarFolder) -> None:
            try:
                if not folder.gone.is_set():
                    all_of(folder)
            except TransferError:
                if not folder.gone.wait(_TOLD_S):
                    raise

        def all_of(folder: FarFolder) -> None:
            for found in folder.client.list_files(folder.handle, skip=_OURS):
                known = found.path in folder.brought and folder.brought[found.path] in (None, found)
                if known or found.path in self._came or is_transient(found.path):
                    continue
                place = folder.places.setdefault(
                    found.path,
                    where_to_put(found.path, folder.client.host, taken=(self._run_dir / found.path).exists()),
                )
                try:
                    folder.client.fetch(folder.handle, found.path, self._here, None, name=place)
                except TransferError as error:
                    if not error.missing:  # removed or renamed since it was listed
                        raise
                    continue
                folder.brought[found.path] = found

        self._on_all(from_host)

    def close(self) -> None:
        """Remove what was on its way here and did not come."""
        shutil.rmtree(self._run_dir / ".incoming", ignore_errors=True)

    def left_at(self) -> str:
        """Where things still lie, in words."""
        return "; ".join(f"{folder.client.host}: {folder.path}" for folder in self.folders.values())

    def _on_all(self, work: Callable[[int, FarFolder], None]) -> None:
        try:
            on_all_hosts(self.folders, lambda number: work(number, self.folders[number]))
        except TransferError as error:
            lines = "\n".join(f"  - {line}" for line in str(error).splitlines())
            raise CheckpointError(f"files of the run in {self._run_dir} could not be moved:\n{lines}") from error


def on_all_hosts(numbers: Iterable[int], work: Callable[[int], None]) -> None:
    """Work with all hosts at once, one thread each.

    Raises:
        TransferError: Naming every host that failed.
    """
    with ThreadPoolExecutor(max_workers=32, thread_name_prefix="host-files") as pool:
        doing = [pool.submit(work, number) for number in list(numbers)]
    failed = [error for one in doing if (error := one.exception()) is not None]
    for error in failed:
        if not isinstance(error, TransferError):
            raise error
    if failed:
        raise TransferError("\n".join(map(str, failed))) from failed[0]


def files_for_ranks(
    files: Sequence[FileRecord], ranks: Sequence[tuple[str, int]], num_ranks: Mapping[str, int]
) -> list[FileRecord]:
    """Those files of a checkpoint that some ranks read: each rank's own, and what lies beside them
    for all of the executor. Where its ranks were another number then, those of all.

    Args:
        ranks: (executor, rank).
        num_ranks: Executor -> its ranks now.
    """
    executors = {executor for executor, _ in ranks}
    own = {f"{executor}/rank_{rank}" for executor, rank in ranks}
    saved = {tuple(record.path.split("/")[:2]) for record in files}
    then = Counter(executor for executor, folder in saved if folder.startswith("rank_"))
    others = {executor for executor in executors if then[executor] != num_ranks[executor]}
    return [
        record
        for record in files
        if (place := record.path.split("/"))[0] in executors
        and (not place[1].startswith("rank_") or place[0] in others or "/".join(place[:2]) in own)
    ]


def where_to_put(path: str, host: str, *, taken: bool) -> str:
    """Where a host's file goes in the controller's folder: under its own name, unless another machine's file has it."""
    return f"{OF_HOSTS}/{host}/{path}" if taken else path


def is_transient(path: str) -> bool:
    """Whether a path is of something that is being written and gets another name when it is whole."""
    return any(part.endswith(".partial") for part in path.split("/"))


def _at(record: FileRecord, path: str) -> FileRecord:
    return replace(record, path=path)
