"""``llamarl worker``: lends this host to controllers that hold its key.

    connection ─▶ Door (TLS, key) ─▶ Job: one a connection, side by side
                                       START ─▶ HostedRank (guard + rank) ─▶ ENDED
                                       end of the connection ─▶ every rank of the job is killed; the daemon stays for the next
                                ─▶ serve_files: for files of jobs that share no folder with their controller

The daemon reads orders of its own (a few words, JSON) and hands on the rest: it unpickles nothing, imports neither torch nor
code of the user's, and runs on one thread.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import sys
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from llamarl.files.host_files import HostFiles, default_base
from llamarl.files.service import serve_files
from llamarl.plural import plural
from llamarl.runtime.child_process import Stores
from llamarl.runtime.children import ForkServer, forks_work
from llamarl.runtime.hosts.addresses import why_unreached
from llamarl.runtime.hosts.door import Door, listen
from llamarl.runtime.hosts.hosted_rank import HostedRank
from llamarl.runtime.hosts.inventory import take_inventory
from llamarl.runtime.hosts.silence import end_when_silent, watch_over
from llamarl.runtime.hosts.successors import Successors
from llamarl.runtime.hosts.wire import FILES, PURPOSE, Word, message, read_message, unpack
from llamarl.runtime.rank_environment import LOOPBACK
from llamarl.transports.network import TlsFiles

__all__ = ["Job", "serve_host"]

_KILL_S = 3.0
"""For guards to end their ranks; then the guards are killed, and their ranks with them."""
_GREETING_S = 10.0
_FILES_SILENCE_S = 60.0
_DIALS_AGAIN_S = 30.0
"""For a controller that is still there after its connection for files broke; then what is kept for its runs goes."""


async def serve_host(
    listener: socket.socket,
    key: bytes,
    *,
    tls: ssl.SSLContext | None = None,
    tls_files: TlsFiles | None = None,
    ports: tuple[int, int] = (0, 0),
    space: str = "",
    say: Callable[[str], None],
    until: asyncio.Event,
    files: HostFiles | None = None,
    forget: bool = False,
) -> None:
    """Lend this host to controllers until ``until`` is set; then no process of theirs is left here.

    Args:
        tls_files: Of this host, for its ranks.
        ports: That ranks may listen on; (0, 0): any.
        space: See ``take_inventory``.
        say: Takes a line for who looks at the daemon.
        files: What is kept here for jobs that share no folder with their controller; None: in the user's cache folder.
        forget: At the end keep nothing for runs: their controller ends with this daemon.
    """
    jobs: set[Job] = set()
    promised: set[int] = set()
    kept = files or HostFiles(default_base())
    successors = Successors(say)

    async def welcome(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        job = Job(reader, writer, ports=ports, space=space, tls_files=tls_files, say=say, promised=promised)
        jobs.add(job)
        try:
            await job.serve()
        finally:
            jobs.discard(job)

    async def welcome_files(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        watch_over(writer.get_extra_info("socket"), _FILES_SILENCE_S)
        used: set[str] = set()
        try:
            await serve_files(reader, writer, kept, used=used)
        except (OSError, EOFError) as error:  # the controller dials again if it is still there
            say(f"a connection for files broke: {error or type(error).__name__}")
            stands_by = kept.patience_s(used) is not None
            if not stands_by and not isinstance(error, EOFError | ConnectionResetError):
                kept.let_go(used)  # nobody knows what became of it
                return
        writer.close()
        hung_up_s = time.monotonic()
        patience_s = await asyncio.to_thread(kept.patience_s, used)
        if patience_s is not None:
            await asyncio.sleep(patience_s)
            for folder, how in await asyncio.to_thread(kept.take_over, used, since_s=hung_up_s):
                await successors.begin(folder, how.words)
            return
        await asyncio.sleep(_DIALS_AGAIN_S)
        await asyncio.to_thread(kept.forget_those_left, used, since_s=hung_up_s)

    keeping = asyncio.create_task(Door(key, tls, {PURPOSE: welcome, FILES: welcome_files}, say).keep(listener))
    await until.wait()
    keeping.cancel()
    listener.close()
    for job in jobs:
        job.hang_up()
    await asyncio.gather(*(job.end() for job in list(jobs)), successors.end())
    if forget:
        await asyncio.to_thread(kept.forget_those_left)


class Job:
    """The ranks of one controller on this host, for as long as its connection lasts.

    Args:
        promised: Ports of meeting places on this host, of all jobs: a rank listens there only once it has started.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        ports: tuple[int, int],
        space: str,
        tls_files: TlsFiles | None,
        say: Callable[[str], None],
        promised: set[int],
    ) -> None:
        self._promised, self._own_promises = promised, set[int]()
        self._reader, self._writer = reader, writer
        self._ports, self._space, self._tls_files, self._say = ports, space, tls_files, say
        self._ranks: dict[int, HostedRank] = {}
        self._servers: dict[frozenset[tuple[str, str]], tuple[ForkServer, frozenset[str]]] = {}
        """Environment of ranks -> who forks those that may be forks, and what it has imported."""
        self._earlier_servers: list[ForkServer] = []
        """Who have imported less; ranks of theirs may be at work."""
        self._starting: dict[int, asyncio.Task[None]] = {}
        self._early: dict[int, list[tuple[Word, bytes]]] = {}
        """What has come for ranks that are being started."""
        self._reaching: set[asyncio.Task[None]] = set()
        self._ended = False
        self._stores = Stores()
        self._peer = str(writer.get_extra_info("peername")[0])
        self._address = str(writer.get_extra_info("sockname")[0])
        self._interface = ""

    async def serve(self) -> None:
        """Obey until the controller is gone."""
        silence_s = 0.0
        watching: asyncio.Task[None] | None = None
        try:
            async with asyncio.timeout(_GREETING_S):
                word, _, data = await read_message(self._reader)
            if word != Word.HELLO:
                raise ValueError(f"expected a greeting, got {word.name}")
            silence_s = float(unpack(data)["silence_s"])
            watch_over(self._writer.get_extra_info("socket"), silence_s)
            watching = asyncio.create_task(end_when_silent(self._reader, self._writer, silence_s))
            inventory = await asyncio.to_thread(
                take_inventory, self._address, ports=self._ports, space=self._space, tls=self._tls_files
            )  # counting GPUs takes seconds
            self._interface = inventory.interface
            self._send(message(Word.HELLO, content=inventory.to_plain()))
            while True:
                self._obey(*await read_message(self._reader))
        except EOFError:
            why = "its connection has ended"
        except TimeoutError:
            why = f"it does not answer for {silence_s or _GREETING_S:g} s"
        except OSError as error:
            why = f"its connection broke: {error.strerror or error}"
        except (ValueError, KeyError, TypeError) as error:
            why = f"it does not keep to the protocol: {error}"
        finally:  # also where this daemon has failed: nobody else ends these ranks
            if watching is not None:
                watching.cancel()
            began = len(self._ranks)
            await self.end()
        if began:
            self._say(f"controller {self._peer}: {why}; {plural(began, 'process')} of it ended")

    def hang_up(self) -> None:
        """Before the end of this daemon: the controller is to hear of that, not of ranks that somebody has killed."""
        self._writer.close()

    async def end(self) -> None:
        """Kill every rank and all that they started; return when they are gone."""
        self._ended = True
        if self._starting:
            await asyncio.wait(self._starting.values(), timeout=_KILL_S)
        for rank in self._ranks.values():
            rank.kill(at_once=False)
            rank.wait_for_nobody()
        for at_once in (True, False):
            if over := [rank.over for rank in self._ranks.values() if not rank.over.done()]:
                await asyncio.wait(over, timeout=_KILL_S)
            for rank in self._ranks.values():
                if at_once and not rank.over.done():
                    rank.kill(at_once=True)
        for server in [*self._earlier_servers, *(server for server, _ in self._servers.values())]:
            server.kill()
        if self._starting:  # slower than that: with the end of its server each ends, or begins and is killed
            await asyncio.wait(self._starting.values(), timeout=_KILL_S)
        self._promised -= self._own_promises
        self._stores.close()
        self._writer.close()

    def _send(self, data: bytes) -> None:
        if not self._writer.is_closing():
            self._writer.write(data)

    def _obey(self, word: Word, number: int, data: bytes) -> None:
        rank = self._ranks.get(number)
        match word:
            case Word.BYTES | Word.KILL if number in self._starting:
                self._early[number].append((word, data))
            case Word.BYTES if rank is not None:
                rank.write(data)
            case Word.TAKEN if rank is not None:
                given = unpack(data)
                rank.taken(Word(given["word"]), int(given["bytes"]))
            case Word.KILL if rank is not None:
                rank.kill(at_once=bool(unpack(data)["at_once"]))
            case Word.BYTES | Word.TAKEN | Word.KILL:
                return  # of a rank that could not be started
            case Word.PING:
                self._send(message(Word.PONG, number, {"monotonic_s": time.monotonic()}))
            case Word.ASK:
                self._send(message(Word.STATE, number, {"stopped": rank is not None and rank.stopped()}))
            case Word.REACH:
                reaching = asyncio.create_task(self._reach(number, unpack(data)))
                self._reaching.add(reaching)  # the loop alone would let it be collected
                reaching.add_done_callback(self._reaching.discard)
            case Word.START:
                self._early[number] = []
                self._starting[number] = asyncio.create_task(self._start(number, unpack(data)))
            case Word.MEET:
                self._send(message(Word.PLACE, number, self._meeting_place(unpack(data))))
            case _:
                raise ValueError(f"{word.name} is not for a daemon")

    async def _reach(self, number: int, asked: Mapping[str, Any]) -> None:
        places = [(str(address), int(port)) for address, port in asked["places"]]
        self._send(message(Word.REACHED, number, {"why_not": await why_unreached(places, float(asked["within_s"]))}))

    async def _start(self, number: int, order: Mapping[str, Any]) -> None:
        environment = self._environment(order)
        try:
            server = self._server([str(name) for name in order["modules"]], environment)
            rank = await HostedRank.start(number, str(order["label"]), environment, server, self._send)
        except OSError as error:
            self._send(message(Word.STARTED, number, {"why_not": str(error)}))
            return
        finally:
            del self._starting[number]
            early = self._early.pop(number)
        if self._ended:  # nobody is there any more for whom it was to start
            rank.wait_for_nobody()
            rank.kill(at_once=True)
            await rank.over
            return
        self._ranks[number] = rank
        if len(self._ranks) == 1:
            self._say(f"controller {self._peer} begins a job here")
        self._send(message(Word.STARTED, number, {"pid": rank.pid}))
        for word, data in early:
            self._obey(word, number, data)

    def _server(self, modules: Collection[str], environment: Mapping[str, str]) -> ForkServer | None:
        """Who forks ranks with this environment, once it has imported these modules; None where they may not be forks."""
        if not modules or not forks_work():
            return None
        key, wanted = frozenset(environment.items()), frozenset(modules)
        server, imported = self._servers.get(key, (None, frozenset()))
        if server is None or not wanted <= imported:
            if server is not None:
                self._earlier_servers.append(server)
            server, imported = ForkServer(sorted(wanted | imported), environment), wanted | imported
            self._servers[key] = server, imported
        return server

    def _environment(self, order: Mapping[str, Any]) -> dict[str, str]:
        listens = LOOPBACK
        if order["apart"]:  # what the user of this host has set comes first
            listens = {name: os.environ.get(name, self._interface) for name in LOOPBACK}
        folders = [*order["folders"], *(path or os.getcwd() for path in sys.path)]
        return {
            **os.environ,
            **{str(name): str(value) for name, value in order["environment"].items()},
            **{name: value for name, value in listens.items() if value},
            "PYTHONPATH": os.pathsep.join(dict.fromkeys(folders)),
        }

    def _meeting_place(self, asked: Mapping[str, Any]) -> dict[str, str]:
        if not asked["apart"]:
            return {"place": self._stores.new(str(asked["name"]))}
        try:
            port = _meeting_port(self._address, self._ports, self._promised)
        except OSError as error:
            return {"why_not": f"no port of {self._ports[0]}-{self._ports[1]} is free on {self._address}: {error}"}
        self._promised.add(port)
        self._own_promises.add(port)
        host = f"[{self._address}]" if ":" in self._address else self._address
        return {"place": f"tcp://{host}:{port}"}


def _meeting_port(address: str, ports: tuple[int, int], promised: Collection[int]) -> int:
    """A free port on which nobody is to listen yet. From the upper end of a range: segment servers begin at the lower one.

    Raises:
        OSError: None is free.
    """
    trouble: OSError | None = None
    for port in range(ports[1], ports[0] - 1, -1):
        if port in promised:
            continue
        try:
            with listen(address, (port, port)) as tried:
                return int(tried.getsockname()[1])
        except OSError as error:
            trouble = error
    raise trouble or OSError("ranks are to meet on all of them")
