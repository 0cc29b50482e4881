"""The transfer plan: from two layouts to a list of slice copies. Pure: no tensors, no processes.

For each parameter, intersect what a sink rank needs with what source ranks hold::

    source (fsdp 2): rank 0 rows 0..4 │ rank 1 rows 4..8          copies
    sink   (tp 3):   rank 0 rows 0..3                       ──▶   0 ─▶ 0 rows 0..3
                     rank 1 rows 3..6                             0 ─▶ 1 rows 3..4,  1 ─▶ 1 rows 4..6
                     rank 2 rows 6..8                             1 ─▶ 2 rows 6..8

Every element that a sink holds is written by exactly one copy. Where several source ranks hold the same box, each copy
goes to the one with the fewest bytes to send so far, largest copies first, so replicas share the load; the choice
depends on the two layouts alone, so every rank computes the same plan without a word.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from llamarl.errors import PlanError
from llamarl.weight_sync.layout import Box, Layout, Piece, box_elements, dtype_bytes, intersect, shift, subtract

__all__ = ["SliceCopy", "TransferPlan", "plan_transfer"]


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
    """All slice copies of one hand-over, in order of parameter, sink rank and position."""

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
    _check_names(source, sink, allow_unused)
    holders = _by_parameter(source)
    needs = _by_parameter(sink)
    jobs: list[tuple[int, str, Box, list[tuple[int, Piece]], int, Piece]] = []
    geometry: dict[object, list[list[tuple[int, Box]]]] = {}
    for name, wanted in needs.items():
        itemsize = dtype_bytes(source.parameters[name].dtype)
        by_box: dict[Box, list[tuple[int, Piece]]] = {}
        for rank, piece in holders.get(name, ()):
            by_box.setdefault(piece.box, []).append((rank, piece))
        boxes = list(by_box)
        sink_boxes = list(dict.fromkeys(piece.box for _, piece in wanted))
        key = (tuple(boxes), tuple(sink_boxes))  # layers repeat: their geometry is worked out once
        if key not in geometry:
            geometry[key] = [_cover(name, need, boxes) for need in sink_boxes]
        covers = dict(zip(sink_boxes, geometry[key], strict=True))
        for sink_rank, piece in wanted:
            for index, box in covers[piece.box]:
                jobs.append((box_elements(box) * itemsize, name, box, by_box[boxes[index]], sink_rank, piece))
    chosen = _share_load(jobs, source.num_ranks)
    copies = tuple(
        SliceCopy(
            parameter=name,
            box=box,
            source_rank=rank,
            source_tensor=held.tensor,
            source_slice=shift(box, [a for a, _ in held.box], held.origin),
            sink_rank=sink_rank,
            sink_tensor=piece.tensor,
            sink_slice=shift(box, [a for a, _ in piece.box], piece.origin),
            nbytes=nbytes,
        )
        for (nbytes, name, box, _, sink_rank, piece), (rank, held) in zip(jobs, chosen, strict=True)
    )
    return TransferPlan(copies, source.num_ranks, sink.num_ranks)


def _check_names(source: Layout, sink: Layout, allow_unused: bool) -> None:
    missing = sorted(sink.parameters.keys() - source.parameters.keys())
    if missing:
        raise PlanError(
            f"the sink needs {len(missing)} parameters that the source does not send: {_some(missing)}; "
            "tied weights are sent once, under the name the source gives them"
        )
    unused = sorted(source.parameters.keys() - {p.parameter for pieces in sink.pieces for p in pieces})
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


def _share_load(
    jobs: list[tuple[int, str, Box, list[tuple[int, Piece]], int, Piece]], num_source_ranks: int
) -> list[tuple[int, Piece]]:
    load = [0] * num_source_ranks
    chosen: list[tuple[int, Piece] | None] = [None] * len(jobs)
    for index in sorted(range(len(jobs)), key=lambda i: (len(jobs[i][3]) > 1, -jobs[i][0], i)):  # no choice: first
        nbytes, _, _, candidates, _, _ = jobs[index]
        holder = min(candidates, key=lambda c: (load[c[0]], c[0]))
        chosen[index] = holder
        load[holder[0]] += nbytes
    return [c for c in chosen if c is not None]


def _sum_by(pairs: Iterable[tuple[int, int]], size: int) -> list[int]:
    total = [0] * size
    for index, amount in pairs:
        total[index] += amount
    return total
