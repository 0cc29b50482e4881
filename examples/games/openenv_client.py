"""Environments behind an OpenEnv server, over its WebSocket: one connection is one session, and
holds one episode at a time.

    [task]
    environment = "examples/games/openenv_client.py:OpenEnv"       pip install websockets
    environment_options = { address = "ws://HOST:PORT/ws" }

    {"type": "reset", "data": {"seed": 7}}             ─▶   {"type": "observation", "data": {"observation": {...}, "reward", "done"}}
    {"type": "step", "data": {"message": "..."}}       ─▶   the same, or {"type": "error", "data": {"message", "code"}}
    {"type": "close"}

An action of OpenEnv is an object; the reply becomes its one text field, told from the server's
``/schema``. A server has no state that could be taken back, but an episode is its seed and replies
here: after a lost connection it is played again. So the server must answer equal replies equally;
``llamarl doctor --env`` says whether it does.
"""

from __future__ import annotations

import contextlib
import json
import re
import urllib.parse
import urllib.request
from typing import Any

from pydantic import PositiveFloat

from llamarl.data.items import TaskItem
from llamarl.environments.episode import EpisodeOver, Observation, Step
from llamarl.environments.games.game import checked

__all__ = ["OpenEnv", "text_field", "websocket_url"]

_LOCAL = re.compile(r"^wss?://(localhost|127\.|\[::1\])")
_MAX_SCHEMA_BYTES = 1 << 22


def websocket_url(address: str) -> str:
    """``ws://host:port/ws`` from that, ``http://host:port`` or ``host:port``.

    Raises:
        ValueError: It is none of these.
    """
    if "://" not in address:
        address = f"ws://{address}"
    parts = urllib.parse.urlsplit(address)
    scheme = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}.get(parts.scheme)
    if scheme is None or not parts.hostname:
        raise ValueError(f"{address!r} is no address of an OpenEnv server, such as ws://127.0.0.1:8000/ws")
    path = parts.path.rstrip("/")
    return f"{scheme}://{parts.netloc}{path if path.endswith('/ws') else f'{path}/ws'}"


def text_field(schema: dict[str, Any]) -> str:
    """The field of an action that a reply is written into: the only text, or the only text that is required.

    Raises:
        ValueError: There is none, or several.
    """
    fields = {name: about for name, about in schema.get("properties", {}).items() if name != "metadata"}
    texts = [name for name, about in fields.items() if about.get("type") == "string"]
    required = [name for name in texts if name in schema.get("required", ())]
    if len(required) == 1 or len(texts) == 1:
        return (required if len(required) == 1 else texts)[0]
    raise ValueError(
        f"its actions have the fields {sorted(fields)}, of which {sorted(texts)} are texts: name one as action_field, or "
        "set action_field = 'json' for replies that are whole actions in JSON"
    )


class OpenEnv:
    """A session on a server.

    Args:
        address: ``ws://host:port/ws``, or ``http://host:port``.
        action_field: Field of the action that holds the reply; empty: told from the server;
            ``json``: the reply is the action.
        action: Further fields of every action.
        observation_field: Field of the observation that is shown; empty: its only text that is not
            blank, else all of it as JSON.
        reset: What else ``reset`` is given, besides ``seed``.
        intro: Said before the first observation.
        timeout_s: Seconds to wait for the server, a message.

    Raises:
        ImportError: websockets is not installed.
        ValueError: The address is none, or the server does not say which field takes text.
        ConnectionError: Nobody answers there.
    """

    @checked
    def __init__(
        self,
        *,
        address: str,
        action_field: str = "",
        action: dict[str, Any] | None = None,
        observation_field: str = "",
        reset: dict[str, Any] | None = None,
        intro: str = "",
        timeout_s: PositiveFloat = 60.0,
    ) -> None:
        import websockets.sync.client  # noqa: F401

        self._url, self._timeout_s = websocket_url(address), timeout_s
        self._action, self._reset, self._intro = action or {}, reset or {}, intro
        self._shown_field = observation_field
        self._socket: Any = None
        self._open = contextlib.ExitStack()
        self._over = True
        self._field = action_field or text_field(self._schema())

    def reset(self, item: TaskItem, seed: int) -> Observation:
        """Begin an episode in the session; an item's words come first."""
        result = self._ask({"type": "reset", "data": {"seed": seed % 2**31, **self._reset}})
        self._over = False
        said = [item.question, self._intro, self._text(result)]
        return Observation(text="\n\n".join(part for part in said if part))

    def step(self, reply: str) -> Step:
        """Send a reply. ``parts``: ``moves``, ``invalid`` (the server does not take the action: its
        words are shown)."""
        if self._over:
            raise EpisodeOver("the episode is over; reset begins the next one")
        action: Any = {**self._action, self._field: reply}
        if self._field == "json":
            try:
                action = json.loads(reply)
            except (ValueError, RecursionError) as error:
                return _invalid(f"Write an action as a JSON object: {error}")
            if not isinstance(action, dict):
                return _invalid("Write an action as a JSON object.")
            action = {**self._action, **action}
        try:
            result = self._ask({"type": "step", "data": action})
        except _NotTaken as error:
            return _invalid(f"That action is not valid: {error}")
        self._over = bool(result.get("done"))
        reward = result.get("reward")
        return Step(
            text=self._text(result),
            reward=0.0 if reward is None else float(reward),
            done=self._over,
            parts={"moves": 1.0, "invalid": 0.0},
        )

    def close(self) -> None:
        """End the session."""
        socket, self._socket, self._over = self._socket, None, True
        if socket is not None:
            import websockets.exceptions

            with contextlib.suppress(websockets.exceptions.ConnectionClosed):  # the server ended it first
                socket.send(json.dumps({"type": "close"}))
        self._open.close()

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        import websockets.exceptions

        if self._socket is None:
            self._socket = self._connect()
        try:
            self._socket.send(json.dumps(message))
            answer = json.loads(self._socket.recv(timeout=self._timeout_s))
        except websockets.exceptions.ConnectionClosed as error:
            self._socket = None
            self._open.close()
            raise ConnectionError(f"the OpenEnv server {self._url} ended the session: {error}") from error
        except TimeoutError as error:
            raise TimeoutError(
                f"the OpenEnv server {self._url} did not answer {message['type']!r} within {self._timeout_s:g} s"
            ) from error
        data = answer.get("data", {}) if isinstance(answer, dict) else {}
        if not isinstance(answer, dict) or answer.get("type") not in ("observation", "error"):
            raise ValueError(f"the OpenEnv server {self._url} answered {str(answer)[:200]!r}")
        if answer["type"] == "error":
            if data.get("code") == "VALIDATION_ERROR" and message["type"] == "step":
                raise _NotTaken(_why(data)[:500])
            raise RuntimeError(f"the OpenEnv server {self._url}: {data.get('code')}: {data.get('message')}")
        return dict(data)

    def _connect(self) -> Any:
        import websockets.exceptions
        from websockets.sync.client import connect

        try:
            return self._open.enter_context(
                connect(
                    self._url,
                    open_timeout=self._timeout_s,
                    max_size=1 << 26,
                    proxy=None if _LOCAL.match(self._url) else True,
                )
            )
        except (OSError, TimeoutError, websockets.exceptions.WebSocketException) as error:
            raise ConnectionError(f"no OpenEnv server answers at {self._url}: {error}") from error

    def _schema(self) -> dict[str, Any]:
        """The server's description of its actions."""
        address = re.sub(r"^ws", "http", self._url).removesuffix("/ws") + "/schema"
        handlers = [urllib.request.ProxyHandler({})] if _LOCAL.match(self._url) else []
        try:
            with urllib.request.build_opener(*handlers).open(address, timeout=self._timeout_s) as answer:
                read = json.loads(answer.read(_MAX_SCHEMA_BYTES))
        except OSError as error:
            raise ConnectionError(f"no OpenEnv server answers at {address}: {error}") from error
        except ValueError as error:
            raise ValueError(f"{address} is no JSON: set action_field") from error
        return dict(read.get("action", {})) if isinstance(read, dict) else {}

    def _text(self, result: dict[str, Any]) -> str:
        seen = result.get("observation", {})
        if self._shown_field:
            if self._shown_field not in seen:
                raise ValueError(f"the observation has no field {self._shown_field!r}, only {sorted(seen)}")
            shown = seen[self._shown_field]
            return shown if isinstance(shown, str) else json.dumps(shown, ensure_ascii=False)
        texts = [value for value in seen.values() if isinstance(value, str) and value.strip()]
        return texts[0] if len(texts) == 1 else json.dumps(seen, ensure_ascii=False)


def _why(data: dict[str, Any]) -> str:
    """The message of an error, and what pydantic found wrong with which field."""
    found = [
        f"{'.'.join(map(str, one.get('loc', ())))}: {one['msg']}"
        for one in data.get("errors") or ()
        if isinstance(one, dict) and "msg" in one
    ]
    return "; ".join(found) or str(data.get("message"))


class _NotTaken(Exception):
    """The server does not take an action."""


def _invalid(text: str) -> Step:
    return Step(text=text, parts={"moves": 1.0, "invalid": 1.0})
