"""Ranks on other hosts as the controller's io thread sees them: links whose bytes go through the daemons of their hosts."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from llamarl.executors.base import ExecutorSpec
from llamarl.runtime.child_process import Killed, cause_of_death
from llamarl.runtime.children import shares_imports
from llamarl.runtime.config import Worker
from llamarl.runtime.determinism import environment
from llamarl.runtime.framed_link import FramedLink
from llamarl.runtime.hosts.connection import HostConnection, HostLost, WorkerKey
from llamarl.runtime.hosts.wire import CHUNK, Word, unpack
from llamarl.runtime.output import OutputReader
from llamarl.runtime.worker import WorkerPlan

__all__ = ["HostLauncher", "HostLink", "imported_on"]

_REACH_S = 5.0
_STREAMS = {Word.OUTPUT: "stdout", Word.ERRORS: "stderr"}


class HostLink(FramedLink):
    """Implements :class:`llamarl.runtime.ranks.Link` for a rank that a daemon holds."""

    def __init__(self, connection: HostConnection, label: str, output: OutputReader) -> None:
        super().__init__(pid=0)
        self.host = connection.worker.name
        self.number = connection.number()
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._reader = asyncio.StreamReader()
        self._reading = asyncio.create_task(self.read(self._reader))
        self._printing = {word: _Printer(self, word, output.pipe(label, stream)) for word, stream in _STREAMS.items()}

    async def start(self, order: dict[str, object]) -> None:
        """Have the process started.

        Raises:
            OSError: The host gives none, or is gone.
        """
        answer = unpack(await self._connection.ask(Word.START, self.number, order, Word.STARTED))
        if why_not := answer.get("why_not"):
            raise OSError(f"host {self.host} starts no process: {why_not}")
        if not self._greeted:
            self.pid = int(answer["pid"])

    def here_s(self, there_s: float) -> float:
        return self._connection.offset.here_s(there_s)

    async def stopped(self) -> bool:
        return bool(unpack(await self._connection.ask(Word.ASK, self.number, {}, Word.STATE))["stopped"])

    def kill(self, *, at_once: bool = False) -> None:
        how: dict[str, object] = {"at_once": at_once}
        try:
            self._loop.call_soon_threadsafe(self._connection.send, Word.KILL, self.number, how)
        except RuntimeError:  # the loop has closed, and the connection with it
            return

    def take(self, word: Word, data: bytes) -> None:
        """What the daemon says of this rank."""
        match word:
            case Word.BYTES:
                self._reader.feed_data(data)
            case Word.OUTPUT | Word.ERRORS:
                self._printing[word].add(data)
            case Word.ENDED:
                self.finish(cause_of_death(int(unpack(data)["returncode"])), streams=False)
            case Word.STATE:  # for which nobody waits any more
                return
            case _:
                raise ValueError(f"{word.name} is not about a rank")

    def finish(self, cause: str, *, streams: bool) -> None:
        """The process has ended, and everything that it said before has been taken.

        Args:
            streams: No more of its output will come either.
        """
        self._reader.feed_eof()
        self._reading.add_done_callback(lambda _: self._end(cause))  # replies that lie in the buffer come first
        if streams:
            for printer in self._printing.values():
                printer.add(b"")

    def taken(self, word: Word, nbytes: int) -> None:
        """So much of its output has been handed on."""
        self._connection.send(Word.TAKEN, self.number, {"word": int(word), "bytes": nbytes})

    def _write(self, data: bytes) -> None:
        for start in range(0, len(data), CHUNK):
            self._connection.send(Word.BYTES, self.number, data[start : start + CHUNK])


class _Printer:
    """Writes one stream of a rank into the pipe that the output reader reads, as fast as that does."""

    def __init__(self, link: HostLink, word: Word, fd: int) -> None:
        self._link, self._word, self._fd = link, word, fd
        self._waiting: asyncio.Queue[bytes] = asyncio.Queue()
        os.set_blocking(fd, False)
        self._task = asyncio.create_task(self._print())

    def add(self, data: bytes) -> None:
        self._waiting.put_nowait(data)

    async def _print(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while data := await self._waiting.get():
                rest = memoryview(data)
                while rest:
                    try:
                        rest = rest[os.write(self._fd, rest) :]
                    except BlockingIOError:
                        room = asyncio.Event()
                        loop.add_writer(self._fd, room.set)
                        try:
                            await room.wait()
                        finally:
                            loop.remove_writer(self._fd)
                self._link.taken(self._word, len(data))
        except OSError:  # nobody reads any more: the job is ending
            return
        finally:
            os.close(self._fd)


def imported_on(
    host: int, spec: ExecutorSpec, specs: Iterable[ExecutorSpec], where: Mapping[str, Sequence[int]]
) -> list[str]:
    """What a fork server of this host imports before it forks a rank of ``spec``: what all ranks there need that may be its forks.
    Empty: this one may not be a fork."""
    if not shares_imports(spec):
        return []
    there = [one for one in specs if one.threads == spec.threads and host in where.get(one.name, ())]
    return sorted({one.factory.rpartition(":")[0] for one in (spec, *there) if shares_imports(one)})


class HostLauncher:
    """Implements :class:`llamarl.runtime.ranks.Launcher` on hosts that run ``llamarl worker``.

    Args:
        workers: The hosts.
        where: Executor -> for each of its ranks, which of ``workers`` has it. Looked at whenever one is started.
        on_lost: Told of a host that is gone, on the io thread.
        spares: Whether hosts without ranks are watched over too, as they may get some.
        specs: All executors that it will start, so that what several ranks of a host import is imported there once.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        where: Mapping[str, Sequence[int]],
        key: WorkerKey,
        on_lost: Callable[[int], None] = lambda host: None,
        *,
        spares: bool = False,
        specs: Sequence[ExecutorSpec] = (),
    ) -> None:
        self._workers, self._where, self._key, self._on_lost = workers, where, key, on_lost
        self.lost: set[int] = set()
        """Hosts that are gone. They stay so, whatever becomes of them."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing = False
        self._spares, self._specs = spares, specs
        self._opening: dict[int, asyncio.Task[HostConnection]] = {}
        self._connections: list[HostConnection] = []
        self._links: dict[int, dict[int, HostLink]] = {}
        """Host -> number -> link."""

    async def start(
        self, plans: Sequence[WorkerPlan], labels: Sequence[str], output: OutputReader
    ) -> tuple[list[HostLink], str]:
        self._loop = asyncio.get_running_loop()
        name = plans[0].spec.name
        hosts = self._where[name]
        for host in range(len(self._workers)) if self._spares else ():
            self._connection(host)
        opened = await asyncio.gather(*(self._connection(host) for host in dict.fromkeys(hosts)))
        connections = dict(zip(dict.fromkeys(hosts), opened, strict=True))
        apart = len(connections) > 1
        rendezvous = ""
        if len(plans) > 1:
            rendezvous = await self._meeting_place(connections[hosts[0]], name, apart=apart)
        links = []
        for host, label in zip(hosts, labels, strict=True):
            link = HostLink(connections[host], label, output)
            self._links[host][link.number] = link
            links.append(link)
        spec = plans[0].spec
        order = {
            "folders": _own_folders(),
            "environment": dict(environment(spec.threads)),
            "apart": apart,
        }
        started = (
            link.start({**order, "label": label, "modules": imported_on(host, spec, self._specs, self._where)})
            for link, label, host in zip(links, labels, hosts, strict=True)
        )
        try:
            await asyncio.gather(*started)
        except BaseException:
            for link in links:
                link.kill(at_once=True)
            raise
        return links, rendezvous

    async def stop(self) -> None:
        await asyncio.gather(*(link.ended for links in self._links.values() for link in links.values()))

    def close(self) -> None:
        self._closing = True
        for connection in self._connections:
            connection.close()

    def why_unreached(self, hosts: Collection[int], places: Sequence[tuple[str, int]]) -> str:
        """Which of these hosts does not reach which places, in words; empty: all do. Any thread but the io thread; takes some
        seconds at most. Nothing is known before the first rank was started.

        Args:
            places: Addresses and ports at which something listens.
        """
        if self._loop is None or not places:
            return ""

        async def ask(host: int) -> str:
            name = self._workers[host].name
            try:
                async with asyncio.timeout(2 * _REACH_S):
                    connection = await asyncio.shield(self._connection(host))
                    asked = {"places": [list(place) for place in places], "within_s": _REACH_S}
                    answer = unpack(await connection.ask(Word.REACH, connection.number(), asked, Word.REACHED))
            except TimeoutError:
                return f"host {name} does not answer within {2 * _REACH_S:g} s"
            except HostLost as error:
                return str(error)
            return f"host {name} does not reach others: {answer['why_not']}" if answer["why_not"] else ""

        async def everyone() -> list[str]:
            return await asyncio.gather(*map(ask, sorted(hosts)))

        asking = asyncio.run_coroutine_threadsafe(everyone(), self._loop)
        try:
            return "; ".join(filter(None, asking.result(3 * _REACH_S)))
        except TimeoutError:
            return f"hosts were not heard of within {3 * _REACH_S:g} s"

    def offsets(self) -> dict[str, tuple[float, float]]:
        """Host -> how far its clock is ahead of the controller's, and by how much that may be wrong; seconds."""
        return {one.worker.name: (one.offset.ahead_s, one.offset.within_s) for one in self._connections}

    def _connection(self, host: int) -> asyncio.Task[HostConnection]:
        """One for all executors."""
        if host not in self._opening:
            task = self._opening[host] = asyncio.create_task(self._open(host))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # of a spare nobody may ask
        return self._opening[host]

    async def _open(self, host: int) -> HostConnection:
        links = self._links[host] = {}

        def on_message(word: Word, number: int, data: bytes) -> None:
            links[number].take(word, data)

        def on_end(cause: str) -> None:
            self._lose(host)
            for link in links.values():
                link.finish(Killed(cause), streams=True)

        connection = HostConnection(self._workers[host], self._key, on_message, on_end)
        self._connections.append(connection)
        try:
            await connection.open()
            await connection.keep_time()
        except HostLost:
            self._lose(host)
            raise
        return connection

    def _lose(self, host: int) -> None:
        if host not in self.lost and not self._closing:
            self.lost.add(host)
            self._on_lost(host)

    async def _meeting_place(self, connection: HostConnection, name: str, *, apart: bool) -> str:
        asked = {"name": name, "apart": apart}
        answer = unpack(await connection.ask(Word.MEET, connection.number(), asked, Word.PLACE))
        if why_not := answer.get("why_not"):
            raise HostLost(f"host {connection.worker.name}: the ranks of {name!r} cannot meet there: {why_not}")
        return str(answer["place"])


def _own_folders() -> list[str]:
    """Folders on ``sys.path`` that are no part of this Python: a host looks in those first, then in its own."""
    python = {os.path.realpath(path) for path in (sys.prefix, sys.base_prefix, sys.exec_prefix)}
    paths = (os.path.realpath(path or os.getcwd()) for path in sys.path)
    return [path for path in paths if not any(path == one or path.startswith(one + os.sep) for one in python)]
