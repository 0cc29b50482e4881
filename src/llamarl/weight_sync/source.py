"""The source rank's side of a hand-over: lay out a slot, fill it block by block, prove it, mark it ready.

    slot = [ header | catalog | checksums | data blocks ]
             state: EMPTY -> WRITING -> READY -> WRITING -> ...
             generation: +1 at each begin; a reader that meets another generation than its handle's came too late

Slots form a ring and are registered once; publishing a version allocates nothing.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from llamarl.errors import WeightSyncError
from llamarl.weight_sync.checksum import digest
from llamarl.weight_sync.layout import HeldShard, Layout, ParameterSpec, Piece, layout_of_rank, replicated_layout, shift
from llamarl.weight_sync.manifest import Catalog, build_catalog, manifest_checksum
from llamarl.weight_sync.transports.base import Address, SourceBuffer, SourceTransport

__all__ = ["EMPTY", "READY", "SLOT_HEADER", "WRITING", "Publisher", "SlotHandle", "dtype_name", "torch_dtype"]

EMPTY, WRITING, READY = 0, 1, 2
SLOT_HEADER = struct.Struct("<8sQQqQQQQ")
"""magic, state, generation, version, catalog offset, catalog bytes, checksums offset, data offset."""
SLOT_MAGIC = b"lrlslot1"
_PAGE = 4096


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
    data_offset: int
    catalog_checksum: int
    manifest_checksum: int


@dataclass
class _Slot:
    buffer: SourceBuffer
    catalog: Catalog
    copies: list[list[tuple[torch.Tensor, str, tuple[slice, ...]]]]
    """By block: (view of the buffer, local tensor, slice of it)."""
    blocks: list[memoryview]
    """By block: its bytes."""
    generation: int

    def close(self) -> None:
        self.copies.clear()
        self.blocks.clear()
        self.buffer.close()


class Publisher:
    """Publishes versions of this rank's shards into a ring of ``num_slots`` registered buffers.

    Args:
        rank: This source rank.
        num_slots: A version stays readable until ``num_slots`` later ones begin to be written.
        transport: Where buffers come from.
    """

    def __init__(self, *, rank: int, num_source_ranks: int, num_slots: int, transport: SourceTransport) -> None:
        self._rank = rank
        self._num_source_ranks = num_source_ranks
        self._num_slots = num_slots
        self._transport = transport
        self._slots: list[_Slot | None] = [None] * num_slots
        self._catalog: Catalog | None = None
        self._catalog_bytes = b""
        self._catalog_checksum = 0
        self._made_for: tuple[object, ...] | None = None
        self._count = 0

    @property
    def catalog(self) -> Catalog | None:
        """Of the last version published."""
        return self._catalog

    def publish(
        self,
        version: int,
        tensors: Mapping[str, torch.Tensor],
        *,
        layout: Layout | Mapping[str, HeldShard] | None = None,
        wire_dtype: torch.dtype | None = None,
        sink_layout: Layout | None = None,
    ) -> SlotHandle:
        """Copy the shards into the next slot, cast on the way, and mark it ready. The tensors are free when it returns.

        Args:
            tensors: This rank's local tensors, by the names the layout's pieces use.
            layout: All source ranks' pieces, or this rank's shards by parameter; None: every rank holds every tensor
                whole.
            wire_dtype: Floating-point parameters travel in it; None: in their own dtype.
            sink_layout: What the sinks will ask for, if known; the slot is then cut to fit.

        Raises:
            ValueError: The tensors do not fit the layout.
            WeightSyncError: No memory for the slots.
        """
        local = {name: _plain(tensor) for name, tensor in tensors.items()}
        self._prepare(local, layout, wire_dtype, sink_layout)
        assert self._catalog is not None
        index = self._count % self._num_slots
        self._count += 1
        slot = self._slot(index)
        slot.generation += 1
        checksums_offset, data_offset = self._offsets()
        memory = slot.buffer.data.numpy()
        raw = memory.data

        def mark(state: int) -> None:
            SLOT_HEADER.pack_into(
                raw, 0, SLOT_MAGIC, state, slot.generation, version, _PAGE, len(self._catalog_bytes),
                checksums_offset, data_offset,
            )  # fmt: skip

        mark(WRITING)
        checksums = np.empty(len(slot.blocks), np.uint64)
        for block, copies in enumerate(slot.copies):
            for view, name, where in copies:
                view.copy_(local[name][where])
            checksums[block] = digest(slot.blocks[block])
        memory[checksums_offset : checksums_offset + checksums.nbytes] = checksums.view(np.uint8)
        mark(READY)
        return SlotHandle(
            source_rank=self._rank,
            version=version,
            slot=index,
            generation=slot.generation,
            address=slot.buffer.address,
            transport=self._transport.name,
            pid=os.getpid(),
            data_offset=data_offset,
            catalog_checksum=self._catalog_checksum,
            manifest_checksum=manifest_checksum(version, self._catalog_checksum, checksums),
        )

    def close(self) -> None:
        """Free the slots. Idempotent."""
        for index, slot in enumerate(self._slots):
            if slot is not None:
                self._slots[index] = None
                slot.close()
        self._transport.close()

    def _slot(self, index: int) -> _Slot:
        """The slot at ``index``, made anew if it was laid out for another catalog."""
        slot = self._slots[index]
        if slot is None or slot.catalog is not self._catalog:
            generation = 0
            if slot is not None:
                generation = slot.generation
                slot.close()
            self._slots[index] = slot = self._new_slot(generation)
        return slot

    def _prepare(
        self,
        local: Mapping[str, torch.Tensor],
        layout: Layout | Mapping[str, HeldShard] | None,
        wire_dtype: torch.dtype | None,
        sink_layout: Layout | None,
    ) -> None:
        signature = tuple((name, tuple(t.shape), t.dtype) for name, t in local.items())
        made_for = (signature, layout, wire_dtype, sink_layout)
        if made_for == self._made_for:
            return
        if layout is None:
            source = _whole(local, self._num_source_ranks)
        elif isinstance(layout, Layout):
            source = layout
        else:
            source = layout_of_rank(layout, self._rank, self._num_source_ranks)
        if source.num_ranks != self._num_source_ranks:
            raise ValueError(f"the layout counts {source.num_ranks} source ranks, the channel {self._num_source_ranks}")
        _check_tensors(source, self._rank, local)
        catalog = build_catalog(source, self._rank, wire_dtypes=_wire_dtypes(source, wire_dtype), sink=sink_layout)
        if catalog != self._catalog:
            self._catalog = catalog
            self._catalog_bytes = catalog.to_bytes()
            self._catalog_checksum = digest(self._catalog_bytes)
        self._made_for = made_for

    def _offsets(self) -> tuple[int, int]:
        assert self._catalog is not None
        checksums = -(-(_PAGE + len(self._catalog_bytes)) // 64) * 64
        data = -(-(checksums + 8 * len(self._catalog.blocks)) // _PAGE) * _PAGE
        return checksums, data

    def _new_slot(self, generation: int) -> _Slot:
        catalog = self._catalog
        assert catalog is not None
        _, data_offset = self._offsets()
        buffer = self._transport.register(data_offset + max(64, catalog.nbytes))
        buffer.data[_PAGE : _PAGE + len(self._catalog_bytes)] = torch.frombuffer(
            bytearray(self._catalog_bytes), dtype=torch.uint8
        )
        pieces: dict[str, list[Piece]] = {}
        for piece in catalog.pieces:
            pieces.setdefault(piece.parameter, []).append(piece)
        data = buffer.data[data_offset:]
        memory = data.numpy()
        copies = []
        for block in catalog.blocks:
            views = []
            for region in block.regions:
                spec = catalog.parameters[region.parameter]
                piece = next(
                    p for p in pieces[region.parameter]
                    if all(a <= c and d <= b for (a, b), (c, d) in zip(p.box, region.box, strict=True))
                )  # fmt: skip
                view = data[region.offset : region.offset + region.nbytes].view(torch_dtype(spec.dtype))
                where = shift(region.box, [a for a, _ in piece.box], piece.origin)
                views.append(
                    (view.view([b - a for a, b in region.box]), piece.tensor, tuple(slice(a, b) for a, b in where))
                )
            copies.append(views)
        blocks = [memory.data[b.offset : b.offset + b.nbytes] for b in catalog.blocks]
        return _Slot(buffer, catalog, copies, blocks, generation)


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.float32`` -> ``"float32"``."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """``"float32"`` -> ``torch.float32``."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    to_local = getattr(tensor, "to_local", None)  # a DTensor hands out this rank's shard
    return (to_local() if to_local is not None else tensor).detach()


def _whole(local: Mapping[str, torch.Tensor], num_ranks: int) -> Layout:
    specs = {name: ParameterSpec(tuple(t.shape), dtype_name(t.dtype)) for name, t in local.items()}
    return replicated_layout(specs, num_ranks)


def _check_tensors(layout: Layout, rank: int, local: Mapping[str, torch.Tensor]) -> None:
    for piece in layout.pieces[rank]:
        tensor = local.get(piece.tensor)
        if tensor is None:
            raise ValueError(
                f"source rank {rank}: the layout places {piece.parameter!r} in {piece.tensor!r}, which is not sent"
            )
        fits = len(piece.local_box) == tensor.ndim and all(
            b <= size for (_, b), size in zip(piece.local_box, tensor.shape, strict=True)
        )
        if not fits:
            raise ValueError(
                f"source rank {rank}: {piece.tensor!r} has shape {tuple(tensor.shape)}, "
                f"the layout needs {piece.local_box} of it for {piece.parameter!r}"
            )


def _wire_dtypes(layout: Layout, wire_dtype: torch.dtype | None) -> dict[str, str]:
    if wire_dtype is None:
        return {}
    if not wire_dtype.is_floating_point:
        raise WeightSyncError(f"wire_dtype {wire_dtype} is no floating-point type; quantize the tensors instead")
    return {
        name: dtype_name(wire_dtype)
        for name, spec in layout.parameters.items()
        if torch_dtype(spec.dtype).is_floating_point
    }
