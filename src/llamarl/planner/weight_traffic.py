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
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from llamarl.errors import PlanError
from llamarl.models.sizes import part_of_rank
from llamarl.weight_sync.layout import ParameterSpec, Shard, dtype_bytes, shard_box

__all__ = ["LinkReport", "MeshSide", "SyncReport", "format_bytes", "report_links", "report_transfer"]

_CHUNK_PAIRS = 1 << 22  # pairs of ranks looked at together: 32 MB


@dataclass(frozen=True, kw_only=True)
class MeshSide:
    """One end of the weights edge."""

    mesh: Mapping[str, int]
    """Axis name -> size, outermost first; axes that no parameter is cut along replicate."""
    placements: Mapping[str, Sequence[Shard]]
    stages: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Places along the axis ``pp`` that hold a parameter. Absent: all."""

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
    sent = np.zeros(source.num_ranks)
    received = np.zeros(sink.num_ranks)
    slots = np.zeros(source.num_ranks)
    num_copies, num_links, model_bytes = 0, 0, 0
    for (left, right), count in _group(parameters, source, sink):
        spec = left.spec
        nbytes = count * dtype_bytes(spec.dtype)
        sent += nbytes * left.elements() * (right.replicas / left.replicas)
        received += nbytes * right.elements()
        slots += nbytes * left.elements()
        model_bytes += count * spec.nbytes
        meetings = math.prod(_meetings(a, b) for a, b in zip(left.intervals, right.intervals, strict=True))
        num_copies += count * meetings * right.replicas
        num_links = max(num_links, meetings * right.replicas * left.replicas)
    return SyncReport(model_bytes, sent, received, slots, num_copies, num_links)


@dataclass(frozen=True)
class LinkReport:
    """Bytes of one version over each link: a pair of source rank and sink rank that exchange something."""

    num_links: int
    mean_bytes: float
    max_bytes: float


def report_links(parameters: Mapping[str, ParameterSpec], source: MeshSide, sink: MeshSide) -> LinkReport:
    """Count the bytes between each source rank and each sink rank, by classes of ranks that hold the same boxes.

    A box that several source ranks hold travels from one of them; its bytes are counted evenly over its holders.

    Raises:
        PlanError: A placement names an axis or dimension that does not exist.
    """
    pairs = [(count, *grids) for grids, count in _group(parameters, source, sink)]
    lefts = np.stack([held for _, left, _ in pairs for held in (left.holds, *left.held)])
    rights = np.stack([held for _, _, right in pairs for held in (right.holds, *right.held)])
    left_ranks, left_counts = _classes(lefts)
    right_ranks, right_counts = _classes(rights)
    num_links, total, most = 0, 0.0, 0.0
    step = max(1, _CHUNK_PAIRS // len(right_ranks))
    for start in range(0, len(left_ranks), step):
        chunk = left_ranks[start : start + step]
        nbytes = np.zeros((len(chunk), len(right_ranks)))
        for count, left, right in pairs:
            share = np.outer(left.holds[chunk], right.holds[right_ranks]) * (
                count * dtype_bytes(left.spec.dtype) / left.replicas
            )
            for dim in range(len(left.spec.shape)):
                overlap = _overlaps(left.intervals[dim], right.intervals[dim])
                share *= overlap[np.ix_(left.held[dim][chunk], right.held[dim][right_ranks])]
            nbytes += share
        weight = left_counts[start : start + step, None] * right_counts[None, :]
        num_links += int(weight[nbytes > 0].sum())
        total += float((nbytes * weight).sum())
        most = max(most, float(nbytes.max()))
    return LinkReport(num_links, total / max(1, num_links), most)


def _group(
    parameters: Mapping[str, ParameterSpec], source: MeshSide, sink: MeshSide
) -> list[tuple[tuple[_Grid, _Grid], int]]:
    """Both sides' grids of each kind of parameter, and how many parameters are of that kind: layers repeat."""
    groups: dict[tuple[ParameterSpec, _How, _How], int] = {}
    for name, spec in parameters.items():
        left, right = ((tuple(side.placements.get(name, ())), side.stages.get(name)) for side in (source, sink))
        key = (spec, left, right)
        groups[key] = groups.get(key, 0) + 1
    grids: dict[tuple[int, ParameterSpec, _How], _Grid] = {}

    def grid(which: int, side: MeshSide, spec: ParameterSpec, how: _How) -> _Grid:
        if (which, spec, how) not in grids:
            grids[which, spec, how] = _Grid(spec, side, *how)
        return grids[which, spec, how]

    return [((grid(0, source, spec, a), grid(1, sink, spec, b)), count) for (spec, a, b), count in groups.items()]


_How = tuple[tuple[Shard, ...], tuple[int, ...] | None]
"""Cuts, and the stages that hold a parameter."""


class _Grid:
    """How one side cuts one parameter: a list of intervals for each dimension, and which of them each rank holds."""

    def __init__(
        self, spec: ParameterSpec, side: MeshSide, cuts: Sequence[Shard], stages: Sequence[int] | None = None
    ) -> None:
        axes = [cut.axis for cut in cuts]
        for cut in cuts:
            size = side.mesh.get(cut.axis, 0)
            uneven = cut.at_most is not None and size > cut.at_most and size % cut.at_most
            if not size or uneven or not 0 <= cut.dim < len(spec.shape) or axes.count(cut.axis) > 1:
                raise PlanError(f"shape {spec.shape} cannot be cut by {tuple(cuts)} on mesh {dict(side.mesh)}")
        coordinates = dict(
            zip(side.mesh, np.indices(tuple(side.mesh.values())).reshape(len(side.mesh), -1), strict=True)
        )
        self.spec = spec
        parts = [part_of_rank(side.mesh[cut.axis], 0, cut.at_most)[0] for cut in cuts]
        self.holds: npt.NDArray[np.int64] = np.ones(side.num_ranks, np.int64)
        """[num ranks] 1 where a rank's stage has the parameter, else 0."""
        if stages is not None:
            if not set(stages) <= set(range(side.mesh.get("pp", 0))):
                raise PlanError(f"shape {spec.shape} cannot lie on stages {tuple(stages)} of mesh {dict(side.mesh)}")
            self.holds = np.isin(coordinates["pp"], stages).astype(np.int64)
        self.replicas = int(self.holds.sum()) // math.prod(parts)
        """Ranks that hold the same box."""
        self.intervals: list[npt.NDArray[np.int64]] = []
        """By dimension: [num intervals, 2]."""
        self.held: list[npt.NDArray[np.int64]] = []
        """By dimension: [num ranks] index of the interval each rank holds."""
        for dim, size in enumerate(spec.shape):
            intervals = [(0, size)]
            held = np.zeros(side.num_ranks, np.int64)
            for cut, count in zip(cuts, parts, strict=True):
                if cut.dim == dim:
                    intervals = [shard_box((i,), 0, count, part)[0] for i in intervals for part in range(count)]
                    held = held * count + coordinates[cut.axis] // (side.mesh[cut.axis] // count)
            self.intervals.append(np.array(intervals, np.int64))
            self.held.append(held)

    def elements(self) -> npt.NDArray[np.float64]:
        """[num ranks] Size of each rank's box."""
        total = self.holds.astype(np.float64)
        for intervals, held in zip(self.intervals, self.held, strict=True):
            total *= (intervals[:, 1] - intervals[:, 0])[held]
        return total


def _classes(held: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """One rank of each class of ranks that hold the same boxes, and how many it stands for."""
    _, first, counts = np.unique(held, axis=1, return_index=True, return_counts=True)
    return first, counts


def _overlaps(left: npt.NDArray[np.int64], right: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """[left intervals, right intervals] Length of what two intervals have in common."""
    stop = np.minimum(left[:, None, 1], right[None, :, 1])
    return np.maximum(0, stop - np.maximum(left[:, None, 0], right[None, :, 0]))


def _meetings(left: npt.NDArray[np.int64], right: npt.NDArray[np.int64]) -> int:
    """How many intervals of one partition meet how many of another: pairs with something in common."""
    starts = np.sort(right[right[:, 0] < right[:, 1], 0])
    held = left[left[:, 0] < left[:, 1]]
    first = np.searchsorted(starts, held[:, 0], side="right")
    last = np.searchsorted(starts, held[:, 1] - 1, side="right")
    return int((last - first + 1).sum())


def format_bytes(nbytes: float) -> str:
    """``1.30 GB``; decimal units."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= factor:
            return f"{nbytes / factor:.2f} {unit}"
    return f"{nbytes:.0f} B"
