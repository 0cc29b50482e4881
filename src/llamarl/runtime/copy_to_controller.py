"""Copies what ranks of other hosts made to this machine before their reports count: it then outlives rank and host.

    report of a rank elsewhere ─┬─ tokens on data channels ─▶ copied into memory of this process ─▶ the same report, which names that
                                ├─ state after the tick    ─▶ copied too
                                └─ weights                 ─▶ stay where they are: they are as large as the model, and are made again

Readers on any host then take a tick's data from this machine, but those that share memory with the
rank that made it. A segment that lies on this machine already is left to ``HeldSegments``, which
copies nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from llamarl.channels.base import Handle
from llamarl.channels.data import DataHandle
from llamarl.runtime.worker import RankReport, RankSetup
from llamarl.transports.remote_segment import copy_of
from llamarl.transports.segments import Segment, SegmentHandle, is_elsewhere

__all__ = ["copy_to_controller", "with_addresses"]

R = TypeVar("R", bound=RankReport | RankSetup)
Move = Callable[[SegmentHandle], SegmentHandle]


def copy_to_controller(result: R, deadline_s: float) -> tuple[R, list[Segment]]:
    """Copy what lies elsewhere; any thread. Closing the segments frees what nobody holds.

    Args:
        deadline_s: For each piece.

    Raises:
        ChannelError: Its process has ended, or there is no memory here.
        DeadlineExceeded: It did not come in time.
    """
    copies: dict[bytes, Segment] = {}

    def move(handle: SegmentHandle) -> SegmentHandle:
        if not is_elsewhere(handle):
            return handle
        if handle.nonce not in copies:
            copies[handle.nonce] = copy_of(handle, deadline_s)
        return copies[handle.nonce].handle

    try:
        return with_addresses(result, move), list(copies.values())
    except BaseException:
        for copy in copies.values():
            copy.close()
        raise


def with_addresses(result: R, move: Move) -> R:
    """The same with each segment of a data token, and of a state, named as ``move`` has it. Pure."""
    changes: dict[str, Any] = {}
    if isinstance(result, RankSetup):
        changes["initial_tokens"] = {name: _moved(ticks, move) for name, ticks in result.initial_tokens.items()}
    if isinstance(result, RankReport):
        changes["outputs"] = _moved(result.outputs, move)
        if result.journal is not None:
            changes["journal"] = replace(result.journal, segment=move(result.journal.segment))
    return replace(result, **changes)


K = TypeVar("K")


def _moved(handles: Mapping[K, Handle], move: Move) -> dict[K, Handle]:
    return {
        key: _moved_one(handle, handle.address, move)
        if isinstance(handle, DataHandle) and isinstance(handle.address, SegmentHandle)
        else handle
        for key, handle in handles.items()
    }


def _moved_one(handle: DataHandle, address: SegmentHandle, move: Move) -> DataHandle:
    there = move(address)
    return handle if there == address else replace(handle, address=there, original=address)
