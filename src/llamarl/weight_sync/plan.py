"""One sink rank's part of the transfer plan: from two layouts to slice copies. Pure: no tensors, no processes.

For each parameter, intersect what a sink rank needs with what source ranks hold::

    source (fsdp 2): rank 0 rows 0..4 │ rank 1 rows 4..8          copies
    sink   (tp 3):   rank 0 rows 0..3                       ──▶   0 ─▶ 0 rows 0..3
                     rank 1 rows 3..6                             0 ─▶ 1 rows 3..4,  1 ─▶ 1 rows 4..6
                     rank 2 rows 6..8                             1 ─▶ 2 rows 6..8

Every element that a sink holds is written by exactly one copy. Copies that the same source ranks could send are dealt to
these ranks in turn, largest first, so that replicas share the load to within one copy: of the rank that is dealt first
and the one that is dealt last, each copy of the second is at least as large as the next one of the first.

A rank works out its own part alone, with work that grows with its own copies, not with the ranks of the job. Whose turn a copy
is follows from how many copies come before it, which is counted instead of listed: parameters of one kind have the same
copies, and one box goes to as many sink ranks as hold it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from llamarl.errors import PlanError
from llamarl.weight_sync.layout import Box, ParameterSpec, box_elements, dtype_bytes, shift
from llamarl.weight_sync.mesh_layout import AnyLayout, Cell, Grid, JoinedGrid, MeshLayout, RankSet

__all__ = ["SliceCopy", "copies_to_sink"]


@dataclass(frozen=True, slots=True)
class SliceCopy:
    """Copy one box of one parameter from a source rank to a sink rank."""

    parameter: str
    box: Box
    """Global coordinates."""
    source_rank: int
    source_slice: Box
    """In the source's local tensor."""
    sink_rank: int
    sink_slice: Box
    """In the sink's local tensor."""
    nbytes: int
    """In the source's dtype."""


def copies_to_sink(
    source: MeshLayout, sink: AnyLayout, rank: int, *, allow_unused: bool = False
) -> tuple[SliceCopy, ...]:
    """List what sink ``rank`` pulls, in order of parameter and position.

    Args:
        allow_unused: Accept source parameters that no sink rank holds. They would keep their old values unnoticed if a
            sink forgot them, so by default they are an error.

    Raises:
        PlanError: A parameter is missing on one side, or has another shape.
    """
    _check_names(source, sink, allow_unused)
    deal = _Deal(source, sink)
    copies = []
    for kind in deal.kinds:
        box = kind.sink.held(rank)
        if box is None:
            continue
        wanted = kind.sink.holders(rank)
        ordinal = wanted.index(rank)
        for cell in kind.source.meeting(box):
            make = _copies(kind, cell, rank, [start for start, _ in box])
            for index, place in enumerate(kind.places):
                turn = 0
                if len(cell.ranks) > 1:
                    turn = (deal.first_turn(cell.ranks, kind, place, (cell.box, wanted.first)) + ordinal) % len(
                        cell.ranks
                    )
                copies.append(make(index, cell.ranks[turn]))
    copies.sort(key=lambda copy: (copy[0], copy[1].box))
    return tuple(copy for _, copy in copies)


def _check_names(source: MeshLayout, sink: AnyLayout, allow_unused: bool) -> None:
    """Both sides must mean the same parameters.

    Raises:
        PlanError: A parameter is missing on one side, or has another shape.
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


_Where = tuple[Box, int]
"""What a source's cell and a sink's have in common, and the first rank of the sink's mesh."""


@dataclass(frozen=True, eq=False)
class _Kind:
    """Parameters that lie alike on both sides."""

    source: Grid
    sink: Grid | JoinedGrid
    itemsize: int
    """Of an element as the source has it."""
    names: Sequence[str]
    places: Sequence[int]
    """Of these among the source's parameters, ascending."""


@dataclass(frozen=True)
class _Parts:
    """Copies of one size that the parameters of one kind have, of the cell that some source ranks hold together."""

    kind: _Kind
    where: Sequence[_Where]
    """In order."""
    before: Sequence[int]
    """Copies of one parameter before each of these, and of all of them."""


class _Deal:
    """Whose turn a copy is, for the copies that several source ranks could send."""

    def __init__(self, source: MeshLayout, sink: AnyLayout) -> None:
        self.kinds = _kinds(source.parameters, source.grids, sink.grids)
        self._of: dict[RankSet, tuple[dict[int, list[_Parts]], dict[int, int]]] = {}

    def first_turn(self, holders: RankSet, kind: _Kind, place: int, where: _Where) -> int:
        """Copies dealt to ``holders`` before those of a box of the parameter at ``place``: larger ones, then those of the same
        size of parameters before it and of boxes before this one."""
        if holders not in self._of:
            self._of[holders] = self._parts(holders)
        by_size, larger = self._of[holders]
        size = box_elements(where[0]) * kind.itemsize
        turn = larger[size]
        for parts in by_size[size]:
            turn += parts.before[-1] * bisect_left(parts.kind.places, place)
            if parts.kind is kind:
                turn += parts.before[bisect_left(parts.where, where)]
        return turn

    def _parts(self, holders: RankSet) -> tuple[dict[int, list[_Parts]], dict[int, int]]:
        by_size: dict[int, list[_Parts]] = {}
        for kind in self.kinds:
            box = kind.source.held(holders[0])
            if box is None or kind.source.holders(holders[0]) != holders:
                continue
            cells: dict[int, list[Cell]] = {}
            for cell in kind.sink.meeting(box):
                cells.setdefault(box_elements(cell.box) * kind.itemsize, []).append(cell)
            for size, alike in cells.items():
                before = [0]
                for cell in alike:
                    before.append(before[-1] + len(cell.ranks))
                by_size.setdefault(size, []).append(
                    _Parts(kind, [(cell.box, cell.ranks.first) for cell in alike], before)
                )
        larger, count = {}, 0
        for size in sorted(by_size, reverse=True):
            larger[size] = count
            count += sum(parts.before[-1] * len(parts.kind.places) for parts in by_size[size])
        return by_size, larger


def _kinds(
    parameters: Mapping[str, ParameterSpec],
    source: Mapping[str, Grid],
    sink: Mapping[str, Grid] | Mapping[str, JoinedGrid],
) -> list[_Kind]:
    found: dict[tuple[Grid, Grid | JoinedGrid, int], tuple[list[str], list[int]]] = {}
    for place, (name, spec) in enumerate(parameters.items()):
        if name in sink and all(spec.shape):
            names, places = found.setdefault((source[name], sink[name], dtype_bytes(spec.dtype)), ([], []))
            names.append(name)
            places.append(place)
    return [_Kind(*key, names, places) for key, (names, places) in found.items()]


def _copies(
    kind: _Kind, held: Cell, sink_rank: int, start: Sequence[int]
) -> Callable[[int, int], tuple[int, SliceCopy]]:
    """Makes the copies of one box: of a parameter, from a source rank that holds it in ``held`` to a sink rank whose own box begins
    at ``start``. What they have in common is made once, for there are as many as layers."""
    box = held.box
    origin = (0,) * len(box)
    source_slice, sink_slice = shift(box, held.start, origin), shift(box, start, origin)
    nbytes = box_elements(box) * kind.itemsize

    def make(index: int, source_rank: int) -> tuple[int, SliceCopy]:
        copy = SliceCopy(kind.names[index], box, source_rank, source_slice, sink_rank, sink_slice, nbytes)
        return kind.places[index], copy

    return make
