"""What travels between a reader of segments and the process that owns them, and the sockets on which it does.

    dial ─▶ TLS, if the job has it ─▶ proof of the run's key, both ways ─▶ request, answer, request, answer, ...

    request  nonce of the segment (16), offset (8), bytes (8)      bytes = 0 asks only whether it is still held
    answer   status (8), bytes (8), and so many bytes: the memory asked for, or an error in words
    to join  nonce, bytes of the words that follow, JOIN, words      answered in words: see llamarl.transports.segment_server

Requests may be sent ahead of the answers, which come in their order. Every wait has a limit in the
kernel (``SO_RCVTIMEO``): a socket that Python itself gives a timeout makes two calls where a
blocking one makes one, a tenth of the rate at 2 GB/s.
"""

from __future__ import annotations

import contextlib
import functools
import socket
import ssl
import struct
from pathlib import Path

from llamarl.errors import ConfigError
from llamarl.transports.network import TlsFiles

__all__ = [
    "ANSWER",
    "CONNECT_S",
    "FAILED",
    "LONGEST_REQUEST",
    "LONGEST_WORDS",
    "OK",
    "PURPOSE",
    "REQUEST",
    "JOIN",
    "client_tls",
    "limit_waits",
    "prepare",
    "server_tls",
    "shut",
]

PURPOSE = "segments"
"""Of the proof of the run's key."""
REQUEST = struct.Struct("<16sQQ")
ANSWER = struct.Struct("<QQ")
OK, FAILED = 0, 1
LONGEST_REQUEST = 1 << 30
JOIN = (1 << 64) - 1
"""In the place of the bytes asked for."""
LONGEST_WORDS = 1 << 12
CONNECT_S = 10.0
"""For TLS and the proof together, at either end."""
_KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 30_000}


def prepare(connection: socket.socket) -> None:
    """No waiting for more to send, and a peer whose host went silent is noticed after half a minute."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def limit_waits(connection: socket.socket, *, receive_s: float | None, send_s: float) -> None:
    """Give each later wait of this blocking socket a limit; over it, ``BlockingIOError`` or ``TimeoutError`` is raised.

    Args:
        receive_s: None: it may last. Inside TLS, whose socket has one limit for both, it is then
            ``send_s`` that has none.
    """
    if isinstance(connection, ssl.SSLSocket):
        connection.settimeout(None if receive_s is None else max(receive_s, send_s))
        return
    connection.settimeout(None)
    for option, seconds in ((socket.SO_RCVTIMEO, receive_s), (socket.SO_SNDTIMEO, send_s)):
        micros = 0 if seconds is None else max(1, int(seconds * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", *divmod(micros, 1_000_000)))


def shut(connection: socket.socket) -> None:
    """End a connection that another thread may be waiting on: its call returns."""
    with contextlib.suppress(OSError):  # it has ended by itself
        socket.socket.shutdown(connection, socket.SHUT_RDWR)  # not SSLSocket's own, which is for the thread that reads


def server_tls(files: TlsFiles) -> ssl.SSLContext:
    """Asks clients for a certificate of the job's authority."""
    context = _tls(files, ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_tls(files: TlsFiles) -> ssl.SSLContext:
    """Shows a certificate and asks for one of the job's authority; names are not compared, since
    peers are dialled by address."""
    return _tls(files, ssl.PROTOCOL_TLS_CLIENT)


@functools.cache
def _tls(files: TlsFiles, protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    try:
        context.load_cert_chain(files.certificate, files.private_key)
        context.load_verify_locations(files.authority)
    except (OSError, ssl.SSLError) as error:
        names: list[Path] = [files.certificate, files.private_key, files.authority]
        raise ConfigError(
            f"TLS: {', '.join(map(str, names))} cannot be used together: {error}; expected a certificate, "
            "its private key, and the certificate of the authority that signed it, all PEM"
        ) from error
    return context
