"""The recipe of a plan for one kind of device, as ``llamarl plan --recipe`` writes it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamarl.cli.plan_files import OURS, merged, write_settings
from llamarl.errors import PlanError

if TYPE_CHECKING:
    from llamarl.planner.choices import Options
    from llamarl.planner.hardware import Hardware
    from llamarl.planner.model_spec import ModelSpec
    from llamarl.planner.search import Plan

__all__ = ["NEEDS_FOLDER", "model_folder", "write_plan"]

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
    _settle_parts(settings, config or {})
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
    write_settings(path, config or {}, settings, header)


def _settle_parts(settings: dict[str, Any], config: dict[str, Any]) -> None:
    """Leave ``schedule.parts`` at 1 where the rest of the recipe works on whole ticks."""
    from llamarl.config import validate
    from llamarl.errors import ConfigError

    schedule = settings["schedule"]
    if "parts" in config.get("schedule", {}):
        schedule.setdefault("parts", 1)
    if schedule.get("parts", 1) > 1:
        try:
            validate(merged(config, {"schedule": schedule}))
        except ConfigError:
            schedule["parts"] = 1
