"""Asking a language model behind a URL: one request, its limits, and what may be tried again. The standard library's HTTP.

The protocol is that of OpenAI's ``/chat/completions``, which most servers speak. Proxies are those of the environment
(``HTTPS_PROXY``, ``NO_PROXY``).
"""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llamarl.running_time import running_s

__all__ = ["ChatClient", "ChatFailed", "ChatReply"]

_MAX_REPLY_BYTES = 4 << 20
_CHUNK_BYTES = 1 << 16
_MAX_DETAIL = 300
_PASSING = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
"""Statuses of a server that may answer a moment later."""


@dataclass(frozen=True, slots=True)
class ChatReply:
    """What the model said, and what it cost."""

    text: str
    prompt_tokens: int
    completion_tokens: int


class ChatFailed(Exception):
    """No reply.

    Attributes:
        may_pass: Whether another attempt may do better.
        wait_s: Seconds after which the server asks to be tried again; 0 where it does not say.
        timed_out: Whether the time was up.
    """

    def __init__(self, detail: str, *, may_pass: bool, wait_s: float = 0.0, timed_out: bool = False) -> None:
        super().__init__(detail)
        self.may_pass, self.wait_s, self.timed_out = may_pass, wait_s, timed_out


class ChatClient:
    """One model of one server. Safe to use from several threads."""

    def __init__(self, url: str, model: str, *, api_key: str = "") -> None:
        """
        Args:
            url: Up to and without ``/chat/completions``.
            api_key: Sent as a bearer token; never part of an error.
        """
        self.url = f"{url.rstrip('/')}/chat/completions"
        self._model = model
        self._key = api_key

    def ask(self, messages: Sequence[Mapping[str, str]], *, until_s: float, **options: Any) -> ChatReply:
        """One request.

        Args:
            until_s: On ``running_s``: nothing is waited for beyond it.
            options: Further keys of the request, such as ``temperature``, ``max_tokens``, ``seed``.

        Raises:
            ChatFailed: The server cannot be reached, refuses, is late, or says what is no reply.
        """
        left_s = until_s - running_s()
        if left_s <= 0:
            raise ChatFailed("no time was left", may_pass=False, timed_out=True)
        body = json.dumps({"model": self._model, "messages": list(messages), **options}).encode()
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        request = urllib.request.Request(self.url, data=body, headers=headers, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=left_s) as response:
                data = _read(response, until_s)
        except urllib.error.HTTPError as error:
            said = self._clean(error.read(_MAX_DETAIL).decode(errors="replace"))
            detail = f"{self.url} refused with status {error.code}: {said or error.reason}"
            wait_s = _seconds(error.headers.get("Retry-After"))
            raise ChatFailed(detail, may_pass=error.code in _PASSING, wait_s=wait_s) from None
        except TimeoutError:
            raise ChatFailed(f"{self.url} gave no reply in time", may_pass=False, timed_out=True) from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, TimeoutError):
                raise ChatFailed(f"{self.url} gave no reply in time", may_pass=False, timed_out=True) from None
            detail = f"{self.url} cannot be reached: {self._clean(str(reason) or type(reason).__name__)}"
            raise ChatFailed(detail, may_pass=True) from None
        return self._reply(data)

    def _reply(self, data: bytes) -> ChatReply:
        try:
            said: Any = json.loads(data)
            text = said["choices"][0]["message"]["content"]
            usage = said.get("usage") or {}
            costs = [int(usage.get(name) or 0) for name in ("prompt_tokens", "completion_tokens")]
            if not isinstance(text, str):
                raise TypeError("its content is no text")
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
            shown = self._clean(data[:_MAX_DETAIL].decode(errors="replace"))
            detail = f"{self.url} sent what is no chat completion ({type(error).__name__}: {error}): {shown}"
            raise ChatFailed(detail, may_pass=True) from None
        return ChatReply(text, *costs)

    def _clean(self, text: str) -> str:
        """One short line, without the key."""
        shown = " ".join(text.split())[:_MAX_DETAIL]
        return shown.replace(self._key, "***") if self._key else shown


def _read(response: Any, until_s: float) -> bytes:
    data = bytearray()
    while chunk := response.read1(_CHUNK_BYTES):
        data += chunk
        if len(data) > _MAX_REPLY_BYTES:
            raise ChatFailed(f"its reply is longer than {_MAX_REPLY_BYTES >> 20} MiB", may_pass=False)
        if running_s() > until_s:
            raise TimeoutError
    return bytes(data)


def _seconds(header: str | None) -> float:
    """Of ``Retry-After``, where it is a number of seconds."""
    try:
        return max(0.0, min(float(header or 0), 3600.0))
    except ValueError:
        return 0.0
