"""A source rank's slot as others see it: by its handle, which is all that the controller carries; and as a sink reads it: is
it the one the handle names, how far is it written, what must its bytes be.

    manifest  = catalog + version + one checksum a block; the handle has one number over it
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NoReturn

import numpy as np
import numpy.typing as npt
import torch

from llamarl.errors import ChannelError, WeightSyncError
from llamarl.transports.base import Address, RemoteBuffer
from llamarl.transports.checksum import digest
from llamarl.transports.deadline import Clock
from llamarl.transports.slots import HEADER_BYTES, PAGE, SlotHeader, SlotState, parse_header
from llamarl.weight_sync.catalog import Catalog

__all__ = ["MAX_ATTEMPTS", "RemoteSlot", "SlotHandle", "manifest_checksum", "read_catalog"]

MAX_ATTEMPTS = 3
"""How often a block whose checksum does not agree is pulled before the version is refused."""

_POLL_S = (20e-6, 2e-4)  # first and longest pause between two looks at a slot that is being written
_POLL_MIRROR_S = 1e-3
_LOST_BETWEEN_GPUS = (
    ", or copies from one GPU to another arrive wrong here, as where an IOMMU is on (pytorch issue 84803): then set "
    "schedule.transport to shared_memory"
)
_CHECK_SOURCE_S = 0.05


@dataclass(frozen=True, slots=True)
class SlotHandle:
    """One source rank's share of one version. Small and picklable."""

    source_rank: int
    version: int
    slot: int
    generation: int
    address: Address
    transport: str
    pid: int
    catalog_bytes: int
    catalog_checksum: int
    checksums_offset: int
    data_offset: int
    manifest_checksum: int | None
    """None: the version was announced while it was still being written; the slot's header says it at the end."""


def manifest_checksum(version: int, catalog_checksum: int, checksums: npt.NDArray[np.uint64]) -> int:
    """One number over everything a manifest says; it travels in the handle, apart from the buffer."""
    return digest(version.to_bytes(8, "little") + catalog_checksum.to_bytes(8, "little") + checksums.tobytes())


class RemoteSlot:
    """One version at one source rank.

    Args:
        who: Opening of every error message: which sink, which version, which source.
        is_mirror: ``remote`` is another host's copy of the slot (:mod:`llamarl.weight_sync.relay`),
            which may be behind it.

    Raises:
        WeightSyncError: The slot is stale, half written by a failed source, or its manifest is not the one promised.
    """

    def __init__(
        self,
        handle: SlotHandle,
        remote: RemoteBuffer,
        catalog: Catalog,
        who: str,
        clock: Clock,
        *,
        is_mirror: bool = False,
    ) -> None:
        self._promised = handle.manifest_checksum
        self._is_mirror = is_mirror
        self._longest_pause_s = _POLL_MIRROR_S if is_mirror else _POLL_S[1]
        if is_mirror:  # it is being written, whatever the source's slot was when it was announced
            handle = replace(handle, manifest_checksum=None)
        self.handle = handle
        self.catalog = catalog
        self.who = who
        self._remote = remote
        self._behind = False  # the mirror still holds an earlier version
        self._known = 0  # blocks whose checksums have been read
        self._checksums = np.zeros(len(catalog.blocks), np.uint64)
        remote.forget()
        header = self._header(clock)
        if handle.manifest_checksum is not None:
            self._take_checksums(len(catalog.blocks), clock)
            self._prove_manifest(handle.manifest_checksum)
        else:
            self._take_checksums(header.progress, clock)

    def read(self, offset: int, into: torch.Tensor, clock: Clock, *, fresh: bool = False) -> None:
        """Copy bytes of the data area into ``into``, uint8; ``fresh``: as they are at the source at this moment."""
        left_s = clock(f"reading from {self._source}")
        with _told(self.who):
            self._remote.read(self.handle.data_offset + offset, into, left_s, fresh=fresh)

    def expect(self, block: int, clock: Clock) -> bool:
        """Have a block sent that will be read soon, after those asked for before; False if not now,
        or not written yet."""
        if block >= self._known:
            return False
        left_s = clock(f"reading from {self._source}")
        place = self.catalog.blocks[block]
        with _told(self.who):
            return self._remote.expect(self.handle.data_offset + place.offset, place.nbytes, left_s)

    def view(self) -> torch.Tensor | None:
        """The data area in place, uint8 and read-only, if the transport maps it here."""
        mapped = self._remote.view()
        return None if mapped is None else mapped[self.handle.data_offset :]

    def checksum(self, block: int, clock: Clock) -> int:
        """What the bytes of ``block`` must give. Waits until the source has written it."""
        if block >= self._known:
            self._follow(block, clock)
        return int(self._checksums[block])

    def finish(self, clock: Clock) -> None:
        """After the last block: the slot is complete, was not overwritten meanwhile, and its manifest is whole."""
        if self._known < len(self.catalog.blocks):
            self._follow(len(self.catalog.blocks) - 1, clock)
        header = self._header(clock)
        if self.handle.manifest_checksum is None:
            pause = _POLL_S[0]
            while header.state != SlotState.READY:
                time.sleep(pause)
                pause = min(self._longest_pause_s, 2 * pause)
                header = self._header(clock, f"waiting for {self._source} to finish the version")
            self._prove_manifest(header.checksum if self._promised is None else self._promised)

    def begins(self, within_s: float, clock: Clock) -> bool:
        """Whether a mirror takes up this version within ``within_s``."""
        until = time.monotonic() + within_s
        while self._header(clock) and self._behind:
            if time.monotonic() > until:
                return False
            time.sleep(self._longest_pause_s)
        return True

    def check_current(self, clock: Clock) -> None:
        """Raise WeightSyncError if the source has begun to write another version into the slot."""
        self._header(clock)

    def refuse_block(self, index: int, attempts: int, clock: Clock) -> NoReturn:
        """Raise WeightSyncError: ``block``'s bytes never gave its checksum. Says so if the cause is a later version."""
        self.check_current(clock)
        names = sorted({region.parameter for region in self.catalog.blocks[index].regions})
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        or_copies = _LOST_BETWEEN_GPUS if self.handle.transport == "cuda_ipc" else ""
        raise WeightSyncError(
            f"{self.who}: {shown}: the bytes pulled {attempts} times do not match the manifest's checksum "
            f"(block {index}); the source's memory was altered{or_copies}. This version is not served: resume the run"
        )

    @property
    def manifest(self) -> int:
        """Over the checksums read so far; of the whole version after ``finish``."""
        return manifest_checksum(self.handle.version, self.handle.catalog_checksum, self._checksums)

    @property
    def _source(self) -> str:
        return f"source rank {self.handle.source_rank}"

    def _follow(self, block: int, clock: Clock) -> None:
        pause, looked = _POLL_S[0], time.monotonic()
        waiting = f"waiting for {self._source} to write block {block} of {len(self.catalog.blocks)}"
        while True:
            header = self._header(clock, waiting)
            if header.progress > block:
                self._take_checksums(header.progress, clock)
                return
            if time.monotonic() - looked > _CHECK_SOURCE_S:
                looked = time.monotonic()
                with _told(self.who, f", with {header.progress} of {len(self.catalog.blocks)} blocks written"):
                    self._remote.check_source()
            time.sleep(pause)
            pause = min(self._longest_pause_s, 2 * pause)

    def _take_checksums(self, up_to: int, clock: Clock) -> None:
        up_to = min(up_to, len(self._checksums))
        if up_to > self._known:
            at = self.handle.checksums_offset + 8 * self._known
            left_s = clock(f"reading from {self._source}")
            data = _read(self._remote, at, 8 * (up_to - self._known), left_s, self.who)
            self._checksums[self._known : up_to] = data.view(np.uint64)
            self._known = up_to

    def _prove_manifest(self, promised: int) -> None:
        if self.manifest != promised:
            raise WeightSyncError(
                f"{self.who}: its manifest does not match its checksum; the source's memory was altered. "
                "This version is not served: resume the run"
            )

    def _header(self, clock: Clock, doing: str | None = None) -> SlotHeader:
        left_s = clock(doing or f"reading from {self._source}")
        header = parse_header(_read(self._remote, 0, HEADER_BYTES, left_s, self.who))
        handle = self.handle
        self._behind = self._is_mirror and header is not None and header.generation < handle.generation
        if self._behind:
            return SlotHeader(SlotState.WRITING, handle.generation, handle.version, progress=0, checksum=0)
        if header is None:
            raise WeightSyncError(
                f"{self.who}: the buffer is no weight slot; the source was restarted or its memory altered"
            )
        states = [SlotState.READY] if handle.manifest_checksum is not None else [SlotState.READY, SlotState.WRITING]
        if (header.generation, header.version) == (handle.generation, handle.version) and header.state in states:
            return header
        expected = " or ".join(state.name.lower() for state in states)
        raise WeightSyncError(
            f"{self.who}: its slot {handle.slot} is {header}; expected {expected}, version {handle.version}, "
            f"generation {handle.generation}. It was overwritten or never finished: raise the capacity of the weights "
            "channel, or resume the run"
        )


def read_catalog(handle: SlotHandle, remote: RemoteBuffer, who: str, clock: Clock) -> Catalog:
    """Where everything lies in the slot.

    Raises:
        WeightSyncError: It does not match the handle's checksum.
        DeadlineExceeded: The clock ran out.
    """
    data = _read(remote, PAGE, handle.catalog_bytes, clock("reading the catalog"), who).tobytes()
    if digest(data) != handle.catalog_checksum:
        raise WeightSyncError(
            f"{who}: its catalog does not match its checksum; the source was restarted or its memory altered. "
            "This version is not served: resume the run"
        )
    return Catalog.from_bytes(data)


def _read(remote: RemoteBuffer, offset: int, nbytes: int, deadline_s: float, who: str) -> npt.NDArray[np.uint8]:
    into = torch.empty(nbytes, dtype=torch.uint8)
    with _told(who):
        remote.read(offset, into, deadline_s, fresh=True)
    return into.numpy()


@contextlib.contextmanager
def _told(who: str, when: str = "") -> Iterator[None]:
    """Tell what goes wrong with a source's buffer as an error of this version."""
    try:
        yield
    except ChannelError as error:
        raise WeightSyncError(f"{who}: {error}{when}; this version is not served: resume the run") from error
