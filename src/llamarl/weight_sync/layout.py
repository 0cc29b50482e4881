"""Parameters, boxes of them, and how a cut divides them over ranks. Pure: no tensors.

A *parameter* is named and shaped as the source of truth names it (Hugging Face names); a tied one
counts once. A rank holds at most one *piece* of it: a box of the global tensor, which is the rank's
local tensor of that name.

A box is one (start, stop) a dimension. Sharding follows PyTorch: ``torch.chunk``, so the last
shards may be smaller or empty (uneven FSDP2), and on a mesh that shards one dimension twice tensor
parallelism cuts first, FSDP cuts what is left.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llamarl.errors import PlanError
from llamarl.models.sizes import part_of_rank

__all__ = [
    "Box",
    "ParameterSpec",
    "Piece",
    "Shard",
    "box_elements",
    "chunk_bounds",
    "dtype_bytes",
    "fullest_rank_bytes",
    "intersect",
    "shift",
    "span",
    "shard_box",
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
