"""What travels on a connection for files: JSON for questions and answers, data in bounded pieces.

    frame = kind (1 byte), length (4 bytes, big-endian), that many bytes

A file is data frames of at most ``CHUNK_BYTES`` and an empty one; then the sender says in JSON what it was, or what went wrong. So
an error on either side is told in words, and neither end holds more than a piece.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import time
from collections.abc import Mapping
from enum import IntEnum
from typing import Any

from llamarl.files.partial import CHUNK_BYTES

__all__ = ["Kind", "SocketFrames", "StreamFrames", "pack"]

_HEAD = struct.Struct("!BI")
_MOST_JSON_BYTES = 1 << 26


class Kind(IntEnum):
    """Of a frame."""

    JSON = 0
    DATA = 1


def pack(value: Mapping[str, Any]) -> bytes:
    """A JSON frame."""
    data = json.dumps(value).encode()
    return _HEAD.pack(Kind.JSON, len(data)) + data


def _unpack_head(head: bytes) -> tuple[Kind, int]:
    kind, length = _HEAD.unpack(head)
    if length > (_MOST_JSON_BYTES if kind == Kind.JSON else CHUNK_BYTES):
        raise ConnectionError(f"the peer does not keep to the protocol: a frame of {length} bytes")
    try:
        return Kind(kind), length
    except ValueError:
        raise ConnectionError(f"the peer does not keep to the protocol: a frame of kind {kind}") from None


def _unpack_json(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConnectionError(f"the peer does not keep to the protocol: {error}") from error
    if not isinstance(value, dict):
        raise ConnectionError("the peer does not keep to the protocol: no object")
    return value


class StreamFrames:
    """The dialled end, on an event loop.

    Args:
        stall_s: Longest time without a byte while something is under way.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, stall_s: float) -> None:
        self._reader, self._writer, self._stall_s = reader, writer, stall_s

    async def question(self) -> dict[str, Any] | None:
        """The next, however long that takes; None when the peer has hung up."""
        try:
            head = await self._reader.readexactly(_HEAD.size)
        except asyncio.IncompleteReadError as error:
            if error.partial:
                raise
            return None
        kind, length = _unpack_head(head)
        if kind is not Kind.JSON:
            raise ConnectionError("the peer does not keep to the protocol: data without a question")
        async with asyncio.timeout(self._stall_s):
            return _unpack_json(await self._reader.readexactly(length))

    async def data(self) -> bytes:
        """The next piece of a file; empty at its end."""
        async with asyncio.timeout(self._stall_s):
            kind, length = _unpack_head(await self._reader.readexactly(_HEAD.size))
            if kind is not Kind.DATA:
                raise ConnectionError("the peer does not keep to the protocol: no data")
            return await self._reader.readexactly(length)

    async def say(self, value: Mapping[str, Any]) -> None:
        self._writer.write(pack(value))
        async with asyncio.timeout(self._stall_s):
            await self._writer.drain()

    async def send(self, data: bytes | memoryview) -> None:
        """A piece of a file; empty: its end."""
        self._writer.write(_HEAD.pack(Kind.DATA, len(data)))
        self._writer.write(data)
        async with asyncio.timeout(self._stall_s):
            await self._writer.drain()


class SocketFrames:
    """The dialling end, blocking.

    Args:
        stall_s: Longest time without a byte while something is under way.
    """

    def __init__(self, connection: socket.socket, stall_s: float) -> None:
        self._socket = connection
        self.wait_no_longer_than(stall_s)
        self._buffer = bytearray(CHUNK_BYTES)

    def wait_no_longer_than(self, stall_s: float) -> None:
        """From now on."""
        self._stall_s = stall_s
        self._socket.settimeout(stall_s)

    def ask(self, value: Mapping[str, Any]) -> None:
        self._socket.sendall(pack(value))

    def answer(self) -> dict[str, Any]:
        kind, length = _unpack_head(self._take(_HEAD.size))
        if kind is not Kind.JSON:
            raise ConnectionError("the peer does not keep to the protocol: data without words")
        return _unpack_json(self._take(length))

    def data(self) -> memoryview:
        """The next piece of a file, until the next call; empty at its end."""
        kind, length = _unpack_head(self._take(_HEAD.size))
        if kind is not Kind.DATA:
            raise ConnectionError("the peer does not keep to the protocol: no data")
        piece = memoryview(self._buffer)[:length]
        self._fill(piece)
        return piece

    def send(self, data: bytes | memoryview) -> None:
        """A piece of a file; empty: its end."""
        self._socket.sendall(_HEAD.pack(Kind.DATA, len(data)))
        if len(data):
            self._socket.sendall(data)

    def close(self) -> None:
        self._socket.close()

    def _take(self, length: int) -> bytes:
        data = bytearray(length)
        self._fill(memoryview(data))
        return bytes(data)

    def _fill(self, view: memoryview) -> None:
        last_s = time.monotonic()
        while view:
            count = self._socket.recv_into(view)
            if not count:
                raise ConnectionResetError("it hung up")
            view, now_s = view[count:], time.monotonic()
            if now_s - last_s > self._stall_s:
                raise TimeoutError(f"no byte for {self._stall_s:g} s")
            last_s = now_s
