"""``llamarl watch``: the page of a run that goes on, served to one user of this machine.

    browser ──/?token=...──▶ a cookie that holds the token, and on to /
            ──state──▶ which blocks there are, each with a digest    every few seconds
            ──block/0/metrics──▶ those that changed, when their view is open

Other users of the machine reach the port too: without the token, which is printed once and random,
they get nothing. Connections are bounded in number and time, and those that have shown no token give
way first, so nobody keeps the owner out. The folder is read again when somebody asks and the last
reading is older than ``READ_EVERY_S``, of a large run than some times what it took; nothing runs otherwise.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from llamarl.bounded_server import BoundedServer, QuietHandler
from llamarl.errors import ConfigError, LlamaRLError
from llamarl.report.page import charting_script, make_page, numbered
from llamarl.report.run_data import RunReader
from llamarl.report.run_files import MAX_RUNS, runs_of, title_of

__all__ = ["READ_EVERY_S", "WatchServer", "WatchedRuns", "make_server"]

READ_EVERY_S = 2.0
_REST, _LONGEST_REST_S = 9.0, 60.0
"""As many times as long as the last reading took is waited: a million responses take seconds of a core."""
_HOST = "127.0.0.1"
_LOCAL = ("127.0.0.1", "localhost")


class WatchedRuns:
    """Blocks of some runs, and of those that begin in a folder of runs, at most ``READ_EVERY_S`` old.
    Used by several threads."""

    def __init__(self, paths: Sequence[Path], max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.title = title_of(paths)
        self._paths = paths
        self._readers = {path: RunReader(path) for path in runs_of(paths)}
        self._max_bytes = max_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._read_at_s: float | None = None
        self._took_s = 0.0
        self._blocks: dict[str, str] = {}

    def blocks(self) -> dict[str, str]:
        """All blocks by name.

        Raises:
            LlamaRLError: A file of a run is there and cannot be read.
        """
        with self._lock:
            now = self._clock()
            rest_s = max(READ_EVERY_S, min(_LONGEST_REST_S, _REST * self._took_s))
            if self._read_at_s is None or now - self._read_at_s >= rest_s:
                runs = runs_of(self._paths)[-MAX_RUNS:] or list(self._readers)  # what was removed is said by its files
                self._readers = {run: self._readers.get(run) or RunReader(run) for run in runs}
                room = self._max_bytes // len(runs)
                self._blocks = numbered([reader.blocks(room) for reader in self._readers.values()])
                self._read_at_s = self._clock()
                self._took_s = self._read_at_s - now
            return self._blocks

    def state(self) -> dict[str, dict[str, str]]:
        """What the page compares with what it has."""
        return {
            "blocks": {name: hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in self.blocks().items()}
        }


class WatchServer(BoundedServer):
    """Shows the page to who has the token.

    Attributes:
        token: What a request must bring.
    """

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler], runs: WatchedRuns) -> None:
        self.runs = runs
        self.token = secrets.token_urlsafe(32)
        super().__init__(address, handler)

    @property
    def url(self) -> str:
        """The address to open, token included."""
        address = str(self.server_address[0])
        name = socket.gethostname() if address == "0.0.0.0" else address
        return f"http://{name}:{self.server_port}/?token={self.token}"

    def is_own_name(self, name: str) -> bool:
        """Whether a browser may call it so: on the loopback another site's name could be made to point here."""
        return self.server_address[0] != _HOST or name in _LOCAL


class _Handler(QuietHandler):
    """Answers one connection of a browser."""

    server: WatchServer

    def do_GET(self) -> None:
        host = self.headers.get("Host", "").rsplit(":", 1)[0]
        if not self.server.is_own_name(host):
            self._answer(HTTPStatus.FORBIDDEN, "text/plain", "this server answers to 127.0.0.1 alone")
            return
        address = urlsplit(self.path)
        given = parse_qs(address.query).get("token", [""])[0]
        if address.path == "/" and self._is_token(given):
            self.server.recognize(self.connection)
            self._let_in(given)
        elif self._is_token(self._cookie()):
            self.server.recognize(self.connection)
            self._answer_with(address.path)
        else:
            self._answer(HTTPStatus.FORBIDDEN, "text/plain", "open the address that llamarl watch has printed")

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(errors="replace"), self.server.token.encode())

    def _cookie(self) -> str:
        """Read the token of our cookie, which is never quoted; unquoting a stranger's would take its time."""
        pairs = (pair.strip().partition("=") for pair in self.headers.get("Cookie", "").split(";"))
        return next((value for name, _, value in pairs if name == self._cookie_name()), "")

    def _cookie_name(self) -> str:
        return f"llamarl-{self.server.server_port}"  # a browser keeps one jar for all ports of a host

    def _let_in(self, token: str) -> None:
        """Send the browser on to an address that shows no token."""
        cookie = f"{self._cookie_name()}={token}; Path=/; HttpOnly; SameSite=Strict"
        headers = {"Location": "/", "Set_Cookie": cookie, "Referrer_Policy": "no-referrer"}
        self.answer(HTTPStatus.SEE_OTHER, "text/plain", b"", **headers)

    def _answer_with(self, path: str) -> None:
        try:
            self._route(path)
        except LlamaRLError as error:
            self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain", str(error))

    def _route(self, path: str) -> None:
        if path == "/":
            self._answer(HTTPStatus.OK, "text/html", make_page(self.server.runs.title, {}, watch=True))
        elif path == "/state":
            self._answer(HTTPStatus.OK, "application/json", json.dumps(self.server.runs.state()))
        elif path == "/charts.js":
            self._answer(HTTPStatus.OK, "text/javascript", charting_script())
        elif path.startswith("/block/") and path.removeprefix("/block/") in (blocks := self.server.runs.blocks()):
            self._answer(HTTPStatus.OK, "text/plain", blocks[path.removeprefix("/block/")])
        else:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", "nothing here")

    def _answer(self, status: HTTPStatus, kind: str, text: str) -> None:
        headers = {"Cache_Control": "no-store", "X_Content_Type_Options": "nosniff"}
        self.answer(status, f"{kind}; charset=utf-8", text.encode(), **headers)


def make_server(runs: WatchedRuns, port: int, bind: str = _HOST) -> WatchServer:
    """A server, bound and not yet serving.

    Args:
        port: 0 takes a free one.
        bind: Address of this machine that it listens on; 0.0.0.0: all.

    Raises:
        ConfigError: The port is taken, or the address is not this machine's.
    """

    try:
        return WatchServer((bind, port), _Handler, runs)
    except OSError as error:
        if bind != _HOST and error.errno != errno.EADDRINUSE:
            raise ConfigError(f"--bind {bind}: is no IPv4 address of this machine ({error.strerror})") from error
        raise ConfigError(
            f"--port {port}: cannot be listened on ({error.strerror}); leave it out for a free one"
        ) from error
