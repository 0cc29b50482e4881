"""``llamarl plan``: how to split devices, and how long a step will take, before the money is spent."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamarl.cli.questions import (
    add_any_tp,
    add_devices,
    add_job,
    device_count,
    hardware_of,
    options_of,
    reward_seconds,
    staleness_levels,
    to_stderr,
    workload_of,
)
from llamarl.errors import PlanError

if TYPE_CHECKING:
    from llamarl.cli.measured_splits import MeasuredSplits
    from llamarl.planner.choices import Options, Workload
    from llamarl.planner.hardware import Hardware
    from llamarl.planner.recipe import RecipeQuestion
    from llamarl.planner.search import Plan
    from llamarl.simulator.splits import Allowed

__all__ = ["add_parser", "run"]

_DESCRIPTION = """\
Tells, for a model, a number of devices and a batch, the best layout of three systems and how long a step takes:

  sync, one layout     generator and trainer share devices and one tensor-parallel size (DeepSpeed-Chat-like)
  sync, re-sharding    they share devices, each in its own layout, weights move between phases (the strong baseline)
  separate, staleness  each on its own devices; the generator may lag that many versions (what llamarl train runs)

For each: split, parallel sizes, precision, memory by part against the limit, time by part, share of device time
spent waiting, and what binds. The plan marked * has the least staleness within 2% of the fastest."""

_EPILOG = """\
examples:
  llamarl plan --model Llama-3.1-70B --devices 256 --hardware h100-sxm --prompts 128 --group-size 16 \\
      --response-tokens 4096:lognormal
  llamarl plan --model path/to/hf-folder --devices 8 --hardware a100 --picture plan.png --recipe plan.toml
  llamarl plan recipes/tiny.toml                 what this machine will make of a recipe
  llamarl plan runs/tiny                         the same with the lengths that the run measured
  llamarl plan recipes/tiny.toml --calibrate     measure this machine and the recipe's executors first; keep both
  llamarl plan recipes/tiny.toml --calibrate --splits    other thread counts and int8 too: which split is fastest

response lengths:
  512                            every response has 512 tokens
  4096:lognormal                 mean 4096, sigma 0.6, cut at 4 times the mean
  4096:lognormal:sigma=0.9,limit=16384
  1000:pareto:alpha=1.8,limit=8192
  file:runs/tiny/rollouts        as measured; or a file with one length a line

Times come from rooflines: work / (peak x efficiency) + latency. Peaks and efficiencies, each with its source, are in
src/llamarl/planner/hardware.toml; docs/planner.md says what the model leaves out."""


def add_parser(subparsers: Any, full: bool = True) -> None:
    parser = subparsers.add_parser(
        "plan",
        help="best split, layout and staleness for a model on given devices, with the step time",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    if not full:
        return
    parser.add_argument("source", nargs="?", help="recipe (TOML), run folder, or Hugging Face config.json / folder")
    what = add_job(parser, "a recipe or run")
    what.add_argument("--reference-model", action="store_true", help="the trainer also scores with a frozen reference")
    where = add_devices(parser)
    where.add_argument("--price-per-device-hour", type=float, help="adds the cost of a step, in the price's currency")
    where.add_argument(
        "--calibrate",
        action="store_true",
        help="measure this machine with the model, and a recipe's executors at work; keep the result",
    )
    where.add_argument(
        "--splits",
        action="store_true",
        help="with --calibrate RECIPE: measure other threads and precisions too, then let the near splits take turns at the "
        "machine for up to seven minutes",
    )
    how = parser.add_argument_group("the search")
    how.add_argument("--staleness", help="max_staleness values to plan for (default 0,1,2,4)")
    how.add_argument("--precision", help="generator precisions to try, e.g. bf16,fp8 (default: all the device has)")
    how.add_argument(
        "--max-segments", type=int, help="versions a response may span; 1: no partial rollouts (default 4)"
    )
    add_any_tp(how)
    how.add_argument("--max-pipeline", type=int, default=1, help="largest pipeline size to try (llamarl runs 1)")
    out = parser.add_argument_group("output")
    out.add_argument("--json", action="store_true", help="print everything as one JSON object instead of the table")
    out.add_argument("--picture", type=Path, metavar="OUT.png", help="time and memory bars (needs matplotlib)")
    out.add_argument(
        "--recipe", type=Path, metavar="OUT.toml", help="write the recipe of the best plan that llamarl train runs"
    )


def run(args: argparse.Namespace) -> int:
    """Plan and print. Raises PlanError (exit code 2) for a question that makes no sense or has no answer."""
    from llamarl.planner.report import report_json, report_text, save_picture
    from llamarl.planner.search import recommend

    config, question = _read_source(args)
    model_path = args.model or (question.model if question else None) or _model_source(args)
    if model_path is None:
        raise PlanError("no model: give --model NAME_OR_FOLDER, a recipe, a run folder or a config.json")
    hardware = _hardware(args, model_path)
    measured = _measured(args, hardware)
    if measured and question:
        question = measured.question(question)
    work = workload_of(args, model_path, question, reference_model=args.reference_model)
    segments = args.max_segments if args.max_segments is not None else question.max_segments if question else 4
    options = options_of(args.precision, segments, max_pipeline=args.max_pipeline, any_tp=bool(args.any_tp))
    devices = device_count(args.devices, hardware)
    price = args.price_per_device_hour
    if price is not None and not 0 <= price < math.inf:
        raise PlanError(f"--price-per-device-hour must be >= 0, got {price}")
    plans, options, unrunnable = _search(
        hardware, work, options, devices, staleness_levels(args.staleness or "0,1,2,4")
    )
    chosen = recommend(plans)
    unrunnable = unrunnable or _stages(chosen)
    if args.picture:
        save_picture(plans, args.picture, f"{work.model.name} on {devices} x {hardware.device.title}")
    if args.recipe and measured:
        _write(args.recipe, config or {}, *measured.recipe())
    elif args.recipe:
        if unrunnable:
            raise PlanError(f"--recipe: {unrunnable}")
        _write_recipe(args.recipe, plans, config, model_path, hardware, options)
    if args.json:
        report = report_json(plans, chosen, work, hardware, price, model_path=_absolute(model_path), options=options)
        report |= {"splits": measured.as_json() if measured else None, "unrunnable": unrunnable}
        print(json.dumps(report, indent=1))
    else:
        print(report_text(plans, chosen, work, hardware, price))
        if unrunnable:
            print(f"  not yet    llamarl train does not run this plan: {unrunnable}\n             see docs/planner.md")
        if measured:
            print(measured.text())
        if question and not args.response_tokens:
            print(f"  lengths    {question.note}")
        for path in filter(None, (args.picture, args.recipe)):
            what = f" ({measured.chosen.name})" if measured and path is args.recipe else ""
            print(f"  wrote      {path}{what}")
    return 0


def _stages(plan: Plan) -> str | None:
    """Why llamarl does not run a plan's pipeline; None: it has none."""
    from llamarl.planner.report import system_title

    stages = max(plan.generator.layout.pp, plan.trainer.layout.pp)
    return (
        f"{system_title(plan)} has {stages} pipeline stages, llamarl runs 1 (--max-pipeline 1)" if stages > 1 else None
    )


def _search(
    hardware: Hardware, work: Workload, options: Options, devices: int, staleness: list[int]
) -> tuple[list[Plan], Options, str | None]:
    """The plans, with layouts that llamarl does not run where it has none; then the last value says why it has none.

    Raises:
        PlanError: Nothing fits either way; what llamarl would need.
    """
    from llamarl.planner.fitting import least_devices
    from llamarl.planner.search import search_all

    try:
        return search_all(hardware, work, options, devices, staleness), options, None
    except PlanError as error:
        if devices < 1 or not options.runnable:
            raise
        wider = dataclasses.replace(options, runnable=False)
        try:
            return search_all(hardware, work, wider, devices, staleness), wider, str(error)
        except PlanError as also:
            if None in least_devices(hardware, work, options):  # no number of devices would do
                raise PlanError(f"{also} (in layouts that llamarl train does not run yet)") from None
            raise error from None


def _absolute(model_path: str) -> str:
    """The model's folder or file from wherever the plan is read; a name stays as it is."""
    path = Path(model_path).expanduser()
    return str(path.resolve()) if path.exists() else model_path


def _model_source(args: argparse.Namespace) -> str | None:
    """The positional argument, where it names a model rather than a recipe."""
    return args.source if args.source and not args.source.endswith(".toml") else None


def _read_source(args: argparse.Namespace) -> tuple[dict[str, Any] | None, RecipeQuestion | None]:
    """The recipe as written, and the question it poses with its defaults filled in; (None, None) without a recipe."""
    if not args.source:
        return None, None
    path = Path(args.source).expanduser()
    run_dir = path if (path / "config.toml").is_file() else None
    recipe = path / "config.toml" if run_dir else path
    if recipe.suffix != ".toml":
        return None, None
    from llamarl.config import load_config, to_plain
    from llamarl.planner.recipe import question_from_config

    config = to_plain(load_config(recipe))
    written = tomllib.loads(recipe.read_text(encoding="utf-8"))
    written.get("run", {}).pop("dir", None)  # the new recipe's runs go to a folder of their own
    return written, question_from_config(config, run_dir)


def _hardware(args: argparse.Namespace, model_path: str) -> Hardware:
    from llamarl.planner.calibrate import calibrate
    from llamarl.planner.hardware import find_hardware
    from llamarl.planner.kept_hardware import calibration_path, save_calibration

    if not args.calibrate:
        return hardware_of(args.hardware, args.calibration)
    path = args.calibration or calibration_path()
    if args.hardware and find_hardware(args.hardware).device.name != "this-machine":
        raise PlanError(f"--calibrate measures this machine, not {args.hardware}: leave --hardware out")
    hardware, samples = calibrate(model_path, log=to_stderr)
    save_calibration(path, hardware, samples, model_path)
    to_stderr(f"kept in {path}")
    return hardware


def _measured(args: argparse.Namespace, hardware: Hardware) -> MeasuredSplits | None:
    """What a recipe's own executors were measured to need on this machine's cores; None where that is not asked."""
    recipe = Path(args.source).expanduser() if args.source and args.source.endswith(".toml") else None
    if args.splits and (recipe is None or not args.calibrate):
        raise PlanError("--splits measures a recipe's executors: llamarl plan RECIPE.toml --calibrate --splits")
    if recipe is None:
        return None
    asked = ("--model", "--prompt-tokens", "--response-tokens", "--devices")
    if other := [flag for flag in asked if getattr(args, flag.removeprefix("--").replace("-", "_")) is not None]:
        if args.splits:
            raise PlanError(
                f"--splits measures the recipe's own job: leave {', '.join(other)} out, or set it in the recipe"
            )
        if args.calibrate:
            to_stderr(f"the recipe's executors are not measured: {', '.join(other)} makes another job of it")
        return None
    if hardware.device.name != "this-machine" or hardware.device.train_precision != "fp32":
        return None
    from llamarl.cli.measured_splits import measure_splits

    return measure_splits(
        recipe,
        args.calibration,
        changes={
            key: value
            for key, value in (("schedule.prompts_per_step", args.prompts), ("generator.group_size", args.group_size))
            if value is not None
        },
        measure=args.calibrate,
        variants=args.splits,
        allowed=_allowed(args),
        reward_s=reward_seconds(args),
        log=to_stderr,
    )


def _allowed(args: argparse.Namespace) -> Allowed:
    """What the command line lets a proposal for this machine's cores use."""
    from llamarl.simulator.splits import Allowed

    precisions = options_of(args.precision, 1).precisions
    return Allowed(
        staleness=staleness_levels(args.staleness) if args.staleness else Allowed.staleness,
        precisions=tuple("none" if precision == "fp32" else precision for precision in precisions),
        max_segments=args.max_segments if args.max_segments is not None else Allowed.max_segments,
    )


def _write_recipe(
    path: Path, plans: list[Plan], config: dict[str, Any] | None, model_path: str, hardware: Hardware, options: Options
) -> None:
    from llamarl.engine.config import QUANTIZATIONS
    from llamarl.planner.recipe import plan_settings
    from llamarl.planner.report import system_title
    from llamarl.planner.search import recommend

    cpu = hardware.device.train_precision == "fp32"
    runnable = [plan for plan in plans if plan.system == "separate" or (cpu and plan.system == "resharding")]
    runnable = runnable or [plan for plan in plans if plan.system == "resharding"]  # a lone device
    if not runnable:
        raise PlanError("a recipe needs a plan with a layout for each role, and none fits: give more devices")
    plan = recommend(runnable)
    if stages := _stages(plan):
        raise PlanError(f"--recipe: {stages}")
    precision, kind = plan.generator.layout.precision, "cpu" if cpu else "cuda"
    known = set(QUANTIZATIONS["native", kind]) & set(hardware.device.weight_precisions)
    if precision not in {hardware.device.train_precision, *known}:
        raise PlanError(
            f"--recipe: the plan generates in {precision}, which llamarl's engine does not have on {hardware.device.title}: "
            f"leave --precision out, or take from {', '.join([hardware.device.train_precision, *sorted(known)])}"
        )
    settings = plan_settings(plan, model_path, hardware, options.oversubscription)
    for role in ("generator", "trainer"):
        if (config or {}).get(role, {}).get("device", "auto") not in ("auto", kind):
            settings[role]["device"] = kind
    if settings["schedule"]["colocated"] and "weights" in (config or {}).get("schedule", {}):
        settings["schedule"]["weights"] = "exact"  # in turns no version arrives inside a tick
    header = (
        f"Written by llamarl plan: {system_title(plan)}, {plan.devices} x {hardware.device.title}.\n"
        f"Forecast: {plan.step_s:.4g} s a step (generator {plan.generator.time_s:.4g} s, trainer "
        f"{plan.trainer.time.total_s:.4g} s)."
    )
    _write(path, config or {}, settings, header)


def _write(path: Path, config: dict[str, Any], settings: dict[str, Any], header: str) -> None:
    from llamarl.config import known_keys
    from llamarl.planner.recipe import recipe_text

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(recipe_text(_merge(config, settings), set(known_keys()), header), encoding="utf-8")
    except OSError as error:
        raise PlanError(f"--recipe {path}: cannot write it: {error}") from error


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged
