"""Channels for data: lists of items (most often groups of responses) from source ranks straight to sink ranks.

    sender                                                     receiver
    parts = one list a sink rank (SCATTER) or one for all      open the segment (once a slot)
    pickle each, copy into slot  seq % (capacity + 1)          copy my part into private memory
    handle = (segment, sequence, checksum of the table)  ──▶   checksum, unpickle over the private copy

The handle is a few hundred bytes whatever the payload. A part is pickled with protocol 5, its arrays out of band, so an
array is copied once into the segment and once out of it, and the receiver's arrays are its own: writable, and stable
when the slot is written again. ``capacity + 1`` slots are reused in turn, so a token stays whole until ``capacity``
later ones have been sent; a reader that comes too late is told so by the slot's sequence number.
"""

from __future__ import annotations

import os
import pickle
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from llamarl.channels.base import ChannelKind, ChannelSpec, Handle
from llamarl.channels.segments import MappedSegment, Segment, SegmentHandle, open_segment
from llamarl.errors import ChannelError, DeadlineExceeded
from llamarl.running_time import running_s

__all__ = ["DataHandle", "DataReceiver", "DataSender", "split_by_cost"]

_ALIGN = 64
_COPY_CHUNK = 64 << 20  # bytes between two looks at the clock
_SLOT_HEADER = struct.Struct("<Q")  # sequence number of the token in the slot; 0 while it is being written
_ENTRY = struct.Struct("<QQQ")  # offset, bytes, checksum of one part


@dataclass(frozen=True, slots=True)
class DataHandle:
    """One source rank's share of one token. Small and picklable."""

    channel: str
    tick: int
    source_rank: int
    sequence: int
    """How many tokens this sender had sent, this one included."""
    slot: int
    segment: SegmentHandle
    num_parts: int
    table_checksum: int


class DataSender:
    """The source rank's end of a GATHER, SCATTER or BROADCAST channel.

    Args:
        rank: This source rank. On a BROADCAST channel only rank 0 publishes; the others' handle is None.
        num_sink_ranks: Parts of a SCATTER: the sink's data-parallel ranks.
    """

    def __init__(self, spec: ChannelSpec, *, rank: int, num_source_ranks: int, num_sink_ranks: int) -> None:
        _check_ranks(spec, rank, num_source_ranks, num_source_ranks, num_sink_ranks)
        self._spec = spec
        self._rank = rank
        self._num_parts = num_sink_ranks if spec.kind is ChannelKind.SCATTER else 1
        self._slots: list[Segment | None] = [None] * (spec.capacity + 1)
        self._sequence = 0
        self._closed = False

    def send(self, tick: int, payload: Any) -> Handle:
        """Publish ``payload``: a sequence of items (GATHER, SCATTER), or any one object (BROADCAST).

        Raises:
            ChannelError: It cannot be pickled, or there is no memory for it.
        """
        if self._closed:
            raise ValueError(f"channel {self._spec.name!r}: send after close")
        if self._spec.kind is ChannelKind.BROADCAST:
            if self._rank != 0:
                return None
            parts: list[Any] = [payload]
        else:
            if not isinstance(payload, Sequence) or isinstance(payload, (str, bytes)):
                raise ValueError(
                    f"channel {self._spec.name!r} ({self._spec.kind.value}) carries a list of items, "
                    f"got {type(payload).__name__} from {self._spec.source!r} rank {self._rank}"
                )
            # Ranks start at different parts, so that leftovers of several sources do not all land on part 0.
            parts = split_by_cost(payload, self._num_parts, first=self._rank)
        encoded = [self._encode(tick, part) for part in parts]
        return self._publish(tick, encoded)

    def close(self) -> None:
        """Free the slots. Idempotent; receivers that have a slot open keep it."""
        self._closed = True
        for segment in self._slots:
            if segment is not None:
                segment.close()
        self._slots = [None] * len(self._slots)

    def _encode(self, tick: int, part: Any) -> list[memoryview]:
        buffers: list[pickle.PickleBuffer] = []
        try:
            body = pickle.dumps(part, protocol=5, buffer_callback=buffers.append)
            views = [memoryview(body), *(b.raw() for b in buffers)]
        except (pickle.PicklingError, TypeError, AttributeError, BufferError) as error:
            raise ChannelError(
                f"channel {self._spec.name!r}: {self._spec.source!r} rank {self._rank} cannot pickle its token of tick "
                f"{tick}: {error}; send plain values and NumPy arrays"
            ) from error
        lengths = struct.pack(f"<{len(views) + 1}Q", len(views), *(v.nbytes for v in views))
        return [memoryview(lengths), *views]

    def _publish(self, tick: int, parts: list[list[memoryview]]) -> DataHandle:
        offset = _aligned(_SLOT_HEADER.size + _ENTRY.size * len(parts))
        placed: list[tuple[int, int]] = []
        for views in parts:
            size = sum(_aligned(v.nbytes) for v in views)
            placed.append((offset, size))
            offset += size
        self._sequence += 1
        slot = self._sequence % len(self._slots)
        segment = self._slots[slot]
        if segment is None or segment.size < offset:
            if segment is not None:
                segment.close()
            segment = self._slots[slot] = Segment(offset + offset // 4)  # room to grow without a new segment
        memory = segment.bytes
        raw = memory.data
        _SLOT_HEADER.pack_into(raw, 0, 0)
        table = bytearray()
        for views, (start, size) in zip(parts, placed, strict=True):
            _write(memory[start : start + size], views)
            table += _ENTRY.pack(start, size, xxhash.xxh3_64_intdigest(raw[start : start + size]))
        memory[_SLOT_HEADER.size : _SLOT_HEADER.size + len(table)] = np.frombuffer(table, np.uint8)
        _SLOT_HEADER.pack_into(raw, 0, self._sequence)
        return DataHandle(
            self._spec.name,
            tick,
            self._rank,
            self._sequence,
            slot,
            segment.handle,
            len(parts),
            xxhash.xxh3_64_intdigest(table),
        )


class DataReceiver:
    """The sink rank's end of a GATHER, SCATTER or BROADCAST channel.

    Args:
        rank: This sink rank, or for SCATTER its data-parallel rank: which part is its own.
    """

    def __init__(self, spec: ChannelSpec, *, rank: int, num_source_ranks: int, num_sink_ranks: int) -> None:
        _check_ranks(spec, rank, num_sink_ranks, num_source_ranks, num_sink_ranks)
        self._spec = spec
        self._rank = rank
        self._num_source_ranks = num_source_ranks
        self._num_parts = num_sink_ranks if spec.kind is ChannelKind.SCATTER else 1
        self._open: dict[tuple[int, int], MappedSegment] = {}

    def receive(self, handles: tuple[Handle, ...], deadline_s: float) -> Any:
        """Pull one token: the list of this rank's items in source-rank order, or the broadcast object.

        Raises:
            ChannelError: A source is gone, or its bytes are not the ones the handle promises.
            DeadlineExceeded: It took longer than ``deadline_s`` seconds.
        """
        if len(handles) != self._num_source_ranks:
            raise ValueError(
                f"channel {self._spec.name!r} joins {self._num_source_ranks} source ranks, got {len(handles)} handles"
            )
        deadline = _Deadline(self._spec, self._rank, deadline_s)
        if self._spec.kind is ChannelKind.BROADCAST:
            return self._pull(self._check(handles[0], 0), deadline)
        items: list[Any] = []
        for source_rank, handle in enumerate(handles):
            items.extend(self._pull(self._check(handle, source_rank), deadline))
        return items

    def close(self) -> None:
        """Unmap what was open. Idempotent."""
        for segment in self._open.values():
            segment.close()
        self._open.clear()

    def _check(self, handle: Any, source_rank: int) -> DataHandle:
        if not isinstance(handle, DataHandle) or (handle.channel, handle.source_rank) != (self._spec.name, source_rank):
            raise ValueError(f"channel {self._spec.name!r}: {handle!r} is not a handle of source rank {source_rank}")
        if handle.num_parts != self._num_parts:
            raise ValueError(
                f"channel {self._spec.name!r}: the source split its token in {handle.num_parts} parts, "
                f"the sink counts {self._num_parts}; both ends must be made with the same num_sink_ranks"
            )
        return handle

    def _pull(self, handle: DataHandle, deadline: _Deadline) -> Any:
        what = (
            f"channel {self._spec.name!r}: {self._spec.sink!r} rank {self._rank} cannot read the token of tick "
            f"{handle.tick} from {self._spec.source!r} rank {handle.source_rank} (process {handle.segment.pid})"
        )
        try:
            memory = self._map(handle).bytes
        except ChannelError as error:
            raise ChannelError(f"{what}: {error}; restart the source and resume the run") from error
        table_end = _SLOT_HEADER.size + _ENTRY.size * handle.num_parts
        table = memory[_SLOT_HEADER.size : table_end].tobytes() if table_end <= len(memory) else b""
        part = self._rank if self._spec.kind is ChannelKind.SCATTER else 0
        if xxhash.xxh3_64_intdigest(table) == handle.table_checksum:
            offset, size, checksum = _ENTRY.unpack_from(table, _ENTRY.size * part)
            private = np.empty(size, np.uint8)
            for start in range(0, size, _COPY_CHUNK):
                deadline.check(handle)
                end = min(size, start + _COPY_CHUNK)
                private[start:end] = memory[offset + start : offset + end]
            deadline.check(handle)
            if xxhash.xxh3_64_intdigest(private.data) == checksum:
                return _decode(private)
        (sequence,) = _SLOT_HEADER.unpack_from(memory.data)
        if sequence != handle.sequence:
            raise ChannelError(
                f"{what}: its slot holds sequence {sequence}, expected {handle.sequence}; it was overwritten because "
                f"more than capacity={self._spec.capacity} later tokens were sent: raise the channel's capacity"
            )
        raise ChannelError(
            f"{what}: the bytes do not match their checksum; the memory was altered or torn, resume the run"
        )

    def _map(self, handle: DataHandle) -> MappedSegment:
        key = (handle.source_rank, handle.slot)
        segment = self._open.get(key)
        if segment is None or segment.handle != handle.segment:
            if segment is not None:
                segment.close()
                del self._open[key]
            segment = self._open[key] = open_segment(handle.segment)
        return segment


def split_by_cost(items: Sequence[Any], num_parts: int, *, first: int = 0) -> list[list[Any]]:
    """Split ``items`` into ``num_parts`` lists of nearly equal cost; the order inside a list is the order of ``items``.

    The costliest item goes first, each to the part that is cheapest so far (longest processing time; at most 4/3 of the
    best split). Ties go to the lower item and to the part that follows ``first``, so the result depends on costs alone.

    Args:
        items: Cost is ``item.num_tokens`` where there is one, else 1.
    """
    if num_parts < 1:
        raise ValueError(f"num_parts must be >= 1, got {num_parts}")
    costs = [int(getattr(item, "num_tokens", 1)) for item in items]
    preference = [(first + i) % num_parts for i in range(num_parts)]
    load = [0] * num_parts
    count = [0] * num_parts
    chosen: list[int] = [0] * len(items)
    for index in sorted(range(len(items)), key=lambda i: (-costs[i], i)):
        part = min(preference, key=lambda p: (load[p], count[p]))
        chosen[index] = part
        load[part] += costs[index]
        count[part] += 1
    parts: list[list[Any]] = [[] for _ in range(num_parts)]
    for index, item in enumerate(items):
        parts[chosen[index]].append(item)
    return parts


class _Deadline:
    def __init__(self, spec: ChannelSpec, rank: int, seconds: float) -> None:
        self._spec, self._rank, self._seconds = spec, rank, seconds
        self._started = running_s()

    def check(self, handle: DataHandle) -> None:
        waited = running_s() - self._started
        if waited > self._seconds:
            raise DeadlineExceeded(
                f"channel {self._spec.name!r}: {self._spec.sink!r} rank {self._rank} (process {os.getpid()}) has been "
                f"reading the token of tick {handle.tick} from {self._spec.source!r} rank {handle.source_rank} for "
                f"{waited:.1f} s, limit {self._seconds:g} s; raise the limit or send less"
            )


def _check_ranks(spec: ChannelSpec, rank: int, num_own: int, num_source_ranks: int, num_sink_ranks: int) -> None:
    if spec.kind is ChannelKind.WEIGHTS:
        raise ValueError(f"channel {spec.name!r} carries weights: use llamarl.channels.weights")
    if num_source_ranks < 1 or num_sink_ranks < 1 or not 0 <= rank < num_own:
        raise ValueError(
            f"channel {spec.name!r}: rank {rank} of {num_own}, {num_source_ranks} source and {num_sink_ranks} sink ranks"
        )
    if spec.capacity < 1:
        raise ValueError(f"channel {spec.name!r}: capacity must be >= 1, got {spec.capacity}")


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _write(memory: npt.NDArray[np.uint8], views: list[memoryview]) -> None:
    position = 0
    for view in views:
        end = position + view.nbytes
        memory[position:end] = np.frombuffer(view, np.uint8)
        position = position + _aligned(view.nbytes)
        memory[end:position] = 0  # padding is part of the checksum


def _decode(private: npt.NDArray[np.uint8]) -> Any:
    memory = private.data
    (count,) = struct.unpack_from("<Q", memory)
    lengths = struct.unpack_from(f"<{count}Q", memory, 8)
    position = _aligned(8 * (count + 1))
    views = []
    for length in lengths:
        views.append(memory[position : position + length])
        position += _aligned(length)
    return pickle.loads(views[0], buffers=views[1:])
