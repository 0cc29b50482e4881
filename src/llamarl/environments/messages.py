"""What passes between a pool and its workers, and how it lies on the socket: a length, then so many bytes.

Requests go from the process that trusts nobody to one that may be anything by now, as pickles. Replies come back from a
process in which user code ran: plain JSON, read by ``parse_reply``, which takes nothing on trust but the shapes below.

    {"kind": "ready", "pid": 71}      {"kind": "refused", "cause": "..."}
    {"kind": "verdicts", "job": 5, "retire": false, "verdicts": [
        {"value": 1.0, "parts": {"correct": 1.0}}, {"failed": "exception", "detail": "..."}]}
    {"kind": "answer", "job": 6, "retire": false, "answer": {"step": {...}}}    or {"observation": {...}}, {"failed": ..}

Every request has a number that no other of the pool has, and the reply repeats it: a reply that comes late, or from another
process that the worker's judge started, is nobody's verdict.
"""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from llamarl.environments.episode import Observation, Step
from llamarl.types import Failure, FailureKind, Score

__all__ = [
    "Answer",
    "Answered",
    "BrokenReply",
    "Frames",
    "Ready",
    "Refused",
    "pack_reply",
    "pack_request",
    "parse_reply",
]

LENGTH_BYTES = 8
_MAX_REPLY_BYTES = 1 << 26
_FAILURES_OF_WORKERS = ("exception", "not_a_number")


class BrokenReply(Exception):
    """Bytes from a worker that are no reply."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The worker has made its task."""

    pid: int


@dataclass(frozen=True, slots=True)
class Refused:
    """The task cannot be made."""

    cause: str


Answer = tuple[Score | Failure, ...] | Observation | Step | Failure
"""Outcomes of a job's samples, in their order; or what an environment said."""


@dataclass(frozen=True, slots=True)
class Answered:
    """What came of one job."""

    job: int
    answer: Answer
    retire: bool
    """The worker ends by its own wish, and another should take its place."""


def pack_request(message: Any) -> bytes:
    """A message to a worker as it stands on the socket."""
    return _pack(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))


def pack_reply(message: Mapping[str, Any]) -> bytes:
    """A message from a worker as it stands on the socket."""
    return _pack(json.dumps(message, allow_nan=False).encode("ascii"))


def _pack(body: bytes) -> bytes:
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


class Frames:
    """Whole messages out of bytes that come in pieces."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, chunk: bytes) -> list[bytes]:
        """The messages that are whole with this piece.

        Raises:
            BrokenReply: A message says that it is longer than any reply is.
        """
        self._bytes += chunk
        whole = []
        while len(self._bytes) >= LENGTH_BYTES:
            length = int.from_bytes(self._bytes[:LENGTH_BYTES], "little")
            if length > _MAX_REPLY_BYTES:
                raise BrokenReply(f"a reply of {length} bytes")
            end = LENGTH_BYTES + length
            if len(self._bytes) < end:
                break
            whole.append(bytes(self._bytes[LENGTH_BYTES:end]))
            del self._bytes[:end]
        return whole


def parse_reply(frame: bytes) -> Ready | Refused | Answered:
    """A worker's reply, every value of it checked.

    Raises:
        BrokenReply: It is none.
    """
    try:
        reply = json.loads(frame)
        match reply:
            case {"kind": "ready", "pid": int(pid)}:
                return Ready(pid)
            case {"kind": "refused", "cause": str(cause)}:
                return Refused(cause)
            case {"kind": "verdicts", "job": int(job), "retire": bool(retire), "verdicts": list(verdicts)}:
                return Answered(job, tuple(_outcome(verdict) for verdict in verdicts), retire)
            case {"kind": "answer", "job": int(job), "retire": bool(retire), "answer": dict(answer)}:
                return Answered(job, _answer(answer), retire)
    except (ValueError, RecursionError) as error:
        raise BrokenReply(f"{type(error).__name__} in {frame[:80]!r}") from error
    raise BrokenReply(f"{frame[:80]!r}")


def _outcome(verdict: object) -> Score | Failure:
    match verdict:
        case {"failed": str(kind), "detail": str(detail)} if kind in _FAILURES_OF_WORKERS:
            return Failure(kind=cast(FailureKind, kind), detail=detail)
        case {"value": float(value), "parts": dict(parts)} if _all_finite(value, *parts.values()):
            return Score(value=value, parts=parts)
    raise BrokenReply(f"the verdict {str(verdict)[:80]}")


def _answer(said: Mapping[str, object]) -> Observation | Step | Failure:
    match said:
        case {"failed": str(kind), "detail": str(detail)} if kind in _FAILURES_OF_WORKERS:
            return Failure(kind="environment", detail=detail)
        case {"observation": {"text": str(text), "messages": list(messages), "tools": list(tools)}} if _all_objects(
            *messages, *tools
        ):
            return Observation(text=text, messages=tuple(messages), tools=tuple(tools))
        case {
            "step": {
                "text": str(text),
                "messages": list(messages),
                "reward": float(reward),
                "done": bool(done),
                "truncated": bool(truncated),
                "parts": dict(parts),
            }
        } if _all_objects(*messages) and _all_finite(reward, *parts.values()):
            return Step(text=text, messages=tuple(messages), reward=reward, done=done, truncated=truncated, parts=parts)
    raise BrokenReply(f"the answer {str(said)[:80]}")


def _all_objects(*values: object) -> bool:
    return all(isinstance(value, dict) for value in values)


def _all_finite(*values: object) -> bool:
    return all(type(value) is float and math.isfinite(value) for value in values)
