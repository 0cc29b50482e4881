"""The layout of all ranks of a trainer, from what one of them says of itself."""

from __future__ import annotations

from collections.abc import Mapping

from llamarl.models.parallel import SHARD, ParallelLayout, ParameterShard
from llamarl.weight_sync.layout import ParameterSpec, Shard
from llamarl.weight_sync.mesh_layout import Grid, MeshLayout

__all__ = ["layout_of_shards"]


def layout_of_shards(shards: Mapping[str, ParameterShard], layout: ParallelLayout) -> MeshLayout:
    """What all ranks of a trainer hold, from what one of them says of itself."""
    parameters = {name: ParameterSpec(tuple(s.shape), s.dtype) for name, s in shards.items()}
    cuts = {n: tuple(Shard(cut.axis, cut.dim, cut.at_most) for cut in s.cuts) for n, s in shards.items()}
    stages = {name: tuple(s.stages) for name, s in shards.items() if s.stages is not None}
    found = MeshLayout(parameters, {axis: layout.size(axis) for axis in ("pp", SHARD, "tp")}, cuts, stages)
    held: dict[tuple[Grid, object], bool] = {}
    for name, shard in shards.items():
        grid = found.grids[name]
        key = (grid, shard.box)
        if key not in held:
            empty = any(start >= stop for start, stop in shard.box)
            held[key] = grid.held(layout.rank) == (None if empty else tuple(shard.box))
        assert held[key], f"{name}: rank {layout.rank} holds {shard.box}, by the mesh's rule {grid.held(layout.rank)}"
    return found
