"""A segment of another host: read over connections to its owner's server that last from read to read.

    RemoteSegment.expect(next bytes) ─▶ request goes out, the answer gathers in the socket       while the reader proves
    RemoteSegment.read(those bytes)  ─▶ recv_into the caller's memory, no copy in between         what it read before

Expected bytes come on a connection of the segment's own; all other reads borrow one from a pool
that the segments of one owner share. Whatever goes wrong, and every deadline, ends the
connection that it happened on: no answer is ever taken for another request's.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import ssl
import threading
import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from llamarl.errors import ChannelError, DeadlineExceeded, SourceGone
from llamarl.running_time import running_s
from llamarl.transports.network import Network, mine
from llamarl.transports.run_key import KeyRefused, prove_as_client
from llamarl.transports.segment_server import Endpoint
from llamarl.transports.segment_wire import (
    ANSWER,
    CONNECT_S,
    JOIN,
    LONGEST_REQUEST,
    LONGEST_WORDS,
    OK,
    PURPOSE,
    REQUEST,
    client_tls,
    limit_waits,
    prepare,
)
from llamarl.transports.segments import Segment, SegmentHandle

__all__ = ["RemoteSegment", "copy_of"]

_TICK_S = 1.0
"""Longest single wait in the kernel: between two, the deadline's own clock is asked, which stands
still while we are stopped."""
_DIALS = 3
_REDIAL_S = 0.05


class RemoteSegment:
    """A segment of another space, as far as it can be read from here. Reads may come from any
    thread, ``expect`` from one.

    Args:
        deadline_s: For the first connection.

    Raises:
        ChannelError: Its owner is gone or has closed it.
        DeadlineExceeded: The owner did not answer in time.
    """

    def __init__(self, handle: SegmentHandle, deadline_s: float) -> None:
        self.handle = handle
        self._who = f"segment of process {handle.pid} at {handle.endpoint[0]}:{handle.endpoint[1]}"
        self._owner = _owner(handle.endpoint)
        self._stream: _Connection | None = None
        self._expected: deque[tuple[int, int]] = deque()  # offset, bytes
        self.check(deadline_s)

    def read(self, offset: int, into: npt.NDArray[np.uint8], deadline_s: float, *, fresh: bool = True) -> None:
        """Fill ``into``, uint8 [n] and contiguous, with the bytes from ``offset``.

        Args:
            fresh: As they are at the owner now. Otherwise they may be those that were expected, as they were when sent.

        Raises:
            ChannelError: The owner is gone, has closed the segment, or the bytes lie outside it.
            DeadlineExceeded: They did not come in time.
        """
        until = running_s() + deadline_s
        view = into.data
        if not fresh and self._expected and self._expected[0] == (offset, view.nbytes):
            self._expected.popleft()
            assert self._stream is not None, "an expectation has a connection"
            try:
                return self._stream.take(view, until, self._who)
            except _HungUp:  # an owner ends who takes nothing for long, as this process while it was stopped
                self.close()
            except BaseException:
                self.close()
                raise
        for start in range(0, view.nbytes, LONGEST_REQUEST):
            self._ask(offset + start, view[start : start + LONGEST_REQUEST], until)

    def expect(self, offset: int, nbytes: int, deadline_s: float) -> None:
        """Have bytes sent that the next reads will ask for, in the order of the calls; see :meth:`read`."""
        if not 0 < nbytes <= LONGEST_REQUEST:
            return
        until = running_s() + deadline_s
        try:
            self._stream = self._stream or self._owner.dial(until, self._who)
            self._stream.ask(self.handle.nonce, offset, nbytes, until, self._who)
        except _HungUp:  # as in ``read``, which asks for these bytes, and all that were expected, by itself
            return self.close()
        except BaseException:
            self.close()
            raise
        self._expected.append((offset, nbytes))

    @property
    def num_expected(self) -> int:
        """Reads that are on their way."""
        return len(self._expected)

    def check(self, deadline_s: float) -> None:
        """Raise ChannelError if its owner is gone or has closed it."""
        self._ask(0, memoryview(b""), running_s() + deadline_s)

    def join_chain(
        self, mirror: SegmentHandle, deadline_s: float, gone: SegmentHandle | None = None
    ) -> tuple[bool, SegmentHandle | None]:
        """Offer to pass this segment on from a copy in ``mirror``; see :mod:`llamarl.transports.segment_server`.

        Args:
            gone: What an earlier call returned, where that is not there any more.

        Returns:
            Whether this process is to do so, and whose copy it reads: that of a host before it
            (None: the segment itself), or, where another process of this space passes it on, that
            process's.

        Raises: As ``read``.
        """
        until = running_s() + deadline_s
        connection = self._owner.dial(until, self._who)
        words = json.dumps([mirror.space, _in_words(mirror), "" if gone is None else _in_words(gone)]).encode()
        try:
            connection.ask(self.handle.nonce, len(words), JOIN, until, self._who, words)
            relays, found = json.loads(connection.take_words(until, self._who))
        finally:
            connection.close()
        return bool(relays), _from_words(found) if found else None

    def forget(self) -> None:
        """Drop what was expected and never read."""
        if self._expected:
            self.close()

    def close(self) -> None:
        """End the connection of this segment. Idempotent."""
        self._expected.clear()
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _ask(self, offset: int, into: memoryview, until: float) -> None:
        connection = self._owner.borrow(until, self._who)
        try:
            try:
                connection.ask(self.handle.nonce, offset, into.nbytes, until, self._who)
                connection.take(into, until, self._who)
            except _HungUp:  # since an earlier read, or while this process was stopped; or its owner is gone
                connection.close()
                connection = self._owner.dial(until, self._who)
                connection.ask(self.handle.nonce, offset, into.nbytes, until, self._who)
                connection.take(into, until, self._who)
        except _Refused:  # an answer like any other: the connection goes on
            self._owner.give_back(connection)
            raise
        except BaseException:
            connection.close()
            raise
        self._owner.give_back(connection)


def copy_of(handle: SegmentHandle, deadline_s: float) -> Segment:
    """A segment of this process with the bytes of one that lies elsewhere.

    Raises:
        ChannelError: Its owner is gone, or there is no memory for it here.
        DeadlineExceeded: They did not come in time.
    """
    remote = RemoteSegment(handle, deadline_s)
    copy = Segment(handle.size)
    try:
        remote.read(0, copy.bytes, deadline_s)
    except BaseException:
        copy.close()
        raise
    finally:
        remote.close()
    return copy


class _HungUp(SourceGone):
    """The connection ended."""


class _Refused(ChannelError):
    """The owner answered in words."""


class _Connection:
    """One socket that has been proved, and what is asked on it."""

    def __init__(self, made: socket.socket) -> None:
        self._socket = made
        self._whole = 0 if isinstance(made, ssl.SSLSocket) else socket.MSG_WAITALL
        limit_waits(made, receive_s=_TICK_S, send_s=_TICK_S)

    def ask(self, nonce: bytes, offset: int, nbytes: int, until: float, who: str, words: bytes = b"") -> None:
        view = memoryview(REQUEST.pack(nonce, offset, nbytes) + words)
        while view:
            try:
                view = view[self._socket.send(view) :]
            except (BlockingIOError, TimeoutError):
                _check(until, f"{who}: asking for {nbytes:,} bytes")
            except OSError as error:
                raise _gone(who, error) from error

    def take(self, into: memoryview, until: float, who: str) -> None:
        """The next answer."""
        status, nbytes = self._head(until, who)
        if status == OK and nbytes == into.nbytes:
            return self._fill(into, until, who)
        if status == OK or nbytes > LONGEST_WORDS:
            raise ChannelError(
                f"{who}: answered {nbytes:,} bytes where {into.nbytes:,} were asked for; it is another program"
            )
        raise _Refused(f"{who}: {self._words(nbytes, until, who).decode(errors='replace')}")

    def take_words(self, until: float, who: str) -> bytes:
        """The next answer, which is in words."""
        status, nbytes = self._head(until, who)
        if nbytes > 2 * LONGEST_WORDS:
            raise ChannelError(
                f"{who}: answered {nbytes:,} bytes where a few words were asked for; it is another program"
            )
        words = self._words(nbytes, until, who)
        if status != OK:
            raise _Refused(f"{who}: {words.decode(errors='replace')}")
        return words

    def _head(self, until: float, who: str) -> tuple[int, int]:
        head = bytearray(ANSWER.size)
        self._fill(memoryview(head), until, who)
        status, nbytes = ANSWER.unpack(head)
        return status, nbytes

    def _words(self, nbytes: int, until: float, who: str) -> bytes:
        words = bytearray(nbytes)
        self._fill(memoryview(words), until, who)
        return bytes(words)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.close()

    def _fill(self, into: memoryview, until: float, who: str) -> None:
        whole = into.nbytes
        while into:
            try:
                count = self._socket.recv_into(into, 0, self._whole)
            except (BlockingIOError, TimeoutError):
                _check(until, f"{who}: {whole - into.nbytes:,} of {whole:,} bytes came")
                continue
            except OSError as error:
                raise _gone(who, error) from error
            if not count:
                raise _gone(who, "it hung up")
            into = into[count:]
            if into:
                _check(until, f"{who}: {whole - into.nbytes:,} of {whole:,} bytes came")


@dataclass
class _Owner:
    """Connections to one process's server."""

    endpoint: Endpoint
    network: Network
    idle: list[_Connection] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def borrow(self, until: float, who: str) -> _Connection:
        """A connection for one read."""
        with self.lock:
            if self.idle:
                return self.idle.pop()
        return self.dial(until, who)

    def give_back(self, connection: _Connection) -> None:
        with self.lock:
            if len(self.idle) < _MOST_IDLE:
                self.idle.append(connection)
                return
        connection.close()

    def dial(self, until: float, who: str) -> _Connection:
        for attempt in range(_DIALS):
            _check(until, f"{who}: connecting")
            try:
                return _Connection(self._dialled(until))
            except TimeoutError as error:
                _check(until, f"{who}: connecting")
                raise SourceGone(f"{who}: does not answer; its host is down or not reached from here") from error
            except (KeyRefused, ConnectionResetError, ssl.SSLEOFError) as error:
                if attempt == _DIALS - 1:  # a server that is being flooded hangs up on some
                    raise SourceGone(
                        f"{who}: cannot be opened ({error}); its owner has ended or is another run's"
                    ) from error
                time.sleep(_REDIAL_S)
            except OSError as error:
                raise SourceGone(f"{who}: cannot be opened ({error}); its owner has ended or closed it") from error
        raise AssertionError("the last attempt returns or raises")

    def _dialled(self, until: float) -> socket.socket:
        limit = max(0.001, min(CONNECT_S, until - running_s()))
        made = socket.create_connection(self.endpoint, timeout=limit)
        try:
            prepare(made)
            if self.network.tls is not None:
                made = client_tls(self.network.tls).wrap_socket(made)
            prove_as_client(made, self.network.key, PURPOSE, limit)
        except BaseException:
            made.close()
            raise
        return made


_MOST_IDLE = 8
_owners: dict[tuple[Endpoint, Network], _Owner] = {}
_owners_lock = threading.Lock()


def _owner(endpoint: Endpoint) -> _Owner:
    network = mine()
    assert network is not None, "nothing lies elsewhere in a job on one machine"
    with _owners_lock:
        return _owners.setdefault((endpoint, network), _Owner(endpoint, network))


def _in_words(handle: SegmentHandle) -> str:
    values = [handle.pid, handle.fd, handle.size, handle.nonce.hex(), handle.space, *handle.endpoint]
    return json.dumps(values)


def _from_words(text: str) -> SegmentHandle:
    pid, fd, size, nonce, space, address, port = json.loads(text)
    return SegmentHandle(pid, fd, size, bytes.fromhex(nonce), space, (address, port))


def _check(until: float, doing: str) -> None:
    if running_s() > until:
        raise DeadlineExceeded(
            f"{doing}, and its time is over; look at the owner's process and the network, or raise the limit"
        )


def _gone(who: str, error: object) -> _HungUp:
    return _HungUp(f"{who}: cannot be read ({error}); its owner has ended or closed it")


def _forked() -> None:
    """A connection that two processes read from gives each a part of the other's answers."""
    global _owners_lock
    _owners_lock = threading.Lock()
    _owners.clear()


os.register_at_fork(after_in_child=_forked)
