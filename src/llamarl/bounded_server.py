"""An HTTP server that strangers who reach its port cannot tie up.

A request has ``REQUEST_S`` to arrive and its answer as long to be taken, and at most ``MAX_CONNECTIONS``
are open at a time: for one more, the oldest gives way that the server has not recognized.
"""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

__all__ = ["MAX_CONNECTIONS", "REQUEST_S", "BoundedServer", "NamelessServer", "QuietHandler"]

REQUEST_S = 10.0
MAX_CONNECTIONS = 16
GIVE_WAY_S = 1.0
"""A connection that was ended may take so long to be gone."""


class QuietHandler(BaseHTTPRequestHandler):
    """Answers the requests of one connection, and logs nothing: the terminal is the user's."""

    timeout = REQUEST_S

    def answer(self, status: HTTPStatus, kind: str, data: bytes, **headers: str) -> None:
        """Send a whole answer.

        Args:
            kind: Its content type.
            headers: Further ones; an underscore stands for a hyphen.
        """
        self.send_response(status)
        for name, value in {"Content_Type": kind, "Content_Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


class NamelessServer(ThreadingHTTPServer):
    """Begins without the look-up of this machine's name, which may ask the network, and wait for it."""

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)
        host, port = self.server_address[:2]
        self.server_name, self.server_port = str(host), port


class BoundedServer(NamelessServer):
    """Bounds its connections in number and time. Above the bound the oldest that was not recognized is ended."""

    request_queue_size = 128

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._unknown: dict[socket.socket, None] = {}  # those that were not recognized, oldest first
        super().__init__(address, handler)

    def recognize(self, connection: socket.socket) -> None:
        """Let a connection that has shown who it is stay."""
        self._unknown.pop(connection, None)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            for oldest in list(self._unknown)[:1]:
                _end(oldest)  # its thread wakes up and gives its place back
            if not self._free.acquire(timeout=GIVE_WAY_S):
                self.shutdown_request(request)
                return
        self._unknown[request] = None
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # there is no thread to be had
            self._unknown.pop(request, None)
            self._free.release()
            self.shutdown_request(request)

    def process_request_thread(self, request: socket.socket, client_address: Any) -> None:  # type: ignore[override]
        # One byte now and then would renew a socket's own limit for ever.
        end = threading.Timer(2 * REQUEST_S, _end, [request])
        end.daemon = True
        end.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            end.cancel()
            self._unknown.pop(request, None)
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a connection that broke: the terminal is the user's."""


def _end(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
