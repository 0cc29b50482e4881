"""Which ranks the generator has, and what each holds of the weights: the same answer for every executor that asks.

    rank = replica * tp + tp_rank     generator.dp replicas of generator.tp ranks

The first rank of a replica speaks for it.

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
from torch.distributed.device_mesh import DeviceMesh

from llamarl.config import RunConfig
from llamarl.models.folders import resolve_model_path
from llamarl.models.parallel import ParallelLayout, make_layout, new_group
from llamarl.settings.executors import GeneratorConfig
from llamarl.weight_sync.layout import AnyLayout, JoinedLayout, MeshLayout
from llamarl.weight_sync.model_layouts import adapter_parameters, model_parameters, tp_placements

__all__ = ["Replica", "evaluator_weights", "generator_layout", "generator_weights", "replicas_of", "why_ranks_unfit"]


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


def why_ranks_unfit(generator: GeneratorConfig, num_ranks: int, groups: int) -> str:
    """Why a generator of ``num_ranks`` ranks cannot share ``groups`` groups a tick; empty: it can.
    Of the job's own the recipe has been checked; a further one has as many ranks as
    ``executors.NAME.ranks`` says."""
    if generator.replicas:
        return ""
    replicas = num_ranks // generator.tp
    if num_ranks % generator.tp or not replicas:
        return f"has {num_ranks} ranks, and one replica takes {generator.tp} (generator.tp): give it a multiple of that"
    if generator.shards and generator.shards < replicas:
        return (
            f"has {replicas} replicas for {generator.shards} shards (generator.shards), so that some would have nothing to do: give it "
            "fewer ranks, or more shards"
        )
    if groups % (shared := generator.shards or replicas):
        parts = "shards (generator.shards)" if generator.shards else "replicas"
        return (
            f"has {groups} groups a tick (schedule.prompts_per_step), which do not divide among its {shared} {parts}: make them a "
            "multiple"
        )
    return ""


def _unlike(generator: GeneratorConfig) -> Iterator[Replica]:
    kinds = [place for place, kind in enumerate(generator.replicas) for _ in range(kind.dp)]
    first = 0
    for number, (kind, num_ranks) in enumerate(zip(kinds, generator.replica_ranks, strict=True)):
        yield Replica(number, kind, first, num_ranks)
        first += num_ranks


def generator_layout(config: RunConfig, device: str, replica: Replica) -> ParallelLayout | None:
    """This process's place among the ranks of its replica; None where that is one: replicas need no group."""
    generator = config.generator
    if replica.num_ranks == 1:
        return None
    if not generator.replicas:
        return make_layout(fsdp=generator.dp, tp=generator.tp, device=device, keys=("generator.dp", "generator.tp"))
    ranks = list(range(replica.first_rank, replica.first_rank + replica.num_ranks))
    group = new_group(ranks, use_local_synchronization=True)  # other replicas may have no group to make
    mesh = DeviceMesh.from_group(group, torch.device(device).type, mesh_dim_names=("tp",))
    return ParallelLayout(fsdp=1, tp=replica.num_ranks, mesh=mesh)


def generator_weights(config: RunConfig) -> AnyLayout | None:
    """What every generator rank holds of what is handed over; None: each holds all of it."""
    return _rank_weights(config, config.generator.replica_ranks)


def evaluator_weights(config: RunConfig) -> AnyLayout | None:
    """What every evaluator rank holds of it; None without tensor parallelism: each holds all."""
    return _rank_weights(config, (config.evaluation.tp,) * config.evaluation.dp)


def _rank_weights(config: RunConfig, replicas: tuple[int, ...]) -> AnyLayout | None:
    """What each rank of replicas of so many tensor-parallel ranks holds of what is handed over,
    parameters or adapters alone; None where each holds all of it."""
    if max(replicas) == 1:
        return None
    lora = config.lora
    adapters = (lora.rank, lora.targets) if lora.rank and lora.hand_over == "adapter" else None
    return _weights(config.model.path, replicas, adapters)


@cache
def _weights(path: str, replicas: tuple[int, ...], adapters: tuple[int, tuple[str, ...]] | None) -> AnyLayout:
    """
    Args:
        replicas: Ranks of each.
        adapters: Their rank and target layers, where they alone are handed over.
    """
    parameters = model_parameters(resolve_model_path(path), dtype="float32")
    if adapters is not None:
        parameters = adapter_parameters(parameters, rank=adapters[0], targets=adapters[1])
    placements = tp_placements(parameters)
    alike = [MeshLayout(parameters, {"dp": len(list(of)), "tp": tp}, placements) for tp, of in groupby(replicas)]
    return alike[0] if len(alike) == 1 else JoinedLayout(tuple(alike))
