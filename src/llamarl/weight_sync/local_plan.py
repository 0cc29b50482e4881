"""One rank's part of a transfer plan, without the rest of it. Pure: no tensors, no processes.

    two layouts by rule ─▶ my pieces ─▶ the cells of the other side that meet them ─▶ my slice copies

Equal to what ``plan.plan_transfer`` lists for that rank, so both ends agree without a word. A rank's work grows with the
copies that it sends or receives itself, not with the ranks of the job.

Copies that several source ranks could send are dealt to them in turn (``plan.py``). Whose turn a copy is follows from how
many copies come before it, which is counted instead of listed: parameters of one kind have the same copies, and one box
goes to as many sink ranks as hold it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from llamarl.weight_sync.layout import Box, ParameterSpec, box_elements, dtype_bytes, shift
from llamarl.weight_sync.mesh_layout import Cell, Grid, JoinedGrid, MeshLayout, RankSet, RuleLayout
from llamarl.weight_sync.plan import SliceCopy, check_names

__all__ = ["copies_from_source", "copies_to_sink"]


def copies_to_sink(
    source: MeshLayout, sink: RuleLayout, rank: int, *, allow_unused: bool = False
) -> tuple[SliceCopy, ...]:
    """What sink ``rank`` pulls, in order of parameter and position.

    Raises:
        PlanError: As ``plan_transfer``.
    """
    check_names(source, sink, allow_unused)
    deal = _Deal(source, sink)
    copies = []
    for kind in deal.kinds:
        box = kind.sink.held(rank)
        if box is None:
            continue
        wanted = kind.sink.holders(rank)
        ordinal = wanted.index(rank)
        for cell in kind.source.meeting(box):
            make = _copies(kind, cell, [start for start, _ in box])
            for index, place in enumerate(kind.places):
                turn = 0
                if len(cell.ranks) > 1:
                    turn = (deal.first_turn(cell.ranks, kind, place, (cell.box, wanted.first)) + ordinal) % len(
                        cell.ranks
                    )
                copies.append(make(index, cell.ranks[turn], rank))
    return _in_order(copies)


def copies_from_source(
    source: MeshLayout, sink: RuleLayout, rank: int, *, allow_unused: bool = False
) -> tuple[SliceCopy, ...]:
    """What is pulled from source ``rank``, in order of parameter, sink rank and position.

    Raises:
        PlanError: As ``plan_transfer``.
    """
    check_names(source, sink, allow_unused)
    deal = _Deal(source, sink)
    copies = []
    for kind in deal.kinds:
        box = kind.source.held(rank)
        if box is None:
            continue
        holders = kind.source.holders(rank)
        mine = holders.index(rank)
        for cell in kind.sink.meeting(box):
            make = _copies(kind, Cell(cell.box, tuple(start for start, _ in box), holders), cell.start)
            for index, place in enumerate(kind.places):
                first = 0
                if len(holders) > 1:
                    first = (mine - deal.first_turn(holders, kind, place, (cell.box, cell.ranks.first))) % len(holders)
                for ordinal in range(first, len(cell.ranks), len(holders)):
                    copies.append(make(index, rank, cell.ranks[ordinal]))
    return _in_order(copies)


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

    def __init__(self, source: MeshLayout, sink: RuleLayout) -> None:
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


def _copies(kind: _Kind, held: Cell, start: Sequence[int]) -> Callable[[int, int, int], tuple[int, SliceCopy]]:
    """Makes the copies of one box: of a parameter, from a source rank that holds it in ``held`` to a sink rank whose own box begins
    at ``start``. What they have in common is made once, for there are as many as layers."""
    box = held.box
    origin = (0,) * len(box)
    source_slice, sink_slice = shift(box, held.start, origin), shift(box, start, origin)
    nbytes = box_elements(box) * kind.itemsize

    def make(index: int, source_rank: int, sink_rank: int) -> tuple[int, SliceCopy]:
        name = kind.names[index]
        copy = SliceCopy(name, box, source_rank, name, source_slice, sink_rank, name, sink_slice, nbytes)
        return kind.places[index], copy

    return make


def _in_order(copies: list[tuple[int, SliceCopy]]) -> tuple[SliceCopy, ...]:
    copies.sort(key=lambda copy: (copy[0], copy[1].sink_rank, copy[1].box))
    return tuple(copy for _, copy in copies)
