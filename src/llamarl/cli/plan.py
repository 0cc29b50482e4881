"""``llamarl plan``: how to split devices, and how long a step will take, before the money is spent."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamarl.cli.plan_files import refuse_to_replace, write_settings
from llamarl.cli.plan_hosts import ASKED, hosts_asked, is_inventory, pools_of, read_inventory
from llamarl.cli.plan_recipe import NEEDS_FOLDER, Written, choose_written, model_folder, write_plan
from llamarl.cli.plan_unlike import run_unlike
from llamarl.cli.questions import (
    add_devices,
    add_job,
    device_count,
    hardware_of,
    options_of,
    refuse_flags,
    reward_seconds,
    staleness_levels,
    to_stderr,
    workload_of,
)
from llamarl.errors import PlanError
from llamarl.reading import read_toml, user_path
from llamarl.shipped import shipped_or_path

if TYPE_CHECKING:
    from llamarl.cli.measured_schedules import MeasuredSchedules
    from llamarl.planner.choices import Options, Workload
    from llamarl.planner.every_rank import EveryRank
    from llamarl.planner.hardware import Hardware
    from llamarl.planner.model_spec import ModelSpec
    from llamarl.planner.recipe import RecipeQuestion
    from llamarl.planner.replica_times import Pool
    from llamarl.planner.search import Plan

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
  llamarl plan --model Llama-3.1-70B --devices 128:h100-sxm,128:a100-80gb --recipe plan.toml
  llamarl plan --model Llama-3.1-8B --devices inventory --hosts a,b,c    what the workers there tell of their GPUs
  llamarl plan recipes/tiny.toml                 what this machine will make of a recipe
  llamarl plan runs/tiny                         the same with the lengths that the run measured
  llamarl plan recipes/tiny.toml --calibrate     measure short runs of it first; keep what they say of this machine

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
    parser.add_argument(
        "source",
        nargs="?",
        type=shipped_or_path,
        help="recipe (its name or TOML file), run folder, or Hugging Face config.json / folder",
    )
    what = add_job(parser, "a recipe or run")
    what.add_argument("--reference-model", action="store_true", help="the trainer also scores with a frozen reference")
    where = add_devices(parser, kinds=True)
    where.add_argument("--price-per-device-hour", type=float, help="adds the cost of a step, in the price's currency")
    where.add_argument(
        "--calibrate",
        action="store_true",
        help="run the recipe for a few ticks, fit this machine to them; keep the result for plans of any model",
    )
    where.add_argument(
        "--hosts", metavar="A,B", help="hosts of such devices, as llamarl train takes them (default: the recipe's)"
    )
    where.add_argument(
        "--link",
        metavar="RATE[:ROUND_TRIP]",
        help="of a host, each way, such as 10gbit:1ms (default: the hardware's network)",
    )
    how = parser.add_argument_group("the search")
    how.add_argument("--staleness", help="max_staleness values to plan for (default 0,1,2,4)")
    how.add_argument("--precision", help="generator precisions to try, e.g. bf16,fp8 (default: all the device has)")
    how.add_argument(
        "--max-segments", type=int, help="versions a response may span; 1: no partial rollouts (default 4)"
    )
    how.add_argument(
        "--max-pipeline",
        type=int,
        default=1,
        help="largest pipeline size to try (1; a generator that fits nowhere else may get more)",
    )
    how.add_argument(
        "--system",
        choices=("separate", "in-turns"),
        help="recommend, and write, a plan with devices of its own for each role, or with both roles in turns on all of them "
        "(default: whichever is faster)",
    )
    out = parser.add_argument_group("output")
    out.add_argument("--json", action="store_true", help="print everything as one JSON object instead of the table")
    out.add_argument(
        "--every-rank",
        action="store_true",
        help="count the bytes of every rank of the plan from the model's own parameters (with --json: all of them)",
    )
    out.add_argument("--picture", type=Path, metavar="OUT.png", help="time and memory bars (needs matplotlib)")
    out.add_argument(
        "--recipe",
        type=Path,
        metavar="OUT.toml",
        help="write the recipe of the plan marked *, or, if llamarl train does not run that, of the best that it runs",
    )


def run(args: argparse.Namespace) -> int:
    """Plan and print. Raises PlanError (exit code 2) for a question that makes no sense or has no answer."""
    from llamarl.planner.plan_report import report_json, report_text, save_picture
    from llamarl.planner.runnable import why_not_run
    from llamarl.planner.search import recommend

    if args.recipe:
        refuse_to_replace(args.recipe)
    config, question = _read_source(args)
    model_path = args.model or (question.model if question else None) or _model_source(args)
    if model_path is None:
        raise PlanError("no model: give --model NAME_OR_FOLDER, a recipe, a run folder or a config.json")
    alike: Hardware | None = None
    if isinstance(args.devices, str):
        folder = model_folder(model_path)
        if not is_inventory(args.devices):
            return run_unlike(args, model_path, question, config=config, folder=folder)
        pools, of_kinds = _inventory(args, config)
        if len(pools) > 1:
            return run_unlike(args, model_path, question, config=config, pools=pools, hosts=of_kinds, folder=folder)
        alike = _of_one_kind(args, pools[0], of_kinds)
    hosts = _host_names(args, config)
    hardware = _with_link(alike or _hardware(args), args.link)
    measured = _measured(args, hardware)
    if measured:
        refuse_flags(
            args, "--system", because="what was measured here names each schedule; --staleness chooses among them"
        )
    if measured and question:
        question = measured.question(question)
    work = workload_of(args, model_path, question, reference_model=args.reference_model)
    segments = args.max_segments if args.max_segments is not None else question.max_segments if question else 4
    options = options_of(
        args.precision,
        segments,
        max_pipeline=args.max_pipeline,
        share_prompts=question.share_prompts if question else None,
    )
    if hosts and measured:
        measured = None  # schedules of one machine
    devices = _num_devices(args, hardware, hosts)
    price = args.price_per_device_hour
    if price is not None and not 0 <= price < math.inf:
        raise PlanError(f"--price-per-device-hour must be >= 0, got {price}")
    plans, options, unrunnable = _search(
        hardware, work, options, devices, staleness_levels(args.staleness or "0,1,2,4")
    )
    chosen = recommend(_of_system(plans, args.system))
    reasons = [unrunnable] if unrunnable else []
    unrunnable = "; ".join([*reasons, *why_not_run(chosen, work.model)]) or None
    if args.picture:
        save_picture(plans, args.picture, f"{work.model.name} on {devices} x {hardware.device.title}")
    written: Written | None = None
    if args.recipe and measured:
        write_settings(args.recipe, config or {}, *measured.recipe())
    elif args.recipe:
        if reasons:
            raise PlanError(f"--recipe: {reasons[0]}")
        written = choose_written(_of_system(plans, args.system), chosen, work.model, hardware, config)
        write_plan(args.recipe, written.plan, config, model_path, work.model, hardware, options, hosts)
    ranks, uncounted = None, None
    if args.every_rank and not (chosen.trainer.layout.runnable and chosen.generator.layout.runnable):
        uncounted = (
            f"not counted: the plan is for a system that cuts more of {work.model.name} than llamarl does, and ranks are counted as "
            "llamarl cuts it"
        )
    elif args.every_rank:
        ranks = _every_rank(chosen, work.model, model_path, hardware)
    if args.json:
        report = report_json(plans, chosen, work, hardware, price, model_path=_absolute(model_path), options=options)
        report |= {"measured": measured.as_json() if measured else None, "unrunnable": unrunnable, "hosts": hosts}
        if written:
            report["written"] = {"plan": plans.index(written.plan), "why": written.why}
        if ranks is not None:
            report["every_rank"] = ranks.as_json()
        elif uncounted:
            report["every_rank"] = {"uncounted": uncounted}
        print(json.dumps(report, indent=1))
    else:
        print(report_text(plans, chosen, work, hardware, price, options=options, among=_AMONG[args.system]))
        for line in _host_lines(chosen, hardware, hosts, args.link):
            print(line)
        if unrunnable:
            print(f"  not yet    llamarl train does not run this plan: {unrunnable}\n             see docs/planner.md")
        if ranks is not None:
            print(f"\n{ranks.text()}\n")
        elif uncounted:
            print(f"  every rank {uncounted}")
        if measured:
            print(measured.text())
        if question and not args.response_tokens:
            print(f"  lengths    {question.note}")
        if args.recipe and model_folder(model_path) is None:
            print(f"  to do      {NEEDS_FOLDER.format(shape=model_path)}")
        for path in filter(None, (args.picture, args.recipe)):
            what = f" ({measured.chosen.name})" if measured and path is args.recipe else ""
            if written and path is args.recipe:
                what = f": {written.why}"
            print(f"  wrote      {path}{what}")
    return 0


_AMONG = {
    None: "",
    "separate": " with devices of its own for each role, as --system asks",
    "in-turns": " with both roles in turns, as --system asks",
}


def _of_system(plans: Sequence[Plan], asked: str | None) -> list[Plan]:
    """Those among which one is recommended.

    Raises:
        PlanError: None of that kind fits.
    """
    found = [plan for plan in plans if asked is None or (plan.system == "separate") == (asked == "separate")]
    if not found:
        other = "in-turns" if asked == "separate" else "separate"
        raise PlanError(f"--system {asked}: no such plan fits these devices; leave it out, or ask for {other}")
    return found


def _inventory(args: argparse.Namespace, config: dict[str, Any] | None) -> tuple[list[Pool], dict[str, list[str]]]:
    """What hosts have, asked or read."""
    from llamarl.runtime.config import host_settings

    if args.devices != ASKED:
        refuse_flags(args, "--hosts", because=f"{args.devices} names the hosts")
        return pools_of(read_inventory(Path(args.devices)))
    try:
        asked = {**(config or {}).get("hosts", {}), **(host_settings(args.hosts) if args.hosts else {})}
    except ValueError as error:
        raise PlanError(f"--hosts: {error}") from None
    return pools_of(hosts_asked(asked))


def _of_one_kind(args: argparse.Namespace, pool: Pool, hosts: dict[str, list[str]]) -> Hardware:
    """As if the command line had said what hosts that are all alike have."""
    refuse_flags(args, "--hardware", "--calibration", because=f"--devices {args.devices} says what the hosts have")
    args.devices, args.hardware, args.hosts = pool.devices, pool.name, ",".join(hosts[pool.name])
    return pool.hardware


def _host_names(args: argparse.Namespace, config: dict[str, Any] | None) -> list[str]:
    """Those that take part; empty: one, or as many as the devices need, without names."""
    from llamarl.runtime.config import host_settings, parse_workers

    own = (config or {}).get("hosts", {})
    try:
        words = host_settings(args.hosts).get("workers", []) if args.hosts else list(own.get("workers", []))
        parse_workers(words)
        if args.hosts:
            own.pop("on", None)  # it speaks of other hosts
    except ValueError as error:
        raise PlanError(f"--hosts: {error}") from None
    return words


def _with_link(hardware: Hardware, link: str | None) -> Hardware:
    from llamarl.planner.over_hosts import with_network
    from llamarl.simulator.links import parse_link

    if link is None:
        return hardware
    found = parse_link(link)
    return with_network(hardware, bytes_per_s=found.bytes_per_s, round_trip_s=found.round_trip_s)


def _num_devices(args: argparse.Namespace, hardware: Hardware, hosts: list[str]) -> int:
    room = hardware.device.devices_per_node * len(hosts)
    if not hosts:
        return device_count(args.devices, hardware)
    if args.devices is not None and args.devices > room:
        raise PlanError(
            f"--devices {args.devices}: {len(hosts)} hosts of {hardware.device.devices_per_node} have {room}: name more, or plan for "
            "fewer"
        )
    return room if args.devices is None else int(args.devices)


def _host_lines(plan: Plan, hardware: Hardware, hosts: list[str], link: str | None) -> list[str]:
    """Which hosts the plan takes and what joins them; none where it takes one without a name."""
    from llamarl.planner.over_hosts import hosts_needed, place_roles
    from llamarl.planner.weight_traffic import format_bytes

    count = hosts_needed(plan.devices, hardware)
    if count < 2 and len(hosts) < 2:
        return []
    device = hardware.device
    host_rate = device.inter_node_bytes_per_s * hardware.efficiency.link * device.devices_per_node
    joined = f"joined by {format_bytes(host_rate)}/s a host" + (f" ({link})" if link else "")
    if not hosts:
        return [f"  hosts      {count} of {device.devices_per_node}, {joined}; name them for a recipe: --hosts a,b"]
    where = place_roles(plan, hardware, hosts)
    if where is None:
        return [f"  hosts      {len(hosts)}, {joined}; place the ranks yourself: no even spread of them fits"]
    placed = "; ".join(f"{name} on {','.join(found)}" for name, found in where.items())
    return [f"  hosts      {placed}; {joined}"]


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


def _every_rank(plan: Plan, model: ModelSpec, model_path: str, hardware: Hardware) -> EveryRank:
    from llamarl.planner.every_rank import count_every_rank
    from llamarl.planner.model_spec import find_config
    from llamarl.weight_sync.model_layouts import model_parameters

    dtype = "float32" if hardware.device.train_precision == "fp32" else "bfloat16"
    parameters = model_parameters(find_config(model_path)[1], dtype=dtype)
    return count_every_rank(parameters, plan, model, hardware)


def _absolute(model_path: str) -> str:
    """The model's folder or file from wherever the plan is read; a name stays as it is."""
    path = user_path(model_path, "the model")
    return str(path.resolve()) if path.exists() else model_path


def _model_source(args: argparse.Namespace) -> str | None:
    """The positional argument, where it names a model rather than a recipe."""
    return args.source if args.source and not args.source.endswith(".toml") else None


def _read_source(args: argparse.Namespace) -> tuple[dict[str, Any] | None, RecipeQuestion | None]:
    """The recipe as written, and the question it poses with its defaults filled in; (None, None) without a recipe."""
    if not args.source:
        return None, None
    path = user_path(args.source, "the source")
    run_dir = path if (path / "config.toml").is_file() else None
    recipe = path / "config.toml" if run_dir else path
    if recipe.suffix != ".toml":
        return None, None
    from llamarl.config import load_config, to_plain
    from llamarl.planner.recipe import question_from_config

    config = to_plain(load_config(recipe))
    written = read_toml(recipe)
    written.get("run", {}).pop("dir", None)  # the new recipe's runs go to a folder of their own
    return written, question_from_config(config, run_dir, written=written)


def _hardware(args: argparse.Namespace) -> Hardware:
    from llamarl.planner.hardware import find_hardware

    if not args.calibrate:
        return hardware_of(args.hardware, args.calibration)
    if args.hardware and find_hardware(args.hardware).device.name != "this-machine":
        raise PlanError(f"--calibrate measures this machine, not {args.hardware}: leave --hardware out")
    path = user_path(args.source, "the source") if args.source else Path()
    recipe = path if path.suffix == ".toml" else path / "config.toml"
    if not args.source or not recipe.is_file():
        raise PlanError(
            "--calibrate measures short runs of a recipe: give one, for example llamarl plan recipes/tiny.toml --calibrate; "
            "what it finds of this machine then serves plans of any model"
        )
    from llamarl.cli.measured_schedules import calibrate

    return calibrate(recipe, args.calibration, changes=_batch(args), log=to_stderr)


def _batch(args: argparse.Namespace) -> dict[str, Any]:
    """Dotted recipe key -> value of what the command line asks for instead of the recipe's batch."""
    asked = {"schedule.prompts_per_step": args.prompts, "generator.group_size": args.group_size}
    return {key: value for key, value in asked.items() if value is not None}


def _measured(args: argparse.Namespace, hardware: Hardware) -> MeasuredSchedules | None:
    """What short runs of a recipe measured on this machine's cores; None where that is not asked."""
    recipe = user_path(args.source, "the source") if args.source and args.source.endswith(".toml") else None
    if recipe is None:
        return None
    asked = ("--model", "--prompt-tokens", "--response-tokens", "--devices", "--precision")
    if any(getattr(args, flag.removeprefix("--").replace("-", "_")) is not None for flag in asked):
        return None  # another job than the recipe's
    if hardware.device.name != "this-machine" or hardware.device.train_precision != "fp32":
        return None
    from llamarl.cli.measured_schedules import schedules_of

    limits: dict[str, Any] = {}
    if args.staleness:
        limits["staleness"] = staleness_levels(args.staleness)
    if args.max_segments is not None:
        limits["max_segments"] = args.max_segments
    return schedules_of(
        recipe,
        args.calibration,
        changes=_batch(args),
        reward_s=reward_seconds(args),
        log=to_stderr,
        **limits,
    )
