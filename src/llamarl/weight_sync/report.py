"""What a hand-over moves, for any number of ranks, without listing every copy. Pure: no tensors, no processes.

A mesh layout cuts each parameter into a grid of boxes, each held by equally many ranks. Both sides' grids cover the
parameter, so every box of the source travels once to each replica of the sink, shared among its holders: a source rank
sends ``size of its box * sink replicas / holders``, a sink rank receives the size of its box. Boxes that meet are counted
dimension by dimension. Llama-3.1-405B over 16,384 ranks takes a moment; its list of slice copies would be far longer
than memory. The numbers equal those of ``plan_transfer`` (a test compares them), but for the even split among
replicated sources, which here is exact and there is to within one copy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llamarl.errors import PlanError
from llamarl.weight_sync.layout import ParameterSpec, Shard, dtype_bytes, shard_box

__all__ = ["MeshSide", "SyncReport", "format_report", "report_transfer"]


@dataclass(frozen=True, kw_only=True)
class MeshSide:
    """One end of the weights edge."""

    mesh: Mapping[str, int]
    """Axis name -> size, outermost first; axes that no parameter is cut along replicate."""
    placements: Mapping[str, Sequence[Shard]]

    @property
    def num_ranks(self) -> int:
        return math.prod(self.mesh.values())


@dataclass(frozen=True)
class SyncReport:
    """Bytes of one version, in the dtype in which it travels."""

    model_bytes: int
    sent_bytes: npt.NDArray[np.float64]
    """[num source ranks]; replicated sources share evenly."""
    received_bytes: npt.NDArray[np.float64]
    """[num sink ranks]"""
    source_slot_bytes: npt.NDArray[np.float64]
    """[num source ranks] One version of a rank's own shards: what one slot takes."""
    num_copies: int
    """Slice copies of the full plan, replicas counted."""
    num_links: int
    """Most (source rank, sink rank) pairs that can talk: those whose boxes meet for some parameter."""


def report_transfer(parameters: Mapping[str, ParameterSpec], source: MeshSide, sink: MeshSide) -> SyncReport:
    """Count the bytes that each rank sends and receives for one version.

    Args:
        parameters: Global shapes; ``dtype`` is the one in which they travel.

    Raises:
        PlanError: A placement names an axis or dimension that does not exist.
    """
    groups: dict[tuple[ParameterSpec, tuple[Shard, ...], tuple[Shard, ...]], int] = {}
    for name, spec in parameters.items():
        key = (spec, tuple(source.placements.get(name, ())), tuple(sink.placements.get(name, ())))
        groups[key] = groups.get(key, 0) + 1
    sent = np.zeros(source.num_ranks)
    received = np.zeros(sink.num_ranks)
    slots = np.zeros(source.num_ranks)
    num_copies, num_links, model_bytes = 0, 0, 0
    for (spec, source_cuts, sink_cuts), count in groups.items():
        left, right = _Grid(spec, source, source_cuts), _Grid(spec, sink, sink_cuts)
        nbytes = count * dtype_bytes(spec.dtype)
        sent += nbytes * left.elements() * (right.replicas / left.replicas)
        received += nbytes * right.elements()
        slots += nbytes * left.elements()
        model_bytes += count * spec.nbytes
        meetings = math.prod(_meetings(a, b) for a, b in zip(left.intervals, right.intervals, strict=True))
        num_copies += count * meetings * right.replicas
        num_links = max(num_links, meetings * right.replicas * left.replicas)
    return SyncReport(model_bytes, sent, received, slots, num_copies, num_links)


def format_report(report: SyncReport, *, versions: int = 2, link_bytes_per_s: float | None = None) -> str:
    """A few lines for people.

    Args:
        versions: Slots that a source rank holds: the capacity of the weights channel + 1.
        link_bytes_per_s: Of one rank, each way; if given, the least time a version takes is printed.
    """
    lines = [
        f"model, one copy             {_size(report.model_bytes)}",
        f"source ranks                {len(report.sent_bytes):,}",
        f"  sent by a rank            mean {_size(report.sent_bytes.mean())}, most {_size(report.sent_bytes.max())}",
        f"  held for {versions} versions       most {_size(versions * report.source_slot_bytes.max())}",
        f"sink ranks                  {len(report.received_bytes):,}",
        f"  received by a rank        mean {_size(report.received_bytes.mean())}, most {_size(report.received_bytes.max())}",
        f"slice copies                {report.num_copies:,}",
        f"links (rank pairs), most    {report.num_links:,}",
    ]
    if link_bytes_per_s is not None:
        busiest = max(report.sent_bytes.max(), report.received_bytes.max())
        lines.append(f"least time at {_size(link_bytes_per_s)}/s    {busiest / link_bytes_per_s:.3g} s")
    return "\n".join(lines)


class _Grid:
    """How one side cuts one parameter: a list of intervals for each dimension, and which of them each rank holds."""

    def __init__(self, spec: ParameterSpec, side: MeshSide, cuts: Sequence[Shard]) -> None:
        axes = [cut.axis for cut in cuts]
        for cut in cuts:
            if cut.axis not in side.mesh or not 0 <= cut.dim < len(spec.shape) or axes.count(cut.axis) > 1:
                raise PlanError(f"shape {spec.shape} cannot be cut by {tuple(cuts)} on mesh {dict(side.mesh)}")
        coordinates = dict(
            zip(side.mesh, np.indices(tuple(side.mesh.values())).reshape(len(side.mesh), -1), strict=True)
        )
        self._num_ranks = side.num_ranks
        self.replicas = side.num_ranks // math.prod(side.mesh[axis] for axis in axes)
        """Ranks that hold the same box."""
        self.intervals: list[npt.NDArray[np.int64]] = []
        """By dimension: [num intervals, 2]."""
        self._held: list[npt.NDArray[np.int64]] = []
        for dim, size in enumerate(spec.shape):
            intervals = [(0, size)]
            held = np.zeros(self._num_ranks, np.int64)
            for cut in cuts:
                if cut.dim == dim:
                    parts = side.mesh[cut.axis]
                    intervals = [shard_box((i,), 0, parts, part)[0] for i in intervals for part in range(parts)]
                    held = held * parts + coordinates[cut.axis]
            self.intervals.append(np.array(intervals, np.int64))
            self._held.append(held)

    def elements(self) -> npt.NDArray[np.float64]:
        """[num ranks] Size of each rank's box."""
        total = np.ones(self._num_ranks)
        for intervals, held in zip(self.intervals, self._held, strict=True):
            total *= (intervals[:, 1] - intervals[:, 0])[held]
        return total


def _meetings(left: npt.NDArray[np.int64], right: npt.NDArray[np.int64]) -> int:
    """How many intervals of one partition meet how many of another: pairs with something in common."""
    starts = np.sort(right[right[:, 0] < right[:, 1], 0])
    held = left[left[:, 0] < left[:, 1]]
    first = np.searchsorted(starts, held[:, 0], side="right")
    last = np.searchsorted(starts, held[:, 1] - 1, side="right")
    return int((last - first + 1).sum())


def _size(nbytes: float) -> str:
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= factor:
            return f"{nbytes / factor:.2f} {unit}"
    return f"{nbytes:.0f} B"
