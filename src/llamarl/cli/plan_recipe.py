"""The recipe of a plan for one kind of device, as ``llamarl plan --recipe`` writes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamarl.cli.plan_files import OURS, merged, write_settings
from llamarl.errors import PlanError

if TYPE_CHECKING:
    from llamarl.planner.choices import Options
    from llamarl.planner.hardware import Hardware
    from llamarl.planner.model_spec import ModelSpec
    from llamarl.planner.search import Plan

__all__ = ["NEEDS_FOLDER", "Written", "choose_written", "model_folder", "write_plan"]

NEEDS_FOLDER = (
    "{shape} is a shape without weights: set model.path to the Hugging Face folder that holds them, before training and before a "
    "dry-run (llamarl train THIS --dry-run --model.path FOLDER)"
)


def model_folder(model_path: str) -> str | None:
    """What a recipe may name as ``model.path``; None for a bundled shape, which has no weights."""
    path = Path(model_path).expanduser()
    if path.is_file():
        return str(path.parent)
    return model_path if path.is_dir() or model_path.startswith("bundled:") else None


@dataclass(frozen=True)
class Written:
    """The plan whose recipe is written."""

    plan: Plan
    why: str
    """Which one that is, and why that one."""


def choose_written(
    plans: Sequence[Plan],
    recommended: Plan,
    model: ModelSpec,
    hardware: Hardware,
    config: dict[str, Any] | None = None,
) -> Written:
    """The recommended plan; where llamarl does not run that, the best of those that it runs.

    Args:
        plans: To choose from.
        config: Recipe whose other settings the written one keeps; some forbid turns.

    Raises:
        PlanError: It runs none of them.
    """
    from llamarl.planner.plan_report import seconds_text, system_title
    from llamarl.planner.runnable import why_not_run
    from llamarl.planner.search import recommend

    cpu = hardware.device.train_precision == "fp32"

    def against(plan: Plan) -> list[str]:
        if cpu and plan.system == "common":  # counted as copies of one core each
            return ["on the cores of a CPU llamarl's roles each have a layout of their own"]
        reasons = why_not_run(plan, model)
        if not reasons and config and plan.system != "separate" and (forbidden := _why_not_in_turns(config)):
            return [f"the recipe's other settings forbid turns: {forbidden}"]
        return reasons

    runs = [plan for plan in plans if not against(plan)]
    if not runs:
        raise PlanError(f"--recipe: llamarl train does not run this plan: {'; '.join(against(recommended))}")
    plan = recommended if any(plan is recommended for plan in runs) else recommend(runs)
    title = f"{system_title(plan)}, {seconds_text(plan.step_s)} a step"
    if plan is not recommended:
        return Written(
            plan, f"{title}; not the plan marked *, which llamarl does not run: {'; '.join(against(recommended))}"
        )
    others = [other for other in runs if (other.system == "separate") != (plan.system == "separate")]
    why = f"{title}, the plan marked *"
    if others:
        other = recommend(others)
        flag = "separate" if other.system == "separate" else "in-turns"
        why += f" (--system {flag}: {system_title(other)}, {seconds_text(other.step_s)} a step)"
    if plan.system != "separate" and not cpu:
        why += "; moving a role out of a GPU between the turns has not run on one yet"
    return Written(plan, why)


def _why_not_in_turns(config: dict[str, Any]) -> str:
    """What else in a recipe keeps generator and trainer from taking turns; empty: nothing."""
    from llamarl.config import validate
    from llamarl.errors import ConfigError

    turns = {"colocated": True, "max_staleness": 0, "weights": "exact"}
    plain = {"schedule": turns, "generator": {"max_segments": 1, "oversubscription": 1.0}}
    try:
        validate(merged(config, plain))
    except ConfigError as error:
        return str(error) if "schedule.colocated" in str(error) else ""
    return ""


def write_plan(
    path: Path,
    plan: Plan,
    config: dict[str, Any] | None,
    model_path: str,
    model: ModelSpec,
    hardware: Hardware,
    options: Options,
    hosts: Sequence[str] = (),
) -> None:
    """Write it.

    Args:
        config: Recipe that it changes; None: it has no other settings.
        hosts: Their names; empty: not known.

    Raises:
        PlanError: llamarl does not run the plan, or the file cannot be written.
    """
    from llamarl.engine.config import QUANTIZATIONS
    from llamarl.planner.over_hosts import hosts_needed, place_roles
    from llamarl.planner.plan_report import system_title
    from llamarl.planner.recipe import plan_settings
    from llamarl.planner.runnable import why_not_run

    cpu = hardware.device.train_precision == "fp32"
    if reasons := why_not_run(plan, model):
        raise PlanError(f"--recipe: llamarl train does not run this plan: {'; '.join(reasons)}")
    precision, kind = plan.generator.layout.precision, "cpu" if cpu else "cuda"
    known = set(QUANTIZATIONS["native", kind]) & set(hardware.device.weight_precisions)
    if precision not in {hardware.device.train_precision, *known}:
        raise PlanError(
            f"--recipe: the plan generates in {precision}, which llamarl's engine does not have on {hardware.device.title}: "
            f"leave --precision out, or take from {', '.join([hardware.device.train_precision, *sorted(known)])}"
        )
    folder = model_folder(model_path)
    settings = plan_settings(plan, folder or model_path, hardware, options.oversubscription)
    if hosts:
        settings["hosts"] = {"workers": list(hosts)}
        if where := place_roles(plan, hardware, hosts):
            settings["hosts"]["on"] = where
    for role in ("generator", "trainer"):
        if (config or {}).get(role, {}).get("device", "auto") not in ("auto", kind):
            settings[role]["device"] = kind
    if settings["schedule"]["colocated"] and "weights" in (config or {}).get("schedule", {}):
        settings["schedule"]["weights"] = "exact"  # in turns no version arrives inside a tick
    header = (
        f"{OURS}{system_title(plan)}, {plan.devices} x {hardware.device.title}.\n"
        f"Forecast: {plan.step_s:.4g} s a step (generator {plan.generator.time_s:.4g} s, trainer "
        f"{plan.trainer.time.total_s:.4g} s)."
    )
    if not hosts and (count := hosts_needed(plan.devices, hardware)) > 1:
        header += f"\nIt takes {count} hosts: llamarl train THIS --hosts A,B,... (docs/hosts.md)."
    if folder is None:
        header += f"\n{NEEDS_FOLDER.format(shape=model_path)}"
    own = (config or {}).get("generator", {})
    if "replicas" in own:  # unlike ones, in whose place the plan has alike ones
        config = {**(config or {}), "generator": {key: value for key, value in own.items() if key != "replicas"}}
    write_settings(path, config or {}, settings, header, plan.generator.demand.prompt_tokens)
