"""The recipe that a plan for devices of several kinds amounts to: a table ``[[generator.replicas]]`` for each kind that generates. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from llamarl.errors import PlanError
from llamarl.planner.hardware import Hardware
from llamarl.planner.over_hosts import most_on_a_host
from llamarl.planner.recipe import budget_of
from llamarl.planner.unlike import Share, UnlikePlan

__all__ = ["ON_GPUS", "replica_tables", "share_numbers", "unlike_settings"]

ON_GPUS = ("none", "fp8")
"""What ``generator.quantization`` may be on the devices of such plans."""


def replica_tables(plan: UnlikePlan) -> list[dict[str, Any]]:
    """Kind by kind what makes its replicas unlike the others; without caches and numbers of sequences."""
    return [
        {"dp": len(share.prompts), "share": number, "tp": share.choice.layout.tp}
        | ({"pp": pp} if (pp := share.choice.layout.pp) > 1 else {})
        | ({"quantization": quantized} if (quantized := _quantization(share)) != "none" else {})
        for share, number in zip(plan.shares, share_numbers([share.prompts for share in plan.shares]), strict=True)
    ]


def share_numbers(prompts: Sequence[Sequence[int]]) -> list[float]:
    """What to write as each kind's share: the prompts that one of its replicas gets on average, or whole numbers in the same ratios
    where these have no end as decimals.

    Args:
        prompts: Of the replicas of each kind.
    """
    means = [Fraction(sum(own), len(own)) for own in prompts]
    if all(Fraction(str(float(mean))) == mean for mean in means):
        return [int(mean) if mean.denominator == 1 else float(mean) for mean in means]
    unit = math.lcm(*(mean.denominator for mean in means))
    return [int(mean * unit) for mean in means]


def unlike_settings(
    plan: UnlikePlan, model_path: str, oversubscription: float, hosts: Mapping[str, Sequence[str]] | None = None
) -> dict[str, dict[str, Any]]:
    """Recipe sections that make llamarl run ``plan``.

    Args:
        hosts: Kind of device -> its hosts by name; None: not known.

    Raises:
        PlanError: llamarl does not run it, or these hosts have too little room.
    """
    if plan.why_not_run:
        raise PlanError(f"--recipe: llamarl train does not run this plan: {plan.why_not_run}")
    if others := {_quantization(share) for share in plan.shares} - set(ON_GPUS):
        raise PlanError(
            f"--recipe: the plan generates in {', '.join(sorted(others))}, which llamarl's engine does not have on GPUs: leave --precision "
            "out, or take bf16,fp8"
        )
    t, work = plan.trainer.layout, plan.shares[0].choice.demand
    prompts = sum(sum(share.prompts) for share in plan.shares)
    tables = [
        table | {"max_sequences": share.choice.demand.slots, "kv_cache_bytes": math.ceil(_cache_bytes(share))}
        for table, share in zip(replica_tables(plan), plan.shares, strict=True)
    ]
    settings: dict[str, dict[str, Any]] = {
        "model": {"path": model_path},
        "schedule": {"prompts_per_step": prompts, "max_staleness": plan.max_staleness, "colocated": False},
        "generator": {
            "group_size": work.group_size,
            "max_segments": work.max_segments if work.partial else 1,
            "oversubscription": oversubscription if work.partial else 1.0,
            "dp": 1,
            "cp": 1,
            "shards": 0,
            "quantization": "none",
            "sampling": {"max_new_tokens": work.lengths.limit},
            "engine": {"dtype": "bfloat16"},
            "replicas": tables,
        },
        "trainer": {
            "fsdp": t.data_ranks,
            "tp": t.tp,
            "pp": t.pp,
            "cp": t.cp,
            "ep": t.ep,
            "dtype": "bfloat16",
            "max_tokens_per_microbatch": budget_of(t, work),
            "share_prompts": t.share_prompts,
            "activation_checkpointing": "full" if t.recompute else "none",
        },
    }
    if hosts is not None:
        settings["hosts"] = {
            "workers": [name for names in hosts.values() for name in names],
            "on": _places(plan, hosts),
            "allow_unlike": True,
        }
    return settings


def _quantization(share: Share) -> str:
    precision = share.choice.layout.precision
    return "none" if precision == share.hardware.device.train_precision else precision


def _cache_bytes(share: Share) -> float:
    """The planned cache of a replica's rank and room for blocks half full, within what the limit leaves."""
    memory = share.choice.memory
    room = share.hardware.usable_memory_bytes - sum(memory.values())
    return memory["kv_cache"] + max(0.0, min(0.25 * memory["kv_cache"], room))


def _places(plan: UnlikePlan, hosts: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Executor, or kind of replicas, -> its hosts: those of its kind of device, each filled evenly.

    Where the trainer's kind generates too, each of both has hosts of its own, or both an even part of all of them.
    """
    t, device = plan.trainer.layout, plan.trainer_hardware.device
    of_trainer = list(hosts[device.name])
    own = next(
        (n for n in range(1, len(of_trainer) + 1) if _room(t.devices, t.tp * t.pp * t.cp, n, plan.trainer_hardware)), 0
    )
    places: dict[str, list[str]] = {}
    for place, share in enumerate(plan.shares):
        found = list(hosts[share.hardware.device.name])
        unit = share.choice.layout.devices
        if share.hardware.device.name != device.name:
            places[f"generator_{place}"] = found
            continue
        if own and _room(share.devices, unit, len(found) - own, share.hardware):
            of_trainer, places[f"generator_{place}"] = found[:own], found[own:]
        elif _room(
            share.devices, unit, len(found), share.hardware, most_on_a_host(t.devices, t.tp * t.pp * t.cp, len(found))
        ):
            places[f"generator_{place}"] = found
        else:
            raise PlanError(
                f"--recipe: {t.devices} {device.name} that train and {share.devices} that generate have no even place on "
                f"{', '.join(found)}: leave the hosts out, and place the ranks yourself (hosts.on)"
            )
    return {"trainer": of_trainer, **places}


def _room(devices: int, unit: int, hosts: int, hardware: Hardware, taken: int = 0) -> bool:
    """Whether an even spread leaves no host with more than it has."""
    return hosts > 0 and most_on_a_host(devices, unit, hosts) + taken <= hardware.device.devices_per_node
