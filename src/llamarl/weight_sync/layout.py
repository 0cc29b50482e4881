"""Who holds which box of which parameter: a mesh of ranks and, for each parameter, the cuts along its axes. Pure.

A *parameter* is named and shaped as the source of truth names it (Hugging Face names); a tied one
counts once. A rank holds at most one *piece* of it: a box of the global tensor, which is the rank's
local tensor of that name.

    parameter ─▶ grid of cells (one box each, disjoint, together the whole) ─▶ ranks that hold a cell

A box is one (start, stop) a dimension. Sharding follows PyTorch: ``torch.chunk``, so the last
shards may be smaller or empty (uneven FSDP2), and on a mesh that shards one dimension twice tensor
parallelism cuts first, FSDP cuts what is left. Stages and experts are axes like others: along
``STAGE_AXIS`` some places hold a parameter and the others do not.

Unlike replicas are several meshes, one after another (``JoinedLayout``): a sink may have them, a
source is one mesh.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from llamarl.errors import PlanError
from llamarl.models.sizes import part_of_rank

__all__ = [
    "STAGE_AXIS",
    "AnyLayout",
    "Box",
    "Grid",
    "JoinedLayout",
    "MeshLayout",
    "ParameterSpec",
    "Piece",
    "Shard",
    "box_elements",
    "chunk_bounds",
    "dtype_bytes",
    "intersect",
    "shard_box",
    "shift",
    "span",
    "whole_box",
]

STAGE_AXIS = "pp"
"""The mesh axis whose places are pipeline stages."""

Box = tuple[tuple[int, int], ...]
"""Half-open (start, stop) for each dimension; () is the box of a scalar."""

_DTYPE_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8, "float16": 2, "bfloat16": 2, "float32": 4,
    "float64": 8, "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """Global shape and type of one parameter."""

    shape: tuple[int, ...]
    dtype: str
    """A torch dtype's name without ``torch.``: ``float32``, ``bfloat16``, ..."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * dtype_bytes(self.dtype)


@dataclass(frozen=True, slots=True)
class Piece:
    """What one rank holds of one parameter: its local tensor of that name."""

    parameter: str
    box: Box
    """Global coordinates."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Cut dimension ``dim`` evenly over mesh axis ``axis``."""

    axis: str
    dim: int
    at_most: int | None = None
    """Into no more parts than these: of more ranks along the axis, neighbours hold the same. None: a part a rank."""


def chunk_bounds(size: int, num_parts: int, part: int) -> tuple[int, int]:
    """Bounds of ``torch.chunk(range(size), num_parts)[part]``; empty where torch would give fewer chunks."""
    step = -(-size // num_parts)
    return min(size, part * step), min(size, (part + 1) * step)


def shard_box(box: Box, dim: int, num_parts: int, part: int) -> Box:
    """The ``part``-th of ``num_parts`` chunks of ``box`` along ``dim``."""
    start, stop = box[dim]
    low, high = chunk_bounds(stop - start, num_parts, part)
    return (*box[:dim], (start + low, start + high), *box[dim + 1 :])


def whole_box(shape: Sequence[int]) -> Box:
    return tuple((0, size) for size in shape)


def box_elements(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)


def intersect(a: Box, b: Box) -> Box | None:
    """Common part of two boxes, or None."""
    result = []
    for (a0, a1), (b0, b1) in zip(a, b, strict=True):
        low, high = max(a0, b0), min(a1, b1)
        if low >= high:
            return None
        result.append((low, high))
    return tuple(result)


def span(inner: Box, outer: Box) -> tuple[int, int]:
    """Row-major indices in ``outer`` of the first element of ``inner`` and of the one after its last."""
    first = last = 0
    for (a, b), (start, stop) in zip(inner, outer, strict=True):
        first = first * (stop - start) + a - start
        last = last * (stop - start) + b - 1 - start
    return first, last + 1


def shift(box: Box, origin: Sequence[int], to: Sequence[int]) -> Box:
    """``box`` moved by ``to - origin``: from coordinates that start at ``origin`` to ones that start at ``to``."""
    return tuple((a - o + t, b - o + t) for (a, b), o, t in zip(box, origin, to, strict=True))


def dtype_bytes(dtype: str) -> int:
    """Bytes of one element.

    Raises:
        PlanError: Not a dtype that weights travel in.
    """
    try:
        return _DTYPE_BYTES[dtype]
    except KeyError:
        raise PlanError(f"dtype {dtype!r} cannot be handed over; known: {', '.join(sorted(_DTYPE_BYTES))}") from None


@dataclass(frozen=True)
class Grid:
    """How parameters of one shape, cut alike, lie over a mesh."""

    shape: tuple[int, ...]
    mesh: tuple[tuple[str, int], ...]
    cuts: tuple[Shard, ...]
    stages: tuple[int, ...] | None

    def held(self, rank: int) -> Box | None:
        """The box that a rank holds; None: nothing."""
        places = self._places(rank)
        if self.stages is not None and places[STAGE_AXIS] not in self.stages:
            return None
        box = whole_box(self.shape)
        for cut in self.cuts:
            box = shard_box(box, cut.dim, *part_of_rank(self._size(cut.axis), places[cut.axis], cut.at_most))
        return box if box_elements(box) > 0 else None

    def holders(self, rank: int) -> tuple[int, ...]:
        """The ranks that hold the same cell as ``rank``, itself among them; ascending."""
        places = self._places(rank)
        return self._ranks(
            {cut.axis: part_of_rank(self._size(cut.axis), places[cut.axis], cut.at_most)[1] for cut in self.cuts}
        )

    def meeting(self, box: Box) -> list[tuple[Box, tuple[int, ...]]]:
        """What each cell has in common with ``box``, and the ranks that hold the cell; in order of
        position, cells that do not meet it left out."""
        found: list[tuple[Box, dict[str, int]]] = [((), {})]
        for dim, (wanted, size) in enumerate(zip(box, self.shape, strict=True)):
            intervals = self._intervals([cut for cut in self.cuts if cut.dim == dim], (0, size), wanted)
            found = [
                ((*done, (max(a, wanted[0]), min(b, wanted[1]))), parts | more)
                for done, parts in found
                for (a, b), more in intervals
            ]
        return sorted((common, self._ranks(parts)) for common, parts in found)

    def _intervals(
        self, cuts: Sequence[Shard], interval: tuple[int, int], wanted: tuple[int, int]
    ) -> list[tuple[tuple[int, int], dict[str, int]]]:
        """Parts of ``interval``, cut one after another, that meet ``wanted``, with the part's
        number along each axis."""
        if not cuts:
            return [(interval, {})]
        start, stop = interval
        cut, rest = cuts[0], cuts[1:]
        parts = part_of_rank(self._size(cut.axis), 0, cut.at_most)[0]
        step = max(1, -(-(stop - start) // parts))
        found = []
        for part in range((max(start, wanted[0]) - start) // step, (min(stop, wanted[1]) - 1 - start) // step + 1):
            inner = (start + part * step, min(stop, start + (part + 1) * step))
            found += [(i, {cut.axis: part} | more) for i, more in self._intervals(rest, inner, wanted)]
        return found

    def _ranks(self, parts: Mapping[str, int]) -> tuple[int, ...]:
        """An even part of each axis that cuts the parameter, all of one that does not, the stages that have it."""
        at_most = {cut.axis: cut.at_most for cut in self.cuts}
        ranks = [0]
        for axis, size in self.mesh:
            places: Sequence[int] = range(size)
            if axis in parts:
                each = size // part_of_rank(size, 0, at_most[axis])[0]
                places = range(parts[axis] * each, (parts[axis] + 1) * each)
            elif axis == STAGE_AXIS and self.stages is not None:
                places = self.stages
            ranks = [rank * size + place for rank in ranks for place in places]
        return tuple(ranks)

    def _places(self, rank: int) -> dict[str, int]:
        places = {}
        for axis, size in reversed(self.mesh):
            rank, places[axis] = divmod(rank, size)
        return places

    def _size(self, axis: str) -> int:
        return next(size for name, size in self.mesh if name == axis)


@dataclass(frozen=True)
class MeshLayout:
    """What every rank of a mesh holds; a rank has one piece of a parameter at most, in a tensor of the same name.

    Raises:
        PlanError: A cut or a stage does not fit the mesh or the parameter.
    """

    parameters: Mapping[str, ParameterSpec]
    mesh: Mapping[str, int]
    """Axis name -> size, outermost first; ranks count row by row."""
    cuts: Mapping[str, tuple[Shard, ...]] = field(default_factory=dict)
    """In the order in which they were made: tensor parallelism before FSDP. Absent: replicated over the mesh."""
    stages: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Places along ``STAGE_AXIS`` that hold a parameter, ascending. Absent: all."""
    meshes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """The same ranks, counted along other axes, for parameters that are cut along these."""

    def __post_init__(self) -> None:
        for grid in set(self.grids.values()):
            mesh = dict(grid.mesh)
            axes = [cut.axis for cut in grid.cuts] + ([STAGE_AXIS] if grid.stages is not None else [])
            fits = len(set(axes)) == len(axes) and set(axes) <= mesh.keys()
            fits = fits and math.prod(mesh.values()) == self.num_ranks
            for cut in grid.cuts if fits else ():
                size = mesh[cut.axis]
                uneven = cut.at_most is not None and size > cut.at_most and size % cut.at_most
                fits = fits and not uneven and 0 <= cut.dim < len(grid.shape)
            if grid.stages is not None and fits:  # ascending, each once
                places = [stage for stage in range(mesh[STAGE_AXIS]) if stage in grid.stages]
                fits = bool(places) and tuple(places) == grid.stages
            if not fits:
                name = next(name for name, own in self.grids.items() if own == grid)
                stages = "" if grid.stages is None else f" and lie on stages {grid.stages}"
                raise PlanError(
                    f"layout: {name!r} of shape {grid.shape} cannot be cut by {', '.join(map(str, grid.cuts)) or 'nothing'}"
                    f"{stages} on mesh {mesh}"
                )

    @property
    def num_ranks(self) -> int:
        return math.prod(self.mesh.values())

    @property
    def parts(self) -> tuple[MeshLayout, ...]:
        """As of a ``JoinedLayout``."""
        return (self,)

    def part_of(self, rank: int) -> tuple[MeshLayout, int]:
        """As of a ``JoinedLayout``."""
        return self, rank

    @cached_property
    def grids(self) -> Mapping[str, Grid]:
        """Parameter -> how it lies over the mesh; layers repeat, so few of them differ."""
        mesh = tuple(self.mesh.items())
        made: dict[object, Grid] = {}
        grids = {}
        for name, spec in self.parameters.items():
            own = tuple(self.meshes[name].items()) if name in self.meshes else mesh
            key = (spec.shape, own, tuple(self.cuts.get(name, ())), self.stages.get(name))
            if key not in made:
                made[key] = Grid(*key)
            grids[name] = made[key]
        return grids

    def pieces_of(self, rank: int) -> tuple[Piece, ...]:
        """What one rank holds, in the parameters' order."""
        boxes = {grid: grid.held(rank) for grid in set(self.grids.values())}
        return tuple(Piece(name, box) for name, grid in self.grids.items() if (box := boxes[grid]) is not None)

    def to_json(self) -> dict[str, Any]:
        """Plain values, without the parameters: these name their grid by its number."""
        kinds = list(dict.fromkeys((grid.mesh, grid.cuts, grid.stages) for grid in self.grids.values()))
        number = {kind: index for index, kind in enumerate(kinds)}
        return {
            "mesh": list(self.mesh.items()),
            "kinds": [[mesh, [[c.axis, c.dim, c.at_most] for c in cuts], stages] for mesh, cuts, stages in kinds],
            "of": [number[grid.mesh, grid.cuts, grid.stages] for grid in self.grids.values()],
        }

    @staticmethod
    def from_json(value: Mapping[str, Any], parameters: Mapping[str, ParameterSpec]) -> MeshLayout:
        """What ``to_json`` gave for parameters of these names, in this order."""
        mesh = dict(value["mesh"])
        kinds = [
            (dict(own), tuple(Shard(*cut) for cut in cuts), None if stages is None else tuple(stages))
            for own, cuts, stages in value["kinds"]
        ]
        of = dict(zip(parameters, (kinds[index] for index in value["of"]), strict=True))
        return MeshLayout(
            parameters,
            mesh,
            {name: cuts for name, (_, cuts, _) in of.items() if cuts},
            {name: stages for name, (_, _, stages) in of.items() if stages is not None},
            {name: own for name, (own, _, _) in of.items() if list(own.items()) != list(mesh.items())},
        )


@dataclass(frozen=True)
class JoinedLayout:
    """The ranks of several meshes that hold the same parameters, one after another."""

    parts: tuple[MeshLayout, ...]

    @property
    def parameters(self) -> Mapping[str, ParameterSpec]:
        return self.parts[0].parameters

    @property
    def num_ranks(self) -> int:
        return sum(part.num_ranks for part in self.parts)

    def part_of(self, rank: int) -> tuple[MeshLayout, int]:
        """The mesh of a rank, and its number there."""
        for part in self.parts:
            if rank < part.num_ranks:
                return part, rank
            rank -= part.num_ranks
        raise IndexError(rank)

    def pieces_of(self, rank: int) -> tuple[Piece, ...]:
        """What one rank holds, in the parameters' order."""
        part, own = self.part_of(rank)
        return part.pieces_of(own)


AnyLayout = MeshLayout | JoinedLayout
"""What a sink may have; a source is one mesh."""
