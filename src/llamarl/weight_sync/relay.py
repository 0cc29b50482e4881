"""A host reads a version once and passes it on: a mirror of each source slot, filled block by block as it is proved.

    source's slot ──▶ mirror on host b ──▶ mirror on host c ──▶ ...        over sockets, each block as soon as it is there
                        └─ mapped by every sink rank of b  └─ of c          served in place where that is worth it

A mirror is laid out as the slot it copies, with the same generations, so whoever reads one follows
it as it would follow a source that is still writing, and proves every block again. Whom a host
reads from is decided where the source's slot lies (:mod:`llamarl.transports.fan_out`). A host
before it that does not begin within seconds, or ends, is passed over: the blocks that are missing
come from the source itself. When a source may write a slot again, every sink has finished with it,
mirrors included.

A mirror may begin before its own readers want the version (``Relays.begin``): then the bytes travel while they work on
with the one before, and the way takes none of their time.

Memory: a host holds each version that lies on the edge once, as the source does.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from llamarl.errors import ChannelError, DeadlineExceeded, WeightSyncError
from llamarl.transports.base import RemoteBuffer, SinkTransport, SourceBuffer
from llamarl.transports.checksum import block_digest
from llamarl.transports.deadline import Clock, deadline_clock
from llamarl.transports.segments import SegmentHandle
from llamarl.transports.slots import SlotState, Word, header_words
from llamarl.transports.tcp import TcpRemote, TcpSource
from llamarl.weight_sync.manifest import Catalog, SlotHandle, manifest_checksum
from llamarl.weight_sync.remote_slot import MAX_ATTEMPTS, RemoteSlot

__all__ = ["Mirror", "Relays"]

_PATIENCE_S = 5.0
"""Longest wait for a mirror to go on before the source itself is asked."""
_STOP_S = 30.0


class Mirror:
    """This host's copy of one source slot, and the thread that fills it."""

    def __init__(self, handle: SlotHandle, data_bytes: int) -> None:
        self._buffer: SourceBuffer = TcpSource().register(handle.data_offset, data_bytes)
        control = self._buffer.control.numpy()
        self._words = header_words(control)
        self._checksums = control[handle.checksums_offset : handle.data_offset]
        self._thread: threading.Thread | None = None
        self._stop = False
        self.failure: Exception | None = None
        self.generation = -1
        """Of the slot, as far as a copy of it has begun."""
        self.num_passed_over = 0
        """How often the host before this one was given up and the source asked."""

    @property
    def address(self) -> SegmentHandle:
        address: SegmentHandle = self._buffer.address
        return address

    def fill(self, direct: RemoteSlot, upstream: RemoteSlot | None, deadline_s: float) -> None:
        """Begin to copy the version that both hold, from ``upstream`` as long as it goes on. Returns at once.

        Args:
            direct: The source's slot.
            upstream: The mirror of the host before this one; None: this host reads from the source.
        """
        self.stop()
        handle, catalog = direct.handle, direct.catalog
        self.failure, self._stop = None, False
        self.generation = handle.generation
        self._words[Word.PROGRESS] = 0
        self._words[Word.STATE] = SlotState.WRITING
        self._words[Word.VERSION] = handle.version
        self._words[Word.GENERATION] = handle.generation  # last: by it readers see that the rest is this version's
        self._thread = threading.Thread(
            target=self._run,
            args=(catalog, [s for s in (upstream, direct) if s is not None], deadline_clock(deadline_s, direct.who)),
            name="weight-relay",
            daemon=True,
        )
        self._thread.start()

    def stop(self) -> None:
        """End a copy that is under way. Idempotent."""
        self._stop = True
        if self._thread is not None:
            self._thread.join(_STOP_S)
            self._thread = None

    def close(self) -> None:
        """Stop, and free the memory. Idempotent."""
        self.stop()
        self._words = np.empty(0, np.uint64)
        self._checksums = np.empty(0, np.uint8)
        self._buffer.close()

    def _run(self, catalog: Catalog, slots: list[RemoteSlot], clock: Clock) -> None:
        try:
            checksums = self._checksums[: 8 * len(catalog.blocks)].view(np.uint64)
            ahead = 0
            for index in range(len(catalog.blocks)):
                while True:
                    try:
                        promised, ahead = self._copy(catalog, slots[0], index, ahead, _limited(clock, len(slots) > 1))
                        break
                    except (WeightSyncError, DeadlineExceeded):
                        if len(slots) == 1 or self._stop:
                            raise
                        del slots[0]
                        ahead = index
                        self.num_passed_over += 1
                checksums[index] = promised
                self._words[Word.PROGRESS] = index + 1
            direct = slots[-1]
            direct.finish(clock)  # the source's own manifest, whoever the blocks came from
            whole = manifest_checksum(direct.handle.version, direct.handle.catalog_checksum, checksums)
            if whole != direct.manifest:
                raise WeightSyncError(f"{direct.who}: the blocks that came through another host are not the source's")
            self._words[Word.CHECKSUM] = whole
            self._words[Word.STATE] = SlotState.READY
        except Exception as error:  # raised in this process by who reads the mirror; other hosts go to the source
            self.failure = error
            self._words[Word.STATE] = SlotState.FAILED

    def _copy(self, catalog: Catalog, slot: RemoteSlot, index: int, ahead: int, clock: Clock) -> tuple[int, int]:
        """One block, proved, into the mirror; its checksum, and the first block that is not on its way."""
        if self._stop:
            raise WeightSyncError(f"{slot.who}: another version took its place")
        promised = slot.checksum(index, clock)
        ahead = max(ahead, index)
        while ahead < len(catalog.blocks) and slot.expect(ahead, clock):
            ahead += 1
        block = catalog.blocks[index]
        into = self._buffer.data[block.offset : block.offset + block.nbytes]
        for attempt in range(MAX_ATTEMPTS):
            slot.read(block.offset, into, clock, fresh=attempt > 0)
            if block_digest(into, catalog.checksum) == promised:
                return promised, ahead
        slot.refuse_block(index, MAX_ATTEMPTS, clock)


class _OwnMirror(RemoteBuffer):
    """The mirror that this process fills, as a buffer to read: what goes wrong in the filling is told as it was."""

    def __init__(self, mirror: Mirror, mapped: RemoteBuffer) -> None:
        self._mirror, self._mapped = mirror, mapped

    def view(self) -> torch.Tensor | None:
        return self._mapped.view()

    def read(self, offset: int, into: torch.Tensor, deadline_s: float, *, fresh: bool = False) -> None:
        self.check_source()
        self._mapped.read(offset, into, deadline_s, fresh=fresh)

    def check_source(self) -> None:
        if self._mirror.failure is not None:
            raise ChannelError(str(self._mirror.failure))

    def close(self) -> None:
        self._mapped.close()


@dataclass
class _Place:
    """What this process does about one source slot."""

    address: SegmentHandle
    mirror: Mirror | None = None
    local: RemoteBuffer | None = None
    """The mirror of this host, mapped; None: this process reads the source for itself."""
    upstream: RemoteBuffer | None = None
    """The mirror of the host before this one; None: it reads the source."""

    def close(self) -> None:
        for buffer in (self.local, self.upstream):
            if buffer is not None:
                buffer.close()
        if self.mirror is not None:
            self.mirror.close()


class Relays:
    """The mirrors of one sink rank, by source slot.

    Args:
        transport: Opens mirrors of this host and of others.
    """

    def __init__(self, transport: SinkTransport) -> None:
        self._transport = transport
        self._places: dict[tuple[int, int], _Place] = {}

    @property
    def mirrors(self) -> Sequence[Mirror]:
        """Those that this process fills."""
        return [place.mirror for place in self._places.values() if place.mirror is not None]

    def begin(
        self, handle: SlotHandle, direct: TcpRemote, catalog: Catalog, who: str, clock: Clock, deadline_s: float
    ) -> None:
        """Begin to fill this host's mirror, if this process is who fills it and has not begun yet;
        otherwise as ``follow``.

        A mirror of a source that was brought up again since is left alone: its bytes may be what is being served.
        """
        known = self._places.get((handle.source_rank, handle.slot))
        if known is not None and known.address != handle.address:
            return
        mirror = self._place(handle, direct, clock).mirror
        if mirror is not None and mirror.generation < handle.generation:
            self._fill(handle, direct, catalog, who, clock, deadline_s)

    def drop_stale(self, handle: SlotHandle) -> None:
        """Free the mirror of a slot whose source was brought up again, before a version of the new one is opened."""
        known = self._places.get((handle.source_rank, handle.slot))
        if known is not None and known.address != handle.address:
            del self._places[handle.source_rank, handle.slot]
            known.close()

    def has_begun(self, handle: SlotHandle) -> bool:
        """Whether this process fills a mirror with this version, or has done so."""
        place = self._places.get((handle.source_rank, handle.slot))
        mirror = place.mirror if place is not None and place.address == handle.address else None
        return mirror is not None and mirror.failure is None and mirror.generation == handle.generation

    def follow(
        self, handle: SlotHandle, direct: TcpRemote, catalog: Catalog, who: str, clock: Clock, deadline_s: float
    ) -> RemoteSlot:
        """The slot to read a version from: this host's mirror, which begins to be filled if it has
        not yet, or the source's.

        Args:
            direct: The source's slot, opened.
            deadline_s: Longest time that the filling takes.

        Raises: As ``RemoteSlot``.
        """
        place = self._place(handle, direct, clock)
        if place.local is None:
            return RemoteSlot(handle, direct, catalog, who, clock)
        if place.mirror is not None and not self.has_begun(handle):
            self._fill(handle, direct, catalog, who, clock, deadline_s)
        mirrored = RemoteSlot(handle, place.local, catalog, who, clock, is_mirror=True)
        if place.mirror is None and not mirrored.begins(_PATIENCE_S, clock):
            return RemoteSlot(handle, direct, catalog, who, clock)  # the process that fills it takes another version
        return mirrored

    def close(self) -> None:
        """Free everything. Idempotent."""
        for place in self._places.values():
            place.close()
        self._places.clear()

    def _fill(
        self, handle: SlotHandle, direct: TcpRemote, catalog: Catalog, who: str, clock: Clock, deadline_s: float
    ) -> None:
        place = self._places[handle.source_rank, handle.slot]
        assert place.mirror is not None
        place.mirror.stop()
        source = RemoteSlot(handle, direct, catalog, who, clock)
        place.mirror.fill(source, _upstream(handle, place, catalog, who, clock), deadline_s)

    def _place(self, handle: SlotHandle, direct: TcpRemote, clock: Clock) -> _Place:
        key = (handle.source_rank, handle.slot)
        known = self._places.get(key)
        if known is not None and known.address == handle.address:
            return known
        if known is not None:
            known.close()
        place = self._places[key] = _Place(handle.address)
        mirror = Mirror(handle, handle.address.size - handle.data_offset)
        try:
            relays, copy = direct.join_chain(mirror.address, clock("asking whom to read from"))
            opened, is_gone = self._opened(copy, clock)
            if is_gone:  # of processes that were there before these
                relays, copy = direct.join_chain(mirror.address, clock("asking whom to read from"), gone=copy)
                opened, _ = self._opened(copy, clock)
            if relays:
                mapped = self._transport.open(mirror.address, clock("opening the mirror"))
                place.mirror, place.local, place.upstream = mirror, _OwnMirror(mirror, mapped), opened
                return place
            place.local = opened
        except BaseException:
            mirror.close()
            raise
        mirror.close()
        return place

    def _opened(self, copy: SegmentHandle | None, clock: Clock) -> tuple[RemoteBuffer | None, bool]:
        """A mirror that another process offered, None if there is none; and whether that is because
        it is not there any more."""
        if copy is None:
            return None, False
        try:
            return self._transport.open(copy, min(_PATIENCE_S, clock("opening another host's copy"))), False
        except ChannelError:
            return None, True
        except DeadlineExceeded:
            return None, False


def _upstream(handle: SlotHandle, place: _Place, catalog: Catalog, who: str, clock: Clock) -> RemoteSlot | None:
    if place.upstream is None:
        return None
    try:
        return RemoteSlot(handle, place.upstream, catalog, f"{who}, through another host,", clock, is_mirror=True)
    except WeightSyncError:  # it has ended since
        place.upstream.close()
        place.upstream = None
        return None


def _limited(clock: Clock, impatient: bool) -> Clock:
    return deadline_clock(_PATIENCE_S, "a host that passes weights on") if impatient else clock
