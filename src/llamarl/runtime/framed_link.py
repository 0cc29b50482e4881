"""A link to a rank whose frames travel over bytes in order: a socket pair here, or a connection to the rank's host."""

from __future__ import annotations

import asyncio
import collections
import contextlib

from llamarl.runtime.commands import HEAD, Kind, frame

__all__ = ["FramedLink"]


class FramedLink:
    """What links of both kinds share of :class:`llamarl.runtime.ranks.Link`. Subclasses write, read, watch and kill."""

    host = ""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiting: dict[Kind, collections.deque[asyncio.Future[bytes]]] = collections.defaultdict(collections.deque)
        self._greeted = False

    def _write(self, data: bytes) -> None:
        raise NotImplementedError

    def here_s(self, there_s: float) -> float:
        """A time on the rank's ``time.monotonic`` on the controller's."""
        return there_s

    async def command(self, blob: bytes) -> bytes:
        return await self._ask(Kind.COMMAND, blob)

    async def tell(self, blob: bytes) -> bytes:
        return await self._ask(Kind.TELL, blob)

    async def where(self) -> str:
        if not self._greeted:
            return "start of its process"
        return (await self._ask(Kind.WHERE, b"")).decode()

    async def progress(self) -> str:
        return (await self._ask(Kind.PROGRESS, b"")).decode() if self._greeted else ""

    async def _ask(self, kind: Kind, blob: bytes) -> bytes:
        """Answers of one kind come in the order of the questions."""
        if self.ended.done():
            raise ConnectionResetError(self.ended.result())
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[kind].append(answer)
        self._write(frame(kind, blob))
        return await answer

    async def read(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(
            asyncio.IncompleteReadError, OSError
        ):  # the end of the socket, which whoever watches explains
            while True:
                number, size = HEAD.unpack(await reader.readexactly(HEAD.size))
                blob = await reader.readexactly(size)
                if number == Kind.HELLO:
                    self._greeted, self.pid = True, int(blob)
                    continue
                answer = self._waiting[Kind(number)].popleft()
                if not answer.done():  # who asked may have given up
                    answer.set_result(blob)

    def _end(self, cause: str) -> None:
        """The process has ended: tell those who wait for it, and those who wait for more of it."""
        if self.ended.done():
            return
        self.ended.set_result(cause)
        for answer in (answer for answers in self._waiting.values() for answer in answers):
            if not answer.done():
                answer.set_exception(ConnectionResetError(cause))
