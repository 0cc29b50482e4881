"""Who holds what: layouts of a model's parameters over the ranks of one executor. Pure: no tensors.

A *parameter* is named and shaped as the source of truth names it (Hugging Face names). A rank holds *pieces* of it: a
box of the global tensor that lies somewhere in one of the rank's local tensors. That one notion says it all:

    sharded      box = rows 128..256 of model.embed_tokens.weight, local tensor of the same name, at (0, 0)
    replicated   every rank has a piece whose box is the whole; or neighbours share a part, as of more ranks than heads
    fused        q_proj, k_proj and v_proj are pieces of the local tensor qkv_proj.weight at rows 0, n_q, n_q + n_k
    tied         one parameter; a rank that keeps two copies has two pieces of it, in two tensors

A box is one (start, stop) a dimension. Sharding follows PyTorch: ``torch.chunk``, so the last shards may be smaller or
empty (uneven FSDP2), and on a mesh that shards one dimension twice tensor parallelism cuts first, FSDP cuts what is left.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from llamarl.errors import PlanError
from llamarl.models.sizes import part_of_rank

__all__ = [
    "Box",
    "HeldShard",
    "Layout",
    "ParameterSpec",
    "Piece",
    "Shard",
    "box_elements",
    "chunk_bounds",
    "dtype_bytes",
    "fullest_rank_bytes",
    "intersect",
    "layout_of_rank",
    "mesh_layout",
    "replicated_layout",
    "shift",
    "span",
    "shard_box",
    "subtract",
    "whole_box",
]

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
    """A box of one parameter, and where it lies on the rank that holds it."""

    parameter: str
    box: Box
    """Global coordinates."""
    tensor: str
    """Name of the rank's local tensor that contains it."""
    origin: tuple[int, ...]
    """Where the box starts inside that tensor."""

    @property
    def local_box(self) -> Box:
        """The box in the local tensor's own coordinates."""
        return tuple((o, o + stop - start) for o, (start, stop) in zip(self.origin, self.box, strict=True))


@dataclass(frozen=True, slots=True)
class Shard:
    """Cut dimension ``dim`` evenly over mesh axis ``axis``."""

    axis: str
    dim: int
    at_most: int | None = None
    """Into no more parts than these: of more ranks along the axis, neighbours hold the same. None: a part a rank."""


@dataclass(frozen=True)
class Layout:
    """All ranks' pieces of all parameters.

    Raises:
        PlanError: A piece lies outside its parameter, or names one that is not there.
    """

    parameters: Mapping[str, ParameterSpec]
    pieces: tuple[tuple[Piece, ...], ...]
    """By rank. Empty boxes are left out."""

    def __post_init__(self) -> None:
        for rank, pieces in enumerate(self.pieces):
            for piece in pieces:
                spec = self.parameters.get(piece.parameter)
                if spec is None:
                    raise PlanError(f"layout: rank {rank} holds {piece.parameter!r}, which is not among the parameters")
                inside = len(piece.box) == len(spec.shape) == len(piece.origin) and all(
                    0 <= start < stop <= size for (start, stop), size in zip(piece.box, spec.shape, strict=True)
                )
                if not inside:
                    raise PlanError(
                        f"layout: rank {rank} holds box {piece.box} of {piece.parameter!r}, whose shape is {spec.shape}"
                    )

    @property
    def num_ranks(self) -> int:
        return len(self.pieces)

    def pieces_of(self, rank: int) -> tuple[Piece, ...]:
        """What one rank holds."""
        return self.pieces[rank]

    def held_somewhere(self) -> set[str]:
        """Parameters of which some rank holds something."""
        return {piece.parameter for pieces in self.pieces for piece in pieces}


class HeldShard(Protocol):
    """One parameter and the box of it that one rank holds, as a trainer describes itself."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Global."""
        ...

    @property
    def dtype(self) -> str: ...

    @property
    def box(self) -> Box:
        """Global coordinates; empty where there are more ranks than rows."""
        ...


def layout_of_rank(shards: Mapping[str, HeldShard], rank: int, num_ranks: int) -> Layout:
    """What one rank says of itself: the layout's other ranks are left empty. Enough to publish, not to plan."""
    parameters = {name: ParameterSpec(tuple(s.shape), s.dtype) for name, s in shards.items()}
    pieces = tuple(
        Piece(name, tuple(s.box), name, (0,) * len(s.box)) for name, s in shards.items() if box_elements(s.box) > 0
    )
    return Layout(parameters, tuple(pieces if r == rank else () for r in range(num_ranks)))


def replicated_layout(parameters: Mapping[str, ParameterSpec], num_ranks: int) -> Layout:
    """Every rank holds every parameter whole, in a tensor of the same name."""
    pieces = tuple(
        Piece(name, whole_box(spec.shape), name, (0,) * len(spec.shape))
        for name, spec in parameters.items()
        if math.prod(spec.shape) > 0
    )
    return Layout(dict(parameters), (pieces,) * num_ranks)


def mesh_layout(
    parameters: Mapping[str, ParameterSpec],
    mesh: Mapping[str, int],
    placements: Mapping[str, Sequence[Shard]],
) -> Layout:
    """Layout on a device mesh: a parameter is cut by its shards in order, and replicated over all other axes.

    Args:
        mesh: Axis name -> size, outermost first; ranks count row-major (``{"fsdp": 2, "tp": 4}``: rank = fsdp * 4 + tp).
        placements: Parameter -> cuts in the order they were made; tensor parallelism before FSDP. Absent: replicated.

    Raises:
        PlanError: A cut names an axis or a dimension that does not exist, or its parts do not go evenly over more ranks.
    """
    num_ranks = math.prod(mesh.values())
    cuts = {name: tuple(placements.get(name, ())) for name in parameters}
    for name, shards in cuts.items():
        for shard in shards:
            size = mesh.get(shard.axis, 0)
            uneven = shard.at_most is not None and size > shard.at_most and size % shard.at_most
            if not size or uneven or not 0 <= shard.dim < len(parameters[name].shape):
                raise PlanError(
                    f"layout: {name!r} of shape {parameters[name].shape} cannot be cut by {shard} on mesh {dict(mesh)}"
                )
    ranks = []
    for rank in range(num_ranks):
        coordinates, rest = {}, rank
        for axis, size in reversed(list(mesh.items())):
            rest, coordinates[axis] = divmod(rest, size)
        pieces = []
        for name, spec in parameters.items():
            box = whole_box(spec.shape)
            for shard in cuts[name]:
                box = shard_box(box, shard.dim, *part_of_rank(mesh[shard.axis], coordinates[shard.axis], shard.at_most))
            if box_elements(box) > 0:
                pieces.append(Piece(name, box, name, (0,) * len(box)))
        ranks.append(tuple(pieces))
    return Layout(dict(parameters), tuple(ranks))


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


def subtract(a: Box, b: Box) -> list[Box]:
    """``a`` without ``b``: at most two boxes a dimension, disjoint."""
    common = intersect(a, b)
    if common is None:
        return [a]
    rest, core = [], list(a)
    for dim, ((a0, a1), (c0, c1)) in enumerate(zip(a, common, strict=True)):
        for low, high in ((a0, c0), (c1, a1)):
            if low < high:
                rest.append((*core[:dim], (low, high), *core[dim + 1 :]))
        core[dim] = (c0, c1)
    return rest


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


def fullest_rank_bytes(
    parameters: Mapping[str, ParameterSpec],
    mesh: Mapping[str, int],
    placements: Mapping[str, Sequence[Shard]],
    stages: Mapping[str, tuple[int, ...]],
) -> int:
    """Count the bytes of one version at the rank that holds most: of a stage the first, since chunks never grow.

    Args:
        mesh: Axis -> ranks along it; ``pp`` are the stages.
        stages: Parameter -> the stages that hold it; not named: all.
    """
    held = [0] * mesh.get("pp", 1)
    for name, spec in parameters.items():
        box = whole_box(spec.shape)
        for cut in placements.get(name, ()):
            box = shard_box(box, cut.dim, part_of_rank(mesh[cut.axis], 0, cut.at_most)[0], 0)
        for stage in stages.get(name, range(len(held))):
            held[stage] += box_elements(box) * dtype_bytes(spec.dtype)
    return max(held)
