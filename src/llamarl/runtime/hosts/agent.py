"""What a job has on each node where it has ranks: forks them, carries their bytes, keeps their files.

    controller ── start, obey([BYTES | TAKEN | KILL ...]) ─▶ HostAgent ── fork server ─▶ guard ─▶ rank
               ◀─ receive() = [BYTES | OUTPUT | ENDED ...] ──
               ◀─▶ files(method, ...)                        HostFiles: folder of the run, models and data by content

A cluster starts it in a process of its own (``Cluster.agent``). Ranks are its children: with it
every rank ends, whatever ends it, as the kernel tells their guards (runtime/rank_process.py), and
these end all that ranks started.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from llamarl.determinism import LOOPBACK, environment, import_folders
from llamarl.errors import LlamaRLError, TransferError
from llamarl.files.host_files import HostFiles, default_base
from llamarl.runtime.children import Stores, raise_open_files
from llamarl.runtime.fork_server import ForkServer
from llamarl.runtime.hosts.hosted_rank import HostedRank, Say, Word
from llamarl.runtime.hosts.node import Node

__all__ = ["HostAgent"]

_KILL_S = 3.0
"""For guards to end their ranks; then the guards are killed, and their ranks with them."""


class HostAgent:
    """See the module. All methods run on one event loop, which is also the parent of the ranks.

    Args:
        node: That it is on.
    """

    def __init__(self, node: Node) -> None:
        raise_open_files()
        self._node = node
        self._ranks: dict[int, HostedRank] = {}
        self._servers: dict[tuple[frozenset[str], frozenset[tuple[str, str]]], ForkServer] = {}
        """What is imported, environment -> who forks ranks that may be forks."""
        self._said: list[Say] = []
        self._news = asyncio.Event()
        self._stores = Stores()
        self._promised: dict[int, str] = {}
        """Port of a meeting place -> executor: a rank listens there only once it has started."""
        self._files = HostFiles(default_base())

    async def now_s(self) -> float:
        """This node's ``time.monotonic``."""
        return time.monotonic()

    async def receive(self) -> list[Say]:
        """What ranks have said since it was last asked; waits until there is something."""
        while not self._said:
            self._news.clear()
            await self._news.wait()
        said, self._said = self._said, []
        return said

    async def obey(self, orders: Sequence[Say]) -> None:
        """Carry out what the controller says of ranks, in order. What is of a rank that could not
        be started is dropped."""
        for word, number, content in orders:
            if (rank := self._ranks.get(number)) is None:
                continue
            match word:
                case Word.BYTES:
                    rank.write(content)
                case Word.TAKEN:
                    rank.taken(*content)
                case Word.KILL:
                    rank.kill(at_once=content)

    async def start(self, number: int, order: Mapping[str, Any]) -> int | str:
        """Start a rank's process: its pid, or why there is none."""
        environment = self._environment(order)
        try:
            server = self._server(order["modules"], environment)
            rank = await HostedRank.start(number, order["label"], environment, server, self._say)
        except OSError as error:
            return str(error)
        self._ranks[number] = rank
        return rank.pid

    async def is_stopped(self, number: int) -> bool:
        """Whether a signal has stopped the process of a rank."""
        rank = self._ranks.get(number)
        return rank is not None and rank.stopped()

    async def meeting_place(self, name: str, apart: bool) -> tuple[str, str]:
        """Where ranks can meet, an ``init_method`` of ``torch.distributed``; or why they cannot.

        Args:
            apart: Some of them are on other nodes.
        """
        if not apart:
            return self._stores.new(name), ""
        address, ports = self._node.address, self._node.ports
        try:
            try:
                port = _meeting_port(address, ports, self._promised)
            except OSError:  # a range is used up in the end: where the same executor met before nobody will again
                self._promised = {port: who for port, who in self._promised.items() if who != name}
                port = _meeting_port(address, ports, self._promised)
        except OSError as error:
            return "", f"no port of {ports[0]}-{ports[1]} is free on {address}: {error}"
        self._promised[port] = name
        return f"tcp://{f'[{address}]' if ':' in address else address}:{port}", ""

    async def files(self, method: str, *arguments: Any) -> tuple[Any, str, bool]:
        """Call a method of :class:`HostFiles`, on a thread: its result, what went wrong, and
        whether that is a file that is missing."""
        try:
            return await asyncio.to_thread(getattr(self._files, method), *arguments), "", False
        except FileNotFoundError as error:
            return None, f"{error.filename} is not there", True
        except LlamaRLError as error:
            return None, str(error), isinstance(error, TransferError) and error.missing
        except OSError as error:
            return None, f"{error.filename or 'the disk'}: {error.strerror or error}", False

    async def end(self) -> None:
        """Kill every rank and all that they started; return when they are gone."""
        for rank in self._ranks.values():
            rank.kill(at_once=False)
            rank.wait_for_nobody()
        for at_once in (True, False):
            if over := [rank.over for rank in self._ranks.values() if not rank.over.done()]:
                await asyncio.wait(over, timeout=_KILL_S)
            for rank in self._ranks.values():
                if at_once and not rank.over.done():
                    rank.kill(at_once=True)
        for server in self._servers.values():
            server.kill()
        self._servers = {}
        self._stores.close()

    def _say(self, word: Word, number: int, content: Any) -> None:
        self._said.append((word, number, content))
        self._news.set()

    def _server(self, modules: Collection[str], environment: Mapping[str, str]) -> ForkServer | None:
        """Who forks ranks with this environment, once it has imported these modules; None where
        they may not be forks."""
        if not modules:
            return None
        key = frozenset(modules), frozenset(environment.items())
        if key not in self._servers:
            self._servers[key] = ForkServer(sorted(modules), environment)
        return self._servers[key]

    def _environment(self, order: Mapping[str, Any]) -> dict[str, str]:
        listens = LOOPBACK
        if order["apart"]:  # what the user of this node has set comes first
            own = self._node.interface
            # without "=" NCCL takes every interface whose name begins so: eth10 beside eth1
            listens = {"GLOO_SOCKET_IFNAME": own, "NCCL_SOCKET_IFNAME": own and f"={own}"}
            listens = {name: os.environ.get(name, value) for name, value in listens.items()}
        # a user's queue.py beside a task that the controller has imported must not hide Python's
        python = [
            path for path in import_folders() if path == os.path.dirname(os.__file__) or path.endswith("lib-dynload")
        ]
        folders = [*python, *order["folders"], *import_folders()]
        return {
            **os.environ,
            **environment(order["threads"]),  # which leaves what the user of this node has set
            **{name: value for name, value in listens.items() if value},
            "PYTHONPATH": os.pathsep.join(dict.fromkeys(folders)),
            # All ranks see all of the node's share, which cuda_ipc needs; llamarl numbers the devices itself.
            "CUDA_VISIBLE_DEVICES": ",".join(order["gpus"]),
        }


def _meeting_port(address: str, ports: tuple[int, int], promised: Collection[int]) -> int:
    """A free port on which nobody is to listen yet. From the upper end of a range: segment servers
    begin at the lower one.

    Raises:
        OSError: None is free.
    """
    trouble: OSError | None = None
    for port in range(ports[1], ports[0] - 1, -1):
        if port in promised:
            continue
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            with socket.socket(family, socket.SOCK_STREAM) as tried:
                tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                tried.bind((address, port))
                return int(tried.getsockname()[1])
        except OSError as error:
            trouble = error
    raise trouble or OSError("ranks are to meet on all of them")
