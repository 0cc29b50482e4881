"""The sink rank's side of a hand-over: read manifests, plan, pull exactly the slices needed, prove them.

    handles ─▶ open a slot, read its catalog ─▶ plan (once per layout) ─▶ open the slots that I pull from, check generation
        and manifest ─▶ for each block that matters:
        wait until it is written ─▶ bytes into my memory ─▶ does my checksum agree with the manifest's?
            yes: cast and place        no: pull again, MAX_ATTEMPTS in all, then WeightSyncError

What is checked is the copy that this process holds, not the source's bytes: a block goes into a private, cache-sized
buffer (or, where it fits one tensor as it is, straight into that tensor) and is checksummed there.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from llamarl.errors import ChannelError, DeadlineExceeded, PlanError, WeightSyncError
from llamarl.transports.base import RemoteBuffer, SinkTransport
from llamarl.transports.checksum import ChecksumKind, block_digest
from llamarl.transports.deadline import Clock, deadline_clock, wait_for_device
from llamarl.transports.segments import SegmentHandle, is_elsewhere
from llamarl.transports.tcp import TcpRemote
from llamarl.weight_sync.layout import AnyLayout, Box, MeshLayout, ParameterSpec, box_elements, intersect, shift
from llamarl.weight_sync.manifest import Block, Catalog, SlotHandle
from llamarl.weight_sync.mapped import MapPlan, map_slots, plan_mapping, worth_mapping
from llamarl.weight_sync.plan import SliceCopy, copies_to_sink
from llamarl.weight_sync.relay import Relays
from llamarl.weight_sync.remote_slot import MAX_ATTEMPTS, RemoteSlot, read_catalog
from llamarl.weight_sync.source import own_part, whole_on_each

__all__ = ["MAX_ATTEMPTS", "Puller", "WeightVersion"]

_STOP_S = 30.0


@dataclass(frozen=True)
class _Placement:
    """Part of a block that goes into one tensor."""

    parameter: str
    raw: torch.Tensor
    """View of the scratch buffer, in the wire dtype."""
    target: torch.Tensor
    """View of the sink's tensor, of the same shape."""


@dataclass(frozen=True)
class _Pull:
    """What to do with one block."""

    source_rank: int
    index: int
    block: Block
    placements: tuple[_Placement, ...]
    direct: torch.Tensor | None
    """uint8 view of the sink's tensor, where the block's bytes are exactly its bytes."""


@dataclass(frozen=True)
class _Share:
    """What this rank pulls of sources and sinks that hold what ``key`` says."""

    key: tuple[MeshLayout, AnyLayout]
    copies: tuple[SliceCopy, ...]
    source_ranks: tuple[int, ...]
    """Ascending."""


class Puller:
    """Pulls versions for one sink rank; keeps open buffers and the compiled plan from version to version.

    Args:
        fan_out: Where a source lies on another host, read it once a host and pass it on
            (:mod:`llamarl.weight_sync.relay`).
    """

    def __init__(
        self,
        *,
        rank: int,
        num_sink_ranks: int,
        transport: SinkTransport,
        name: str = "weights",
        allow_unused: bool = False,
        fan_out: bool = False,
    ) -> None:
        self.rank = rank
        self._num_sink_ranks = num_sink_ranks
        self._transport = transport
        self._name = name
        self._allow_unused = allow_unused
        self.relays = Relays(transport) if fan_out else None
        """The copies that this rank passes on, or fetches ahead."""
        self._passes_on = fan_out
        self._opening = threading.Lock()  # versions are opened by two threads: one serves, one fetches ahead
        self._opened: dict[tuple[int, int], int] = {}  # (source rank, slot) -> the last generation that was opened
        self._fetching: threading.Thread | None = None
        self._open: dict[tuple[int, int], tuple[object, RemoteBuffer]] = {}
        self._catalogs: dict[tuple[int, int], Catalog] = {}
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._compiled: tuple[tuple[object, ...], list[_Pull]] | None = None
        self._map_plan: tuple[tuple[object, ...], MapPlan] | None = None
        self._shares: list[_Share] = []
        """The last one first; two, for a version may be asked whether it is worth mapping and then loaded."""

    def open(self, handles: Sequence[SlotHandle], deadline_s: float) -> WeightVersion:
        """Open the slots of the source ranks that this rank pulls from, and prove their manifests.
        Pulls no weights yet.

        Whom it pulls from is known from the version before. Of a first version one slot is looked
        at here, and the others are opened when it is asked for.

        Args:
            deadline_s: Longest time that this takes, and, each for itself, all that is later asked of the version.

        Raises:
            WeightSyncError: A source is gone, its slot is stale or half written, or its manifest is
                not the one promised.
        """
        versions = {h.version for h in handles}
        if len(versions) != 1:
            raise WeightSyncError(f"{self._name}: source ranks offer different versions {sorted(versions)}")
        clock = self.clock("opening", min(versions), deadline_s)
        known = self._shares[0].source_ranks if self._shares else ()
        if not known or known[-1] >= len(handles):
            known = (self.rank % len(handles),)  # sinks begin at different sources
        with self._opening:
            who, remote, catalog = self._slot(handles[known[0]], clock)
            if len(handles) == 1:
                known = (0,)
            elif not self._shares:
                RemoteSlot(handles[known[0]], remote, catalog, who, clock)  # proves it; may not be one to pull from
                known = ()
        version = WeightVersion(self, handles, catalog, deadline_s)
        version.slots_of(known, clock)
        return version

    def fetch_ahead(self, handles: Sequence[SlotHandle], deadline_s: float) -> None:
        """Have a version of another host copied to this one while this process works on; any thread, returns at once.

        ``open`` of the same version then finds the bytes here, or follows them as they come.
        Nothing is told of what goes wrong: ``open`` asks again and tells. What lies on this host
        stays where it is.
        """
        if self._shares:
            handles = [handle for handle in handles if handle.source_rank in self._shares[0].source_ranks]
        if not any(is_elsewhere(handle.address) for handle in handles if isinstance(handle.address, SegmentHandle)):
            return
        before = self._fetching

        def fetch() -> None:
            if before is not None:
                before.join()
            with contextlib.suppress(WeightSyncError, ChannelError, DeadlineExceeded), self._opening:
                clock = self.clock("fetching", handles[0].version, deadline_s)
                self.relays = self.relays or Relays(self._transport)
                for handle in handles:
                    who, remote, catalog = self._slot(handle, clock)
                    opened = self._opened.get((handle.source_rank, handle.slot), -1)
                    if isinstance(remote, TcpRemote) and opened < handle.generation:
                        self.relays.begin(handle, remote, catalog, who, clock, deadline_s)

        self._fetching = threading.Thread(target=fetch, name="weights-ahead", daemon=True)
        self._fetching.start()

    def close(self) -> None:
        """Unmap what was open. Idempotent."""
        if self._fetching is not None:
            self._fetching.join(_STOP_S)
        self._compiled = None
        if self.relays is not None:
            self.relays.close()
        for _, remote in self._open.values():
            remote.close()
        self._open.clear()
        self._transport.close()

    def pull(self, slots: Sequence[RemoteSlot], pulls: Sequence[_Pull], clock: Clock) -> int:
        """Carry out what ``compile`` or ``compile_copies`` worked out; returns the bytes pulled."""
        by_rank = {slot.handle.source_rank: slot for slot in slots}
        ahead = 0  # the first pull that is not on its way
        with self._transport.pulling(clock):
            for number, pull in enumerate(pulls):
                slot = by_rank[pull.source_rank]
                promised = slot.checksum(pull.index, clock)
                ahead = max(ahead, number)
                while ahead < len(pulls) and by_rank[pulls[ahead].source_rank].expect(pulls[ahead].index, clock):
                    ahead += 1
                self._pull_block(slot, pull, promised, clock)
        return sum(pull.block.nbytes for pull in pulls)

    def clock(self, doing: str, version: int, deadline_s: float) -> Clock:
        """Of one thing that is done with a version."""
        return deadline_clock(deadline_s, f"{self._name}: sink rank {self.rank} is {doing} version {version}")

    def map_plan(self, version: WeightVersion, layout: AnyLayout | None, clock: Clock) -> MapPlan:
        """What could be mapped of a version and what not; worked out once per layout."""
        slots, copies = self.share(version, layout, clock)
        catalogs = [slot.catalog for slot in slots]
        key = (tuple(id(catalog) for catalog in catalogs), layout)
        if self._map_plan is None or self._map_plan[0] != key:
            pieces = self._sink(version, layout).pieces_of(self.rank)
            self._map_plan = (key, plan_mapping(catalogs, copies, pieces))
        return self._map_plan[1]

    def share(
        self,
        version: WeightVersion,
        layout: AnyLayout | None,
        clock: Clock,
    ) -> tuple[list[RemoteSlot], Sequence[SliceCopy]]:
        """The slots that this rank pulls from, and its copies.

        Raises:
            WeightSyncError: The two sides' parameters do not fit.
        """
        sink = self._sink(version, layout)
        if sink.num_ranks != self._num_sink_ranks:
            raise ValueError(f"the layout counts {sink.num_ranks} sink ranks, the channel {self._num_sink_ranks}")
        source = version.catalog.layout
        key = (source, sink)
        found = next((share for share in self._shares if share.key == key), None)
        if found is None:
            try:
                copies = copies_to_sink(source, sink, self.rank, allow_unused=self._allow_unused)
            except PlanError as error:
                raise WeightSyncError(f"{self._name}: sink rank {self.rank} cannot be served: {error}") from error
            found = _Share(key, copies, tuple(sorted({copy.source_rank for copy in copies})))
        self._shares = [found, *(share for share in self._shares if share is not found)][:2]
        slots = version.slots_of(found.source_ranks, clock)
        for slot in slots:
            if slot.catalog.layout != source:
                raise WeightSyncError(
                    f"{slot.who}: it describes another layout of the sources than source rank {version.catalog.rank}; "
                    "this version is not served: resume the run"
                )
        return slots, found.copies

    def _sink(self, version: WeightVersion, layout: AnyLayout | None) -> AnyLayout:
        return layout if layout is not None else MeshLayout(version.parameters, {"rank": self._num_sink_ranks})

    def open_slot(self, handle: SlotHandle, clock: Clock, deadline_s: float) -> RemoteSlot:
        """A source rank's slot, or this host's copy of it.

        Raises: As ``open``.
        """
        with self._opening:
            return self._open_slot(handle, clock, deadline_s)

    def _open_slot(self, handle: SlotHandle, clock: Clock, deadline_s: float) -> RemoteSlot:
        who, remote, catalog = self._slot(handle, clock)
        self._opened[handle.source_rank, handle.slot] = handle.generation
        relays = self.relays
        if relays is not None:
            relays.drop_stale(handle)
        if relays is not None and isinstance(remote, TcpRemote) and (self._passes_on or relays.has_begun(handle)):
            try:
                return relays.follow(handle, remote, catalog, who, clock, deadline_s)
            except WeightSyncError:
                raise
            except ChannelError as error:
                raise WeightSyncError(f"{who}: {error}; restart the source and resume the run") from error
        return RemoteSlot(handle, remote, catalog, who, clock)

    def _slot(self, handle: SlotHandle, clock: Clock) -> tuple[str, RemoteBuffer, Catalog]:
        """How errors about a source's slot begin, its memory, and where everything lies in it."""
        who = (
            f"{self._name}: sink rank {self.rank} cannot take version {handle.version} from source rank "
            f"{handle.source_rank} (process {handle.pid}, {handle.transport})"
        )
        key = (handle.source_rank, handle.slot)
        known = self._open.get(key)
        if known is None or known[0] != handle.address:
            if known is not None:
                known[1].close()
                del self._open[key]
            try:
                left_s = clock(f"connecting to source rank {handle.source_rank}")
                known = self._open[key] = (handle.address, self._transport.open(handle.address, left_s))
            except ChannelError as error:
                raise WeightSyncError(f"{who}: {error}; restart the source and resume the run") from error
        catalog_key = (handle.source_rank, handle.catalog_checksum)
        catalog = self._catalogs.get(catalog_key)
        if catalog is None:
            catalog = read_catalog(handle, known[1], who, clock)
            for other in self._catalogs.values():  # the ranks of one layout say the same of it: kept once
                if other.layout == catalog.layout:
                    catalog = replace(catalog, layout=other.layout)
                    break
            self._catalogs[catalog_key] = catalog
        return who, known[1], catalog

    def _pull_block(self, slot: RemoteSlot, pull: _Pull, promised: int, clock: Clock) -> None:
        block = pull.block
        mine = pull.direct if pull.direct is not None else self._scratch[: block.nbytes]
        for attempt in range(MAX_ATTEMPTS):
            slot.read(block.offset, mine, clock, fresh=attempt > 0)
            if _digest(mine, slot.catalog.checksum, clock, pull.index) == promised:
                for placement in pull.placements:
                    placement.target.copy_(placement.raw)
                return
        slot.refuse_block(pull.index, MAX_ATTEMPTS, clock)

    def compile(
        self,
        version: WeightVersion,
        tensors: Mapping[str, torch.Tensor],
        layout: AnyLayout | None,
        clock: Clock,
    ) -> tuple[list[RemoteSlot], list[_Pull]]:
        """What fills ``tensors`` from a version, and from which slots; worked out once per layout
        and set of tensors."""
        local = {name: own_part(tensor) for name, tensor in tensors.items()}
        slots, copies = self.share(
            version, whole_on_each(local, self._num_sink_ranks) if layout is None else layout, clock
        )
        catalogs = [slot.catalog for slot in slots]
        where = tuple((name, t.data_ptr(), tuple(t.shape), t.stride(), t.dtype, t.device) for name, t in local.items())
        key = (tuple(id(c) for c in catalogs), where, layout)  # self._catalogs keeps the ids
        if self._compiled is None or self._compiled[0] != key:
            self._compiled = (key, self.compile_copies(catalogs, copies, local))
        return slots, self._compiled[1]

    def compile_copies(
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
                    (region.offset - block.offset, region.box, common, copy)
                    for region in block.regions
                    for copy in wanted.get((catalog.rank, region.parameter), ())
                    if (common := intersect(region.box, copy.box)) is not None
                ]
                if matches:
                    found += sum(box_elements(common) for _, _, common, _ in matches)
                    placements = tuple(self._place(catalog, local, *match) for match in matches)
                    direct = _direct(block, placements, self._transport.device)
                    pulls.append(_Pull(catalog.rank, index, block, () if direct is not None else placements, direct))
        if found < sum(box_elements(copy.box) for copy in copies):
            raise WeightSyncError(
                f"{self._name}: sink rank {self.rank}: the source ranks do not hold what their layout says; "
                "this version is not served"
            )
        return sorted(pulls, key=lambda pull: pull.index)  # in the order in which the sources write them

    def _place(
        self,
        catalog: Catalog,
        local: Mapping[str, torch.Tensor],
        offset: int,
        region: Box,
        common: Box,
        copy: SliceCopy,
    ) -> _Placement:
        spec = catalog.parameters[copy.parameter]
        dtype = getattr(torch, spec.dtype)
        shape = [b - a for a, b in region]
        nbytes = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        raw = self._scratch[offset : offset + nbytes].view(dtype).view(shape)
        inside = shift(common, [a for a, _ in region], [0] * len(region))
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
        return _Placement(copy.parameter, raw[_slices(inside)], tensor[_slices(there)])


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

    @property
    def num_source_ranks(self) -> int:
        return len(self._handles)

    def slots_of(self, ranks: Iterable[int], clock: Clock) -> list[RemoteSlot]:
        """The slots of some source ranks, in their order; those that were not opened yet are.

        Raises: As ``Puller.open``.
        """
        ranks = list(ranks)
        for rank in ranks:
            if rank not in self._slots:
                self._slots[rank] = self._puller.open_slot(self._handles[rank], clock, self._deadline_s)
        return [self._slots[rank] for rank in ranks]

    def load_into(
        self,
        tensors: Mapping[str, torch.Tensor],
        layout: AnyLayout | None = None,
        deadline_s: float | None = None,
    ) -> int:
        """Pull exactly the slices this rank holds, straight from every source rank, into its live tensors.

        Returns only when all of them are in place and this rank's own checksums agree with the manifests. After an
        exception the tensors hold a mixture of versions and must not be served.

        Args:
            tensors: This sink rank's tensors by name; written in place, cast where their dtype differs.
            layout: Of all sink ranks; None: every sink rank holds every tensor whole, under the
                source's names.
            deadline_s: Longest time that it takes; None: the channel's.

        Returns:
            Bytes pulled.

        Raises:
            WeightSyncError: A block's checksum did not agree after MAX_ATTEMPTS pulls, a slot was overwritten, a
                source died, or the two sides' parameters do not fit; it names parameter, source rank and version.
            DeadlineExceeded: It took longer than ``deadline_s`` seconds.
        """
        with torch.no_grad():
            clock = self._clock("loading", deadline_s)
            slots, pulls = self._puller.compile(self, tensors, layout, clock)
            pulled = self._puller.pull(slots, pulls, clock)
            for slot in slots:
                slot.finish(clock)
            return pulled

    def map_tensors(self, layout: AnyLayout | None = None, deadline_s: float | None = None) -> dict[str, torch.Tensor]:
        """This rank's tensors without a copy: read-only views of the slots, each byte checked against the manifest.

        Only on one host (``can_map``), in the dtype in which they travel; a tensor that is put together from several
        pieces is copied. The views are whole while this version's token lies on the edge, that is until the sink's
        tick ends; then the source may write another version over them. ``check_current`` proves that it has not.

        Raises: As ``load_into``.
        """
        clock = self._clock("mapping", deadline_s)
        plan = self._puller.map_plan(self, layout, clock)
        slots, _ = self._puller.share(self, layout, clock)
        views = map_slots(slots, plan, clock)
        if views is None:
            raise WeightSyncError(f"version {self.version} cannot be mapped: it lies on another host; use load_into")
        private = {
            name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, (shape, dtype) in plan.private.items()
        }
        if private:
            catalogs = [slot.catalog for slot in slots]
            self._puller.pull(slots, self._puller.compile_copies(catalogs, plan.copies, private), clock)
        for slot in slots:
            slot.finish(clock)
        return views | private

    @property
    def can_map(self) -> bool:
        """Whether ``map_tensors`` works here, of whole parameters: the memory of every source that
        this rank would pull them from is mapped in this process."""
        return self._can_map(None)

    def _can_map(self, layout: AnyLayout | None) -> bool:
        slots, _ = self._puller.share(self, layout, self._clock("opening", None))
        return all(slot.view() is not None for slot in slots)

    def worth_mapping(self, layout: AnyLayout | None = None) -> bool:
        """Whether ``map_tensors`` works here and would copy little: see ``llamarl.weight_sync.mapped.worth_mapping``.

        Raises:
            WeightSyncError: The two sides' parameters do not fit.
        """
        clock = self._clock("opening", None)
        return self._can_map(layout) and worth_mapping(self._puller.map_plan(self, layout, clock))

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


def _direct(block: Block, placements: Sequence[_Placement], device: torch.device) -> torch.Tensor | None:
    """The target's bytes, if the whole block is one contiguous run of one tensor in the wire dtype."""
    if len(block.regions) != 1 or len(placements) != 1:
        return None
    raw, target = placements[0].raw, placements[0].target
    same = raw.dtype == target.dtype and target.is_contiguous() and target.device == device
    if not same or raw.numel() * raw.element_size() != block.nbytes:
        return None
    return target.reshape(-1).view(torch.uint8)


def _digest(data: torch.Tensor, kind: ChecksumKind, clock: Clock, block: int) -> int:
    if data.is_cuda:
        wait_for_device(torch.cuda.current_stream(data.device).record_event(), clock, f"copying block {block}")
    return block_digest(data, kind)


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in box)
