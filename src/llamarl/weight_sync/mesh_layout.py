"""A layout as a rule: a mesh of ranks and, for each parameter, the cuts along its axes. Pure: no tensors.

It works out the piece of one rank, and which ranks hold what meets a given box, when it is asked.
What a rank asks for costs it the same on 8 ranks and on thousands:

    parameter ─▶ grid of cells (one box each, disjoint, together the whole) ─▶ ranks that hold a cell

The ranks that hold one cell are a product of ranges, one a mesh axis: an even part of an axis that
cuts the parameter, all of an axis that does not, and along ``STAGE_AXIS`` the stages that have the
parameter at all.

Ranks of several meshes, one after another (unlike replicas), are a ``JoinedLayout``: a sink may
have one, a source is one mesh.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

from llamarl.errors import PlanError
from llamarl.models.sizes import part_of_rank
from llamarl.weight_sync.layout import Box, ParameterSpec, Piece, Shard, box_elements, shard_box, whole_box

__all__ = [
    "STAGE_AXIS",
    "AnyLayout",
    "Cell",
    "Grid",
    "JoinedGrid",
    "JoinedLayout",
    "MeshLayout",
    "RankSet",
]

STAGE_AXIS = "pp"
"""The mesh axis whose places are pipeline stages."""


@dataclass(frozen=True, slots=True)
class RankSet:
    """A product of places along the axes of a mesh, as ranks, in ascending order."""

    places: tuple[Sequence[int], ...]
    """By axis, outermost first: ascending numbers."""
    sizes: tuple[int, ...]
    """Of the axes."""
    first: int = 0
    """Rank of the mesh's first."""

    def __len__(self) -> int:
        return math.prod(map(len, self.places))

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < len(self):
            raise IndexError(index)
        rank, stride = self.first, 1
        for own, size in zip(reversed(self.places), reversed(self.sizes), strict=True):
            index, place = divmod(index, len(own))
            rank += own[place] * stride
            stride *= size
        return rank

    def index(self, rank: int) -> int:
        """How many of these ranks are below ``rank``, which is one of them."""
        rest, found, count = rank - self.first, 0, 1
        for own, size in zip(reversed(self.places), reversed(self.sizes), strict=True):
            rest, place = divmod(rest, size)
            found += own.index(place) * count
            count *= len(own)
        return found


@dataclass(frozen=True, slots=True)
class Cell:
    """What some ranks hold of a parameter, as far as it meets a box that was asked for."""

    box: Box
    """What both have in common; global coordinates."""
    start: tuple[int, ...]
    """Where the whole cell begins."""
    ranks: RankSet


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

    def holders(self, rank: int) -> RankSet:
        """The ranks that hold the same cell as ``rank``, itself among them."""
        places = self._places(rank)
        return self._ranks(
            {cut.axis: part_of_rank(self._size(cut.axis), places[cut.axis], cut.at_most)[1] for cut in self.cuts}
        )

    def meeting(self, box: Box) -> list[Cell]:
        """The cells that have something in common with ``box``, in order of position."""
        found: list[tuple[Box, tuple[int, ...], dict[str, int]]] = [((), (), {})]
        for dim, (wanted, size) in enumerate(zip(box, self.shape, strict=True)):
            intervals = self._intervals([cut for cut in self.cuts if cut.dim == dim], (0, size), wanted)
            found = [
                ((*done, (max(a, wanted[0]), min(b, wanted[1]))), (*starts, a), parts | more)
                for done, starts, parts in found
                for (a, b), more in intervals
            ]
        return [Cell(common, start, self._ranks(parts)) for common, start, parts in found]

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

    def _ranks(self, parts: Mapping[str, int]) -> RankSet:
        at_most = {cut.axis: cut.at_most for cut in self.cuts}
        places: list[Sequence[int]] = []
        for axis, size in self.mesh:
            if axis in parts:
                each = size // part_of_rank(size, 0, at_most[axis])[0]
                places.append(range(parts[axis] * each, (parts[axis] + 1) * each))
            elif axis == STAGE_AXIS and self.stages is not None:
                places.append(self.stages)
            else:
                places.append(range(size))
        return RankSet(tuple(places), tuple(size for _, size in self.mesh))

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
            if grid.stages is not None and fits:
                places = range(mesh[STAGE_AXIS])
                fits = bool(grid.stages) and all(s in places for s in grid.stages) and _ascends(grid.stages)
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

    def held_somewhere(self) -> set[str]:
        """Parameters of which some rank holds something: all but those without an element."""
        return {name for name, spec in self.parameters.items() if math.prod(spec.shape) > 0}

    def edges(self, parameter: str, box: Box) -> list[set[int]]:
        """By dimension: where inside ``box`` one rank's part of a parameter ends and another's
        begins, or at its ends."""
        edges: list[set[int]] = [set() for _ in box]
        for cell in self.grids[parameter].meeting(box):
            for dim, bounds in zip(edges, cell.box, strict=True):
                dim.update(bounds)
        return edges

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
class JoinedGrid:
    """How a parameter lies over several meshes."""

    parts: tuple[tuple[int, int, Grid], ...]
    """First rank of a mesh, the one after its last, and the grid there."""

    def held(self, rank: int) -> Box | None:
        """See ``Grid``."""
        first, grid = self._part(rank)
        return grid.held(rank - first)

    def holders(self, rank: int) -> RankSet:
        """Of the mesh of ``rank``: those of another one may hold the same, too."""
        first, grid = self._part(rank)
        return replace(grid.holders(rank - first), first=first)

    def _part(self, rank: int) -> tuple[int, Grid]:
        return next((first, grid) for first, stop, grid in self.parts if first <= rank < stop)


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

    @cached_property
    def grids(self) -> Mapping[str, JoinedGrid]:
        """See ``MeshLayout``."""
        bounds = list(accumulate((part.num_ranks for part in self.parts), initial=0))
        made: dict[tuple[Grid, ...], JoinedGrid] = {}
        grids = {}
        for name in self.parameters:
            key = tuple(part.grids[name] for part in self.parts)
            if key not in made:
                made[key] = JoinedGrid(tuple(zip(bounds[:-1], bounds[1:], key, strict=True)))
            grids[name] = made[key]
        return grids

    def pieces_of(self, rank: int) -> tuple[Piece, ...]:
        """What one rank holds, in the parameters' order."""
        for part in self.parts:
            if rank < part.num_ranks:
                return part.pieces_of(rank)
            rank -= part.num_ranks
        raise IndexError(rank)

    def held_somewhere(self) -> set[str]:
        """See ``MeshLayout``."""
        return self.parts[0].held_somewhere()

    def edges(self, parameter: str, box: Box) -> list[set[int]]:
        """See ``MeshLayout``."""
        of_parts = [part.edges(parameter, box) for part in self.parts]
        return [set().union(*dims) for dims in zip(*of_parts, strict=True)]


AnyLayout = MeshLayout | JoinedLayout
"""What a sink may have; a source is one mesh."""


def _ascends(values: Iterable[int]) -> bool:
    values = list(values)
    return all(a < b for a, b in zip(values, values[1:], strict=False))
