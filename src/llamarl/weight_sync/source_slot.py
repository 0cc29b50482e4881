"""A source rank's slot from the inside: registered memory laid out for a catalog, and where each
region's bytes come from.

register ─▶ [ header | catalog | checksums | blocks ] ─▶ one copy a region: a bare memory copy where the region is one run
                                                          of the tensor in the same dtype, else a cast on the way
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from llamarl.errors import ChannelError, WeightSyncError
from llamarl.transports.base import SourceBuffer, SourceTransport
from llamarl.transports.slots import PAGE, header_words
from llamarl.weight_sync.layout import shift, span, whole_box
from llamarl.weight_sync.manifest import Catalog

__all__ = ["RegionCopy", "SourceSlot", "make_slot", "slot_offsets"]


@dataclass(frozen=True, slots=True)
class RegionCopy:
    """One region of a slot, and where its values come from."""

    view: torch.Tensor
    """The region, shaped, in the wire dtype."""
    tensor: str
    where: tuple[slice, ...]
    start: int | None
    """Elements from the tensor's first to the region's first, if the region is one run of the (contiguous) tensor."""

    def run(self, tensor: torch.Tensor) -> None:
        view = self.view
        plain = (
            self.start is not None
            and tensor.dtype == view.dtype
            and tensor.is_cpu
            and view.is_cpu
            and tensor.is_contiguous()
        )
        if plain and self.start is not None:  # a bare memory copy: half the overhead of a tensor copy at block size
            address = tensor.data_ptr() + self.start * view.element_size()
            ctypes.memmove(view.data_ptr(), address, view.numel() * view.element_size())
        else:
            view.copy_(tensor[self.where])


@dataclass
class SourceSlot:
    """One slot of the ring, writable."""

    buffer: SourceBuffer
    catalog: Catalog
    copies: list[list[RegionCopy]]
    """By block."""
    blocks: list[torch.Tensor]
    """By block: its bytes, uint8."""
    words: npt.NDArray[np.uint64]
    """The header."""
    checksums: npt.NDArray[np.uint64]
    """[num_blocks], in the slot."""
    generation: int
    token: int | None = None
    """Number of the token it holds, counted by the sender; None before the first."""

    def close(self) -> None:
        self.copies.clear()
        self.blocks.clear()
        self.words = self.checksums = np.empty(0, np.uint64)
        self.buffer.close()


def slot_offsets(catalog: Catalog, catalog_bytes: int) -> tuple[int, int]:
    """Where a slot's checksums and its data begin."""
    checksums = -(-(PAGE + catalog_bytes) // 64) * 64
    data = -(-(checksums + 8 * len(catalog.blocks)) // PAGE) * PAGE
    return checksums, data


def make_slot(
    catalog: Catalog,
    catalog_bytes: bytes,
    transport: SourceTransport,
    shapes: Mapping[str, torch.Size],
    *,
    generation: int,
) -> SourceSlot:
    """Register memory for ``catalog`` and work out the copies that fill it.

    Args:
        shapes: Of the local tensors.
        generation: Of the slot that it replaces; 0 for a first one.

    Raises:
        WeightSyncError: There is not that much memory.
    """
    checksums_offset, data_offset = slot_offsets(catalog, len(catalog_bytes))
    try:
        buffer = transport.register(data_offset, max(64, catalog.nbytes))
    except ChannelError as error:
        raise WeightSyncError(f"cannot register a slot for the weights: {error}") from error
    buffer.control[PAGE : PAGE + len(catalog_bytes)] = torch.frombuffer(bytearray(catalog_bytes), dtype=torch.uint8)
    starts = {piece.parameter: [a for a, _ in piece.box] for piece in catalog.pieces}
    data = buffer.data
    copies = []
    for block in catalog.blocks:
        of_block = []
        for region in block.regions:
            spec = catalog.parameters[region.parameter]
            view = data[region.offset : region.offset + region.nbytes].view(getattr(torch, spec.dtype))
            where = shift(region.box, starts[region.parameter], [0] * len(region.box))
            start, stop = span(where, whole_box(shapes[region.parameter]))
            of_block.append(
                RegionCopy(
                    view=view.view([b - a for a, b in region.box]),
                    tensor=region.parameter,
                    where=tuple(slice(a, b) for a, b in where),
                    start=start if stop - start == view.numel() else None,
                )
            )
        copies.append(of_block)
    blocks = [data[b.offset : b.offset + b.nbytes] for b in catalog.blocks]
    control = buffer.control.numpy()
    checksums = control[checksums_offset : checksums_offset + 8 * len(blocks)].view(np.uint64)
    return SourceSlot(buffer, catalog, copies, blocks, header_words(control), checksums, generation)
