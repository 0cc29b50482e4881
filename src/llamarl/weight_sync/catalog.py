"""How a source rank's buffer is laid out: where each box of each parameter lies, the same for every version. Pure.

The buffer is a row of blocks. A block holds one run of rows of a large piece, or several small pieces, at most
``BLOCK_BYTES`` together where rows allow it; each region in it is contiguous, so a sink reads a block in one go, proves
it by one checksum and spreads it over its tensors. If the sink's layout is known when the catalog is made, pieces are
cut where the sinks' boxes begin and end, and a block holds what the same sinks want, so that a sink reads no byte it
does not need: a column shard of the sink then lies as one contiguous region, whatever the source's strides were.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from llamarl.transports.checksum import BLOCK_BYTES, ChecksumKind
from llamarl.weight_sync.layout import (
    AnyLayout,
    Box,
    MeshLayout,
    ParameterSpec,
    Piece,
    box_elements,
    dtype_bytes,
    intersect,
)

__all__ = ["Block", "Catalog", "Region", "build_catalog"]

_ALIGN = 64
_Readers = tuple[tuple[int, ...], ...]
"""The sink ranks that want a cell, of each mesh of sinks."""


@dataclass(frozen=True, slots=True)
class Region:
    """One box of one parameter, contiguous in the buffer, row-major, in the wire dtype."""

    parameter: str
    box: Box
    """Global coordinates."""
    offset: int
    """Bytes from the start of the buffer."""
    nbytes: int


@dataclass(frozen=True, slots=True)
class Block:
    """The unit of checksum, copy and second attempt."""

    offset: int
    nbytes: int
    regions: tuple[Region, ...]


@dataclass(frozen=True)
class Catalog:
    """Where everything lies in one source rank's buffer."""

    rank: int
    layout: MeshLayout
    """What all source ranks hold, also those of which this rank holds nothing; a parameter's
    ``dtype`` is the wire dtype."""
    blocks: tuple[Block, ...]
    checksum: ChecksumKind = "xxh3"
    """How the blocks' checksums are made."""

    @property
    def parameters(self) -> Mapping[str, ParameterSpec]:
        """All parameters of the hand-over."""
        return self.layout.parameters

    def dtype_of(self, parameter: str) -> torch.dtype:
        """In which a parameter travels."""
        dtype: torch.dtype = getattr(torch, self.parameters[parameter].dtype)
        return dtype

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """What this rank publishes."""
        return self.layout.pieces_of(self.rank)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return self.blocks[-1].offset + self.blocks[-1].nbytes if self.blocks else 0

    def to_bytes(self) -> bytes:
        names = {name: index for index, name in enumerate(self.parameters)}
        value = {
            "rank": self.rank,
            "checksum": self.checksum,
            "parameters": [[name, list(spec.shape), spec.dtype] for name, spec in self.parameters.items()],
            "blocks": [
                [b.offset, b.nbytes, [[names[r.parameter], r.box, r.offset, r.nbytes] for r in b.regions]]
                for b in self.blocks
            ],
            "layout": self.layout.to_json(),
        }
        return json.dumps(value, separators=(",", ":")).encode()

    @staticmethod
    def from_bytes(data: bytes) -> Catalog:
        value = json.loads(data)
        parameters = {name: ParameterSpec(tuple(shape), dtype) for name, shape, dtype in value["parameters"]}
        names = list(parameters)
        return Catalog(
            rank=value["rank"],
            checksum=value["checksum"],
            layout=MeshLayout.from_json(value["layout"], parameters),
            blocks=tuple(
                Block(offset, size, tuple(Region(names[i], _box(box), o, n) for i, box, o, n in regions))
                for offset, size, regions in value["blocks"]
            ),
        )


def build_catalog(
    layout: MeshLayout,
    rank: int,
    *,
    wire_dtypes: Mapping[str, str] | None = None,
    sink: AnyLayout | None = None,
    block_bytes: int = BLOCK_BYTES,
    checksum: ChecksumKind = "xxh3",
) -> Catalog:
    """Lay out the buffer of source ``rank``.

    Args:
        wire_dtypes: Parameter -> dtype in which it travels; absent: its own.
        sink: The sinks' layout if known; pieces are then cut at the sinks' bounds.
    """
    wire_dtypes = wire_dtypes or {}
    parameters = {
        name: ParameterSpec(spec.shape, wire_dtypes.get(name, spec.dtype)) for name, spec in layout.parameters.items()
    }
    cells_of = _cut_for(sink)
    cells = [(readers, piece.parameter, cell) for piece in layout.pieces_of(rank) for cell, readers in cells_of(piece)]
    packer = _Packer(block_bytes)
    for readers, name, cell in _together(cells, parameters, block_bytes):
        packer.begin(readers)
        itemsize = dtype_bytes(parameters[name].dtype)
        for box in _runs(cell, max(1, block_bytes // itemsize)):
            packer.add(name, box, box_elements(box) * itemsize)
    return Catalog(rank, replace(layout, parameters=parameters), packer.finish(), checksum)


class _Packer:
    """Puts regions one after another into blocks of at most ``block_bytes``."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._blocks: list[Block] = []
        self._regions: list[Region] = []
        self._readers: _Readers = ()
        self._start = self._end = 0

    def begin(self, readers: _Readers) -> None:
        """Start a cell on a cache line, and in a block of its readers. Its runs follow without a gap, so that it can be
        mapped."""
        if readers != self._readers and self._regions:
            self._cut()
        self._readers, self._end = readers, _aligned(self._end)

    def add(self, parameter: str, box: Box, nbytes: int) -> None:
        if not self._regions:
            self._start = self._end
        elif self._end - self._start + nbytes > self._block_bytes:
            self._cut()
            self._start = self._end
        self._regions.append(Region(parameter, box, self._end, nbytes))
        self._end += nbytes

    def finish(self) -> tuple[Block, ...]:
        if self._regions:
            self._cut()
        return tuple(self._blocks)

    def _cut(self) -> None:
        self._blocks.append(Block(self._start, self._end - self._start, tuple(self._regions)))
        self._regions = []


def _cut_for(sink: AnyLayout | None) -> Callable[[Piece], list[tuple[Box, _Readers]]]:
    """Says how a piece is cut where the sinks' boxes begin and end, and who wants each cell; whole where that is not
    known."""
    known: dict[object, list[tuple[Box, _Readers]]] = {}

    def cells_of(piece: Piece) -> list[tuple[Box, _Readers]]:
        if sink is None or piece.parameter not in sink.parameters:
            return [(piece.box, ())]
        key = tuple(part.grids[piece.parameter] for part in sink.parts), piece.box
        if key not in known:  # layers repeat
            found = [one for grid in key[0] for one in grid.meeting(piece.box)]
            cuts = [{bound for box, _ in found for bound in box[dim]} for dim in range(len(piece.box))]
            known[key] = [
                (cell, tuple(ranks for box, ranks in found if intersect(box, cell) is not None))
                for cell in _cells(piece.box, cuts)
            ]
        return known[key]

    return cells_of


def _together(
    cells: Iterable[tuple[_Readers, str, Box]], parameters: Mapping[str, ParameterSpec], block_bytes: int
) -> Iterator[tuple[_Readers, str, Box]]:
    """The cells in order, but those that the same sinks want in a row, a block's worth at a time."""
    held: dict[_Readers, list[tuple[_Readers, str, Box]]] = {}
    sizes: Counter[_Readers] = Counter()
    for readers, name, cell in cells:
        nbytes = box_elements(cell) * dtype_bytes(parameters[name].dtype)
        if sizes[readers] + nbytes > block_bytes:
            yield from held.pop(readers, ())
            sizes[readers] = 0
        held.setdefault(readers, []).append((readers, name, cell))
        sizes[readers] += nbytes
    for rest in held.values():
        yield from rest


def _cells(box: Box, cuts: list[set[int]]) -> Iterator[Box]:
    """``box`` cut by planes, in row-major order."""
    if not box:
        yield box
        return
    start, stop = box[0]
    edges = [start, *sorted(c for c in cuts[0] if start < c < stop), stop]
    for low, high in zip(edges, edges[1:], strict=False):
        for rest in _cells(box[1:], cuts[1:]):
            yield ((low, high), *rest)


def _runs(box: Box, max_elements: int) -> Iterator[Box]:
    """``box`` cut into boxes of at most ``max_elements``, each contiguous in a row-major layout of ``box``."""
    if not box or box_elements(box) <= max_elements:
        yield box
        return
    start, stop = box[0]
    row = box_elements(box[1:])
    if row > max_elements:
        for index in range(start, stop):
            for rest in _runs(box[1:], max_elements):
                yield ((index, index + 1), *rest)
        return
    step = max_elements // row
    for low in range(start, stop, step):
        yield ((low, min(stop, low + step)), *box[1:])


def _box(value: list[list[int]]) -> Box:
    return tuple((a, b) for a, b in value)


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
