"""A plan for devices of several kinds as a table, as lines of a recipe and as plain values."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from llamarl.planner.choices import Options, Workload
from llamarl.planner.hardware import Hardware
from llamarl.planner.idle import idle_of_kinds, spare_of
from llamarl.planner.plan_report import prompts_text, seconds_text, system_title, table_lines
from llamarl.planner.recipe import plan_settings
from llamarl.planner.replica_times import Pool
from llamarl.planner.search import Plan
from llamarl.planner.unlike import Share, UnlikePlan
from llamarl.planner.unlike_recipe import replica_tables
from llamarl.plural import plural

__all__ = ["unlike_json", "unlike_text"]


def _trainer(plan: UnlikePlan) -> str:
    t = plan.trainer.layout
    sizes = [f"tp{t.tp}", *(f"{axis}{n}" for axis, n in (("pp", t.pp), ("cp", t.cp)) if n > 1), f"fsdp{t.fsdp}"]
    sizes += [f"{axis}{n}" for axis, n in (("dp", t.dp), ("ep", t.ep)) if n > 1]
    return f"{t.devices} {plan.trainer_hardware.device.name} {'·'.join(sizes)}"


def _generator(share: Share) -> str:
    g = share.choice.layout
    sizes = [f"tp{g.tp}"] + ([f"pp{g.pp}"] if g.pp > 1 else []) + [f"dp{len(share.prompts)}", g.precision]
    return f"{share.devices} {share.hardware.device.name} {'·'.join(sizes)}"


def _dealt(prompts: Sequence[int]) -> str:
    """``4 x 9, 12 x 8 prompts``."""
    counted = Counter(prompts)
    return ", ".join(f"{number} x {count}" for count, number in sorted(counted.items(), reverse=True)) + " prompts"


def unlike_text(plans: Sequence[UnlikePlan], pools: Sequence[Pool], work: Workload, options: Options) -> str:
    """The table, the first plan in detail, and the lines of a recipe that say it.

    Args:
        plans: The best first.
        options: What the search might use.
    """
    best = plans[0]
    lines = [
        f"{work.model.name} on {' + '.join(f'{pool.devices} x {pool.hardware.device.title}' for pool in pools)}",
        "",
    ]
    rows = [["plan", "step", "generate", "train", "waiting", "tokens/s", "trainer", "generators"]]
    for plan in plans:
        rows.append(
            [
                plan.title + ("*" if plan is best else ""),
                seconds_text(plan.step_s),
                seconds_text(plan.generate_s),
                seconds_text(plan.trainer.time.total_s),
                f"{plan.waiting:.0%}",
                f"{plan.tokens_per_s:,.0f}",
                _trainer(plan),
                " + ".join(map(_generator, plan.shares)),
            ]
        )
    lines += [
        *table_lines(rows),
        "",
        f"* {system_title(best.one)}"
        if best.one is not None and best.in_turns
        else f"* staleness {best.max_staleness}",
    ]
    lines.append(
        f"  trainer    {_trainer(best)}: micro-batch {plural(best.trainer.layout.micro_batch, 'sequence')} a rank, {prompts_text(best.trainer)}"
    )
    for share in best.shares:
        rollouts = "partial rollouts" if share.choice.demand.partial else "whole batches"
        lines.append(
            f"  generator  {_generator(share)}: {_dealt(share.prompts)} of a tick, {plural(share.choice.demand.slots, 'sequence')} "
            f"at once, {rollouts}; {seconds_text(share.choice.time_s)}, {'between the turns' if best.in_turns else 'hand-over'} "
            f"{seconds_text(share.sync_s)}"
        )
    for idle in idle_of_kinds(best, pools, work, options, plans):
        lines.append(f"  idle       {idle.text()}")
    if best.one is not None and (spare := spare_of(best.one, work, options, best.trainer_hardware)):
        lines.append(f"  spare      {spare.text()}")
    for plan in plans[1:]:
        lines.append(f"  gain       {plan.step_s / best.step_s:.2f} times as fast as {plan.title}")
    if best.why_not_run:
        lines.append(f"  not yet    llamarl train does not run this plan: {best.why_not_run}")
        runnable = min((plan for plan in plans[1:] if not plan.why_not_run), key=lambda plan: plan.step_s, default=None)
        if runnable is not None:
            lines += [f"  to run     {runnable.title}", *_lines(runnable)]
    else:
        lines += ["  to run     --recipe OUT.toml writes it whole; what makes it this plan:", *_lines(best)]
    return "\n".join(lines)


def _lines(plan: UnlikePlan) -> list[str]:
    """Of a recipe: what says a plan's layout and shares."""
    if plan.one is not None:
        return _lines_of_one(plan.one, plan.trainer_hardware)
    t, kinds = plan.trainer.layout, replica_tables(plan)
    sizes = {
        "fsdp": t.data_ranks,
        "tp": t.tp,
        **{axis: n for axis, n in (("pp", t.pp), ("cp", t.cp), ("ep", t.ep)) if n > 1},
    }
    trainer = [f"{axis} = {n}" for axis, n in sizes.items()]
    lines = ["[trainer]", *trainer]
    for place, (share, table) in enumerate(zip(plan.shares, kinds, strict=True)):
        values = [
            f'{key} = "{value}"' if isinstance(value, str) else f"{key} = {value}" for key, value in table.items()
        ]
        lines += [f"[[generator.replicas]]   # on {share.hardware.device.name}: hosts.on.generator_{place}", *values]
    return [f"             {line}" for line in lines]


def _lines_of_one(plan: Plan, hardware: Hardware) -> list[str]:
    """Of a plan for one kind."""
    settings = plan_settings(plan, "", hardware, 1.0)
    wanted = {
        "schedule": ("colocated",) if settings["schedule"]["colocated"] else (),
        "generator": ("dp", "tp", "pp", "quantization"),
        "trainer": ("fsdp", "tp", "pp", "cp", "ep"),
    }
    lines = []
    for section, keys in wanted.items():
        values = {key: value for key in keys if (value := settings[section][key]) is True or value not in (1, "none")}
        if values or section == "trainer":
            lines.append(f"[{section}]")
        for key, value in values.items():
            lines.append(f"{key} = {json.dumps(value)}")
    if tables := settings["generator"].get("replicas"):
        lines += ["[[generator.replicas]]", f"dp = {tables[0]['dp']}"]
    return [f"             {line}" for line in lines]


def _plain(plan: UnlikePlan) -> dict[str, Any]:
    return {
        "title": plan.title,
        "system": plan.one.system if plan.one is not None else "separate",
        "max_staleness": plan.max_staleness,
        "step_s": plan.step_s,
        "tokens_per_s": plan.tokens_per_s,
        "waiting": plan.waiting,
        "unrunnable": plan.why_not_run or None,
        "trainer": {
            "device": plan.trainer_hardware.device.name,
            **dataclasses.asdict(plan.trainer.layout),
            "devices": plan.trainer.layout.devices,
            "time_s": plan.trainer.time.total_s,
            "memory_bytes": dict(plan.trainer.memory),
        },
        "generators": [
            {
                "device": share.hardware.device.name,
                **dataclasses.asdict(share.choice.layout),
                "devices": share.devices,
                "replicas": len(share.prompts),
                "prompts": list(share.prompts),
                "slots": share.choice.demand.slots,
                "partial_rollouts": share.choice.demand.partial,
                "time_s": share.choice.time_s,
                "sync_s": share.sync_s,
                "memory_bytes": dict(share.choice.memory),
            }
            for share in plan.shares
        ],
    }


def unlike_json(plans: Sequence[UnlikePlan], pools: Sequence[Pool], work: Workload, options: Options) -> dict[str, Any]:
    """Plain values; times in seconds, memory in bytes. The first plan is the recommended one."""
    return {
        "model": work.model.name,
        "pools": [{"device": pool.name, "devices": pool.devices} for pool in pools],
        "plans": [_plain(plan) for plan in plans],
        "recommended": 0,
        "idle": [dataclasses.asdict(idle) for idle in idle_of_kinds(plans[0], pools, work, options, plans)],
    }
