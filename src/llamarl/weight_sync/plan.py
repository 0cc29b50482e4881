"""The transfer plan: from two layouts to a list of slice copies. Pure: no tensors, no processes.

For each parameter, intersect what a sink rank needs with what source ranks hold::

    source (fsdp 2): rank 0 rows 0..4 │ rank 1 rows 4..8          copies
    sink   (tp 3):   rank 0 rows 0..3                       ──▶   0 ─▶ 0 rows 0..3
                     rank 1 rows 3..6                             0 ─▶ 1 rows 3..4,  1 ─▶ 1 rows 4..6
                     rank 2 rows 6..8                             1 ─▶ 2 rows 6..8

Every element that a sink holds is written by exactly one copy. Copies that the same source ranks could send are dealt to
these ranks in turn, largest first, so that replicas share the load to within one copy: of the rank that is dealt first
and the one that is dealt last, each copy of the second is at least as large as the next one of the first. Whose turn a
copy is depends on the two layouts alone, so every rank computes the same plan without a word.

This lists the plan of all ranks, for layouts that are lists themselves. A rank of two layouts that are rules works out
its own part alone, to the same result: ``local_plan.py``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from llamarl.errors import PlanError
from llamarl.weight_sync.layout import (
    Box,
    Layout,
    ParameterSpec,
    Piece,
    box_elements,
    dtype_bytes,
    intersect,
    shift,
    subtract,
)

__all__ = ["SliceCopy", "TransferPlan", "check_names", "plan_transfer"]


@dataclass(frozen=True, slots=True)
class SliceCopy:
    """Copy one box of one parameter from a source rank to a sink rank."""

    parameter: str
    box: Box
    """Global coordinates."""
    source_rank: int
    source_tensor: str
    source_slice: Box
    """In the source's local tensor."""
    sink_rank: int
    sink_tensor: str
    sink_slice: Box
    """In the sink's local tensor."""
    nbytes: int
    """In the source's dtype."""


@dataclass(frozen=True)
class TransferPlan:
    """All slice copies of one hand-over, in order of the source's parameters, sink rank and position."""

    copies: tuple[SliceCopy, ...]
    num_source_ranks: int
    num_sink_ranks: int

    def to_sink(self, rank: int) -> tuple[SliceCopy, ...]:
        """Copies that sink ``rank`` pulls."""
        return tuple(c for c in self.copies if c.sink_rank == rank)

    def sent_bytes(self) -> list[int]:
        """Bytes that leave each source rank."""
        return _sum_by(((c.source_rank, c.nbytes) for c in self.copies), self.num_source_ranks)

    def received_bytes(self) -> list[int]:
        """Bytes that reach each sink rank."""
        return _sum_by(((c.sink_rank, c.nbytes) for c in self.copies), self.num_sink_ranks)

    def link_bytes(self) -> dict[tuple[int, int], int]:
        """(source rank, sink rank) -> bytes, for the pairs that talk at all."""
        total: dict[tuple[int, int], int] = defaultdict(int)
        for copy in self.copies:
            total[copy.source_rank, copy.sink_rank] += copy.nbytes
        return dict(sorted(total.items()))


def plan_transfer(source: Layout, sink: Layout, *, allow_unused: bool = False) -> TransferPlan:
    """The slice copies that fill every piece of ``sink`` from ``source``.

    Args:
        allow_unused: Accept source parameters that no sink rank holds. They would keep their old values unnoticed if a
            sink forgot them, so by default they are an error.

    Raises:
        PlanError: A parameter is missing on one side, has another shape, or no source rank holds a part of it.
    """
    check_names(source, sink, allow_unused)
    holders = _by_parameter(source)
    needs = _by_parameter(sink)
    jobs: list[_Job] = []
    geometry: dict[object, list[list[tuple[int, Box]]]] = {}
    for name in source.parameters:
        wanted = needs.get(name, [])
        itemsize = dtype_bytes(source.parameters[name].dtype)
        by_box: dict[Box, dict[int, Piece]] = {}
        for rank, piece in holders[name]:
            by_box.setdefault(piece.box, {}).setdefault(rank, piece)
        boxes = list(by_box)
        sink_boxes = list(dict.fromkeys(piece.box for _, piece in wanted))
        key = (tuple(boxes), tuple(sink_boxes))  # layers repeat: their geometry is worked out once
        if key not in geometry:
            geometry[key] = [_cover(name, need, boxes) for need in sink_boxes]
        covers = dict(zip(sink_boxes, geometry[key], strict=True))
        of_name = [
            _Job(name, box, box_elements(box) * itemsize, by_box[boxes[index]], sink_rank, piece)
            for sink_rank, piece in wanted
            for index, box in covers[piece.box]
        ]
        jobs += sorted(of_name, key=lambda job: (job.sink_rank, job.box))
    copies = tuple(
        SliceCopy(
            parameter=job.name,
            box=job.box,
            source_rank=rank,
            source_tensor=(held := job.holders[rank]).tensor,
            source_slice=shift(job.box, [a for a, _ in held.box], held.origin),
            sink_rank=job.sink_rank,
            sink_tensor=job.piece.tensor,
            sink_slice=shift(job.box, [a for a, _ in job.piece.box], job.piece.origin),
            nbytes=job.nbytes,
        )
        for job, rank in zip(jobs, _deal(jobs), strict=True)
    )
    return TransferPlan(copies, source.num_ranks, sink.num_ranks)


@dataclass(frozen=True, slots=True)
class _Job:
    """A copy whose source rank is still to be chosen."""

    name: str
    box: Box
    nbytes: int
    holders: Mapping[int, Piece]
    """By source rank."""
    sink_rank: int
    piece: Piece


class _Names(Protocol):
    @property
    def parameters(self) -> Mapping[str, ParameterSpec]: ...

    def held_somewhere(self) -> set[str]: ...


def check_names(source: _Names, sink: _Names, allow_unused: bool) -> None:
    """Both sides must mean the same parameters.

    Raises:
        PlanError: See ``plan_transfer``.
    """
    missing = sorted(sink.parameters.keys() - source.parameters.keys())
    if missing:
        raise PlanError(
            f"the sink needs {len(missing)} parameters that the source does not send: {_some(missing)}; "
            "tied weights are sent once, under the name the source gives them"
        )
    unused = sorted(source.parameters.keys() - sink.held_somewhere())
    if unused and not allow_unused:
        raise PlanError(
            f"the source sends {len(unused)} parameters that no sink rank holds: {_some(unused)}; "
            "they would keep old values: name them in the sink's layout, or pass allow_unused"
        )
    for name, spec in sink.parameters.items():
        if spec.shape != source.parameters[name].shape:
            raise PlanError(
                f"{name!r} has shape {source.parameters[name].shape} at the source, {spec.shape} at the sink"
            )


def _some(names: list[str], limit: int = 5) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def _by_parameter(layout: Layout) -> Mapping[str, list[tuple[int, Piece]]]:
    result: dict[str, list[tuple[int, Piece]]] = {name: [] for name in layout.parameters}
    for rank, pieces in enumerate(layout.pieces):
        for piece in pieces:
            result[piece.parameter].append((rank, piece))
    return result


def _cover(name: str, need: Box, boxes: list[Box]) -> list[tuple[int, Box]]:
    """Disjoint parts of ``need`` with the index of the box each comes from, in order of position."""
    remaining = [need]
    parts: list[tuple[int, Box]] = []
    for index, box in enumerate(boxes):
        if intersect(need, box) is None:
            continue
        left: list[Box] = []
        for region in remaining:
            common = intersect(region, box)
            if common is None:
                left.append(region)
            else:
                parts.append((index, common))
                left.extend(subtract(region, common))
        remaining = left
        if not remaining:
            break
    if remaining:
        raise PlanError(
            f"no source rank holds box {remaining[0]} of {name!r}, which a sink rank needs as part of {need}"
        )
    return sorted(parts, key=lambda part: part[1])


def _deal(jobs: Sequence[_Job]) -> list[int]:
    """The source rank of each copy."""
    turns: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for index, job in enumerate(jobs):
        turns[tuple(sorted(job.holders))].append(index)
    place = {name: index for index, name in enumerate(dict.fromkeys(job.name for job in jobs))}
    chosen = [0] * len(jobs)
    for ranks, indices in turns.items():
        indices.sort(key=lambda i: (-jobs[i].nbytes, place[jobs[i].name], jobs[i].box, jobs[i].sink_rank))
        for turn, index in enumerate(indices):
            chosen[index] = ranks[turn % len(ranks)]
    return chosen


def _sum_by(pairs: Iterable[tuple[int, int]], size: int) -> list[int]:
    total = [0] * size
    for index, amount in pairs:
        total[index] += amount
    return total
