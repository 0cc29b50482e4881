"""One rank of a controller elsewhere, as the daemon of its host holds it: a process, and three streams of bytes that are handed on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence

from llamarl.runtime.child_process import gone, start_rank
from llamarl.runtime.hosts.wire import CHUNK, Word, message

__all__ = ["HostedRank"]

_DRAIN_S = 0.2
"""After a death: how long to read what the rank said before it."""
_AHEAD = 1 << 18
"""Most bytes of output that the controller has not taken: then the rank waits, as it would for a slow terminal."""


class HostedRank:
    """Starts at once; on the daemon's main thread, since the kernel ends a process with the thread that started it.

    Args:
        number: By which the controller calls it.
        send: Takes what goes to the controller; returns when there is room for more.
    """

    def __init__(
        self, number: int, label: str, environment: Mapping[str, str], send: Callable[[bytes], object]
    ) -> None:
        self.number, self.label = number, label
        self._send = send
        pipes = {word: os.pipe() for word in (Word.OUTPUT, Word.ERRORS)}
        try:
            self._control, self._process = start_rank(label, environment, pipes[Word.OUTPUT][1], pipes[Word.ERRORS][1])
        except BaseException:
            for read, _ in pipes.values():
                os.close(read)
            raise
        finally:
            for _, write in pipes.values():
                os.close(write)
        self.pid = self._process.pid
        self._taking = {word: asyncio.Event() for word in pipes}
        self._ahead = dict.fromkeys(pipes, 0)
        self._writer: asyncio.StreamWriter | None = None
        self._early: list[bytes] = []
        pumps = [asyncio.ensure_future(self._pump(word, read)) for word, (read, _) in pipes.items()]
        self.over = asyncio.ensure_future(self._live(pumps))
        """Done when the process has ended and all that it said is handed on."""

    def write(self, data: bytes) -> None:
        """Bytes for the rank's socket."""
        if self._writer is None:
            self._early.append(data)
        else:
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

    def kill(self, *, at_once: bool) -> None:
        """End the process, by its guard or without asking it."""
        with contextlib.suppress(OSError):
            if at_once:
                self._process.kill()
            else:
                self._process.terminate()

    async def _live(self, pumps: Sequence[asyncio.Future[None]]) -> None:
        reader, self._writer = await asyncio.open_unix_connection(sock=self._control)
        for data in self._early:
            self._writer.write(data)
        relaying = asyncio.create_task(self._relay(reader))
        await gone(self._process, relaying)
        await asyncio.wait({relaying}, timeout=_DRAIN_S)
        relaying.cancel()
        self._writer.close()
        self._send(message(Word.ENDED, self.number, {"returncode": self._process.returncode}))
        await asyncio.wait(pumps)

    async def _relay(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK):
                self._send(message(Word.BYTES, self.number, data))

    async def _pump(self, word: Word, fd: int) -> None:
        """Hand on what the rank prints, to the end of it."""
        reader = asyncio.StreamReader(limit=_AHEAD // 4)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd, "rb", 0)
        )
        try:
            while data := await reader.read(_AHEAD // 4):
                self._send(message(word, self.number, data))
                self._ahead[word] += len(data)
                while self._ahead[word] > _AHEAD:
                    self._taking[word].clear()
                    await self._taking[word].wait()
            self._send(message(word, self.number))
        finally:
            transport.close()
