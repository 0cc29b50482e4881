"""The controller's connection to the daemon of one host: dialled, proved, read; its end is the end of every rank there.

Lives on one asyncio loop: that of the runtime's io thread for a job, one of its own for a question (:func:`ask`).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from llamarl.errors import ConfigError
from llamarl.runtime.config import Worker
from llamarl.runtime.hosts.clock import EVERY_S, PINGS, Offset, Ping, best_offset
from llamarl.runtime.hosts.door import prove
from llamarl.runtime.hosts.inventory import Inventory
from llamarl.runtime.hosts.silence import end_when_silent, watch_over
from llamarl.runtime.hosts.wire import Word, message, read_message, unpack
from llamarl.transports.run_key import KeyRefused

__all__ = ["Answer", "HostConnection", "HostLost", "HostRefuses", "WorkerKey", "ask", "ask_each"]

_DIAL_S = 15.0
_INVENTORY_S = 150.0
"""Counting GPUs imports torch there, which a cold disk may make slow."""


class HostLost(ConnectionError):
    """The host is gone, or does not answer."""


class HostRefuses(HostLost):
    """The host is there, and takes no orders by this key or certificate."""


@dataclass(frozen=True)
class WorkerKey:
    """By what a controller may use daemons."""

    key: bytes = field(repr=False)
    tls: ssl.SSLContext | None = None
    silence_s: float = 8.0
    """A host that gives no sign of itself for so long is gone."""


class HostConnection:
    """See the module.

    Args:
        on_message: Takes the word, the rank's number and the bytes of whatever is about a rank.
        on_end: Takes the cause, in words, once.
    """

    def __init__(
        self,
        worker: Worker,
        key: WorkerKey,
        on_message: Callable[[Word, int, bytes], None] = lambda *_: None,
        on_end: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.worker = worker
        self.offset = Offset()
        self.ended = ""
        """Why there is no connection any more."""
        self._key = key
        self._on_message, self._on_end = on_message, on_end
        self._asked: dict[tuple[Word, int], asyncio.Future[bytes]] = {}
        self._numbers = itertools.count(1)
        self._socket: socket.socket | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self) -> Inventory:
        """Dial; returns what the host is made of.

        Raises:
            HostLost: Nobody answers, or in time, or not one who holds the key. The message names the host.
        """
        name, address = self.worker.name, self.worker.address
        at = f"[{address}]:{self.worker.port}" if ":" in address else f"{address}:{self.worker.port}"
        limit_s = _DIAL_S
        try:
            async with asyncio.timeout(limit_s):
                connection = await _connect(self.worker.address, self.worker.port)
                self._socket = connection
                watch_over(connection, self._key.silence_s)
                reader, self._writer = await prove(connection, self._key.key, self._key.tls)
            self._writer.write(message(Word.HELLO, content={"silence_s": self._key.silence_s}))
            limit_s = _INVENTORY_S
            async with asyncio.timeout(limit_s):
                word, _, data = await read_message(reader)
            if word != Word.HELLO:
                raise ValueError(f"expected its inventory, got {word.name}")
            self.inventory = Inventory.from_plain(unpack(data))
        except KeyRefused as error:
            self.close()
            raise HostRefuses(f"host {name}: the worker at {at} does not take this key: {error}") from error
        except ssl.SSLError as error:
            self.close()
            raise HostRefuses(
                f"host {name}: the worker at {at} and this controller do not agree on TLS: {error}"
            ) from error
        except TimeoutError as error:
            self.close()
            raise HostLost(f"host {name}: nothing answers at {at} within {limit_s:g} s") from error
        except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
            self.close()
            raise HostLost(f"host {name}: no worker at {at}: {_words(error)}") from error
        self.here = str(self._writer.get_extra_info("sockname")[0])
        """Numeric address of this end."""
        watching = end_when_silent(reader, self._writer, self._key.silence_s)
        self._tasks = [asyncio.create_task(self._read(reader)), asyncio.create_task(watching)]
        return self.inventory

    async def keep_time(self) -> None:
        """Measure the offset of the host's clock now, and again each minute."""
        await self._measure()
        self._tasks.append(asyncio.create_task(self._measure_again()))

    def send(self, word: Word, number: int, content: bytes | dict[str, object] = b"") -> None:
        """Say something about a rank. On the loop; to a host that is gone nothing is said."""
        if not self.ended and not self._writer.is_closing():
            self._writer.write(message(word, number, content))

    async def ask(self, word: Word, number: int, content: dict[str, object], answer: Word) -> bytes:
        """Say something and wait for the answer about the same number.

        Raises:
            HostLost: The host is gone.
        """
        if self.ended:
            raise HostLost(self.ended)
        waiting: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._asked[answer, number] = waiting
        self.send(word, number, content)
        try:
            return await waiting
        finally:
            del self._asked[answer, number]

    def number(self) -> int:
        """One that was not given before on this connection."""
        return next(self._numbers)

    def close(self) -> None:
        """Hang up, from any thread: the daemon then ends what runs there for us."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                word, number, data = await read_message(reader)
                waiting = self._asked.get((word, number))
                if waiting is None:
                    self._on_message(word, number, data)
                elif not waiting.done():
                    waiting.set_result(data)
        except (EOFError, ConnectionResetError, BrokenPipeError):
            self.ended = f"the worker on host {self.worker.name} has ended, or its host"
        except OSError as error:  # keep-alives without an answer; that the way is gone, after as long
            self.ended = f"host {self.worker.name} does not answer: no sign of it for {self._key.silence_s:g} s ({_words(error)})"
        except ValueError as error:
            self.ended = f"the worker on host {self.worker.name} does not keep to the protocol: {error}"
        for task in self._tasks[1:]:
            task.cancel()
        self._writer.close()
        for waiting in self._asked.values():
            if not waiting.done():
                waiting.set_exception(HostLost(self.ended))
        self._on_end(self.ended)

    async def _measure(self) -> None:
        pings = []
        for _ in range(PINGS):
            sent_s = time.monotonic()
            there = unpack(await self.ask(Word.PING, self.number(), {}, Word.PONG))
            pings.append(Ping(sent_s, float(there["monotonic_s"]), time.monotonic()))
        self.offset = best_offset(pings)

    async def _measure_again(self) -> None:
        with contextlib.suppress(HostLost):  # told where it is seen
            while True:
                await asyncio.sleep(EVERY_S)
                await self._measure()


async def _connect(address: str, port: int) -> socket.socket:
    """The only place where a name is looked up: the one by which the user calls a host."""
    loop = asyncio.get_running_loop()
    trouble: OSError | None = None
    for family, kind, protocol, _, place in await loop.getaddrinfo(address, port, type=socket.SOCK_STREAM):
        connection = socket.socket(family, kind, protocol)
        connection.setblocking(False)
        try:
            await loop.sock_connect(connection, place)
        except OSError as error:
            connection.close()
            trouble = error
        except BaseException:
            connection.close()
            raise
        else:
            return connection
    raise trouble or OSError(errno.EHOSTUNREACH, f"{address} has no address")


def _words(error: BaseException) -> str:
    """Why, as the system says it: asyncio words a refused connection as a call that failed."""
    if isinstance(error, asyncio.IncompleteReadError):
        return "it hung up"
    if isinstance(error, ConnectionError) and error.errno:
        return os.strerror(error.errno)
    return str(getattr(error, "strerror", None) or error or type(error).__name__)


Answer = tuple[Inventory, str]
"""What a host is made of, and the address at which it saw this process."""


def ask_each(workers: Sequence[Worker], key: WorkerKey) -> list[Answer | HostLost]:
    """What each host says, in the order of ``workers``, or why it says nothing. All are asked at once."""

    async def one(worker: Worker) -> Answer | HostLost:
        connection = HostConnection(worker, key)
        try:
            return await connection.open(), connection.here
        except HostLost as error:
            return error
        finally:
            connection.close()

    async def everyone() -> list[Answer | HostLost]:
        return await asyncio.gather(*(one(worker) for worker in workers))

    return asyncio.run(everyone())


def ask(workers: Sequence[Worker], key: WorkerKey) -> tuple[list[Inventory], str]:
    """What each host is made of, in the order of ``workers``, and the address at which the first of them saw this process.

    Raises:
        ConfigError: Some cannot be asked; each is named with its reason.
    """
    answers = ask_each(workers, key)
    lost = [answer for answer in answers if isinstance(answer, HostLost)]
    if lost:
        raise ConfigError("these hosts cannot take part:\n" + "\n".join(f"  - {error}" for error in lost))
    found = [answer for answer in answers if not isinstance(answer, HostLost)]
    return [inventory for inventory, _ in found], found[0][1]
