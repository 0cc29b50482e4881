"""The state of a rank after a tick, in memory that outlives its process once the controller holds it.

rank: executor.journal(k) ─▶ segment ─▶ KeptState in its report ─▶ controller holds the segment ─▶ a new process reads it

On another host the controller holds a copy (:mod:`llamarl.runtime.copy_to_controller`), which the
new process reads over a socket.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from llamarl.errors import ChannelError
from llamarl.transports.checksum import digest
from llamarl.transports.remote_segment import copy_of
from llamarl.transports.segments import Segment, SegmentHandle, is_elsewhere, open_segment

__all__ = ["MAX_STATE_BYTES", "KeptState", "read_state", "write_state"]

MAX_STATE_BYTES = 64 << 20
"""What is larger is not kept: its rank is not brought up again."""


@dataclass(frozen=True, slots=True)
class KeptState:
    """Where it lies."""

    segment: SegmentHandle
    nbytes: int
    checksum: int


def write_state(state: bytes) -> tuple[Segment, KeptState]:
    """A segment of this process that holds ``state``.

    Raises:
        ChannelError: There is no memory for it.
    """
    segment = Segment(max(1, len(state)))
    segment.bytes[: len(state)] = np.frombuffer(state, np.uint8)
    return segment, KeptState(segment.handle, len(state), digest(state))


def read_state(kept: KeptState, deadline_s: float = 60.0) -> bytes:
    """What was written.

    Args:
        deadline_s: Where it lies on another host.

    Raises:
        ChannelError: It is not there any more, or not what it was.
        DeadlineExceeded: It did not come in time.
    """
    away = is_elsewhere(kept.segment)
    segment = copy_of(kept.segment, deadline_s) if away else open_segment(kept.segment)
    try:
        state = bytes(segment.bytes[: kept.nbytes])
    finally:
        segment.close()
    if digest(state) != kept.checksum:
        raise ChannelError(f"a kept state of {kept.nbytes} bytes does not match its checksum; resume the run")
    return state
