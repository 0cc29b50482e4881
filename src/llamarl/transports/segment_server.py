"""Lets processes of other hosts read this one's segments, if they hold the run's key.

    first Segment of a process that is on a network ─▶ listen on its own address alone
    accept ─▶ a thread a connection: TLS, proof of the key before a deadline ─▶ (nonce, offset, bytes) ─▶ the mapped memory

Only what is registered can be read, by its 16 random bytes, and nothing can be written: a peer
sends three numbers, or asks who else reads a segment and leaves two words on where its own copy
lies. Each connection has a thread of its own, so a slow one holds up none but itself. Those that
have not proved the key are few: the oldest goes when there are too many, so half-open connections
cannot shut out who comes after them.

The owner of a buffer sends one copy however many hosts want it::

    owner ─▶ host 0 ─▶ host 1 ─▶ host 2 ─▶ ...        each passes a block on as soon as it has proved it

A chain keeps every link busy in one direction with one copy: R hosts take the time of one and that
of a block for each host between. Hosts join it in the order in which they ask, so nobody has to know
how many come, and whom a host reads from has always joined before it.

A reader that was brought up again, or came later, may be told of a copy whose process has ended. It
says so, and the chain begins anew: processes that pass on end together, as those of one executor do.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import ssl
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from llamarl.errors import ChannelError, ConfigError
from llamarl.transports.network import Network, mine
from llamarl.transports.run_key import KeyRefused, prove_as_server, receive_exactly
from llamarl.transports.segment_wire import (
    ANSWER,
    CONNECT_S,
    FAILED,
    JOIN,
    LONGEST_REQUEST,
    LONGEST_WORDS,
    OK,
    PURPOSE,
    REQUEST,
    limit_waits,
    prepare,
    server_tls,
    shut,
)

__all__ = ["Answer", "Endpoint", "Limits", "Relay", "SegmentServer", "join_chain", "server_here"]


@dataclass(frozen=True)
class Relay:
    """One host that passes on what it reads."""

    space: str
    mirror: str
    """Where its copy lies, in words that its readers understand."""


@dataclass(frozen=True)
class Answer:
    """What a process that asked to join shall do."""

    relays: bool
    """It reads for its host, and passes on; otherwise another process of its space does."""
    mirror: str
    """Whose copy it reads: of the host before it, or of its own host; empty: the owner's buffer."""


def join_chain(chain: Sequence[Relay], newcomer: Relay, gone: str = "") -> tuple[list[Relay], Answer]:
    """Append ``newcomer`` to the chain, unless another process of its space is in it; and say what it shall do.

    Args:
        gone: The copy that it was told of before, and that is not there any more; empty: it was
            told of none.
    """
    if gone and any(relay.mirror == gone for relay in chain):  # else somebody has said so already
        chain = ()
    for relay in chain:
        if relay.space == newcomer.space:
            return list(chain), Answer(False, relay.mirror)
    return [*chain, newcomer], Answer(True, chain[-1].mirror if chain else "")


Endpoint = tuple[str, int]
"""Numeric address and port."""

_PAUSE_S = 0.05
_TLS_CHUNK = 1 << 20
"""Bytes for which ``stall_s`` counts anew inside TLS; without it the kernel counts from progress to progress."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What connections may take."""

    unproved: int = 128
    """Connections whose proof is out; one more ends the oldest."""
    proved: int = 1 << 14
    """Connections in all; one more is told so and ended."""
    proof_s: float = CONNECT_S
    stall_s: float = 60.0
    """Longest wait for a peer that takes nothing of an answer, or sends part of a request."""


class SegmentServer:
    """Listens at once.

    Raises:
        ConfigError: The address is not this host's, or no port of the range is free.
    """

    def __init__(self, network: Network, limits: Limits | None = None) -> None:
        self._key = network.key
        self._limits = limits or Limits()
        self._tls = server_tls(network.tls) if network.tls is not None else None
        self._lock = threading.RLock()  # a segment may be collected, and so withdrawn, while this thread has it
        self._segments: dict[bytes, list[memoryview]] = {}
        """Nonce -> the same pages as often as they were registered, in that order."""
        self._chains: dict[bytes, list[Relay]] = {}
        self.sent_bytes = 0
        """Of segments, to readers, in all."""
        self._unproved: OrderedDict[int, socket.socket] = OrderedDict()
        self._proved: dict[int, socket.socket] = {}
        self._number = 0
        self._closed = False
        self.num_refused = 0
        """Connections that did not prove the key."""
        self._listener = _listen(network)
        address = self._listener.getsockname()
        self.endpoint: Endpoint = (address[0], address[1])
        threading.Thread(target=self._accept, name="llamarl-segments", daemon=True).start()

    def register(self, nonce: bytes, memory: memoryview) -> None:
        """Let the payload ``memory`` be read by who knows ``nonce``, until it is withdrawn as often
        as it was registered: who holds another's segment registers the same pages once more."""
        with self._lock:
            self._segments.setdefault(nonce, []).append(memory)

    def withdraw(self, nonce: bytes) -> None:
        """Undo one ``register``; after the last nobody can read it. One more does nothing."""
        with self._lock:
            if memories := self._segments.get(nonce):
                del memories[0]
            if not memories:
                self._segments.pop(nonce, None)
                self._chains.pop(nonce, None)

    def close(self) -> None:
        """End all connections and listen no more. Idempotent."""
        with self._lock:
            self._closed = True
            self._segments.clear()
            connections = [*self._unproved.values(), *self._proved.values()]
        shut(self._listener)
        self._listener.close()
        for connection in connections:
            shut(connection)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed; or out of descriptors, which passes
                if self._closed:
                    return
                time.sleep(_PAUSE_S)
                continue
            with self._lock:
                self._number += 1
                number = self._number
                self._unproved[number] = connection
                oldest = self._unproved.popitem(last=False)[1] if len(self._unproved) > self._limits.unproved else None
            if oldest is not None:
                shut(oldest)
            try:
                threading.Thread(
                    target=self._serve, args=(number, connection), name="llamarl-segment-reader", daemon=True
                ).start()
            except RuntimeError:  # no more threads: as out of descriptors
                self._forget(number)
                connection.close()
                time.sleep(_PAUSE_S)

    def _serve(self, number: int, connection: socket.socket) -> None:
        """One connection, to its end. What goes wrong with it is for who dialled: it sees the end,
        and says what it wanted."""
        try:
            connection = self._prove(number, connection)
            full = self._take_in(number, connection)
            self._let_it_wait(connection)
            while (request := self._next_request(connection)) is not None:
                if full:
                    _fail(connection, f"it has {self._limits.proved} readers already")
                    return
                self._answer(connection, *REQUEST.unpack(request))
        except KeyRefused:
            with self._lock:
                self.num_refused += 1
        except OSError:
            pass
        finally:
            self._forget(number)
            connection.close()

    def _prove(self, number: int, connection: socket.socket) -> socket.socket:
        until = time.monotonic() + self._limits.proof_s
        prepare(connection)
        if self._tls is not None:
            connection.settimeout(self._limits.proof_s)
            try:
                connection = self._tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
                with self._lock:
                    if number not in self._unproved:  # ended meanwhile, for being the oldest
                        raise KeyRefused("too many connections wait for their proof")
                    self._unproved[number] = connection
                connection.do_handshake()
            except ssl.SSLError as error:
                raise KeyRefused(f"no TLS with a certificate of this job: {error}") from error
        prove_as_server(connection, self._key, PURPOSE, max(0.001, until - time.monotonic()))
        return connection

    def _take_in(self, number: int, connection: socket.socket) -> bool:
        """Count it among the proved; whether there are too many of them."""
        with self._lock:
            self._unproved.pop(number, None)
            if self._closed:
                raise ConnectionAbortedError
            self._proved[number] = connection
            return len(self._proved) > self._limits.proved

    def _forget(self, number: int) -> None:
        with self._lock:
            self._unproved.pop(number, None)
            self._proved.pop(number, None)

    def _next_request(self, connection: socket.socket) -> bytes | None:
        first = connection.recv(REQUEST.size)
        if not first:
            return None
        if len(first) < REQUEST.size:
            rest = REQUEST.size - len(first)
            first += receive_exactly(connection, rest, time.monotonic() + self._limits.stall_s)
            self._let_it_wait(connection)
        return first

    def _let_it_wait(self, connection: socket.socket) -> None:
        """A reader keeps its connection from tick to tick, but takes what it asked for."""
        limit_waits(connection, receive_s=None, send_s=self._limits.stall_s)

    def _answer(self, connection: socket.socket, nonce: bytes, offset: int, nbytes: int) -> None:
        with self._lock:
            memories = self._segments.get(nonce)
            memory = memories[-1] if memories else None
        if memory is None:
            return _fail(connection, "its owner has closed it or restarted")
        if nbytes == JOIN:
            return self._join(connection, nonce, offset)
        if nbytes > LONGEST_REQUEST or offset + nbytes > memory.nbytes:
            return _fail(connection, f"bytes {offset} to {offset + nbytes} lie outside its {memory.nbytes}")
        with self._lock:
            self.sent_bytes += nbytes
        head = ANSWER.pack(OK, nbytes)
        if isinstance(connection, ssl.SSLSocket):
            connection.settimeout(self._limits.stall_s)
            connection.sendall(head)
            for start in range(offset, offset + nbytes, _TLS_CHUNK):
                connection.sendall(memory[start : min(start + _TLS_CHUNK, offset + nbytes)])
            connection.settimeout(None)
        else:
            connection.sendall(head, socket.MSG_MORE if nbytes else 0)
            connection.sendall(memory[offset : offset + nbytes])

    def _join(self, connection: socket.socket, nonce: bytes, nbytes: int) -> None:
        if nbytes > LONGEST_WORDS:
            raise ConnectionAbortedError  # what follows cannot be told from requests
        words = receive_exactly(connection, nbytes, time.monotonic() + self._limits.stall_s)
        self._let_it_wait(connection)
        try:
            space, mirror, gone = json.loads(words)
            newcomer = Relay(str(space), str(mirror))
        except ValueError as error:
            return _fail(connection, f"no place in the chain for {words[:80]!r}: {error}")
        with self._lock:
            self._chains[nonce], answer = join_chain(self._chains.get(nonce, []), newcomer, str(gone))
        text = json.dumps([answer.relays, answer.mirror]).encode()
        connection.sendall(ANSWER.pack(OK, len(text)) + text)


def _fail(connection: socket.socket, words: str) -> None:
    text = words.encode()
    connection.sendall(ANSWER.pack(FAILED, len(text)) + text)


def _listen(network: Network) -> socket.socket:
    first, last = network.ports
    family = socket.AF_INET6 if ":" in network.address else socket.AF_INET
    error: OSError | None = None
    for port in range(first, last + 1):
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            # A port whose last connections are still being wound up is free: an earlier job on a
            # short range has left some.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((network.address, port))
            listener.listen(1024)
        except OSError as raised:
            error = raised
            listener.close()
        else:
            return listener
    where = network.address if last == 0 else f"{network.address}, ports {first} to {last}"
    raise ConfigError(
        f"segments cannot be offered to other hosts on {where}: {error}; give an address of this host, or more ports"
    ) from error


_here: tuple[Network, SegmentServer] | None = None
_here_lock = threading.Lock()


def server_here() -> SegmentServer | None:
    """This process's server, started when first asked for; None in a job on one machine.

    Raises:
        ChannelError: It cannot listen.
    """
    global _here
    network = mine()
    if network is None:
        return None
    with _here_lock:
        if _here is None or _here[0] != network:
            try:
                _here = (network, SegmentServer(network))
            except ConfigError as error:
                raise ChannelError(str(error)) from error
        return _here[1]


def _forked() -> None:
    """Threads do not live on in a fork: a child that makes segments gets a server of its own."""
    global _here, _here_lock
    if _here is not None:
        with contextlib.suppress(OSError):
            _here[1]._listener.close()
    _here, _here_lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forked)
