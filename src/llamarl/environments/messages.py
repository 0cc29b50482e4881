"""What passes between a pool and its workers, in frames (llamarl/frames.py).

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
from llamarl.frames import BrokenFrame, frame
from llamarl.types import Failure, Score

__all__ = ["Answer", "Answered", "Ready", "Refused", "pack_request", "parse_reply", "plain_text", "reply_text"]

MAX_REPLY_BYTES = 1 << 26
KIND = 0
"""Of all frames: which one it is, what comes before says."""


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
    return frame(KIND, pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))


def reply_text(reply: Ready | Refused | Answered) -> bytes:
    """What a worker says, in JSON."""
    return _ENVELOPE.dump_json(_Envelope(reply))


def parse_reply(text: bytes) -> Ready | Refused | Answered:
    """A worker's reply, every value of it checked.

    Raises:
        BrokenFrame: It is none.
    """
    try:
        return _ENVELOPE.validate_json(text).reply
    except ValueError as error:
        raise BrokenFrame(f"{type(error).__name__} in {text[:80]!r}") from error


def plain_text(text: str, most: int) -> str:
    """Text that can be written as UTF-8, of limited length."""
    return text[:most].encode("utf-8", "backslashreplace").decode()
