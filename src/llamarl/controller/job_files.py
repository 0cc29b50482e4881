"""The files of a job over several hosts: which of them share the run's folder, and what travels to and from the others.

open_job_files ─┬─ proof: does the host read and write the run's folder? ─▶ shared: nothing travels
                ├─ else a folder of its own ─▶ states and logs to it now, what its ranks write from it all along
                └─ models, data, code: the same bytes under the same path there, or sent ─▶ the plan of that host's ranks
"""

from __future__ import annotations

import contextlib
import functools
import socket
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from llamarl.checkpoint.shared_folder import ask, judge, withdraw
from llamarl.checkpoint.snapshot import MANIFEST, Manifest
from llamarl.checkpoint.storage import being_written
from llamarl.config import RunConfig, to_plain, validate
from llamarl.errors import LlamaRLError, TransferError
from llamarl.executors.base import ExecutorSpec
from llamarl.files.client import FileClient
from llamarl.files.content import Content, content_of, paths_in, provide, same_there, with_paths
from llamarl.files.host_folders import CHECKPOINTS, FarFolder, HostFolders, Line, records_of
from llamarl.observability.events import REPLAY_FILE
from llamarl.reading import read_bytes
from llamarl.runtime.config import Worker
from llamarl.runtime.hosts.connection import WorkerKey
from llamarl.runtime.hosts.silence import watch_over
from llamarl.runtime.hosts.wire import FILES
from llamarl.runtime.worker import RankReport, WorkerPlan
from llamarl.transports.run_key import KeyRefused, prove_as_client

__all__ = ["JobFiles", "client_of", "folder_answers", "open_job_files"]

_DIAL_S = 15.0
_STALL_S = 30.0
"""Longest wait for a byte while a file is under way: a disk may be slow where a network is not."""
_READ_BY_RANKS = (REPLAY_FILE, "verdicts")
"""In a run's folder, what ranks read that is no checkpoint: files, or folders of files."""
T = TypeVar("T")


@dataclass
class _Host:
    number: int
    client: FileClient
    run_id: str
    reports: Line
    sends: Line
    why_apart: str = ""
    """Why it does not share the run's folder; empty: it does."""
    handle: str = ""
    folder: Path = Path()
    """Of its own, once it has been opened."""
    paths: dict[str, str] = field(default_factory=dict)
    """A file or folder as the plan names it, and after that by its full path here -> its path there."""

    def open_run(self, client: FileClient | None = None) -> str:
        """The handle of its folder of the run; made by ``client``, or by its own, when it is first asked for."""
        if not self.handle:
            self.handle, self.folder = (client or self.client).open_run(self.run_id)
        return self.handle


class JobFiles:
    """What :func:`open_job_files` made. ``far`` is for ``RunCheckpoints``; the rest is called by one thread.

    Args:
        run_dir: The controller's.
        where: Executor -> the host of each rank, -1 for the controller's machine.
    """

    def __init__(self, run_dir: Path, hosts: Sequence[_Host], where: Mapping[str, Sequence[int]]) -> None:
        self._run_dir, self._where = run_dir, where
        self._paths: dict[str, list[str]] = {}
        """Executor -> what its plan names."""
        self._hosts = {host.number: host for host in hosts}
        apart = {
            h.number: FarFolder(h.client, h.open_run(), h.folder, reports=h.reports, sends=h.sends)
            for h in hosts
            if h.why_apart
        }
        self.far = HostFolders(run_dir, apart, where)

    def send_saved(self, load_from: Path | None) -> None:
        """Send to hosts with folders of their own what their ranks read: the state that the run goes on from, its logs.

        Raises:
            CheckpointError: A file is not as it was written, or a host cannot take it.
        """
        if not self.far.folders:
            return
        found = [path for name in _READ_BY_RANKS for path in _files_at(self._run_dir / name)]
        self.far.send(
            records_of(self._run_dir, [path.relative_to(self._run_dir).as_posix() for path in found]), self._run_dir
        )
        if load_from is not None:
            self.far.send_state(load_from, Manifest.from_bytes(read_bytes(load_from / MANIFEST)).files)

    def send_again(self, executor: str, load_from: Path | None, hosts: Collection[int]) -> None:
        """Have what an executor reads on the hosts where its ranks will be: content that its plan names, its saved state. Any thread.

        Args:
            load_from: None: its ranks need no saved state. Else ``hosts`` are those of its ranks in ``where``.

        Raises:
            CheckpointError: A file is not as it was written, or a host cannot take it.
            TransferError: A host cannot be reached, or has no room.
        """
        for number in sorted(set(hosts) & self._hosts.keys()):
            host = self._hosts[number]
            for path in self._paths.get(executor, ()):
                if path not in host.paths:
                    with host.sends.use() as client:
                        _provide(host, client, path, _content)
        if load_from is not None and self.far.folders:
            files = Manifest.from_bytes(read_bytes(load_from / MANIFEST)).files
            self.far.send_state_of(executor, load_from, files)

    def bring(self, executor: str, report: RankReport, host: int) -> None:
        """Bring what a rank on ``host`` has written into the run's folder, before its report counts; any thread. Of its saved states
        that of this very tick: after the last one nobody would write it again, should its host go.

        Raises:
            TransferError: It did not come.
        """
        self.far.bring(host, report.files)
        if (state := report.saved.get(report.tick)) is not None:
            self.far.bring(host, state, f"{CHECKPOINTS}/{being_written(report.tick)}")

    def lose(self, number: int) -> None:
        """A host is gone: nothing more is asked of it. Any thread."""
        self.far.lose(number)
        self._hurry(number)

    def send_content(self, executors: Sequence[ExecutorSpec]) -> None:
        """Have every model, data file and file of code that the plans name on the hosts whose ranks need it.

        Raises:
            TransferError: A host cannot take one, or it changed meanwhile.
        """
        specs = {spec.name: spec for spec in executors}
        named = self._paths = {name: paths_in(_plain(spec)) for name, spec in specs.items()}

        content = functools.cache(_content)

        def to_host(host: _Host) -> None:
            for path in dict.fromkeys(p for n, hosts in self._where.items() if host.number in hosts for p in named[n]):
                _provide(host, host.client, path, content)

        _on_all(list(self._hosts.values()), to_host)

    def adapt(self, plan: WorkerPlan, number: int) -> WorkerPlan:
        """A rank's plan with the paths of its host."""
        host = self._hosts.get(number)
        if host is None:
            return plan
        moved = {path: there for path, there in host.paths.items() if path != there}
        if moved:
            spec = replace(plan.spec, factory=with_paths(plan.spec.factory, moved))
            if isinstance(spec.config, RunConfig):
                spec = replace(spec, config=validate(with_paths(to_plain(spec.config), moved)))
            plan = replace(plan, spec=spec, paths={there: path for path, there in moved.items()})
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
        """The run has failed: a host that does not answer is not asked again."""
        for number in self._hosts:
            self._hurry(number)

    def _hurry(self, number: int) -> None:
        if (host := self._hosts.get(number)) is not None:
            for one in (host.client, host.sends, host.reports):
                one.hurry()

    def end(self) -> None:
        """Bring what is left, let the hosts forget the run, and hang up. What cannot be brought is told, with where it lies."""
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
                with contextlib.suppress(TransferError):  # it forgets by itself a day later
                    (host.client.forget if forget else host.client.leave)(host.handle)
            for one in (host.reports, host.sends, host.client):
                one.close()


def open_job_files(
    run_dir: Path,
    run_id: str,
    workers: Mapping[int, Worker],
    key: WorkerKey,
    where: Mapping[str, Sequence[int]],
    *,
    own_folders: bool = False,
) -> JobFiles:
    """Ask the hosts of a job whether they see the run's folder, and give those that do not one of their own.

    Args:
        workers: Host's number -> its worker, for the hosts that have ranks.
        own_folders: Give every host one of its own, whatever it sees.

    Raises:
        CheckpointError: The run's folder cannot be written.
        TransferError: A host cannot be reached, or has no room.
    """
    hosts = [_host(number, worker, key, run_id) for number, worker in workers.items()]
    question = ask(run_dir)

    def compare_folder(host: _Host) -> None:
        host.why_apart = 'hosts.run_folder = "own"'
        if not own_folders:
            host.why_apart = judge(question, host.client.host, host.client.share(question))
        if host.why_apart:
            host.open_run()

    try:
        _on_all(hosts, compare_folder)
    except BaseException:
        for host in hosts:
            host.client.close()
        raise
    finally:
        withdraw(question)
    return JobFiles(run_dir, hosts, where)


def _host(number: int, worker: Worker, key: WorkerKey, run_id: str) -> _Host:
    again = functools.partial(client_of, worker, key)
    return _Host(number, again(), run_id, Line(again), Line(again))


def folder_answers(folder: Path, workers: Sequence[Worker], key: WorkerKey) -> dict[str, str]:
    """Host -> why it does not share ``folder``; empty where it does. Nothing is left in the folder.

    Raises:
        CheckpointError: The folder cannot be written.
        TransferError: A host cannot be reached.
    """
    hosts = [_host(number, worker, key, "") for number, worker in enumerate(workers)]
    question = ask(folder)

    def compare_folder(host: _Host) -> None:
        host.why_apart = judge(question, host.client.host, host.client.share(question))

    try:
        _on_all(hosts, compare_folder)
    finally:
        withdraw(question)
        for host in hosts:
            host.client.close()
    return {host.client.host: host.why_apart for host in hosts}


def _content(path: str) -> Content:
    return content_of(Path(path).expanduser())


def _provide(host: _Host, client: FileClient, path: str, content: Callable[[str], Content]) -> None:
    """Have a file or folder that a plan names on a host."""
    place = Path(path).expanduser().absolute()
    if not same_there(client, place):
        place = provide(client, content(path), lambda: host.open_run(client))
    host.paths[path] = host.paths[str(Path(path).expanduser().resolve())] = str(place)


def client_of(worker: Worker, key: WorkerKey) -> FileClient:
    """For the files that a worker keeps; it is dialled when it is first asked."""
    return FileClient(worker.name, functools.partial(_dial, worker, key), stall_s=max(key.silence_s, _STALL_S))


def _dial(worker: Worker, key: WorkerKey) -> socket.socket:
    connection = socket.create_connection((worker.address, worker.port), timeout=min(_DIAL_S, key.silence_s))
    try:
        watch_over(connection, key.silence_s, full_is_silent=True)
        if key.tls is not None:  # peers are dialled by number, and known by who signed their certificates
            connection = key.tls.wrap_socket(connection)
        prove_as_client(connection, key.key, FILES, _DIAL_S)
    except KeyRefused as error:
        connection.close()
        raise TransferError(f"its worker takes no connection for files: {error}") from error
    except BaseException:
        connection.close()
        raise
    return connection


def _on_all(hosts: Sequence[_Host], work: Callable[[_Host], None]) -> None:
    """All at once, one thread each.

    Raises:
        TransferError: Naming every host that failed.
    """
    if not hosts:
        return
    with ThreadPoolExecutor(max_workers=min(32, len(hosts)), thread_name_prefix="host-files") as pool:
        doing = [pool.submit(work, host) for host in hosts]
    failed = [error for one in doing if (error := one.exception()) is not None]
    for error in failed:
        if not isinstance(error, TransferError):
            raise error
    if failed:
        raise TransferError("\n".join(str(error) for error in failed)) from failed[0]


def _plain(spec: ExecutorSpec) -> list[Any]:
    return [spec.factory, to_plain(spec.config) if isinstance(spec.config, RunConfig) else None]


def _files_at(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(file for file in path.iterdir() if file.is_file())
    return [path] if path.is_file() else []
