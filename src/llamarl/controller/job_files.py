"""The files of a job over several hosts: which of them share the run's folder, and what travels to and from the others.

JobFiles ─┬─ proof: does the host read and write the run's folder? ─▶ shared: nothing travels
          ├─ else a folder of its own ─▶ states and logs to it now, what its ranks write from it all along
          └─ models, data, code: the same bytes under the same path there, or sent ─▶ the plan of that host's ranks

A host that gets its first rank while the job runs, as it takes the place of another, is opened then.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamarl.checkpoint.shared_folder import FolderQuestion, answer, ask, judge, withdraw
from llamarl.checkpoint.snapshot import MANIFEST, FileRecord, Manifest
from llamarl.checkpoint.storage import being_written
from llamarl.config import RunConfig, to_plain, validate
from llamarl.errors import LlamaRLError, TransferError
from llamarl.executors.base import ExecutorSpec
from llamarl.files.content import Content, content_of, paths_in, provide, same_there, with_paths
from llamarl.files.file_client import FileClient
from llamarl.files.host_folders import CHECKPOINTS, FarFolder, HostFolders, on_all_hosts
from llamarl.observability.events import REPLAY_FILE
from llamarl.reading import read_bytes
from llamarl.runtime.worker import RankReport, WorkerPlan

if TYPE_CHECKING:
    from llamarl.runtime.hosts.cluster import Cluster

__all__ = ["JobFiles", "folder_answers"]

_STALL_S = 60.0
"""Longest wait for one answer: a disk may be slow where a network is not."""
_READ_BY_RANKS = (REPLAY_FILE, "verdicts")
"""In a run's folder, what ranks read that is no checkpoint: files, or folders of files."""


@dataclass
class _Host:
    number: int
    client: FileClient
    run_id: str
    why_apart: str
    """Why it does not share the run's folder; empty: it does."""
    handle: str = ""
    folder: Path = Path()
    """Of its own, once it has been opened."""
    paths: dict[str, str] = field(default_factory=dict)
    """A file or folder as the plan names it, and after that by its full path here -> its path there."""

    def open_run(self) -> str:
        """The handle of its folder of the run; made when it is first asked for."""
        if not self.handle:
            self.handle, self.folder = self.client.open_run(self.run_id)
        return self.handle


class JobFiles:
    """Asks the hosts of a job whether they see the run's folder, and gives those that do not one of
    their own. ``far`` is for ``RunCheckpoints``; the rest is called by one thread, if it does not say
    otherwise.

    Args:
        run_dir: The controller's.
        where: Executor -> the host of each rank.
        own_folders: Give every host one of its own, whatever it sees.

    Raises:
        CheckpointError: The run's folder cannot be written.
        TransferError: A host cannot be reached, or has no room.
    """

    def __init__(
        self, run_dir: Path, run_id: str, cluster: Cluster, where: Mapping[str, Sequence[int]], *, own_folders: bool
    ) -> None:
        self._run_dir, self._run_id, self._cluster, self._where = run_dir, run_id, cluster, where
        self._own_folders = own_folders
        self._paths: dict[str, list[str]] = {}
        """Executor -> what its plan names."""
        self._hosts: dict[int, _Host] = {}
        self._opening = threading.Lock()
        self._folders: dict[int, FarFolder] = {}
        self.far = HostFolders(run_dir, self._folders, where)
        self.open({host for ranks in where.values() for host in ranks})

    def open(self, numbers: Collection[int]) -> None:
        """Ask hosts that were not asked yet whether they see the run's folder; give those that do
        not one of their own. Any thread.

        Raises:
            CheckpointError: The run's folder cannot be written.
            TransferError: A host cannot be reached, or has no room.
        """
        with self._opening:
            new = [number for number in numbers if number not in self._hosts]
            if not new:
                return
            question = None if self._own_folders else ask(self._run_dir)
            try:
                on_all_hosts(new, functools.partial(self._open_one, question))
            finally:
                if question is not None:
                    withdraw(question)

    def _open_one(self, question: FolderQuestion | None, number: int) -> None:
        name = self._cluster.nodes[number].name
        why_apart = _why_apart(self._cluster, number, question) if question is not None else 'hosts.run_folder = "own"'
        try:
            agent = self._cluster.agent(number)
        except ConnectionError as error:
            raise TransferError(str(error)) from error
        client = FileClient(name, functools.partial(agent, "files"), stall_s=_STALL_S)
        host = _Host(number, client, self._run_id, why_apart)
        if why_apart:
            handle = host.open_run()
            folder = FarFolder(host.client, handle, host.folder)
            found = [path for name in _READ_BY_RANKS for path in _files_at(self._run_dir / name)]
            read = [FileRecord.of(path.relative_to(self._run_dir).as_posix(), path) for path in found]
            self.far.send_to(folder, read, self._run_dir)
            self._folders[number] = folder
        self._hosts[number] = host

    def send_saved(self, load_from: Path | None) -> None:
        """Send to hosts with folders of their own the state that the run goes on from.

        Raises:
            CheckpointError: A file is not as it was written, or a host cannot take it.
        """
        if load_from is not None and self._folders:
            self.far.send_state(load_from, Manifest.from_bytes(read_bytes(load_from / MANIFEST)).files)

    def send_to_new_hosts(self, executor: str, load_from: Path | None, hosts: Collection[int]) -> None:
        """Have what an executor reads on the hosts where its ranks will be: content that its plan
        names, its saved state. Any thread.

        Args:
            load_from: None: its ranks need no saved state. Else ``hosts`` are those of its ranks in ``where``.

        Raises:
            CheckpointError: A file is not as it was written, or a host cannot take it.
            TransferError: A host cannot be reached, or has no room.
        """
        self.open(set(hosts))
        for number in sorted(set(hosts)):
            host = self._hosts[number]
            for path in self._paths.get(executor, ()):
                if path not in host.paths:
                    _provide(host, path, _content)
        if load_from is not None and self._folders:
            files = Manifest.from_bytes(read_bytes(load_from / MANIFEST)).files
            self.far.send_state_of(executor, load_from, files)

    def bring(self, executor: str, report: RankReport, host: int) -> None:
        """Bring what a rank on ``host`` has written into the run's folder, before its report
        counts; any thread. Of its saved states that of this very tick: after the last one nobody
        would write it again, should its host go.

        Raises:
            TransferError: It did not come.
        """
        self.far.bring(host, report.files)
        if (state := report.saved.get(report.tick)) is not None:
            self.far.bring(host, state, f"{CHECKPOINTS}/{being_written(report.tick)}")

    def lose(self, number: int) -> None:
        """A host's agent is gone: nothing more is asked of it; if the host gets ranks again, it is
        opened anew. Any thread."""
        self.far.lose(number)
        if (host := self._hosts.pop(number, None)) is not None:
            host.client.hurry()

    def send_content(self, executors: Sequence[ExecutorSpec]) -> None:
        """Have every model, data file and file of code that the plans name on the hosts whose ranks need it.

        Raises:
            TransferError: A host cannot take one, or it changed meanwhile.
        """
        named = self._paths = {spec.name: paths_in(_plain(spec)) for spec in executors}
        content = functools.cache(_content)

        def to_host(number: int) -> None:
            for path in dict.fromkeys(p for n, hosts in self._where.items() if number in hosts for p in named[n]):
                _provide(self._hosts[number], path, content)

        on_all_hosts(self._hosts, to_host)

    def adapt(self, plan: WorkerPlan, number: int) -> WorkerPlan:
        """A rank's plan with the paths of its host."""
        host = self._hosts.get(number)
        if host is None:
            return plan
        moved = {path: there for path, there in host.paths.items() if path != there}
        if moved:
            own = {name: with_paths(getattr(plan.spec, name), moved) for name in ("factory", "options")}
            spec = replace(plan.spec, **own)
            if isinstance(spec.config, RunConfig):
                spec = replace(spec, config=validate(with_paths(to_plain(spec.config), moved)))
            channels = tuple(replace(one, transport=with_paths(one.transport, moved)) for one in plan.channels)
            plan = replace(plan, spec=spec, channels=channels)
        if host.why_apart:
            plan = replace(plan, run_dir=host.folder, controller_dir=self._run_dir)
        return plan

    def summary(self) -> str:
        """Which hosts share the run's folder, for people."""
        shared = [host.client.host for host in self._hosts.values() if not host.why_apart]
        lines = [f"shared with {', '.join(shared)}"] if shared else []
        lines += [f"not with {h.client.host}: {h.why_apart}" for h in self._hosts.values() if h.why_apart]
        return "; ".join(lines)

    def hurry(self) -> None:
        """The run has failed: a host that does not answer is waited for only a few seconds."""
        for host in self._hosts.values():
            host.client.hurry()

    def end(self) -> None:
        """Bring what is left, let the hosts forget the run, and hang up. What cannot be brought is
        told, with where it lies."""
        try:
            self.far.sweep()
        except LlamaRLError as error:
            print(
                f"llamarl: {error}\nWhat these hosts had not sent lies there still: {self.far.left_at()}",
                file=sys.stderr,
            )
            self._close(forget=False)
        else:
            self._close(forget=True)
        self.far.close()

    def _close(self, *, forget: bool) -> None:
        for host in self._hosts.values():
            if host.handle:
                with contextlib.suppress(TransferError):  # it forgets by itself, with its agent
                    (host.client.forget if forget else host.client.leave)(host.handle)


def folder_answers(folder: Path, cluster: Cluster, numbers: Sequence[int]) -> dict[str, str]:
    """Host -> why it does not share ``folder``; empty where it does. Nothing is left in the folder.

    Raises:
        CheckpointError: The folder cannot be written.
        TransferError: A host cannot be reached.
    """
    question = ask(folder)
    try:
        return {cluster.nodes[number].name: _why_apart(cluster, number, question) for number in numbers}
    finally:
        withdraw(question)


def _why_apart(cluster: Cluster, number: int, question: FolderQuestion) -> str:
    """Why a host does not share the folder of a question; empty: it does."""
    name = cluster.nodes[number].name
    return judge(question, name, cluster.call(number, _STALL_S, answer, question, name))


def _content(path: str) -> Content:
    return content_of(Path(path).expanduser())


def _provide(host: _Host, path: str, content: Callable[[str], Content]) -> None:
    """Have a file or folder that a plan names on a host."""
    place = Path(path).expanduser().absolute()
    if not same_there(host.client, place):
        place = provide(host.client, content(path), host.open_run)
    host.paths[path] = host.paths[str(Path(path).expanduser().resolve())] = str(place)


def _plain(spec: ExecutorSpec) -> list[Any]:
    return [spec.factory, to_plain(spec.config) if isinstance(spec.config, RunConfig) else None]


def _files_at(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(file for file in path.iterdir() if file.is_file())
    return [path] if path.is_file() else []
