"""Which ranks the generator has, and what each holds of the weights: the same answer for every executor that asks.

    rank = replica * tp + tp_rank     generator.dp replicas of generator.tp ranks; rank 0 of a replica speaks for it

Unlike replicas (``generator.replicas``) stand one after the other too, each with its own number of ranks::

    replicas  [tp 2]  [tp 1]  [tp 1]
    ranks      0  1    2       3

The trainer lays a version's bytes out for these parts, and each generator rank pulls its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import groupby

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from llamarl.config import RunConfig
from llamarl.executors.config import GeneratorConfig
from llamarl.models.folders import resolve_model_path
from llamarl.models.parallel import ParallelLayout, make_layout
from llamarl.weight_sync.adapter_layouts import adapter_parameters
from llamarl.weight_sync.mesh_layout import JoinedLayout, MeshLayout, RuleLayout
from llamarl.weight_sync.model_layouts import model_parameters, tp_placements

__all__ = ["Replica", "generator_layout", "generator_weights", "rank_weights", "replicas_of"]


@dataclass(frozen=True)
class Replica:
    """One copy of the model, and its ranks among the generator's."""

    number: int
    kind: int
    """In ``generator.replicas``; 0 where all are alike."""
    first_rank: int
    num_ranks: int

    def holds(self, rank: int) -> bool:
        """Whether a rank is one of its own."""
        return 0 <= rank - self.first_rank < self.num_ranks

    def section(self, config: RunConfig) -> RunConfig:
        """The recipe as this replica sees it: [generator] is that of its kind."""
        if not config.generator.replicas:
            return config
        own = dataclasses.replace(
            config.generator.as_of_kind(self.kind), dp=1
        )  # prompts need not divide by their number
        return dataclasses.replace(config, generator=own)


def replicas_of(config: RunConfig, num_ranks: int) -> tuple[Replica, ...]:
    """The replicas of a generator that has ``num_ranks`` ranks, in the order of these."""
    generator = config.generator
    if not generator.replicas:
        tp = generator.tp
        return tuple(Replica(number, 0, number * tp, tp) for number in range(num_ranks // tp))
    return tuple(_unlike(generator))


def _unlike(generator: GeneratorConfig) -> Iterator[Replica]:
    kinds = [place for place, kind in enumerate(generator.replicas) for _ in range(kind.dp)]
    first = 0
    for number, (kind, num_ranks) in enumerate(zip(kinds, generator.replica_ranks, strict=True)):
        yield Replica(number, kind, first, num_ranks)
        first += num_ranks


def generator_layout(config: RunConfig, device: str, replica: Replica) -> ParallelLayout | None:
    """This process's place among the ranks of its replica; None where that is one: replicas need no group.

    Raises:
        ValueError: The process group has not as many ranks as the recipe says.
    """
    generator = config.generator
    if replica.num_ranks == 1:
        return None
    if not generator.replicas:
        return make_layout(fsdp=generator.dp, tp=generator.tp, device=device, keys=("generator.dp", "generator.tp"))
    world, wanted = dist.get_world_size() if dist.is_initialized() else 1, sum(generator.replica_ranks)
    if world != wanted:
        raise ValueError(f"generator.replicas have {wanted} ranks, the process group {world}")
    ranks = list(range(replica.first_rank, replica.first_rank + replica.num_ranks))
    group = dist.new_group(ranks, use_local_synchronization=True)  # other replicas may have no group to make
    mesh = DeviceMesh.from_group(group, torch.device(device).type, mesh_dim_names=("tp",))
    return ParallelLayout(fsdp=1, tp=replica.num_ranks, mesh=mesh)


def generator_weights(config: RunConfig) -> RuleLayout | None:
    """What every generator rank holds of what is handed over; None without tensor parallelism: each holds all of it."""
    return rank_weights(config, config.generator.replica_ranks)


def rank_weights(config: RunConfig, ranks: tuple[int, ...]) -> RuleLayout | None:
    """What each rank of replicas of so many tensor-parallel ranks holds of what is handed over, parameters or adapters alone; None
    where each holds all of it."""
    if max(ranks) == 1:
        return None
    lora = config.lora
    adapters = (lora.rank, lora.targets) if lora.rank and lora.hand_over == "adapter" else None
    return _weights(config.model.path, ranks, adapters)


@cache
def _weights(path: str, ranks: tuple[int, ...], adapters: tuple[int, tuple[str, ...]] | None) -> RuleLayout:
    """
    Args:
        ranks: Of each replica.
        adapters: Their rank and target layers, where they alone are handed over.
    """
    parameters = model_parameters(resolve_model_path(path), dtype="float32")
    if adapters is not None:
        parameters = adapter_parameters(parameters, rank=adapters[0], targets=adapters[1])
    placements = tp_placements(parameters)
    alike = [MeshLayout(parameters, {"dp": len(list(of)), "tp": tp}, placements) for tp, of in groupby(ranks)]
    return alike[0] if len(alike) == 1 else JoinedLayout(tuple(alike))
