"""The sink rank's side of a hand-over: read manifests, plan, pull exactly the slices needed, prove them.

    handles ─▶ open a slot, read its catalog ─▶ plan (once per layout) ─▶ open the slots that I pull from, check generation
        and manifest ─▶ for each block that matters:
        wait until it is written ─▶ bytes into my memory ─▶ does my checksum agree with the manifest's?
            yes: cast and place        no: pull again, MAX_ATTEMPTS in all, then WeightSyncError

What is checked is the copy that this process holds, not the source's bytes: a block goes into a private, cache-sized
buffer (or, where it fits one tensor as it is, straight into that tensor) and is checksummed there.

A rank that wants every parameter whole, each of which lies in one piece in one slot of its own host, may serve from
these slots in place instead: no copy, only the proof.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from llamarl.errors import PlanError, WeightSyncError
from llamarl.transports.base import SinkTransport
from llamarl.transports.checksum import ChecksumKind, block_digest, mix64
from llamarl.transports.deadline import Clock, wait_for_device
from llamarl.weight_sync.catalog import Block, Catalog, Region
from llamarl.weight_sync.layout import (
    AnyLayout,
    Box,
    MeshLayout,
    ParameterSpec,
    box_elements,
    intersect,
    shift,
    span,
    whole_box,
)
from llamarl.weight_sync.plan import SliceCopy, copies_to_sink
from llamarl.weight_sync.relay import Slots
from llamarl.weight_sync.slot import MAX_ATTEMPTS, RemoteSlot, SlotHandle
from llamarl.weight_sync.source import own_part, whole_on_each

__all__ = ["MAX_ATTEMPTS", "Puller", "WeightVersion"]


@dataclass(frozen=True)
class _Pull:
    """What to do with one block."""

    source_rank: int
    index: int
    block: Block
    placements: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    """Views of the same shape: of the scratch buffer, in the wire dtype, and of the sink's tensor."""
    direct: torch.Tensor | None
    """uint8 view of the sink's tensor, where the block's bytes are exactly its bytes."""


@dataclass(frozen=True)
class _Run:
    """Where a whole parameter lies in one piece: bytes of one source's data area."""

    source_rank: int
    start: int
    stop: int
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class _Share:
    """What this rank pulls of sources and sinks that hold what ``key`` says."""

    key: tuple[MeshLayout, AnyLayout]
    copies: tuple[SliceCopy, ...]
    source_ranks: tuple[int, ...]
    """Ascending."""


class Puller:
    """Pulls versions for one sink rank; keeps open slots and the compiled plan from version to version.

    Args:
        fan_out: Where a source lies on another host, read it once a host and pass it on
            (:mod:`llamarl.weight_sync.relay`).
    """

    def __init__(
        self, *, rank: int, num_sink_ranks: int, transport: SinkTransport, name: str = "weights", fan_out: bool = False
    ) -> None:
        self.rank = rank
        self.num_sink_ranks = num_sink_ranks
        self._name = name
        self._transport = transport
        self.slots = Slots(name, rank, transport, passes_on=fan_out)
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._compiled: tuple[tuple[object, ...], list[_Pull]] | None = None
        self._shares: list[_Share] = []
        """The last one first; two, for a version may be asked whether it can be mapped and then loaded."""

    def open(self, handles: Sequence[SlotHandle], deadline_s: float) -> WeightVersion:
        """Open the slots of the source ranks that this rank pulls from, and prove their manifests.
        Pulls no weights yet.

        Whom it pulls from is known from the version before. Of a first version one catalog is read
        here, and the slots are opened when it is asked for.

        Args:
            deadline_s: Longest time that this takes, and, of all that is later asked of the version, longest wait for
                the next block.

        Raises:
            WeightSyncError: A source is gone, its slot is stale or half written, or its manifest is
                not the one promised.
        """
        versions = {h.version for h in handles}
        if len(versions) != 1:
            raise WeightSyncError(f"{self._name}: source ranks offer different versions {sorted(versions)}")
        clock = self.clock("opening", min(versions), deadline_s)
        known = self._shares[0].source_ranks if self._shares else ()
        if len(handles) == 1:
            known = (0,)
        first = known[0] if known and known[-1] < len(handles) else self.rank % len(handles)  # spread over the sources
        version = WeightVersion(self, handles, self.slots.catalog(handles[first], clock), deadline_s)
        version.slots_of((rank for rank in known if rank < len(handles)), clock)
        return version

    def fetch_ahead(self, handles: Sequence[SlotHandle], deadline_s: float) -> None:
        """Have the part of a version that this rank pulls come to this host while this process
        works on; see ``Slots``."""
        if self._shares:
            handles = [handle for handle in handles if handle.source_rank in self._shares[0].source_ranks]
        self.slots.fetch_ahead(handles, deadline_s)

    def close(self) -> None:
        """Unmap what was open. Idempotent."""
        self._compiled = None
        self.slots.close()

    def clock(self, doing: str, version: int, deadline_s: float) -> Clock:
        """Of one thing that is done with a version."""
        return Clock(deadline_s, f"{self._name}: sink rank {self.rank} is {doing} version {version}")

    def copies(self, version: WeightVersion, sink: AnyLayout, clock: Clock) -> tuple[list[RemoteSlot], list[SliceCopy]]:
        """What this rank copies, and the slots that it pulls from; worked out once per layout.

        Raises:
            WeightSyncError: The two sides' parameters do not fit.
        """
        source = version.catalog.layout
        found = next((share for share in self._shares if share.key == (source, sink)), None)
        if found is None:
            try:
                copies = copies_to_sink(source, sink, self.rank)
            except PlanError as error:
                raise WeightSyncError(f"{self._name}: sink rank {self.rank} cannot be served: {error}") from error
            found = _Share((source, sink), copies, tuple(sorted({copy.source_rank for copy in copies})))
        self._shares = [found, *(share for share in self._shares if share is not found)][:2]
        slots = version.slots_of(found.source_ranks, clock)
        for slot in slots:
            if slot.catalog.layout != source:
                raise WeightSyncError(
                    f"{slot.who}: it describes another layout of the sources than source rank {version.catalog.rank}; "
                    "this version is not served: resume the run"
                )
        return slots, list(found.copies)

    def load(
        self, version: WeightVersion, tensors: Mapping[str, torch.Tensor], layout: AnyLayout | None, clock: Clock
    ) -> int:
        """See ``WeightVersion.load_into``."""
        local = {name: own_part(tensor) for name, tensor in tensors.items()}
        sink = whole_on_each(local, self.num_sink_ranks) if layout is None else layout
        slots, copies = self.copies(version, sink, clock)
        catalogs = [slot.catalog for slot in slots]
        where = tuple((name, t.data_ptr(), tuple(t.shape), t.stride(), t.dtype, t.device) for name, t in local.items())
        key = (tuple(id(c) for c in catalogs), where, layout)  # ``slots`` keeps the ids
        if self._compiled is None or self._compiled[0] != key:
            self._compiled = (key, self.compile(catalogs, copies, local))
        pulls = self._compiled[1]
        by_rank = {slot.handle.source_rank: slot for slot in slots}
        with self._transport.pulling(clock):
            on_device = catalogs and all(catalog.checksum == "mix64" for catalog in catalogs)
            (self._pull_together if on_device else self._pull_in_turn)(pulls, by_rank, clock)
        for slot in slots:
            slot.finish(clock)
        return sum(pull.block.nbytes for pull in pulls)

    def _pull_in_turn(self, pulls: Sequence[_Pull], slots: Mapping[int, RemoteSlot], clock: Clock) -> None:
        """Prove each block while its bytes are in a core's cache, with the next ones on their way."""
        ahead = 0  # the first pull that is not on its way
        for number, pull in enumerate(pulls):
            slot = slots[pull.source_rank]
            promised = slot.checksum(pull.index, clock)
            ahead = max(ahead, number)
            while ahead < len(pulls) and slots[pulls[ahead].source_rank].expect(pulls[ahead].index, clock):
                ahead += 1
            self._pull_block(slot, pull, promised, clock)
            clock.restart()

    def _pull_together(self, pulls: Sequence[_Pull], slots: Mapping[int, RemoteSlot], clock: Clock) -> None:
        """Queue all copies and checksums on the device, and wait for it once; what fails its proof is pulled again."""
        sums = []
        for pull in pulls:
            slot, mine = slots[pull.source_rank], self._where_pulled(pull)
            slot.checksum(pull.index, clock)
            slot.read(pull.block.offset, mine, clock)
            sums.append(mix64(mine))
            _place(pull)
        if not sums:
            return
        if (found := torch.stack(sums)).is_cuda:
            wait_for_device(torch.cuda.current_stream(found.device).record_event(), clock, "copying and proving blocks")
        for pull, one in zip(pulls, found.tolist(), strict=True):
            slot = slots[pull.source_rank]
            promised = slot.checksum(pull.index, clock)
            if one % (1 << 64) != promised:
                self._pull_block(slot, pull, promised, clock)

    def _pull_block(self, slot: RemoteSlot, pull: _Pull, promised: int, clock: Clock) -> None:
        mine = self._where_pulled(pull)
        for attempt in range(MAX_ATTEMPTS):
            slot.read(pull.block.offset, mine, clock, fresh=attempt > 0)
            if _digest(mine, slot.catalog.checksum, clock, pull.index) == promised:
                _place(pull)
                return
        slot.refuse_block(pull.index, MAX_ATTEMPTS, clock)

    def _where_pulled(self, pull: _Pull) -> torch.Tensor:
        return pull.direct if pull.direct is not None else self._scratch[: pull.block.nbytes]

    def compile(
        self, catalogs: Sequence[Catalog], copies: Sequence[SliceCopy], local: Mapping[str, torch.Tensor]
    ) -> list[_Pull]:
        """The blocks that hold what ``copies`` ask for, and where each part of them goes in ``local``."""
        wanted: dict[tuple[int, str], list[SliceCopy]] = {}
        for copy in copies:
            wanted.setdefault((copy.source_rank, copy.parameter), []).append(copy)
        largest = max((b.nbytes for c in catalogs for b in c.blocks), default=0)
        if self._scratch.numel() < largest:
            self._scratch = torch.empty(largest, dtype=torch.uint8, device=self._transport.device)
        pulls = []
        found = 0
        for catalog in catalogs:
            for index, block in enumerate(catalog.blocks):
                matches = [
                    (region, common, copy)
                    for region in block.regions
                    for copy in wanted.get((catalog.rank, region.parameter), ())
                    if (common := intersect(region.box, copy.box)) is not None
                ]
                if matches:
                    found += sum(box_elements(common) for _, common, _ in matches)
                    placements = tuple(self._placement(catalog, block, local, *match) for match in matches)
                    direct = _direct(block, *placements[0], self._transport.device) if len(placements) == 1 else None
                    pulls.append(_Pull(catalog.rank, index, block, () if direct is not None else placements, direct))
        if found < sum(box_elements(copy.box) for copy in copies):
            raise WeightSyncError(
                f"{self._name}: sink rank {self.rank}: the source ranks do not hold what their layout says; "
                "this version is not served"
            )
        return sorted(pulls, key=lambda pull: pull.index)  # in the order in which the sources write them

    def _placement(
        self,
        catalog: Catalog,
        block: Block,
        local: Mapping[str, torch.Tensor],
        region: Region,
        common: Box,
        copy: SliceCopy,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The part of a block that one copy asks for, and where it goes."""
        start = region.offset - block.offset
        raw = self._scratch[start : start + region.nbytes].view(catalog.dtype_of(region.parameter))
        inside = shift(common, [a for a, _ in region.box], [0] * len(common))
        there = shift(common, [a for a, _ in copy.box], [a for a, _ in copy.sink_slice])
        tensor = local.get(copy.parameter)
        fits = tensor is not None and tensor.ndim == len(there) and all(
            b <= size for (_, b), size in zip(there, tensor.shape, strict=True)
        )  # fmt: skip
        if tensor is None or not fits:
            raise WeightSyncError(
                f"{self._name}: sink rank {self.rank}: the layout asks for {there} of its tensor "
                f"{copy.parameter!r}, which {'has shape ' + str(tuple(tensor.shape)) if tensor is not None else 'is not there'}"
            )
        return raw.view([b - a for a, b in region.box])[_slices(inside)], tensor[_slices(there)]


class WeightVersion:
    """One version of the weights, published and not yet pulled. Valid while its token lies on the edge.

    Args:
        deadline_s: Of each of its methods that is given none: the one within which the channel had to open it.
    """

    def __init__(self, puller: Puller, handles: Sequence[SlotHandle], catalog: Catalog, deadline_s: float) -> None:
        self._puller = puller
        self._handles = handles
        self._slots: dict[int, RemoteSlot] = {}
        self._deadline_s = deadline_s
        self.catalog = catalog
        """Of one source rank."""

    @property
    def version(self) -> int:
        """Trainer ticks done when these weights were made."""
        return self._handles[0].version

    @property
    def parameters(self) -> Mapping[str, ParameterSpec]:
        """Global shapes and wire dtypes of what the source sends."""
        return self.catalog.parameters

    def slots_of(self, ranks: Iterable[int], clock: Clock) -> list[RemoteSlot]:
        """The slots of some source ranks, in their order; those that were not opened yet are.

        Raises: As ``Puller.open``.
        """
        ranks = list(ranks)
        for rank in ranks:
            if rank not in self._slots:
                self._slots[rank] = self._puller.slots.open(self._handles[rank], clock, self._deadline_s)
        return [self._slots[rank] for rank in ranks]

    def load_into(
        self, tensors: Mapping[str, torch.Tensor], layout: AnyLayout | None = None, deadline_s: float | None = None
    ) -> int:
        """Pull exactly the slices this rank holds, straight from every source rank, into its live tensors.

        Returns only when all of them are in place and this rank's own checksums agree with the manifests. After an
        exception the tensors hold a mixture of versions and must not be served.

        Args:
            tensors: This sink rank's tensors by name; written in place, cast where their dtype differs.
            layout: Of all sink ranks; None: every sink rank holds every tensor whole, under the
                source's names.
            deadline_s: Longest wait for the next block; None: the channel's.

        Returns:
            Bytes pulled.

        Raises:
            WeightSyncError: A block's checksum did not agree after MAX_ATTEMPTS pulls, a slot was overwritten, a
                source died, or the two sides' parameters do not fit; it names parameter, source rank and version.
            DeadlineExceeded: No block came for ``deadline_s`` seconds.
        """
        with torch.no_grad():
            return self._puller.load(self, tensors, layout, self._clock("loading", deadline_s))

    def map_tensors(self) -> dict[str, torch.Tensor] | None:
        """Every parameter, whole and without a copy: read-only views of the slots, each byte checked
        against the manifest; None where one is not mapped here, or lies in several pieces.

        They are in the dtype in which they travel, and whole while this version's token lies on the
        edge, that is until the sink's tick ends; then the source may write another version over
        them. ``check_current`` proves that it has not.

        Raises: As ``load_into``.
        """
        clock = self._clock("mapping", None)
        sink = MeshLayout(self.parameters, {"rank": self._puller.num_sink_ranks})
        slots, copies = self._puller.copies(self, sink, clock)
        data = {slot.handle.source_rank: view for slot in slots if (view := slot.view()) is not None}
        runs = _whole_runs([slot.catalog for slot in slots], copies) if len(data) == len(slots) else None
        if runs is None:
            return None
        by_rank = {slot.handle.source_rank: slot for slot in slots}
        for index, rank in sorted({(index, run.source_rank) for run in runs.values() for index in run.blocks}):
            slot, block = by_rank[rank], by_rank[rank].catalog.blocks[index]
            promised = slot.checksum(index, clock)
            clock(f"proving block {index} of source rank {rank}")
            if block_digest(data[rank][block.offset : block.offset + block.nbytes], slot.catalog.checksum) != promised:
                slot.refuse_block(index, 1, clock)
            clock.restart()
        for slot in slots:
            slot.finish(clock)
        return {
            name: data[run.source_rank][run.start : run.stop]
            .view(self.catalog.dtype_of(name))
            .view(self.parameters[name].shape)
            for name, run in runs.items()
        }

    def check_current(self, deadline_s: float | None = None) -> None:
        """Prove that no slot was written again since this version was opened; asked after serving from its views.

        Raises:
            WeightSyncError: One was: what was computed from the views since then is of no version.
        """
        clock = self._clock("checking", deadline_s)
        for slot in self._slots.values():
            slot.check_current(clock)

    def _clock(self, doing: str, deadline_s: float | None) -> Clock:
        return self._puller.clock(doing, self.version, self._deadline_s if deadline_s is None else deadline_s)


def _whole_runs(catalogs: Sequence[Catalog], copies: Sequence[SliceCopy]) -> dict[str, _Run] | None:
    """Where the whole parameters that ``copies`` ask for lie, if each does in one run of bytes in row-major order."""
    regions: dict[tuple[int, str], list[tuple[Region, int]]] = {}
    for catalog in catalogs:
        for index, block in enumerate(catalog.blocks):
            for region in block.regions:
                regions.setdefault((catalog.rank, region.parameter), []).append((region, index))
    runs: dict[str, _Run] = {}
    for copy in copies:
        whole = whole_box(catalogs[0].parameters[copy.parameter].shape)
        own = regions[copy.source_rank, copy.parameter]
        start = stop = own[0][0].offset
        done = 0
        for region, _ in own:
            size = box_elements(region.box)
            if region.offset != stop or span(region.box, whole) != (done, done + size):
                return None
            stop, done = stop + region.nbytes, done + size
        if copy.box != whole or done != math.prod(high for _, high in whole):
            return None
        runs[copy.parameter] = _Run(copy.source_rank, start, stop, tuple(index for _, index in own))
    return runs


def _direct(block: Block, raw: torch.Tensor, target: torch.Tensor, device: torch.device) -> torch.Tensor | None:
    """The target's bytes, if the whole block is one contiguous run of one tensor in the wire dtype."""
    same = raw.dtype == target.dtype and target.is_contiguous() and target.device == device
    if len(block.regions) != 1 or not same or raw.numel() * raw.element_size() != block.nbytes:
        return None
    return target.reshape(-1).view(torch.uint8)


def _place(pull: _Pull) -> None:
    for raw, target in pull.placements:
        target.copy_(raw)


def _digest(data: torch.Tensor, kind: ChecksumKind, clock: Clock, block: int) -> int:
    if data.is_cuda:
        wait_for_device(torch.cuda.current_stream(data.device).record_event(), clock, f"copying block {block}")
    return block_digest(data, kind)


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in box)
