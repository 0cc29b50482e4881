"""Which ranks the generator has, and what each holds of the weights: the same answer for every executor that asks.

    rank = replica * tp + tp_rank     generator.dp replicas of generator.tp ranks; rank 0 of a replica speaks for it

The trainer lays a version's bytes out for these parts, and each generator rank pulls its own.
"""

from __future__ import annotations

from functools import cache

from llamarl.config import RunConfig
from llamarl.models.folders import resolve_model_path
from llamarl.models.parallel import ParallelLayout, make_layout
from llamarl.weight_sync.layout import Layout, mesh_layout
from llamarl.weight_sync.model_layouts import model_parameters, tp_placements

__all__ = ["generator_layout", "generator_weights"]


def generator_layout(config: RunConfig, device: str) -> ParallelLayout | None:
    """This process's place among the generator's ranks; None without tensor parallelism: replicas need no group."""
    if config.generator.tp == 1:
        return None
    return make_layout(
        fsdp=config.generator.dp, tp=config.generator.tp, device=device, keys=("generator.dp", "generator.tp")
    )


def generator_weights(config: RunConfig) -> Layout | None:
    """What every generator rank holds of each parameter; None without tensor parallelism: each holds all of them."""
    return _weights(config.model.path, config.generator.dp, config.generator.tp) if config.generator.tp > 1 else None


@cache
def _weights(path: str, dp: int, tp: int) -> Layout:
    parameters = model_parameters(resolve_model_path(path), dtype="float32")
    return mesh_layout(parameters, {"dp": dp, "tp": tp}, tp_placements(parameters))
