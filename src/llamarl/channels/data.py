"""Channels for data: lists of items (most often groups of responses) from source ranks straight to sink ranks.

    sender                                                     receiver
    parts = one list a sink rank (SCATTER) or one for all      open the buffer (once a slot)
    encode each, copy into slot  seq % (capacity + 1)          read the table, then my part into private memory
    handle = (address, sequence, checksum of the table)  ──▶   checksum, decode over the private copy

The handle is a few hundred bytes whatever the payload. A part is encoded as plain values
(:mod:`llamarl.channels.plain_values`), its arrays out of band, so an array is copied once into the
slot and once out of it, and the receiver's arrays are its own: writable, and stable when the slot
is written again. ``capacity + 1`` slots are reused in turn, so a token stays whole until
``capacity`` later ones have been sent; a reader that comes too late is told so by the generation in
the slot's header. On a ``kept`` channel a slot gets new memory each time: who holds the old one
reads it as long as it likes.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from llamarl.channels.base import ChannelKind, ChannelSpec, Handle
from llamarl.channels.plain_values import ALIGN, framed, from_bytes
from llamarl.errors import ChannelError
from llamarl.models.packing import balance
from llamarl.transports.base import Address, RemoteBuffer, SinkTransport, SourceBuffer, SourceTransport
from llamarl.transports.checksum import digest
from llamarl.transports.deadline import Clock
from llamarl.transports.segments import SegmentHandle, is_elsewhere
from llamarl.transports.shared_memory import SharedMemorySink, SharedMemorySource
from llamarl.transports.slots import HEADER_BYTES, SlotHeader, SlotState, Word, header_words, parse_header

__all__ = ["DataHandle", "DataReceiver", "DataSender", "Shares", "check_token"]

_COPY_CHUNK = 64 << 20  # bytes between two looks at the clock
_ENTRY = struct.Struct("<QQQ")  # offset behind the control part, bytes, checksum of one part


@dataclass(frozen=True, slots=True)
class DataHandle:
    """One source rank's share of one token. Small and picklable."""

    channel: str
    tick: int
    source_rank: int
    sequence: int
    """How many tokens this sender had sent, this one included."""
    slot: int
    address: Address
    pid: int
    num_parts: int
    table_checksum: int
    original: SegmentHandle | None = None
    """Where the bytes were first, if ``address`` is a copy: sinks that share memory with that read
    there as long as it is there."""


class Shares(list[Any]):
    """A list of items in consecutive shares, each of which a SCATTER splits by itself: so who gets
    what does not depend on how many shares a source rank has.

    Args:
        shares: (the part that the first of its leftovers goes to, its items).
    """

    def __init__(self, shares: Iterable[tuple[int, Sequence[Any]]]) -> None:
        self.shares = tuple(shares)
        super().__init__(item for _, items in self.shares for item in items)


class DataSender:
    """The source rank's end of a GATHER, SCATTER or BROADCAST channel.

    Args:
        rank: This source rank. On a BROADCAST channel only rank 0 publishes; the others' handle is None.
        num_sink_ranks: Parts of a SCATTER: the sink's data-parallel ranks.
    """

    def __init__(
        self,
        spec: ChannelSpec,
        *,
        rank: int,
        num_source_ranks: int,
        num_sink_ranks: int,
        transport: SourceTransport | None = None,
    ) -> None:
        self._spec = spec
        self._rank = rank
        self._num_parts = num_sink_ranks if spec.kind is ChannelKind.SCATTER else 1
        self._transport = transport if transport is not None else SharedMemorySource()
        self._slots: list[SourceBuffer | None] = [None] * (spec.capacity + 1)
        self._sequence = 0

    def send(self, tick: int, payload: Any) -> Handle:
        """Publish ``payload``: a sequence of items (GATHER, SCATTER), or any one object (BROADCAST).

        Raises:
            ChannelError: It holds something that is no plain value, or there is no memory for it.
        """
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
            shares = payload.shares if isinstance(payload, Shares) else ((self._rank, payload),)
            parts = [[] for _ in range(self._num_parts)]
            for first, items in shares:
                costs = [int(getattr(item, "num_tokens", 1)) for item in items]
                for part, chosen in zip(parts, balance(costs, self._num_parts, first=first), strict=True):
                    part += [items[i] for i in chosen]
        encoded = [self._encode(tick, part) for part in parts]
        return self._publish(tick, encoded)

    def close(self) -> None:
        """Free the slots. Idempotent; receivers that have a slot open keep it."""
        for buffer in self._slots:
            if buffer is not None:
                buffer.close()
        self._slots = [None] * len(self._slots)
        self._transport.close()

    def _encode(self, tick: int, part: Any) -> list[memoryview]:
        try:
            return framed(part)
        except (TypeError, ValueError) as error:
            raise ChannelError(
                f"channel {self._spec.name!r}: {self._spec.source!r} rank {self._rank} cannot send its token of tick "
                f"{tick}: {error}; send plain values, NumPy arrays and records of llamarl.types"
            ) from error

    def _publish(self, tick: int, parts: list[list[memoryview]]) -> DataHandle:
        placed: list[tuple[int, int]] = []
        end = 0
        for views in parts:
            size = sum(_aligned(v.nbytes) for v in views)
            placed.append((end, size))
            end += size
        self._sequence += 1
        slot = self._sequence % len(self._slots)
        buffer = self._slots[slot]
        if buffer is None or buffer.data.numel() < end or self._spec.kept:
            if buffer is not None:
                buffer.close()
            room = max(ALIGN, end if self._spec.kept else end + end // 4)  # to grow without a new buffer
            buffer = self._slots[slot] = self._transport.register(_control_bytes(len(parts)), room)
        words = header_words(buffer.control.numpy())
        words[Word.STATE] = SlotState.WRITING
        words[Word.GENERATION] = self._sequence
        words[Word.VERSION] = tick % (1 << 64)  # tokens that lie on a delayed edge at start have ticks below 0
        table = bytearray()
        for views, (start, size) in zip(parts, placed, strict=True):
            part = buffer.data[start : start + size]
            _write(part, views)
            table += _ENTRY.pack(start, size, digest(part.numpy().data))
        checksum = digest(table)
        buffer.control[HEADER_BYTES : HEADER_BYTES + len(table)] = torch.frombuffer(table, dtype=torch.uint8)
        words[Word.CHECKSUM] = checksum
        words[Word.STATE] = SlotState.READY
        return DataHandle(
            channel=self._spec.name,
            tick=tick,
            source_rank=self._rank,
            sequence=self._sequence,
            slot=slot,
            address=buffer.address,
            pid=os.getpid(),
            num_parts=len(parts),
            table_checksum=checksum,
        )


class DataReceiver:
    """The sink rank's end of a GATHER, SCATTER or BROADCAST channel.

    Args:
        rank: This sink rank, or for SCATTER its data-parallel rank: which part is its own.
    """

    def __init__(
        self,
        spec: ChannelSpec,
        *,
        rank: int,
        num_source_ranks: int,
        num_sink_ranks: int,
        transport: SinkTransport | None = None,
    ) -> None:
        self._spec = spec
        self._rank = rank
        self._num_source_ranks = num_source_ranks
        self._num_parts = num_sink_ranks if spec.kind is ChannelKind.SCATTER else 1
        self._transport = transport if transport is not None else SharedMemorySink()
        self._open: dict[tuple[int, int], tuple[Address, RemoteBuffer]] = {}

    def receive(self, handles: tuple[Handle, ...], deadline_s: float) -> Any:
        """Pull one token: the list of this rank's items in source-rank order, or the broadcast object.

        Raises:
            ChannelError: A source is gone, or its bytes are not the ones the handle promises.
            DeadlineExceeded: It took longer than ``deadline_s`` seconds.
        """
        if len(handles) != self._num_source_ranks and not (self._spec.elastic and handles):
            raise ValueError(
                f"channel {self._spec.name!r} joins {self._num_source_ranks} source ranks, got {len(handles)} handles"
            )
        who = f"channel {self._spec.name!r}: {self._spec.sink!r} rank {self._rank} (process {os.getpid()}) is reading"
        clock = Clock(deadline_s, who)
        if self._spec.kind is ChannelKind.BROADCAST:
            return self._pull(handles[0], clock)
        items: list[Any] = []
        for handle in handles:
            items.extend(self._pull(handle, clock))
        return items

    def close(self) -> None:
        """Unmap what was open. Idempotent."""
        for _, remote in self._open.values():
            remote.close()
        self._open.clear()
        self._transport.close()

    def _pull(self, handle: DataHandle, clock: Clock) -> Any:
        doing = f"the token of tick {handle.tick} from {self._spec.source!r} rank {handle.source_rank}"
        what = f"channel {self._spec.name!r}: {self._spec.sink!r} rank {self._rank} cannot read {doing} (process {handle.pid})"
        try:
            remote = self._connect(handle, clock, doing)
            remote.forget()
            private = self._read_part(handle, remote, clock, doing)
            if private is not None:
                return from_bytes(private.numpy().data)
            header = self._header(remote, clock, doing)
        except ValueError as error:
            raise ChannelError(f"{what}: {error}") from error
        except ChannelError as error:
            raise ChannelError(f"{what}: {error}; restart the source and resume the run") from error
        if header is None or header.generation != handle.sequence:
            raise ChannelError(
                f"{what}: its slot holds {f'sequence {header.generation}' if header else 'no token'}, expected "
                f"{handle.sequence}; it was overwritten because more than capacity={self._spec.capacity} later tokens were "
                "sent: raise the channel's capacity"
            )
        raise ChannelError(
            f"{what}: the bytes do not match their checksum; the memory was altered or torn, resume the run"
        )

    def _read_part(self, handle: DataHandle, remote: RemoteBuffer, clock: Clock, doing: str) -> torch.Tensor | None:
        """This rank's part in private memory, proved; None where a checksum does not agree."""
        table = torch.empty(_ENTRY.size * handle.num_parts, dtype=torch.uint8)
        remote.read(HEADER_BYTES, table, clock(doing), fresh=True)
        if digest(table.numpy().data) != handle.table_checksum:
            return None
        part = self._rank if self._spec.kind is ChannelKind.SCATTER else 0
        offset, size, checksum = _ENTRY.unpack_from(table.numpy().data, _ENTRY.size * part)
        offset += _control_bytes(handle.num_parts)
        private = torch.empty(size, dtype=torch.uint8)
        for start in range(0, size, _COPY_CHUNK):
            end = min(size, start + _COPY_CHUNK)
            remote.read(offset + start, private[start:end], clock(doing))
        clock(doing)
        return private if digest(private.numpy().data) == checksum else None

    def _header(self, remote: RemoteBuffer, clock: Clock, doing: str) -> SlotHeader | None:
        data = torch.empty(HEADER_BYTES, dtype=torch.uint8)
        remote.read(0, data, clock(doing), fresh=True)
        return parse_header(data.numpy())

    def _connect(self, handle: DataHandle, clock: Clock, doing: str) -> RemoteBuffer:
        key = (handle.source_rank, handle.slot)
        known = self._open.get(key)
        if known is None or known[0] != handle.address:
            if known is not None:
                known[1].close()
                del self._open[key]
            known = self._open[key] = (handle.address, self._opened(handle, clock, doing))
        return known[1]

    def _opened(self, handle: DataHandle, clock: Clock, doing: str) -> RemoteBuffer:
        if handle.original is not None and not is_elsewhere(handle.original):
            with contextlib.suppress(ChannelError):  # its source has gone, or sent others since
                return self._transport.open(handle.original, clock(doing))
        return self._transport.open(handle.address, clock(doing))


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


def _control_bytes(num_parts: int) -> int:
    """Header and table of a slot."""
    return _aligned(HEADER_BYTES + _ENTRY.size * num_parts)


def _write(into: torch.Tensor, views: list[memoryview]) -> None:
    memory = into.numpy()
    position = 0
    for view in views:
        end = position + view.nbytes
        memory[position:end] = np.frombuffer(view, np.uint8)
        position = position + _aligned(view.nbytes)
        memory[end:position] = 0  # padding is part of the checksum


def check_token(token: bytes | memoryview, num_parts: int, table_checksum: int) -> list[Any]:
    """Check a token that was found on a disk as its readers will: every checksum, and that plain values are in it.

    Args:
        token: All bytes of its slot.

    Returns:
        The values of each part.

    Raises:
        ValueError: It is torn, or holds something else.
    """
    memory = np.frombuffer(token, np.uint8)
    table = memory[HEADER_BYTES : HEADER_BYTES + _ENTRY.size * num_parts]
    if len(table) != _ENTRY.size * num_parts or digest(table.data) != table_checksum:
        raise ValueError(f"the table of a token of {len(token)} bytes does not match its checksum")
    parts = []
    for offset, size, checksum in _ENTRY.iter_unpack(table.data):
        start = offset + _control_bytes(num_parts)
        if start + size > len(memory) or digest(memory[start : start + size].data) != checksum:
            raise ValueError(f"a part of a token of {len(token)} bytes does not match its checksum")
        parts.append(from_bytes(memory[start : start + size].copy().data))
    return parts
