"""``llamarl watch``: the page of a run that goes on, served to this machine alone.

    browser ──state──▶ which blocks there are, each with a digest    every few seconds
            ──block/0/metrics──▶ those that changed, when their view is open

The folder is read again when somebody asks and the last reading is older than ``READ_EVERY_S``; nothing runs otherwise.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from llamarl.errors import ConfigError, LlamaRLError
from llamarl.report.page import charting_script, make_page, numbered
from llamarl.report.run_data import RunReader

__all__ = ["READ_EVERY_S", "WatchedRuns", "make_server"]

READ_EVERY_S = 2.0
_HOST = "127.0.0.1"
_LOCAL = ("127.0.0.1", "localhost")


class WatchedRuns:
    """Blocks of some runs, at most ``READ_EVERY_S`` old. Used by several threads."""

    def __init__(self, paths: Sequence[Path], max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.title = ", ".join(path.resolve().name for path in paths)
        self._readers = [RunReader(path) for path in paths]
        self._max_bytes = max_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._read_at_s: float | None = None
        self._blocks: dict[str, str] = {}

    def blocks(self) -> dict[str, str]:
        """All blocks by name.

        Raises:
            LlamaRLError: A file of a run is there and cannot be read.
        """
        with self._lock:
            now = self._clock()
            if self._read_at_s is None or now - self._read_at_s >= READ_EVERY_S:
                self._blocks = numbered(
                    [reader.blocks(self._max_bytes // len(self._readers)) for reader in self._readers]
                )
                self._read_at_s = self._clock()
            return self._blocks

    def state(self) -> dict[str, dict[str, str]]:
        """What the page compares with what it has."""
        return {
            "blocks": {name: hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in self.blocks().items()}
        }


def make_server(runs: WatchedRuns, port: int) -> ThreadingHTTPServer:
    """A server on 127.0.0.1, bound and not yet serving.

    Args:
        port: 0 takes a free one.

    Raises:
        ConfigError: The port is taken.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            host = self.headers.get("Host", "").rsplit(":", 1)[0]
            if host not in _LOCAL:  # another site's name that was made to point here
                self._answer(HTTPStatus.FORBIDDEN, "text/plain", "this server answers to 127.0.0.1 alone")
                return
            try:
                self._route(self.path.split("?", 1)[0])
            except LlamaRLError as error:
                self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain", str(error))

        def _route(self, path: str) -> None:
            if path == "/":
                self._answer(HTTPStatus.OK, "text/html", make_page(runs.title, {}, watch=True))
            elif path == "/state":
                self._answer(HTTPStatus.OK, "application/json", json.dumps(runs.state()))
            elif path == "/charts.js":
                self._answer(HTTPStatus.OK, "text/javascript", charting_script())
            elif path.startswith("/block/") and path.removeprefix("/block/") in (blocks := runs.blocks()):
                self._answer(HTTPStatus.OK, "text/plain", blocks[path.removeprefix("/block/")])
            else:
                self._answer(HTTPStatus.NOT_FOUND, "text/plain", "nothing here")

        def _answer(self, status: HTTPStatus, kind: str, text: str) -> None:
            data = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(data)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing: the terminal is the user's."""

    try:
        return ThreadingHTTPServer((_HOST, port), Handler)
    except OSError as error:
        raise ConfigError(
            f"--port {port}: cannot be listened on ({error.strerror}); leave it out for a free one"
        ) from error
