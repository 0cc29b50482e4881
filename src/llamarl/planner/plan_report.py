"""A plan as a text table, as JSON and as a picture."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llamarl.errors import PlanError
from llamarl.planner.choices import Options, TrainerChoice, Workload
from llamarl.planner.hardware import Hardware
from llamarl.planner.idle import idle_of, spare_of
from llamarl.planner.search import Plan
from llamarl.plural import plural

__all__ = [
    "NOT_MEASURED",
    "plan_to_dict",
    "prompts_text",
    "report_json",
    "report_text",
    "save_picture",
    "seconds_text",
    "system_title",
    "table_lines",
]


def system_title(plan: Plan) -> str:
    """One name a plan, as tables and pictures show it."""
    if plan.system == "common":
        return "sync, one layout"
    if plan.system == "resharding":
        return "sync, re-sharding"
    return f"separate, staleness {plan.max_staleness}"


def table_lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns of one width each, a rule under the first row."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]


def seconds_text(value: float) -> str:
    """Three digits and the unit that suits them."""
    if value == 0:
        return "0"
    for limit, scale, unit in ((1e-3, 1e6, "us"), (1.0, 1e3, "ms"), (600.0, 1.0, "s"), (36000.0, 1 / 60, "min")):
        if value < limit:
            return f"{value * scale:.3g} {unit}"
    return f"{value / 3600:.3g} h"


def _bytes(value: float) -> str:
    for scale, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:.0f} B"


def _split(plan: Plan) -> str:
    if plan.system != "separate":
        return "shared"
    return f"{plan.generator.devices}+" + ("rest" if plan.trainer.core_s else f"{plan.trainer.layout.devices}")


def _trainer_layout(plan: Plan) -> str:
    t = plan.trainer.layout
    if plan.trainer.core_s:
        return plural(t.threads, "thread")
    sizes = (
        [f"tp{t.tp}"] + ([f"pp{t.pp}"] if t.pp > 1 else []) + ([f"cp{t.cp}"] if t.cp > 1 else []) + [f"fsdp{t.fsdp}"]
    )
    return "·".join(sizes + [f"{axis}{n}" for axis, n in (("dp", t.dp), ("ep", t.ep)) if n > 1])


def _generator_layout(plan: Plan) -> str:
    g = plan.generator.layout
    cuts = [f"{axis}{n}" for axis, n in (("pp", g.pp), ("cp", g.cp)) if n > 1]
    return "·".join([f"tp{g.tp}", *cuts, f"dp{plan.generator.replicas}", g.precision])


NOT_MEASURED = (
    "times rest on assumed rates and may be wrong several times over: this machine was never measured "
    "(llamarl plan RECIPE --calibrate)"
)


def _cost(plan: Plan, price: float | None) -> float | None:
    return None if price is None else plan.devices * plan.step_s / 3600.0 * price


def report_text(
    plans: Sequence[Plan],
    chosen: Plan,
    work: Workload,
    hardware: Hardware,
    price: float | None = None,
    *,
    options: Options | None = None,
    among: str = "",
) -> str:
    """The table of all plans, then the chosen one in detail.

    Args:
        among: Of which plans the chosen one is the best, in words after "within 2% of the fastest"; empty: of all.
        options: What the search might use; None: its defaults.
    """
    model = work.model
    size = f"{model.total_params / 1e9:.3g} B parameters"
    if model.experts:
        size += f", {model.active_params / 1e9:.3g} B active a token"
    lines = [
        f"{model.name} ({size}) on {plans[0].devices} x {hardware.device.title}",
        f"{plural(work.prompts_per_step, 'prompt')} x {plural(work.group_size, 'response')} a step; "
        f"prompt {plural(work.prompt_tokens, 'token')}; "
        f"response {work.response.label} (mean {work.response.mean:.0f}, longest of a step "
        f"{work.response.expected_max(work.sequences):.0f})",
        *([NOT_MEASURED] if hardware.device.assumed else []),
        "",
    ]
    head = ["system", "step", "generate", "train", "sync", "waiting", "tokens/s", "split g+t", "generator", "trainer"]
    if price is not None:
        head.append("cost/step")
    rows = [head]
    for plan in plans:
        mark = "*" if plan is chosen else ""
        row = [
            system_title(plan) + mark,
            seconds_text(plan.step_s),
            seconds_text(plan.generator.time_s),
            seconds_text(plan.trainer.time.total_s),
            seconds_text(plan.sync_s),
            f"{plan.bubble:.0%}",
            f"{plan.tokens_per_s:,.0f}",
            _split(plan),
            _generator_layout(plan),
            _trainer_layout(plan),
        ]
        cost = _cost(plan, price)
        rows.append(row + ([f"{cost:,.4g}"] if cost is not None else []))
    lines += table_lines(rows)
    lines += ["", *_details(chosen, among)]
    if idle := idle_of(chosen, work, options or Options(), hardware.device.name):
        lines.append(f"  idle       {idle.text()}")
    if spare := spare_of(chosen, work, options or Options(), hardware):
        lines.append(f"  spare      {spare.text()}")
    best_sync = min((p.step_s for p in plans if p.system != "separate"), default=None)
    if best_sync is not None and chosen.system == "separate":
        lines.append(f"  gain       against the best synchronous plan: {best_sync / chosen.step_s:.2f} times as fast")
    if chosen.system != "separate" and (separate := [p for p in plans if p.system == "separate"]):
        best = min(separate, key=lambda p: p.step_s)
        lines.append(
            f"  note       best with executors on their own devices: {seconds_text(best.step_s)} ({system_title(best)})"
        )
    return "\n".join(lines)


def _prompts(plan: Plan) -> str:
    """Of unevenly dealt ones, how many a replica gets."""
    asked = plan.generator.demand
    if plan.generator.is_even:
        return ""
    most = asked.sequences // asked.group_size
    return f"{most - 1} or {most} prompts each, "


def prompts_text(trainer: TrainerChoice) -> str:
    """How often the trainer computes a prompt."""
    return "prompts once a group" if trainer.layout.share_prompts else "prompts with every response"


def _details(plan: Plan, among: str) -> list[str]:
    t, g = plan.trainer, plan.generator
    lines = [f"* recommended: {system_title(plan)} (least staleness within 2% of the fastest{among})"]
    lines.append(f"  binds      {plan.binds}")
    if plan.max_staleness or g.demand.partial:
        lines.append(f"  staleness  of any token at most {plural(plan.token_staleness, 'version')}")
    rollouts = "partial rollouts" if g.demand.partial else "whole batches"
    separate = plan.system == "separate"
    waits = [f"; idle {share:.0%}" if separate else "" for share in (plan.generator_idle, plan.trainer_idle)]
    lines.append(
        f"  generator  {plural(g.devices, 'device')}: {plural(g.replicas, 'replica')}, {_prompts(plan)}"
        f"{plural(g.demand.slots, 'sequence')} at once each, {rollouts}" + waits[0]
    )
    recompute = "recomputed activations" if t.layout.recompute else "kept activations"
    where = plural(t.layout.devices, "device")
    if t.core_s:
        where = f"{'what the generator leaves of ' if separate else ''}{plural(plan.devices, 'core')}, "
        where += plural(t.layout.threads, "thread")
        where += f", {t.layout.at_once} micro-batches at once" if t.layout.at_once > 1 else ""
    lines.append(
        f"  trainer    {where}: micro-batch {plural(t.layout.micro_batch, 'sequence')} a rank, {prompts_text(t)}, {recompute}"
        + waits[1]
    )
    parts = dataclasses.asdict(t.time)
    lines.append("             " + ", ".join(f"{k[:-2].replace('_', ' ')} {seconds_text(v)}" for k, v in parts.items()))
    for role, memory in (("generator", g.memory), ("trainer", t.memory)):
        held = ", ".join(f"{name.replace('_', ' ')} {_bytes(size)}" for name, size in memory.items() if size)
        if gone := [name.replace("_", " ") for name, size in memory.items() if not size]:
            held += f"; no {' and '.join(gone)} at that moment"
        when = " at its fullest" if role == "trainer" else ""
        lines.append(
            f"  memory     {role}{when}: {_bytes(sum(memory.values()))} of {_bytes(plan.memory_limit)} ({held})"
        )
    lines += [f"  note       {note}" for note in plan.notes]
    return lines


def plan_to_dict(plan: Plan, price: float | None = None) -> dict[str, Any]:
    """Plain values, JSON-ready. Times in seconds, memory in bytes."""
    t, g = plan.trainer, plan.generator
    return {
        "system": plan.system,
        "max_staleness": plan.max_staleness,
        "token_staleness": plan.token_staleness,
        "devices": plan.devices,
        "step_s": plan.step_s,
        "binds": plan.binds,
        "tokens_per_s": plan.tokens_per_s,
        "sync_s": plan.sync_s,
        "bubble": plan.bubble,
        "cost_per_step": _cost(plan, price),
        "memory_limit_bytes": plan.memory_limit,
        "notes": list(plan.notes),
        "generator": {
            **dataclasses.asdict(g.layout),
            "devices": g.devices,
            "replicas": g.replicas,
            "slots": g.demand.slots,
            "sequences_per_replica": g.demand.sequences,
            "dealt_evenly": g.is_even,
            "partial_rollouts": g.demand.partial,
            "max_segments": g.demand.max_segments,
            "time_s": g.time_s,
            "idle": plan.generator_idle,
            "memory_bytes": dict(g.memory),
        },
        "trainer": {
            **dataclasses.asdict(t.layout),
            "devices": t.layout.devices,
            "time_s": t.time.total_s,
            "core_s": t.core_s or None,
            "parts_s": dataclasses.asdict(t.time),
            "idle": plan.trainer_idle,
            "memory_bytes": dict(t.memory),
        },
    }


def report_json(
    plans: Sequence[Plan],
    chosen: Plan,
    work: Workload,
    hardware: Hardware,
    price: float | None = None,
    *,
    model_path: str,
    options: Options,
) -> dict[str, Any]:
    """The whole answer: question, hardware with its sources, every plan, and which one is recommended.

    Args:
        model_path: The model as it was asked for, which finds it again: a bundled shape's name, a folder or a config.json.
        options: What the search might use.
    """
    model = work.model
    return {
        "model": {
            **dataclasses.asdict(model),
            "path": model_path,
            "total_params": model.total_params,
            "active_params": model.active_params,
            "kv_bytes_per_token": model.kv_bytes_per_token(),
        },
        "workload": {
            "prompts_per_step": work.prompts_per_step,
            "group_size": work.group_size,
            "prompt_tokens": work.prompt_tokens,
            "response": work.response.label,
            "response_mean": work.response.mean,
            "response_limit": work.response.limit,
            "reward_s": work.reward_s,
            "reference_model": work.reference_model,
        },
        "options": dataclasses.asdict(options),
        "hardware": {
            "device": dataclasses.asdict(hardware.device),
            "efficiency": dataclasses.asdict(hardware.efficiency),
        },
        "plans": [plan_to_dict(plan, price) for plan in plans],
        "recommended": next(i for i, plan in enumerate(plans) if plan is chosen),
        "idle": dataclasses.asdict(idle) if (idle := idle_of(chosen, work, options, hardware.device.name)) else None,
        "spare": dataclasses.asdict(spare) if (spare := spare_of(chosen, work, options, hardware)) else None,
    }


def save_picture(plans: Sequence[Plan], path: Path, title: str) -> None:
    """Time bars by role and memory bars by part, one group a plan, written as PNG (or what the suffix says).

    Raises:
        PlanError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        raise PlanError("a picture needs matplotlib: pip install 'llamarl[plots]'") from None
    names = [system_title(plan).replace(", ", ",\n") for plan in plans]
    figure, (times, memory) = plt.subplots(1, 2, figsize=(max(11.0, 4 + 1.6 * len(plans)), 5.2))
    for i, plan in enumerate(plans):
        generate, train = plan.generator.time_s, plan.trainer.time.total_s
        if plan.system == "separate":
            times.bar(i - 0.2, generate, 0.38, color="#4c72b0")
            times.bar(i - 0.2, plan.sync_s, 0.38, bottom=generate, color="#c44e52")
            times.bar(i + 0.2, train, 0.38, color="#dd8452")
        else:
            times.bar(i, generate, 0.6, color="#4c72b0")
            times.bar(i, train, 0.6, bottom=generate, color="#dd8452")
            times.bar(i, plan.sync_s, 0.6, bottom=generate + train, color="#c44e52")
        times.plot([i - 0.42, i + 0.42], [plan.step_s] * 2, color="black", linewidth=1.5)
        times.text(i, plan.step_s, f" {seconds_text(plan.step_s)}", ha="center", va="bottom", fontsize=9)
    for role, color in (("generator", "#4c72b0"), ("trainer", "#dd8452"), ("weight hand-over", "#c44e52")):
        times.bar(0, 0, color=color, label=role)
    times.plot([], [], color="black", label="step")
    times.set_xticks(range(len(plans)), names, fontsize=8)
    times.set_ylabel("seconds a step")
    times.set_title("time by role")
    times.legend(fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.14))
    times.margins(y=0.08)
    parts = sorted({name for plan in plans for m in (plan.trainer.memory, plan.generator.memory) for name in m})
    colors = {name: plt.get_cmap("tab10")(index % 10) for index, name in enumerate(parts)}
    for i, plan in enumerate(plans):
        for offset, held in ((-0.2, plan.generator.memory), (0.2, plan.trainer.memory)):
            bottom = 0.0
            for name, size in held.items():
                memory.bar(i + offset, size / 1e9, 0.38, bottom=bottom, color=colors.get(name, "grey"))
                bottom += size / 1e9
    for name in parts:
        memory.bar(0, 0, color=colors.get(name, "grey"), label=name.replace("_", " "))
    memory.axhline(plans[0].memory_limit / 1e9, color="black", linestyle="--", linewidth=1)
    memory.set_xticks(range(len(plans)), names, fontsize=8)
    memory.set_ylabel("GB a device")
    memory.set_title("memory: generator left, trainer right, dashed: limit", fontsize=10)
    memory.set_ylim(0, plans[0].memory_limit / 1e9 * 1.05)
    memory.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise PlanError(f"--picture {path}: cannot write it: {error}") from error
    finally:
        plt.close(figure)
