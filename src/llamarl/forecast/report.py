"""Plans and simulations as text. Times that rest on a constant nobody measured stand behind a ``~``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llamarl.forecast.costs import is_captured
from llamarl.forecast.hardware import Hardware
from llamarl.forecast.memory import MARGIN
from llamarl.forecast.scenario import Scenario
from llamarl.forecast.search import GeneratorChoice, Plan, Workload
from llamarl.forecast.simulate import SimulationResult
from llamarl.plural import format_bytes, plural, table

__all__ = ["plan_title", "plans_text", "results_text"]

_GUESSED = "~ guessed: the rates of this machine are assumed, times may be wrong several times over; a finished run measures it: llamarl plan RUN"
_ESTIMATED = "~ estimated: rates are the maker's times published efficiencies; no time here was measured with llamarl"
_EXTRAPOLATED = (
    "~ extrapolated: the constants are fitted to a run on this machine of another model, or of other threads"
)
_FITTED = "forecast from constants fitted to a run of this machine; no time here was itself measured"


def _is_estimated(hardware: Hardware) -> bool:
    return hardware.device.assumed or bool(hardware.efficiency.estimates)


def _legend(hardware: Hardware, *, estimated: bool) -> str:
    if hardware.device.assumed:
        return _GUESSED
    unmeasured = hardware.efficiency.estimates
    if unmeasured and "generator_scale" not in unmeasured:
        return _ESTIMATED
    return _EXTRAPOLATED if estimated else _FITTED


def seconds_text(value: float, *, estimated: bool = False) -> str:
    """Three digits and the unit that suits them, behind a ``~`` where they are estimated."""
    mark = "~" if estimated and value else ""
    if value == 0:
        return "0"
    for limit, scale, unit in ((1e-3, 1e6, "us"), (1.0, 1e3, "ms"), (600.0, 1.0, "s"), (36000.0, 1 / 60, "min")):
        if value < 0.9995 * limit:  # what would be shown as the limit has the next unit
            return f"{mark}{value * scale:.3g} {unit}"
    return f"{mark}{value / 3600:.3g} h"


# -- plans ------------------------------------------------------------------------------------------------------------


def plan_title(plan: Plan) -> str:
    """One name a plan, as tables and recipes show it."""
    return "synchronous, in turns" if plan.colocated else f"asynchronous, staleness {plan.max_staleness}"


def _trainer_layout(plan: Plan) -> str:
    t = plan.trainer.layout
    if plan.hardware.is_cpu:
        return plural(plan.trainer.threads, "thread")
    sizes = (("tp", t.tp), ("pp", t.pp), ("cp", t.cp), ("fsdp", t.fsdp), ("dp", t.dp), ("ep", t.ep))
    return "·".join(f"{axis}{n}" for axis, n in sizes if n > 1 or axis in ("tp", "fsdp"))


def _generator_layout(plan: Plan, choice: GeneratorChoice) -> str:
    if plan.hardware.is_cpu:
        return f"{plural(plan.generator_devices, 'thread')}·{choice.layout.precision}"
    return f"tp{choice.layout.tp}·dp{choice.replicas}·{choice.layout.precision}"


def plans_text(plans: Sequence[Plan], chosen: Plan, work: Workload, kinds: str = "") -> str:
    """The table of all plans, then the chosen one in detail.

    Args:
        kinds: Of several kinds of devices, how many of which.
    """
    model, hardware = work.model, chosen.hardware
    size = f"{model.total_params / 1e9:.3g} B parameters"
    if model.experts:
        size += f", {model.active_params / 1e9:.3g} B active a token"
    estimated = _is_estimated(hardware)
    mark = "~" if estimated else ""
    lines = [
        f"{model.name} ({size}) on {kinds or f'{chosen.devices} x {hardware.device.title}'}",
        f"{plural(work.prompts_per_step, 'prompt')} x {plural(work.group_size, 'response')} a step; prompt "
        f"{plural(work.prompt_tokens, 'token')}; response {work.response.label} (mean {work.response.mean:.0f}, longest of a step "
        f"{work.response.expected_max(work.sequences):.0f})",
        _legend(hardware, estimated=estimated),
        "",
    ]
    rows = [
        ["plan", "step", "generate", "train", "hand-over", "waiting", "tokens/s", "devices g+t", "generator", "trainer"]
    ]
    for plan in plans:
        times = (plan.step_s, plan.generator.time_s, plan.trainer.time.total_s, plan.sync_s)
        rows.append(
            [
                plan_title(plan) + (f" ({plan.devices} x {plan.hardware.device.name})" if kinds and not plan.other_kinds else "") + "*" * (plan is chosen),
                *(seconds_text(seconds, estimated=estimated) for seconds in times),
                f"{mark}{plan.waiting:.0%}",
                f"{mark}{plan.tokens_per_s:,.0f}",
                "shared" if plan.colocated else f"{plan.generator_devices}+{plan.trainer_devices}",
                " + ".join(_generator_layout(plan, choice) for choice in plan.generators),
                _trainer_layout(plan),
            ]
        )  # fmt: skip
    lines += [*table(rows, ruled=True), "", *_details(chosen, work, estimated)]
    if best := [plan.step_s for plan in plans if plan.colocated and plan is not chosen]:
        lines.append(f"  gain       {mark}{min(best) / chosen.step_s:.2f} times as fast as in turns")
    return "\n".join(lines)


def _details(plan: Plan, work: Workload, estimated: bool) -> list[str]:
    t = plan.trainer
    lines = [f"* {plan_title(plan)}: the least staleness within 2 % of the fastest", f"  binds      {plan.binds}"]
    if plan.token_staleness:
        lines.append(f"  staleness  of any token at most {plural(plan.token_staleness, 'version')}")
    for g in plan.generators:
        asked = g.demand
        each = asked.sequences // asked.group_size
        prompts = f"{each} prompts each" if g.is_even else f"{each - 1} or {each} prompts each"
        lines.append(
            f"  generator  {plural(plan.generator_devices if plan.hardware.is_cpu else g.devices, 'device')}"
            f"{f' {g.hardware.device.name}' if plan.other_kinds else ''}: "
            f"{plural(g.replicas, 'replica')}, {prompts}, {plural(asked.slots, 'sequence')} at once, "
            f"{'partial rollouts' if asked.partial else 'whole batches'}"
        )
        lines.append(f"  memory     {_memory(g.memory, g.hardware)}")
    recompute = "recomputed activations" if t.layout.recompute else "kept activations"
    lines.append(
        f"  trainer    {plural(plan.trainer_devices, 'device')}: micro-batch {plural(t.layout.micro_batch, 'sequence')} a rank, {recompute}"
    )
    parts = ((name.removesuffix("_s"), seconds) for name, seconds in vars(t.time).items() if seconds)
    lines.append("             " + ", ".join(f"{name} {seconds_text(s, estimated=estimated)}" for name, s in parts))
    of_trainer = plan.hardware.joined(plan.trainer.threads) if plan.hardware.is_cpu else plan.hardware
    lines.append(f"  memory     {_memory(t.memory, of_trainer)}")
    eager = not all(is_captured(g.hardware, work.model, g.layout) for g in plan.generators)
    if eager and "eager_layer_overhead_s" in plan.hardware.efficiency.estimates:
        lines.append(
            f"  rests on   eager_layer_overhead_s = {plan.hardware.efficiency.eager_layer_overhead_s * 1e6:g} us, which nobody measured: "
            "a decoded layer without graphs takes at least that"
        )
    if plan.devices > plan.used and not plan.hardware.is_cpu:
        lines.append(
            f"  unused     {plan.devices - plan.used} of {plan.devices} devices: prompts are dealt whole, and no layout found is faster with them"
        )
    return lines


def _memory(parts: Any, hardware: Hardware) -> str:
    held = ", ".join(f"{name.replace('_', ' ')} {format_bytes(size)}" for name, size in parts.items() if size)
    total = sum(parts.values()) * (1.0 + MARGIN)
    return (
        f"{format_bytes(total)} of {format_bytes(hardware.usable_memory_bytes)} with a margin of {MARGIN:.0%} ({held})"
    )


# -- simulations ------------------------------------------------------------------------------------------------------

_ROLES = ("generator", "reward", "trainer")
_BAR = 40


def policy_title(result: SimulationResult) -> str:
    """One name a schedule."""
    s = result.scenario
    title = "synchronous" if s.max_staleness == 0 else f"staleness {s.max_staleness}"
    return title + (f", partial x{s.oversubscription:g} in {s.max_segments}" if s.max_segments > 1 else "")


def results_text(results: Sequence[SimulationResult], hardware: Hardware) -> str:
    """The table, then the staleness of trained tokens."""
    s: Scenario = results[0].scenario
    devices = f"{s.devices} shared devices" if s.in_turns else f"{s.generator_devices}+{s.trainer_devices} devices"
    lines = [
        s.title,
        _legend(hardware, estimated=any(result.scenario.estimated for result in results)),
        f"{plural(s.prompts_per_step, 'prompt')} x {plural(s.group_size, 'response')} a step; prompt {plural(s.prompt_tokens, 'token')}; response "
        f"{s.lengths.label}; "
        f"{plural(s.replicas, 'generator replica')}; {devices}; {plural(s.num_ticks, 'tick')}",
        "",
    ]
    failed = any(r.scenario.failures for r in results)
    head = ["policy", "step", "theory", "step/theory", "generate", "reward", "train"]
    head += ["idle gen", "idle replicas", "idle train", "tokens/s", *(["failures", "lost"] if failed else [])]
    rows = [head]
    for r in results:
        known = {"estimated": r.scenario.estimated}
        row = [policy_title(r), seconds_text(r.step_s, **known), seconds_text(r.theory_s, **known)]
        row.append(f"{r.step_s / r.theory_s:.3f}" if r.theory_s else "-")
        row += [seconds_text(r.role_s[role], **known) for role in _ROLES]
        mark = "~" if r.scenario.estimated else ""
        row += [f"{mark}{share:.0%}" for share in (r.idle["generator"], r.replica_idle, r.idle["trainer"])]
        rows.append(
            [*row, f"{mark}{r.tokens_per_s:,.0f}", *([str(r.num_failures), f"{r.lost_share:.0%}"] if failed else [])]
        )
    lines += table(rows, ruled=True)
    for r in results:
        lines += ["", f"staleness of trained tokens, {policy_title(r)} (mean {r.staleness_mean:.2f} versions)"]
        total = sum(r.staleness.values())
        for lag, tokens in r.staleness.items():
            lines.append(f"  {lag:>3}  {tokens / total:6.1%}  {'#' * round(_BAR * tokens / total)}".rstrip())
    return "\n".join(lines)
