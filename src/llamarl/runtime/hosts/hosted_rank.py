"""One rank of a controller elsewhere, as the agent of its node holds it: a process, and three
streams of bytes that are handed on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Any

from llamarl.runtime.children import Child, is_stopped, start_rank
from llamarl.runtime.fork_server import ForkServer

__all__ = ["HostedRank", "Say", "Word"]

_CHUNK = 1 << 18
_DRAIN_S = 0.2
"""After a death: how long to read what the rank said before it."""
_AHEAD = 1 << 18
"""Most bytes of output that the controller has not taken: then the rank waits, as it would for a slow terminal."""


class Word(IntEnum):
    """What passes between controller and agent about one rank."""

    BYTES = 0
    """Either way: what goes through the rank's socket."""
    OUTPUT = 1
    """From the agent: bytes of stdout; none: its end."""
    ERRORS = 2
    """The same of stderr."""
    TAKEN = 3
    """To the agent: of which of both so many bytes have been handed on; more may come."""
    KILL = 4
    """To the agent: end the process; ``at_once`` without asking its guard."""
    ENDED = 5
    """From the agent: how the process ended, as ``subprocess`` tells it."""


Say = tuple[Word, int, Any]
"""Word, the rank's number, and the bytes, (word, count), ``at_once`` or exit code."""


class HostedRank:
    """Made by ``start``, on the agent's event loop.

    Args:
        number: By which the controller calls it.
        reader, writer: This end of the socket to the rank.
        pipes: Read ends of what it prints.
        send: Takes what goes to the controller.
    """

    @classmethod
    async def start(
        cls,
        number: int,
        label: str,
        environment: Mapping[str, str],
        server: ForkServer | None,
        send: Callable[[Word, int, Any], object],
    ) -> HostedRank:
        """Start its process.

        Args:
            server: Whose fork it is to be, where that forks; None: a process of its own.

        Raises:
            OSError: The system gives no process.
        """
        pipes = {word: os.pipe() for word in (Word.OUTPUT, Word.ERRORS)}
        try:
            ends = {"stdout": pipes[Word.OUTPUT][1], "stderr": pipes[Word.ERRORS][1]}
            control, child = await start_rank(server, label, environment, **ends)
            connection = await asyncio.open_unix_connection(sock=control)
        except BaseException:
            for read, _ in pipes.values():
                os.close(read)
            raise
        finally:
            for _, write in pipes.values():
                os.close(write)
        return cls(number, *connection, child, {word: read for word, (read, _) in pipes.items()}, send)

    def __init__(
        self,
        number: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        child: Child,
        pipes: Mapping[Word, int],
        send: Callable[[Word, int, Any], object],
    ) -> None:
        self.number = number
        self._writer, self._child, self._send = writer, child, send
        self.pid = child.pid
        self._taking = {word: asyncio.Event() for word in pipes}
        self._ahead = dict.fromkeys(pipes, 0)
        pumps = [asyncio.ensure_future(self._pump(word, read)) for word, read in pipes.items()]
        self.over = asyncio.ensure_future(self._live(reader, pumps))
        """Done when the process has ended and all that it said is handed on."""

    def write(self, data: bytes) -> None:
        """Bytes for the rank's socket."""
        self._writer.write(data)

    def taken(self, word: Word, nbytes: int) -> None:
        """The controller has handed on so much of the output."""
        self._ahead[word] -= nbytes
        self._taking[word].set()

    def wait_for_nobody(self) -> None:
        """The controller takes no output any more: what is still said is read and handed on at once, or to nobody."""
        for word, taking in self._taking.items():
            self._ahead[word] = -sys.maxsize
            taking.set()

    def stopped(self) -> bool:
        """Whether a signal has stopped the rank, or its guard."""
        return is_stopped(self.pid)

    def kill(self, *, at_once: bool) -> None:
        """End the process, by its guard or without asking it."""
        with contextlib.suppress(OSError):
            self._child.signal(signal.SIGKILL if at_once else signal.SIGTERM)

    async def _live(self, reader: asyncio.StreamReader, pumps: Sequence[asyncio.Future[None]]) -> None:
        relaying = asyncio.create_task(self._relay(reader))
        code = await self._child.code()
        await asyncio.wait({relaying}, timeout=_DRAIN_S)
        relaying.cancel()
        self._writer.close()
        self._send(Word.ENDED, self.number, -signal.SIGKILL if code is None else code)
        await asyncio.wait(pumps)

    async def _relay(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK):
                self._send(Word.BYTES, self.number, data)

    async def _pump(self, word: Word, fd: int) -> None:
        """Hand on what the rank prints, to the end of it."""
        reader = asyncio.StreamReader(limit=_AHEAD // 4)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd, "rb", 0)
        )
        try:
            while data := await reader.read(_AHEAD // 4):
                self._send(word, self.number, data)
                self._ahead[word] += len(data)
                while self._ahead[word] > _AHEAD:
                    self._taking[word].clear()
                    await self._taking[word].wait()
            self._send(word, self.number, b"")
        finally:
            transport.close()
