"""One sink rank's part of the transfer plan: from two layouts to slice copies. Pure: no tensors, no processes.

For each parameter, intersect what a sink rank needs with what source ranks hold::

    source (fsdp 2): rank 0 rows 0..4 │ rank 1 rows 4..8          copies
    sink   (tp 3):   rank 0 rows 0..3                       ──▶   0 ─▶ 0 rows 0..3
                     rank 1 rows 3..6                             0 ─▶ 1 rows 3..4,  1 ─▶ 1 rows 4..6
                     rank 2 rows 6..8                             1 ─▶ 2 rows 6..8

Every element that a sink holds is written by exactly one copy. Where several source ranks hold the
same, the sink ranks that want it take them in turn: the first asks the first, the second the second.

A rank works out its own part alone, with work that grows with its own copies, not with the ranks of
the job; parameters that lie alike on both sides are worked out once, for there are as many as layers.
"""

from __future__ import annotations

from dataclasses import dataclass

from llamarl.errors import PlanError
from llamarl.weight_sync.layout import AnyLayout, Box, Grid, MeshLayout, shift

__all__ = ["SliceCopy", "copies_to_sink"]


@dataclass(frozen=True, slots=True)
class SliceCopy:
    """One box of one parameter that a sink rank copies from a source rank."""

    parameter: str
    box: Box
    """Global coordinates."""
    source_rank: int
    sink_slice: Box
    """In the sink's local tensor."""


def copies_to_sink(source: MeshLayout, sink: AnyLayout, rank: int) -> tuple[SliceCopy, ...]:
    """List what sink ``rank`` pulls, in order of parameter and position.

    Raises:
        PlanError: A parameter is missing on one side, or has another shape.
    """
    _check_names(source, sink)
    mesh, own = sink.part_of(rank)
    made: dict[tuple[Grid, Grid], list[tuple[Box, int, Box]]] = {}
    copies = []
    for name, there in source.grids.items():
        here = mesh.grids[name]
        if (there, here) not in made:
            made[there, here] = _boxes(there, here, own)
        copies += [SliceCopy(name, *box) for box in made[there, here]]
    return tuple(copies)


def _boxes(source: Grid, sink: Grid, rank: int) -> list[tuple[Box, int, Box]]:
    """What a sink rank pulls of a parameter: (box, source rank, where it goes here), in order of position."""
    wanted = sink.held(rank)
    if wanted is None:
        return []
    turn = sink.holders(rank).index(rank)
    start, origin = [low for low, _ in wanted], [0] * len(wanted)
    return [(box, ranks[turn % len(ranks)], shift(box, start, origin)) for box, ranks in source.meeting(wanted)]


def _check_names(source: MeshLayout, sink: AnyLayout) -> None:
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
    unused = sorted(source.parameters.keys() - sink.parameters.keys())
    if unused:
        raise PlanError(
            f"the source sends {len(unused)} parameters that no sink rank holds: {_some(unused)}; "
            "they would keep old values: name them in the sink's layout"
        )
    for name, spec in sink.parameters.items():
        if spec.shape != source.parameters[name].shape:
            raise PlanError(
                f"{name!r} has shape {source.parameters[name].shape} at the source, {spec.shape} at the sink"
            )


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
