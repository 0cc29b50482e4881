"""Who may speak: both ends of a connection prove that they hold the run's key, and neither sends it.

    dialled end (server)                     dialling end (client)
    magic, 32 random bytes        ───────▶
                                  ◀───────   32 random bytes, HMAC-SHA256(key, "client" + purpose + both)
    HMAC(key, "server" + ... )    ───────▶   checked here

Nothing that a peer sends is parsed before its proof is checked: 64 bytes of a fixed length are
read, no more. A replayed proof fails, since the server's bytes are new each time; a proof made for
one purpose (orders, segments, files) fails for another. The key proves who speaks and hides
nothing: what travels can be read and altered on the way unless the connection is inside TLS.
"""

from __future__ import annotations

import hmac
import os
import socket
import time

from llamarl.errors import ChannelError

__all__ = ["KEY_BYTES", "KeyRefused", "prove_as_client", "prove_as_server", "receive_exactly"]

KEY_BYTES = 32
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_MAGIC = b"llamarl-key-1\n\x00\x00"
_OLDEST_MAGIC = b"llamarl-key-"


class KeyRefused(ChannelError):
    """The other end does not hold this run's key, or is not ours at all."""


def prove_as_server(connection: socket.socket, key: bytes, purpose: str, deadline_s: float) -> None:
    """Let the peer prove itself, then prove ourselves. Leaves the socket's timeout as it found it.

    Args:
        purpose: What the connection is for; both ends must name the same.
        deadline_s: For all of it, however slowly the peer sends.

    Raises:
        KeyRefused: The peer has another key, purpose or protocol, is too slow, or hung up.
    """
    before, until = connection.gettimeout(), time.monotonic() + deadline_s
    own = os.urandom(_NONCE_BYTES)  # other bytes each time
    try:
        connection.settimeout(deadline_s)
        connection.sendall(_MAGIC + own)
        answer = receive_exactly(connection, _NONCE_BYTES + _PROOF_BYTES, until)
        theirs, proof = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
        if not hmac.compare_digest(proof, _proof(key, "client", purpose, own, theirs)):
            raise KeyRefused("the peer does not hold this run's key")
        connection.sendall(_proof(key, "server", purpose, own, theirs))
    except OSError as error:
        raise KeyRefused(f"the peer did not prove that it holds the key: {error or type(error).__name__}") from error
    connection.settimeout(before)


def prove_as_client(connection: socket.socket, key: bytes, purpose: str, deadline_s: float) -> None:
    """Prove ourselves, then let the server prove itself; as :func:`prove_as_server`."""
    before, until = connection.gettimeout(), time.monotonic() + deadline_s
    own = os.urandom(_NONCE_BYTES)
    try:
        connection.settimeout(deadline_s)
        asked = receive_exactly(connection, len(_MAGIC) + _NONCE_BYTES, until)
        if not asked.startswith(_OLDEST_MAGIC):
            raise KeyRefused("what answers there is no llamarl process")
        if not asked.startswith(_MAGIC):
            raise KeyRefused("what answers there is a llamarl process of another version")
        theirs = asked[len(_MAGIC) :]
        connection.sendall(own + _proof(key, "client", purpose, theirs, own))
        proof = receive_exactly(connection, _PROOF_BYTES, until)
    except OSError as error:
        raise KeyRefused(f"the peer did not accept this run's key: {error or type(error).__name__}") from error
    if not hmac.compare_digest(proof, _proof(key, "server", purpose, theirs, own)):
        raise KeyRefused("the peer does not hold this run's key")
    connection.settimeout(before)


def receive_exactly(connection: socket.socket, nbytes: int, until: float) -> bytes:
    """``nbytes`` bytes, by ``until`` on ``time.monotonic``.

    Raises:
        ConnectionError: The peer hung up before.
        TimeoutError: They did not come in time.
    """
    data = bytearray()
    while len(data) < nbytes:
        left_s = until - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(f"{len(data)} of {nbytes} bytes came in time")
        connection.settimeout(left_s)
        if not (part := connection.recv(nbytes - len(data))):
            raise ConnectionResetError(f"it hung up after {len(data)} of {nbytes} bytes")
        data += part
    return bytes(data)


def _proof(key: bytes, side: str, purpose: str, server_nonce: bytes, client_nonce: bytes) -> bytes:
    return hmac.digest(
        key, b"\x00".join([side.encode(), purpose.encode()]) + b"\x00" + server_nonce + client_nonce, "sha256"
    )
