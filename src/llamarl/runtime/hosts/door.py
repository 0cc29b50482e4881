"""The door of a daemon: who proves the key comes in, everybody else is sent away with nothing read of what they say.

    accept ─▶ TLS, if asked ─▶ proof of the key for a purpose, by a deadline ─▶ that purpose's welcome(reader, writer)

A connection costs a socket until it has proved itself. At most ``_MOST_WAITING`` may be in the middle of that: the next one
pushes the oldest out. So thousands of connections that say nothing neither fill memory nor keep out who has the key, whose
proof takes milliseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping

from llamarl.runtime.hosts.wire import PURPOSE
from llamarl.transports.run_key import (
    ANSWER_BYTES,
    CHALLENGE_BYTES,
    PROOF_BYTES,
    KeyRefused,
    answer_challenge,
    challenge,
    check_answer,
)

__all__ = ["Door", "listen", "prove"]

_PROOF_S = 5.0
_MOST_WAITING = 128
_LIMIT = 1 << 20
"""Bytes that a reader takes in ahead of whoever reads."""

Welcome = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Door:
    """See the module.

    Args:
        key: That a peer must prove.
        tls: Server's context, or None.
        welcomes: Purpose -> called with each connection that has proved itself for it.
        say: Takes a line for the daemon's user.
    """

    def __init__(
        self, key: bytes, tls: ssl.SSLContext | None, welcomes: Mapping[str, Welcome], say: Callable[[str], None]
    ) -> None:
        self._key, self._tls, self._welcomes, self._say = key, tls, welcomes, say
        self._waiting: dict[asyncio.Task[None], socket.socket] = {}
        """Those that have not proved themselves, oldest first."""
        self._inside: set[asyncio.Task[None]] = set()
        self._refused = 0
        self._told_s = float("-inf")

    async def keep(self, listener: socket.socket) -> None:
        """Accept connections for ever."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:  # no descriptors left, or the peer was gone already
                self._say(f"cannot accept a connection: {error}")
                await asyncio.sleep(0.1)
                continue
            if len(self._waiting) >= _MOST_WAITING:
                oldest = next(iter(self._waiting))
                oldest.cancel()
                del self._waiting[oldest]
                await asyncio.sleep(0)  # let it close its socket
            task = loop.create_task(self._admit(connection))
            self._waiting[task] = connection
            task.add_done_callback(lambda done: self._waiting.pop(done, None))

    async def _admit(self, connection: socket.socket) -> None:
        try:
            peer = connection.getpeername()[0]
            async with asyncio.timeout(_PROOF_S):
                reader, writer = await _streams(connection, self._tls)
                try:
                    purpose = await _prove_as_server(reader, writer, self._key, self._welcomes)
                except BaseException:
                    writer.transport.abort()
                    raise
        except (OSError, EOFError, TimeoutError, KeyRefused, asyncio.CancelledError) as error:
            connection.close()
            self._tell(f"refused a connection: {_why(error)}")
            return
        inside = asyncio.get_running_loop().create_task(self._host(self._welcomes[purpose], reader, writer, peer))
        self._inside.add(inside)
        inside.add_done_callback(self._inside.discard)

    async def _host(
        self, welcome: Welcome, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: str
    ) -> None:
        try:
            await welcome(reader, writer)
        except Exception as error:
            self._say(f"the job of {peer} ended by an error of this daemon: {type(error).__name__}: {error}")
        finally:
            writer.close()

    def _tell(self, text: str) -> None:
        """At most a line a second: a flood of strangers must not fill a disk."""
        self._refused += 1
        now = time.monotonic()
        if now - self._told_s >= 1.0:
            more = f" ({self._refused} since this was last said)" if self._refused > 1 else ""
            self._say(text + more)
            self._told_s, self._refused = now, 0


def listen(address: str, ports: tuple[int, int]) -> socket.socket:
    """A socket that listens on ``address`` and the first free of ``ports``; (0, 0) takes any.

    Raises:
        OSError: None is free, or the address is not of this host.
    """
    trouble: OSError | None = None
    for port in range(ports[0], ports[1] + 1):
        listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((address, port))
            listener.listen(1024)
        except OSError as error:
            listener.close()
            trouble = error
            continue
        listener.setblocking(False)
        return listener
    raise trouble or OSError(f"no port in {ports}")


async def prove(
    connection: socket.socket, key: bytes, tls: ssl.SSLContext | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """The dialling end: streams over a connected socket, once both ends have proved the key.

    Raises:
        KeyRefused: The peer does not hold it, or says that we do not.
        OSError: TLS or the connection failed.
    """
    name = "" if tls is not None else None  # certificates are checked by who signed them: peers are dialled by number
    reader, writer = await asyncio.open_connection(sock=connection, ssl=tls, server_hostname=name, limit=_LIMIT)
    try:
        answer, expected = answer_challenge(key, PURPOSE, await reader.readexactly(CHALLENGE_BYTES))
        writer.write(answer)
        proof = await reader.readexactly(PROOF_BYTES)
    except EOFError as error:
        writer.transport.abort()
        raise KeyRefused("it hung up: it holds another key") from error
    except BaseException:
        writer.transport.abort()
        raise
    if not hmac.compare_digest(proof, expected):
        writer.transport.abort()
        raise KeyRefused("it does not hold this key")
    return reader, writer


async def _prove_as_server(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes, purposes: Iterable[str]
) -> str:
    """For which of ``purposes`` the peer has proved the key."""
    asked = challenge()
    writer.write(asked)
    answer = await reader.readexactly(ANSWER_BYTES)
    for purpose in purposes:
        with contextlib.suppress(KeyRefused):  # it may be for the next
            writer.write(check_answer(key, purpose, asked, answer))
            return purpose
    raise KeyRefused("the peer does not hold this run's key")


async def _streams(
    connection: socket.socket, tls: ssl.SSLContext | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Of an accepted connection."""
    loop = asyncio.get_running_loop()
    connection.setblocking(False)
    reader = asyncio.StreamReader(limit=_LIMIT)
    protocol = asyncio.StreamReaderProtocol(reader)
    transport, _ = await loop.connect_accepted_socket(
        lambda: protocol, connection, ssl=tls, ssl_handshake_timeout=_PROOF_S if tls is not None else None
    )
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


def _why(error: BaseException) -> str:
    match error:
        case TimeoutError():
            return f"no proof of the key within {_PROOF_S:g} s"
        case asyncio.CancelledError():
            return f"more than {_MOST_WAITING} at once had not proved the key"
        case EOFError():
            return "it hung up before it proved the key"
        case KeyRefused():
            return "it does not hold the key"
    with contextlib.suppress(AttributeError):
        return str(error.strerror or error)  # type: ignore[attr-defined]
    return str(error)
