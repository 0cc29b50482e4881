"""The source slots that a sink rank has open; those of another host are read once a host, and passed on.

    source's slot ──▶ mirror on host b ──▶ mirror on host c ──▶ ...        over sockets, each block as soon as it is there
                        └─ mapped by every sink rank of b  └─ of c          served in place where that is worth it

A mirror is laid out as the slot it copies, with the same generations, so whoever reads one follows
it as it would follow a source that is still writing, and proves every block again. Whom a host
reads from is decided where the source's slot lies (:mod:`llamarl.transports.segment_server`). A host
before it that does not begin within seconds, or ends, is passed over: the blocks that are missing
come from the source itself. When a source may write a slot again, every sink has finished with it,
mirrors included.

A mirror may begin before its own readers want the version (``Slots.fetch_ahead``): then the bytes
travel while they work on with the one before, and the way takes none of their time.

Memory: a host holds each version that lies on the edge once, as the source does.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from llamarl.errors import ChannelError, DeadlineExceeded, WeightSyncError
from llamarl.transports.base import Address, RemoteBuffer, SinkTransport
from llamarl.transports.checksum import block_digest
from llamarl.transports.deadline import Clock
from llamarl.transports.shared_memory import SharedMemorySource
from llamarl.transports.slots import SlotState, Word, header_words
from llamarl.weight_sync.catalog import Catalog
from llamarl.weight_sync.slot import MAX_ATTEMPTS, RemoteSlot, SlotHandle, manifest_checksum, read_catalog

__all__ = ["Mirror", "Slots"]

_PATIENCE_S = 5.0
"""Longest wait for a mirror to go on before the source itself is asked."""
_STOP_S = 30.0


class Mirror(RemoteBuffer):
    """This host's copy of one source slot, and the thread that fills it. To this process it is a buffer to read like
    any other, which tells what goes wrong in the filling as it was."""

    def __init__(self, handle: SlotHandle, data_bytes: int) -> None:
        self._buffer = SharedMemorySource().register(handle.data_offset, data_bytes)
        control = self._buffer.control.numpy()
        self._words = header_words(control)
        self._checksums = control[handle.checksums_offset : handle.data_offset]
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        """Of the copy that is under way: one that comes back after its time is over must not touch the next one's."""
        self.address = self._buffer.address
        self.mapped: RemoteBuffer | None = None
        """The same memory, opened to be read here."""
        self.failure: Exception | None = None
        self.generation = -1
        """Of the slot, as far as a copy of it has begun."""
        self.num_passed_over = 0
        """How often the host before this one was given up and the source asked."""

    def view(self) -> torch.Tensor | None:
        assert self.mapped is not None
        return self.mapped.view()

    def read(self, offset: int, into: torch.Tensor, deadline_s: float, *, fresh: bool = False) -> None:
        assert self.mapped is not None
        self.check_source()
        self.mapped.read(offset, into, deadline_s, fresh=fresh)

    def check_source(self) -> None:
        if self.failure is not None:
            raise ChannelError(str(self.failure))

    def fill(self, slots: Sequence[RemoteSlot], deadline_s: float) -> None:
        """Begin to copy the version that ``slots`` hold, from the first as long as it goes on, and
        at last from the source's own. Returns at once."""
        self.stop()
        handle = slots[-1].handle
        self.failure, self._stop = None, threading.Event()
        self.generation = handle.generation
        self._words[Word.PROGRESS] = 0
        self._words[Word.STATE] = SlotState.WRITING
        self._words[Word.VERSION] = handle.version
        self._words[Word.GENERATION] = handle.generation  # last: by it readers see that the rest is this version's
        clock = Clock(deadline_s, slots[-1].who)
        self._thread = threading.Thread(
            target=self._run, args=([*slots], clock, self._stop), name="weight-relay", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """End a copy that is under way. Idempotent."""
        self.give_up()
        if self._thread is not None:
            self._thread.join(_STOP_S)
            self._thread = None

    def give_up(self) -> None:
        """Have a copy that is under way end at its next block, without waiting for that."""
        self._stop.set()

    def close(self) -> None:
        """Stop, and free the memory. Idempotent."""
        self.stop()
        if self.mapped is not None:
            self.mapped.close()
        self._words = np.empty(0, np.uint64)
        self._checksums = np.empty(0, np.uint8)
        self._buffer.close()

    def _run(self, slots: list[RemoteSlot], clock: Clock, stop: threading.Event) -> None:
        direct = slots[-1]
        try:
            checksums = self._checksums[: 8 * len(direct.catalog.blocks)].view(np.uint64)
            ahead = 0
            for index in range(len(checksums)):
                while True:
                    try:
                        within = clock if len(slots) == 1 else Clock(_PATIENCE_S, "a host that passes weights on")
                        checksums[index], ahead = self._copy(slots[0], index, ahead, within, stop)
                        break
                    except (WeightSyncError, DeadlineExceeded):
                        if len(slots) == 1 or stop.is_set():
                            raise
                        del slots[0]
                        ahead = index
                        self.num_passed_over += 1
                self._words[Word.PROGRESS] = index + 1
                clock.restart()
            direct.finish(clock)  # the source's own manifest, whoever the blocks came from
            whole = manifest_checksum(direct.handle.version, direct.handle.catalog_checksum, checksums)
            if whole != direct.manifest:
                raise WeightSyncError(f"{direct.who}: the blocks that came through another host are not the source's")
            self._words[Word.CHECKSUM] = whole
            self._words[Word.STATE] = SlotState.READY
        except Exception as error:  # raised in this process by who reads the mirror; other hosts go to the source
            if self._stop is stop:  # else another copy has begun since
                self.failure = ChannelError(str(error))  # without what it was raised in, which would keep this mirror
                self._words[Word.STATE] = SlotState.FAILED

    def _copy(self, slot: RemoteSlot, index: int, ahead: int, clock: Clock, stop: threading.Event) -> tuple[int, int]:
        """One block, proved, into the mirror; its checksum, and the first block that is not on its way."""
        if stop.is_set():
            raise WeightSyncError(f"{slot.who}: another version took its place")
        promised = slot.checksum(index, clock)
        ahead = max(ahead, index)
        while ahead < len(slot.catalog.blocks) and slot.expect(ahead, clock):
            ahead += 1
        block = slot.catalog.blocks[index]
        into = self._buffer.data[block.offset : block.offset + block.nbytes]
        for attempt in range(MAX_ATTEMPTS):
            slot.read(block.offset, into, clock, fresh=attempt > 0)
            if block_digest(into, slot.catalog.checksum) == promised:
                return promised, ahead
        slot.refuse_block(index, MAX_ATTEMPTS, clock)


@dataclass
class _Place:
    """What this process has open of one source slot."""

    address: Address
    remote: RemoteBuffer
    """The source's own buffer."""
    opened: int = -1
    """The last generation that was opened to be read."""
    joined: bool = False
    """Whether it has been asked whom to read from."""
    mirror: Mirror | None = None
    """This host's, if this process fills it."""
    local: RemoteBuffer | None = None
    """This host's mirror, to be read; None: this process reads the source for itself."""
    upstream: RemoteBuffer | None = None
    """The mirror of the host before this one; None: it reads the source."""

    def has_begun(self, handle: SlotHandle) -> bool:
        """Whether this process fills a mirror with this version, or has done so."""
        mirror = self.mirror
        return mirror is not None and mirror.failure is None and mirror.generation == handle.generation

    def close(self) -> None:
        for buffer in (self.local, self.upstream, self.remote):
            if buffer is not None:
                buffer.close()


class Slots:
    """The source slots of one sink rank, kept open from version to version.

    Args:
        name: Of the channel, for errors.
        passes_on: Where a source lies on another host, read it once a host and pass it on.
    """

    def __init__(self, name: str, rank: int, transport: SinkTransport, *, passes_on: bool) -> None:
        self._name = name
        self._rank = rank
        self._transport = transport
        self._passes_on = passes_on
        self._places: dict[tuple[int, int], _Place] = {}
        self._catalogs: dict[tuple[int, int], Catalog] = {}
        self._opening = threading.Lock()  # versions are opened by two threads: one serves, one fetches ahead
        self._fetching: threading.Thread | None = None

    @property
    def mirrors(self) -> Sequence[Mirror]:
        """Those that this process fills."""
        return [place.mirror for place in self._places.values() if place.mirror is not None]

    def catalog(self, handle: SlotHandle, clock: Clock) -> Catalog:
        """Where everything lies in a slot.

        Raises: As ``open``.
        """
        with self._opening:
            return self._catalog(handle, self._place(handle, clock), clock)

    def open(self, handle: SlotHandle, clock: Clock, deadline_s: float) -> RemoteSlot:
        """A source rank's slot, or this host's copy of it, which begins to be filled if it has not yet.

        Args:
            deadline_s: Longest wait of the filling for its next block.

        Raises:
            WeightSyncError: The source is gone, its slot is stale or half written, or its manifest
                is not the one promised.
        """
        with self._opening:
            place = self._place(handle, clock)
            place.opened = handle.generation
            if self._transport.is_elsewhere(handle.address) and (self._passes_on or place.has_begun(handle)):
                try:
                    self._join(handle, place, clock)
                except ChannelError as error:
                    raise WeightSyncError(
                        f"{self._who(handle)}: {error}; restart the source and resume the run"
                    ) from error
                if place.mirror is not None and not place.has_begun(handle):
                    self._fill(handle, place, clock, deadline_s)
                if place.local is not None:
                    mirrored = self._slot(handle, place, place.local, clock)
                    # the process that fills it may take another version
                    if place.mirror is not None or mirrored.begins(_PATIENCE_S, clock):
                        return mirrored
            return self._slot(handle, place, place.remote, clock)

    def fetch_ahead(self, handles: Sequence[SlotHandle], deadline_s: float) -> None:
        """Have a version of another host copied to this one while this process works on; any thread, returns at once.

        ``open`` of the same version then finds the bytes here, or follows them as they come.
        Nothing is told of what goes wrong: ``open`` asks again and tells. What lies on this host
        stays where it is.
        """
        handles = [handle for handle in handles if self._transport.is_elsewhere(handle.address)]
        if not handles:
            return
        before = self._fetching

        def fetch() -> None:
            if before is not None:
                before.join()
            with contextlib.suppress(ChannelError, DeadlineExceeded), self._opening:
                clock = Clock(deadline_s, self._who(handles[0]))
                for handle in handles:
                    self._begin(handle, clock, deadline_s)

        self._fetching = threading.Thread(target=fetch, name="weights-ahead", daemon=True)
        self._fetching.start()

    def close(self) -> None:
        """Free everything. Idempotent."""
        if self._fetching is not None:
            self._fetching.join(_STOP_S)
        for place in self._places.values():
            place.close()
        self._places.clear()
        self._transport.close()

    def _begin(self, handle: SlotHandle, clock: Clock, deadline_s: float) -> None:
        """Begin to fill this host's mirror, if this process is who fills it and nobody has opened the version yet.

        What is open of a source that was brought up again since is left alone: it may be what is being served.
        """
        known = self._places.get((handle.source_rank, handle.slot))
        if known is not None and (known.address != handle.address or known.opened >= handle.generation):
            return
        place = self._place(handle, clock)
        self._join(handle, place, clock)
        if place.mirror is not None and place.mirror.generation < handle.generation:
            self._fill(handle, place, clock, deadline_s)

    def _place(self, handle: SlotHandle, clock: Clock) -> _Place:
        key = (handle.source_rank, handle.slot)
        known = self._places.get(key)
        if known is None or known.address != handle.address:
            # what was open is not closed: an earlier version may be served from it, and its memory goes with that
            before = self._places.pop(key, None)
            if before is not None and before.mirror is not None:
                before.mirror.give_up()
            try:
                left_s = clock(f"connecting to source rank {handle.source_rank}")
                known = self._places[key] = _Place(handle.address, self._transport.open(handle.address, left_s))
            except ChannelError as error:
                raise WeightSyncError(f"{self._who(handle)}: {error}; restart the source and resume the run") from error
        return known

    def _catalog(self, handle: SlotHandle, place: _Place, clock: Clock) -> Catalog:
        key = (handle.source_rank, handle.catalog_checksum)
        if key not in self._catalogs:
            catalog = read_catalog(handle, place.remote, self._who(handle), clock)
            for other in self._catalogs.values():  # the ranks of one layout say the same of it: kept once
                if other.layout == catalog.layout:
                    catalog = replace(catalog, layout=other.layout)
                    break
            self._catalogs[key] = catalog
        return self._catalogs[key]

    def _slot(self, handle: SlotHandle, place: _Place, buffer: RemoteBuffer, clock: Clock) -> RemoteSlot:
        """A slot as it is in one of the place's buffers."""
        who = self._who(handle) + (", through another host," if buffer is place.upstream else "")
        catalog = self._catalog(handle, place, clock)
        return RemoteSlot(handle, buffer, catalog, who, clock, is_mirror=buffer is not place.remote)

    def _fill(self, handle: SlotHandle, place: _Place, clock: Clock, deadline_s: float) -> None:
        assert place.mirror is not None
        place.mirror.stop()
        slots = [self._slot(handle, place, place.remote, clock)]
        if place.upstream is not None:
            try:
                slots.insert(0, self._slot(handle, place, place.upstream, clock))
            except WeightSyncError:  # it has ended since
                place.upstream.close()
                place.upstream = None
        place.mirror.fill(slots, deadline_s)

    def _join(self, handle: SlotHandle, place: _Place, clock: Clock) -> None:
        """Ask, once for each slot, who of this host reads it and from whom."""
        if place.joined:
            return
        mirror = Mirror(handle, handle.address.size - handle.data_offset)
        try:
            relays, copy = place.remote.join_chain(mirror.address, clock("asking whom to read from"))
            opened, is_gone = self._opened(copy, clock)
            if is_gone:  # of processes that were there before these
                relays, copy = place.remote.join_chain(mirror.address, clock("asking whom to read from"), gone=copy)
                opened, _ = self._opened(copy, clock)
            if relays:
                mirror.mapped = self._transport.open(mirror.address, clock("opening the mirror"))
                place.mirror = place.local = mirror
                place.upstream = opened
            else:
                place.local = opened
            place.joined = True
        finally:
            if place.mirror is None:
                mirror.close()

    def _opened(self, copy: Address | None, clock: Clock) -> tuple[RemoteBuffer | None, bool]:
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

    def _who(self, handle: SlotHandle) -> str:
        """How errors about a source's slot begin."""
        return (
            f"{self._name}: sink rank {self._rank} cannot take version {handle.version} from source rank "
            f"{handle.source_rank} (process {handle.pid}, {handle.transport})"
        )
