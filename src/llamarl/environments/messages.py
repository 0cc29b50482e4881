"""What passes between a pool and its workers, and how it lies on the socket: a length, then so many bytes.

Requests go from the process that trusts nobody to one that may be anything by now, as pickles. Replies come back from a
process in which user code ran: plain JSON, of which pydantic checks every value.

Every job has a number that no other of the pool has, and the reply repeats it: a reply that comes late, or from another
process that the worker's judge started, is nobody's verdict.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Annotated, Any

import pydantic
from pydantic import AfterValidator, ConfigDict, TypeAdapter

from llamarl.environments.episode import Observation, Step
from llamarl.types import Failure, Score

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
    "plain_text",
]

LENGTH_BYTES = 8
_MAX_REPLY_BYTES = 1 << 26


class BrokenReply(Exception):
    """Bytes from a worker that are no reply."""


def _of_worker(failure: Failure) -> Failure:
    if failure.kind not in ("exception", "not_a_number", "environment"):
        raise ValueError(f"a worker cannot say {failure.kind!r}")
    return failure


_WorkerFailure = Annotated[Failure, AfterValidator(_of_worker)]
Answer = tuple[Score | _WorkerFailure, ...] | Observation | Step | _WorkerFailure
"""Outcomes of a job's samples, in their order; or what an environment said."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The worker has made its task."""

    pid: int


@dataclass(frozen=True, slots=True)
class Refused:
    """The task cannot be made."""

    cause: str


@dataclass(frozen=True, slots=True)
class Answered:
    """What came of one job."""

    job: int
    answer: Answer
    retire: bool = False
    """The worker ends by its own wish, and another should take its place."""


@pydantic.dataclasses.dataclass(config=ConfigDict(strict=True, extra="forbid", allow_inf_nan=False))
class _Envelope:
    reply: Ready | Refused | Answered


_ENVELOPE = TypeAdapter(_Envelope)


def pack_request(message: Any) -> bytes:
    """A message to a worker as it stands on the socket."""
    return _pack(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))


def pack_reply(reply: Ready | Refused | Answered) -> bytes:
    """A message from a worker as it stands on the socket."""
    return _pack(_ENVELOPE.dump_json(_Envelope(reply)))


def parse_reply(frame: bytes) -> Ready | Refused | Answered:
    """A worker's reply, every value of it checked.

    Raises:
        BrokenReply: It is none.
    """
    try:
        return _ENVELOPE.validate_json(frame).reply
    except ValueError as error:
        raise BrokenReply(f"{type(error).__name__} in {frame[:80]!r}") from error


def plain_text(text: str, most: int) -> str:
    """Text that can be written as UTF-8, of limited length."""
    return text[:most].encode("utf-8", "backslashreplace").decode()


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
