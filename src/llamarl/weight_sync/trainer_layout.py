"""The layout of all ranks of a trainer, from what one of them says of itself."""

from __future__ import annotations

from collections.abc import Mapping

from llamarl.models.parallel import EXPERT_SHARD, EXPERTS, SHARD, Cut, ParallelLayout, ParameterShard
from llamarl.weight_sync.layout import ParameterSpec, Shard
from llamarl.weight_sync.mesh_layout import Grid, MeshLayout

__all__ = ["layout_of_shards"]


def layout_of_shards(shards: Mapping[str, ParameterShard], layout: ParallelLayout) -> MeshLayout:
    """What all ranks of a trainer hold, from what one of them says of itself."""
    parameters = {name: ParameterSpec(tuple(s.shape), s.dtype) for name, s in shards.items()}
    cuts = {name: tuple(cut for how in shard.cuts for cut in _cuts(how)) for name, shard in shards.items()}
    stages = {name: tuple(s.stages) for name, s in shards.items() if s.stages is not None}
    found = MeshLayout(
        parameters,
        {axis: layout.size(axis) for axis in ("pp", SHARD, "tp")},
        cuts,
        stages,
        {
            name: {axis: layout.size(axis) for axis in ("pp", EXPERT_SHARD, "ep", "tp")}
            for name, shard in shards.items()
            if any(cut.axis == EXPERTS for cut in shard.cuts)
        },
    )
    held: dict[tuple[Grid, object], bool] = {}
    for name, shard in shards.items():
        grid = found.grids[name]
        key = (grid, shard.box)
        if key not in held:
            empty = any(start >= stop for start, stop in shard.box)
            held[key] = grid.held(layout.rank) == (None if empty else tuple(shard.box))
        assert held[key], f"{name}: rank {layout.rank} holds {shard.box}, by the mesh's rule {grid.held(layout.rank)}"
    return found


def _cuts(cut: Cut) -> tuple[Shard, ...]:
    """Experts are cut over the tensor-parallel ranks, and what each of these has over those of ``ep``: whole experts, so evenly."""
    axes = ("tp", "ep") if cut.axis == EXPERTS else (cut.axis,)
    return tuple(Shard(axis, cut.dim, cut.at_most) for axis in axes)
