"""An OpenAI-compatible endpoint of one episode: requests of its program come in, the policy's replies go out.

    program's thread ──POST──▶ request's thread ──Called──▶ events ──▶ whoever plays the episode
                     ◀─answer─      waits       ◀──────── answer(reply) ──┘

It listens on 127.0.0.1 alone, at a port that the system gives, and takes only requests that show
its key. One request is open at a time. A request waits until it is answered or the endpoint is
closed; nothing else waits without a limit.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import queue
import secrets
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from llamarl.bounded_server import NamelessServer, QuietHandler
from llamarl.environments.adapters.chat_requests import (
    BadRequest,
    ChatRequest,
    assistant_message,
    chunks,
    completion,
    new_messages,
    read_request,
    shown,
)
from llamarl.environments.episode import Message

__all__ = ["MODEL", "Called", "ChatServer", "Refused"]

MODEL = "policy"
"""The model's name; requests may give any other."""

_MAX_BODY_BYTES = 1 << 26
_MAX_REPLY_S = 24 * 3600.0
"""Of one request, for the policy's reply: training may stand still in between."""
_SOCKET_S = 60.0
"""For a client to send its request, once it is connected."""


@dataclass(frozen=True, slots=True)
class Called:
    """The program asks the policy."""

    messages: tuple[Message, ...]
    """What is new, as chat templates take it."""
    tools: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """The program asked for something that cannot be part of an episode."""

    cause: str


@dataclass(slots=True)
class _Waiting:
    """One request, in its thread."""

    request: ChatRequest
    turn: int
    is_over: threading.Event = field(default_factory=threading.Event)
    message: dict[str, Any] | None = None
    """The answer; None where there will be none."""


class ChatServer:
    """The endpoint of one episode.

    Args:
        events: Gets a ``Called`` for each request that goes on with the conversation, a ``Refused`` for any other.
    """

    def __init__(self, events: queue.SimpleQueue[Any]) -> None:
        self.api_key = secrets.token_hex(16)
        self._events = events
        self._lock = threading.Lock()
        self._history: tuple[Message, ...] = ()
        self._tools: tuple[Mapping[str, Any], ...] = ()
        self._turn = 0
        self._open: _Waiting | None = None
        self._last: _Waiting | None = None
        self._closed = False
        self._http = _Http(self)
        self._thread = threading.Thread(target=self._serve, daemon=True, name="chat server")
        self._thread.start()

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}/v1"

    def answer(self, reply: str) -> None:
        """Answer the request that is open with the policy's words."""
        with self._lock:
            waiting, self._open = self._open, None
            assert waiting is not None, "no request is open"
            message = assistant_message(reply, waiting.request, self._turn)
            said = read_request({"messages": [message, {"role": "user", "content": ""}]}).messages[0]
            self._history = (*waiting.request.messages, said)
            self._turn += 1
            self._last, waiting.message = waiting, message
        waiting.is_over.set()

    def close(self) -> None:
        """End the endpoint; a request that is open gets an error."""
        with self._lock:
            waiting, self._open, self._closed = self._open, None, True
        if waiting is not None:
            waiting.is_over.set()
        self._http.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread, which waits for a connection
        self._thread.join(10)
        self._http.server_close()

    def _serve(self) -> None:
        while not self._closed:
            self._http.handle_request()

    def put(self, body: object, *, again: bool) -> _Waiting:
        """Take a request.

        Args:
            again: The client says that it sent this before and had no answer: it gets the answer to that.

        Raises:
            BadRequest: It cannot be part of the episode; the player has been told.
            ConnectionAbortedError: The episode is over.
        """
        try:
            request = read_request(body)
            with self._lock:
                if self._closed:
                    raise ConnectionAbortedError("the episode is over")
                for known in (self._open, self._last):
                    if again and known is not None and known.request == request:
                        return known
                if self._open is not None:
                    raise BadRequest("another request of this episode is open: its program asks one thing at a time")
                added = new_messages(self._history, request)
                if self._turn and request.tools and request.tools != self._tools:
                    raise BadRequest(
                        "tools are not those of the first request: an episode shows them once, at its start"
                    )
                called = Called(shown(added, self._history), request.tools)
                if not self._turn:
                    self._tools = request.tools
                self._open = _Waiting(request, self._turn)
                self._events.put(called)
                return self._open
        except BadRequest as error:
            self._events.put(Refused(str(error)))
            raise


class _Http(NamelessServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 16

    def __init__(self, chat: ChatServer) -> None:
        self.chat = chat
        super().__init__(("127.0.0.1", 0), _Handler)


class _Handler(QuietHandler):
    """One connection, which is one request: HTTP/1.0, so that no thread is left waiting for a next one."""

    timeout = _SOCKET_S
    server: _Http

    def do_GET(self) -> None:
        if not self._is_allowed():
            return
        known = {"id": MODEL, "object": "model", "created": 0, "owned_by": "llamarl"}
        if self._path == "/v1/models":
            self._send({"object": "list", "data": [known]})
        elif self._path.startswith("/v1/models/"):
            self._send(known)
        else:
            self._not_found()

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > _MAX_BODY_BYTES:
            self._fail(HTTPStatus.BAD_REQUEST, f"Content-Length must be given, and at most {_MAX_BODY_BYTES} bytes")
            return
        sent = self.rfile.read(int(length))
        if not self._is_allowed():
            return
        if self._path != "/v1/chat/completions":
            self._not_found()
            return
        try:
            body = json.loads(sent)
        except (ValueError, RecursionError) as error:
            self._fail(HTTPStatus.BAD_REQUEST, f"the body is no JSON: {error}")
            return
        try:
            waiting = self.server.chat.put(body, again=self.headers.get("x-stainless-retry-count", "0") != "0")
        except BadRequest as error:
            self._fail(HTTPStatus.BAD_REQUEST, str(error))
            return
        except ConnectionAbortedError as error:
            self._fail(HTTPStatus.GONE, str(error))
            return
        waiting.is_over.wait(_MAX_REPLY_S)
        if waiting.message is None:
            self._fail(HTTPStatus.GONE, "the episode is over: nobody will answer")
        elif waiting.request.stream:
            lines = [json.dumps(body) for body in chunks(waiting.message, waiting.request, waiting.turn)]
            events = "".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"])
            self._send_bytes(HTTPStatus.OK, "text/event-stream", events.encode())
        else:
            self._send(completion(waiting.message, waiting.request, waiting.turn))

    @property
    def _path(self) -> str:
        return self.path.partition("?")[0].rstrip("/")

    def _is_allowed(self) -> bool:
        shown_key = self.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        if hmac.compare_digest(shown_key.encode(), self.server.chat.api_key.encode()):
            return True
        self._fail(HTTPStatus.UNAUTHORIZED, "the api_key that the agent was called with must be shown")
        return False

    def _not_found(self) -> None:
        self._fail(
            HTTPStatus.NOT_FOUND,
            f"there is no {self.command} {self._path}: this endpoint has POST /v1/chat/completions and GET /v1/models",
        )

    def _fail(self, status: HTTPStatus, cause: str) -> None:
        kind = "authentication_error" if status == HTTPStatus.UNAUTHORIZED else "invalid_request_error"
        self._send({"error": {"message": cause, "type": kind, "param": None, "code": None}}, status)

    def _send(self, body: Mapping[str, Any], status: HTTPStatus = HTTPStatus.OK) -> None:
        self._send_bytes(status, "application/json", json.dumps(body).encode())

    def _send_bytes(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        with contextlib.suppress(ConnectionError, TimeoutError):  # the client has gone: it is for it to say why
            # read by OpenAI's clients: the same again gets the same
            self.answer(status, kind, body, x_should_retry="false")
