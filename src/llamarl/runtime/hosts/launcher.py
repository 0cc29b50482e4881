"""Ranks on the nodes of a cluster as the controller's io thread sees them: links whose bytes go
through the agents of their nodes.

A death counts when the verdict is there (``Cluster.lose``). An agent's end is seen before anybody
knows whether its node is gone; who starts the next rank on that word alone starts it on a dead node.
Until then its ranks are neither dead nor alive.

Clocks of nodes are read here by pings, of which the quickest is the one to believe. They run apart
by some tens of microseconds a second, so that is measured again each minute::

    sent ──────▶ there (node's clock) ──────▶ received        ahead = there - (sent + received) / 2, wrong by at most half the way
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from llamarl.determinism import import_folders
from llamarl.executors.base import ExecutorSpec
from llamarl.runtime.children import Killed, cause_of_death
from llamarl.runtime.commands import Link
from llamarl.runtime.fork_server import shares_imports
from llamarl.runtime.hosts.cluster import Agent, Cluster, end_ranks
from llamarl.runtime.hosts.hosted_rank import Say, Word
from llamarl.runtime.output import OutputReader
from llamarl.runtime.worker import WorkerPlan

__all__ = ["HostLauncher", "HostLink", "imported_on", "seconds_ahead"]

_PINGS = 5
_EVERY_S = 60.0
_END_S = 6.0
_STREAMS = {Word.OUTPUT: "stdout", Word.ERRORS: "stderr"}


class NodeLost(ConnectionError):
    """The node is gone, or its agent is."""


class _Node:
    """The agent of one node, as the io thread speaks with it: one batch of orders and one question
    for news are always under way.

    Args:
        on_end: Takes the cause, in words, and whether the node is gone; once.
    """

    def __init__(self, cluster: Cluster, number: int, on_end: Callable[[str, bool], None]) -> None:
        self.name = cluster.nodes[number].name
        self.ahead_s = 0.0
        self.agent: Agent | None = None
        """Once it has been opened."""
        self.links: dict[int, HostLink] = {}
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._cluster, self._number, self._on_end = cluster, number, on_end
        self._orders: asyncio.Queue[Say] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._ending = False

    async def open(self) -> None:
        """Start the agent, or find it; measure its clock.

        Raises:
            NodeLost: It does not start, or is gone.
        """
        try:
            self.agent = await asyncio.to_thread(self._cluster.agent, self._number)
        except ConnectionError as error:
            gone, told = await self._is_gone(str(error))
            self.ended.set_result(told)
            self._on_end(told, gone)
            raise NodeLost(str(error)) from error
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._send())]
        await self._measure()
        self._tasks.append(asyncio.create_task(self._measure_again()))

    def send(self, word: Word, number: int, content: Any) -> None:
        """Say something about a rank; to a node that is gone nothing is said."""
        self._orders.put_nowait((word, number, content))

    async def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of the agent.

        Raises:
            NodeLost: The node is gone, or its agent is.
        """
        if self.ended.done():
            raise NodeLost(self.ended.result())
        try:
            return await self._ask(method, *arguments)
        except ConnectionError as error:
            raise NodeLost(await asyncio.shield(self.ended)) from error

    def _ask(self, method: str, *arguments: Any) -> asyncio.Future[Any]:
        assert self.agent is not None, "opened before it is asked"
        return asyncio.wrap_future(self.agent(method, *arguments))

    async def _receive(self) -> None:
        try:
            while True:
                for word, number, content in await self._ask("receive"):
                    self.links[number].take(word, content)
        except Exception as error:  # of a kind of the user's own anything: a rank nobody hears of would be waited for
            await self._end(error)

    async def _end(self, error: Exception) -> None:
        """Tell what the first of receiving and sending has met; the other ends with it."""
        if self._ending:
            return
        self._ending = True
        told = str(error) if isinstance(error, ConnectionError) else f"{type(error).__name__}: {error}"
        gone, told = await self._is_gone(told)
        what = (
            f"node {self.name} is gone" if gone else f"the agent on node {self.name} has ended, and its ranks with it"
        )
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        self.ended.set_result(f"{what} ({told})")
        self._on_end(self.ended.result(), gone)

    async def _is_gone(self, told: str) -> tuple[bool, str]:
        """The cluster's verdict, and what it was told of; a node of which it can say nothing counts as gone."""
        try:
            return await self._cluster.lose(self._number), told
        except Exception as error:
            return True, f"{told}; {type(self._cluster).__name__}.lose raised {type(error).__name__}: {error}"

    async def _send(self) -> None:
        try:
            while True:
                orders = [await self._orders.get()]
                while not self._orders.empty():
                    orders.append(self._orders.get_nowait())
                await self._ask("obey", orders)
        except Exception as error:
            await self._end(error)

    async def _measure(self) -> None:
        pings = []
        for _ in range(_PINGS):
            sent_s = time.monotonic()
            there_s = float(await self.ask("now_s"))
            pings.append((sent_s, there_s, time.monotonic()))
        self.ahead_s = seconds_ahead(pings)

    async def _measure_again(self) -> None:
        with contextlib.suppress(NodeLost):  # told where it is seen
            while True:
                await asyncio.sleep(_EVERY_S)
                await self._measure()


def seconds_ahead(pings: Sequence[tuple[float, float, float]]) -> float:
    """A host's ``time.monotonic`` less the controller's, from the quickest of ``pings``, at least one:
    when it was sent, the time there, when it was received."""
    sent_s, there_s, received_s = min(pings, key=lambda ping: ping[2] - ping[0])
    return there_s - (sent_s + received_s) / 2


class HostLink(Link):
    """The :class:`llamarl.runtime.commands.Link` to a rank that an agent holds."""

    def __init__(self, node: _Node, number: int, label: str, output: OutputReader) -> None:
        super().__init__(pid=0)
        self.host = node.name
        self.number = number
        self._node = node
        self._loop = asyncio.get_running_loop()
        self._reader = asyncio.StreamReader()
        self._reading = asyncio.create_task(self.read(self._reader))
        self._printing = {word: _Printer(self, word, output.pipe(label, stream)) for word, stream in _STREAMS.items()}

    async def start(self, order: dict[str, object]) -> None:
        """Have the process started.

        Raises:
            OSError: The node gives none, or is gone.
        """
        answer = await self._node.ask("start", self.number, order)
        if isinstance(answer, str):
            self.finish("it was never started", streams=True)
            raise OSError(f"node {self.host} starts no process: {answer}")
        if not self._greeted:
            self.pid = answer

    def here_s(self, there_s: float) -> float:
        return there_s - self._node.ahead_s

    async def stopped(self) -> bool:
        return bool(await self._node.ask("is_stopped", self.number))

    def kill(self, *, at_once: bool = False) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has closed: the agents have been told to end
            self._loop.call_soon_threadsafe(self._node.send, Word.KILL, self.number, at_once)

    def take(self, word: Word, content: Any) -> None:
        """What the agent says of this rank."""
        match word:
            case Word.BYTES:
                self._reader.feed_data(content)
            case Word.OUTPUT | Word.ERRORS:
                self._printing[word].add(content)
            case Word.ENDED:
                self.finish(cause_of_death(content), streams=False)

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
        self._node.send(Word.TAKEN, self.number, (word, nbytes))

    def _write(self, data: bytes) -> None:
        self._node.send(Word.BYTES, self.number, data)


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
    """What a fork server of this node imports before it forks a rank of ``spec``: what all ranks
    there need that may be its forks. Empty: this one may not be a fork."""
    if not shares_imports(spec):
        return []
    there = [one for one in specs if one.threads == spec.threads and host in where.get(one.name, ())]
    return sorted({one.factory.rpartition(":")[0] for one in (spec, *there) if shares_imports(one)})


class HostLauncher:
    """Implements :class:`llamarl.runtime.ranks.Launcher` on the nodes of a cluster.

    Args:
        where: Executor -> for each of its ranks, which node has it. Looked at whenever one is started.
        on_lost: Told of a node that is gone, on the io thread.
        specs: All executors that it will start, so that what several ranks of a node import is imported there once.
    """

    def __init__(
        self,
        cluster: Cluster,
        where: Mapping[str, Sequence[int]],
        on_lost: Callable[[int], None],
        specs: Sequence[ExecutorSpec],
    ) -> None:
        self._cluster, self._where, self._on_lost, self._specs = cluster, where, on_lost, specs
        self.lost: set[int] = set()
        """Nodes that are gone. They stay so, whatever becomes of them."""
        self._closing = False
        self._numbers = itertools.count(1)
        self._opening: dict[int, asyncio.Task[_Node]] = {}
        self._nodes: dict[int, _Node] = {}

    async def start(
        self, plans: Sequence[WorkerPlan], labels: Sequence[str], output: OutputReader
    ) -> tuple[list[HostLink], str]:
        spec = plans[0].spec
        on = self._where[spec.name]
        used = list(dict.fromkeys(on))
        nodes = dict(zip(used, await asyncio.gather(*map(self._node, used)), strict=True))
        apart = len(used) > 1
        rendezvous = ""
        if len(plans) > 1:
            rendezvous, why_not = await nodes[on[0]].ask("meeting_place", spec.name, apart)
            if why_not:
                raise OSError(f"node {nodes[on[0]].name}: the ranks of {spec.name!r} cannot meet there: {why_not}")
        links = []
        for number, label in zip(on, labels, strict=True):
            link = HostLink(nodes[number], next(self._numbers), label, output)
            nodes[number].links[link.number] = link
            links.append(link)
        order = {"folders": _own_folders(), "threads": spec.threads, "apart": apart}
        started = (
            link.start(
                {
                    **order,
                    "label": label,
                    "gpus": self._cluster.gpus(number),
                    "modules": imported_on(number, spec, self._specs, self._where),
                }
            )
            for link, label, number in zip(links, labels, on, strict=True)
        )
        try:
            # all are waited for: one that is still starting takes no order to end
            for error in await asyncio.gather(*started, return_exceptions=True):
                if error is not None:
                    raise error
        except BaseException:
            for link in links:
                link.kill(at_once=True)
            raise
        return links, rendezvous

    async def stop(self) -> None:
        await asyncio.gather(*(link.ended for node in self._nodes.values() for link in node.links.values()))

    def close(self) -> None:
        """Have the agents end all ranks; they stay, for the files that lie there."""
        self._closing = True
        end_ranks([node.agent for node in self._nodes.values() if node.agent is not None], _END_S)

    def _node(self, number: int) -> asyncio.Task[_Node]:
        """One for all executors; another when its agent has ended."""
        if (found := self._nodes.get(number)) is not None and found.ended.done() and number not in self.lost:
            self._opening.pop(number, None)
        if number not in self._opening:
            self._opening[number] = asyncio.create_task(self._open(number))
        return self._opening[number]

    async def _open(self, number: int) -> _Node:
        def on_end(cause: str, gone: bool) -> None:
            if gone and number not in self.lost and not self._closing:
                self.lost.add(number)
                self._on_lost(number)
            for link in node.links.values():
                link.finish(Killed(cause), streams=True)

        node = self._nodes[number] = _Node(self._cluster, number, on_end)
        await node.open()
        return node


def _own_folders() -> list[str]:
    """Folders on ``sys.path`` that are no part of this Python: a host looks in those first, then in its own."""
    python = {os.path.realpath(path) for path in (sys.prefix, sys.base_prefix, sys.exec_prefix)}
    paths = map(os.path.realpath, import_folders())
    return [path for path in paths if not any(path == one or path.startswith(one + os.sep) for one in python)]
