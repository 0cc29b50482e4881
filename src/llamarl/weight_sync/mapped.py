"""Serve from the source's slot in place: no copy at the sink, only the proof.

    slot of the source ──mmap──▶ view of each cell this rank holds ──▶ checksum of every block, in place ──▶ live weights

A sink tensor can be mapped if it is one piece, and that piece is one run of bytes in one source's
slot. The catalog lays cells out without gaps, so this holds for whole and row-cut parameters of an
unsharded source, and for any cut if the source knew the sinks' layout. What cannot be mapped is
pulled into memory of its own, while the version before is still held: that part of the weights lies
there twice. ``worth_mapping`` says up to which share that is done.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from llamarl.transports.checksum import block_digest
from llamarl.transports.deadline import Clock
from llamarl.weight_sync.layout import Box, Piece, box_elements, dtype_bytes, intersect, span
from llamarl.weight_sync.manifest import Catalog, Region
from llamarl.weight_sync.plan import SliceCopy
from llamarl.weight_sync.remote_slot import RemoteSlot

__all__ = ["MOST_PRIVATE", "MapPlan", "MappedTensor", "map_slots", "plan_mapping", "worth_mapping"]

MOST_PRIVATE = 1 / 8
"""Most of a rank's weights, by bytes, that a version served in place may copy: by so much, at most,
memory grows while a version takes the place of the one before."""


@dataclass(frozen=True)
class MappedTensor:
    """Where one sink tensor lies in one source's data area."""

    source_rank: int
    start: int
    stop: int
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class MapPlan:
    """Which of a sink rank's tensors are views, and what has to be pulled for the others."""

    mapped: Mapping[str, MappedTensor]
    private: Mapping[str, tuple[tuple[int, ...], str]]
    """Tensor -> shape, dtype."""
    copies: tuple[SliceCopy, ...]
    """What fills the private ones."""
    blocks: tuple[tuple[int, int], ...]
    """(block, source rank) to prove, in the order in which they are written."""

    @property
    def mapped_bytes(self) -> int:
        """Bytes that are views."""
        return sum(m.stop - m.start for m in self.mapped.values())

    @property
    def private_bytes(self) -> int:
        """Bytes that each version allocates anew."""
        return sum(math.prod(shape) * dtype_bytes(dtype) for shape, dtype in self.private.values())


def worth_mapping(plan: MapPlan) -> bool:
    """Whether a version should be served in place: at most ``MOST_PRIVATE`` of it would be copied anyway.

    A whole model whose source cuts it into rows (fsdp >= 2) has nearly all tensors in several pieces. Mapping it would
    allocate the model again at each hand-over; loading it into the sink's own tensors allocates nothing.
    """
    return plan.private_bytes <= MOST_PRIVATE * (plan.private_bytes + plan.mapped_bytes)


def plan_mapping(catalogs: Sequence[Catalog], copies: Sequence[SliceCopy], pieces: Sequence[Piece]) -> MapPlan:
    """Decide once per layout what can be mapped."""
    regions: dict[tuple[int, str], list[tuple[Region, int]]] = {}
    for catalog in catalogs:
        for index, block in enumerate(catalog.blocks):
            for region in block.regions:
                regions.setdefault((catalog.rank, region.parameter), []).append((region, index))
    parts: dict[str, list[SliceCopy]] = {piece.parameter: [] for piece in pieces}
    for copy in copies:
        parts[copy.parameter].append(copy)
    mapped: dict[str, MappedTensor] = {}
    private: dict[str, tuple[tuple[int, ...], str]] = {}
    blocks: set[tuple[int, int]] = set()
    for name, into in parts.items():
        first = into[0]
        dtype = catalogs[0].parameters[first.parameter].dtype
        shape = tuple(max(c.sink_slice[dim][1] for c in into) for dim in range(len(first.box)))
        run = _one_run(regions[first.source_rank, first.parameter], first.box)
        if len(into) > 1 or run is None or box_elements(first.box) != box_elements(tuple((0, n) for n in shape)):
            private[name] = (shape, dtype)
        else:
            mapped[name] = MappedTensor(first.source_rank, run[0], run[1], shape, dtype)
            blocks.update((index, first.source_rank) for index in run[2])
    return MapPlan(mapped, private, tuple(c for c in copies if c.parameter in private), tuple(sorted(blocks)))


def map_slots(slots: Sequence[RemoteSlot], plan: MapPlan, clock: Clock) -> dict[str, torch.Tensor] | None:
    """Views of the mapped tensors, proved; None if the transport maps nothing here.

    Raises:
        WeightSyncError: A block's bytes are not the ones the manifest promises.
    """
    data: dict[int, torch.Tensor] = {}
    for slot in slots:
        view = slot.view()
        if view is None:
            return None
        data[slot.handle.source_rank] = view
    by_rank = {slot.handle.source_rank: slot for slot in slots}
    for index, rank in plan.blocks:
        slot = by_rank[rank]
        promised = slot.checksum(index, clock)
        clock(f"proving block {index} of source rank {rank}")
        block = slot.catalog.blocks[index]
        if block_digest(data[rank][block.offset : block.offset + block.nbytes], slot.catalog.checksum) != promised:
            slot.refuse_block(index, 1, clock)
    return {
        name: data[m.source_rank][m.start : m.stop].view(getattr(torch, m.dtype)).view(m.shape)
        for name, m in plan.mapped.items()
    }


def _one_run(regions: Sequence[tuple[Region, int]], box: Box) -> tuple[int, int, list[int]] | None:
    """(start, stop, blocks) of the bytes of ``box``, if they are one run in row-major order of ``box``."""
    start = stop = -1
    blocks: list[int] = []
    done = 0
    for region, index in regions:
        common = intersect(region.box, box)
        if common is None:
            continue
        size = box_elements(common)
        itemsize = region.nbytes // box_elements(region.box)
        here, there = span(common, region.box), span(common, box)
        if here[1] - here[0] != size or there != (done, done + size):
            return None
        offset = region.offset + here[0] * itemsize
        if blocks and offset != stop:
            return None
        start = offset if not blocks else start
        stop = offset + size * itemsize
        blocks.append(index)
        done += size
    return (start, stop, blocks) if done == box_elements(box) else None
