"""``llamarl simulate``: run a job's schedule on a virtual clock, with lengths, stragglers and failures that vary."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from llamarl.reading import user_path
from llamarl.shipped import shipped_or_path

if TYPE_CHECKING:
    from llamarl.config import RunConfig
    from llamarl.planner.choices import Options, Workload
    from llamarl.planner.hardware import Hardware
    from llamarl.planner.search import Plan
    from llamarl.simulator.scenario import Failures, Scenario

__all__ = ["add_parser", "run"]

_DESCRIPTION = """\
Runs the real controller and the real dataflow graph on a virtual clock, with executors that only take time, and tells for
each staleness: time a step (beside the theory's), idle shares, tokens/s, staleness of the trained tokens.

What is simulated:
  recipe.toml            the recipe's own layout, on --hardware or on this machine: there with measured costs, where
                         llamarl plan RECIPE --calibrate has been run, else with rooflines; --section.key VALUE as in
                         llamarl train changes a setting
  a run's folder         the same schedule with the times and lengths that the run measured; of a run with partial
                         rollouts (max_segments > 1), whose times cannot be fitted, its recipe with its lengths:
                         RUN/config.toml --response-tokens file:RUN/rollouts
  plan.json              what llamarl plan --json printed: its plans, with lengths drawn for each response
  --model, --devices     the best separate plans, as llamarl plan finds them
  --durations 6,1,5      generator, reward and trainer always take these seconds (a fourth number: hand-over)"""

_TOKENS_OF_A_TICK = 1000
"""With --durations: decode steps of a tick where versions may change between them."""

_EPILOG = """\
examples:
  llamarl simulate --durations 6,5,5 --staleness 0,1,2
  llamarl simulate --durations 6,1,4 --staleness 1,2 --weights exact,latest
  llamarl simulate recipes/tiny.toml --staleness 0,1 --parts 1,4
  llamarl simulate tiny --trainer.fsdp 2 --generator.dp 2
  llamarl simulate recipes/tiny.toml --staleness 0,1,2 --trace trace.json
  llamarl simulate runs/tiny/config.toml --response-tokens file:runs/tiny/rollouts
  llamarl simulate recipes/tiny.toml --staleness 0,1 --hosts a,b --on generator=b --on trainer=a --link 100mbit:50ms
  llamarl simulate --model Llama-3.1-70B --devices 256 --hardware h100 --response-tokens 4096:lognormal \\
      --slow-replicas 0.05:1.5 --mtbf-hours 50000 --picture simulation.png

Response lengths as in llamarl plan --help. docs/simulator.md says what the model leaves out."""


def add_parser(subparsers: Any, full: bool = True) -> None:
    parser = subparsers.add_parser(
        "simulate",
        help="a job's schedule on a virtual clock: step time, idle shares and staleness when lengths vary",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run, takes_overrides=True, overrides=())
    parser.set_defaults(
        max_pipeline=1, runnable=True, share_prompts=None, reference_model=False, planned_hardware=None
    )  # a plan's JSON may say more
    if not full:
        return
    parser.add_argument(
        "source",
        nargs="?",
        type=shipped_or_path,
        help="recipe (its name or TOML file), run folder, or the JSON of llamarl plan --json",
    )
    parser.add_argument("--durations", metavar="G,R,T[,SYNC]", help="seconds a tick of each role, always the same")
    what = add_job(parser, "a recipe, run or plan")
    what.add_argument("--reward-sample", metavar="MEAN[:SIGMA[:WORKERS]]", help="more: seconds a sample, log-normal")
    add_devices(parser)
    how = parser.add_argument_group("the schedule")
    how.add_argument("--staleness", help="max_staleness values (default: the recipe's or run's, else 0,1,2,4)")
    how.add_argument("--weights", help="exact (default), latest, or exact,latest: which version makes a batch")
    how.add_argument(
        "--kv-on-update", choices=("recompute", "keep"), help="what latest does with the cache at a new version"
    )
    how.add_argument(
        "--parts",
        help="parts of a tick that are trained while others decode, such as 1,4 (default: 1)",
    )
    how.add_argument(
        "--longest-first",
        action="store_true",
        help="groups start in the order of their lengths, as if these were known",
    )
    how.add_argument("--max-segments", type=int, help="versions a response may span; 1: no partial rollouts")
    how.add_argument("--oversubscription", type=float, help="active groups in units of a step's, 1 to max-segments")
    how.add_argument("--precision", help="generator precisions a plan may use, e.g. bf16,fp8")
    how.add_argument("--ticks", type=int, help="trainer ticks (default 100)")
    how.add_argument("--seed", type=int, help="of lengths, jitter and failures (default: the recipe's, else 0)")
    vary = parser.add_argument_group("what varies besides lengths")
    vary.add_argument(
        "--slow-replicas",
        metavar="SHARE:FACTOR",
        help="share of replicas (at least one) that take FACTOR times as long",
    )
    vary.add_argument(
        "--jitter",
        metavar="GENERATOR[,TRAINER]",
        help="log-normal sigma of each tick's time (default: as measured, else 0)",
    )
    vary.add_argument("--mtbf-hours", type=float, help="mean time between failures of one device; the job restarts")
    vary.add_argument("--restart-s", type=float, default=300.0, help="from a failure to the next tick (default 300)")
    vary.add_argument("--checkpoint-every", type=int, default=20, help="ticks between checkpoints (default 20)")
    apart = parser.add_argument_group("hosts that are apart")
    apart.add_argument(
        "--link",
        action="append",
        metavar="[A,B=]RATE[:ROUND_TRIP]",
        help="between hosts, such as 100mbit:50ms; of two of them a,b=1gbit:1ms; may be repeated",
    )
    apart.add_argument("--hosts", metavar="A,B", help="a recipe's hosts, as llamarl train takes them")
    apart.add_argument(
        "--on", action="append", metavar="EXECUTOR=A,B", help="with --hosts: which of them an executor gets"
    )
    out = parser.add_argument_group("output")
    out.add_argument("--json", action="store_true", help="print everything as one JSON object instead of the table")
    out.add_argument("--trace", type=Path, metavar="OUT.json", help="timeline for https://ui.perfetto.dev")
    out.add_argument("--picture", type=Path, metavar="OUT.png", help="timeline and staleness (needs matplotlib)")


def run(args: argparse.Namespace) -> int:
    """Simulate and print. Raises PlanError or ConfigError (exit code 2) for a question that makes no sense."""
    from llamarl.simulator.simulate import simulate
    from llamarl.simulator.simulation_report import result_to_dict, results_text, save_simulation_picture, save_trace

    scenarios = [
        _with_weights(_varied(scenario, args), weights, parts, args)
        for scenario in _scenarios(args)
        for weights in _policies(args, scenario)
        for parts in _parts(args, scenario)
    ]
    if args.kv_on_update and not any(scenario.weights == "latest" for scenario in scenarios):
        raise PlanError(
            f"--kv-on-update {args.kv_on_update}: with exact weights no version changes inside a tick: add --weights latest"
        )
    if args.longest_first:
        to_stderr(
            "not yet: llamarl train starts groups in the order of their prompts; docs/simulator.md says what is simulated"
        )
    results = [simulate(scenario) for scenario in scenarios]
    if args.trace:
        save_trace(results, args.trace)
    if args.picture:
        save_simulation_picture(results, args.picture)
    if args.json:
        print(json.dumps({"simulations": [result_to_dict(result) for result in results]}, indent=1))
    else:
        print(results_text(results))
        for path in filter(None, (args.trace, args.picture)):
            print(f"wrote {path}")
    return 0


def _scenarios(args: argparse.Namespace) -> list[Scenario]:
    path = user_path(args.source, "the source") if args.source else None
    if path is not None and not args.durations and (path.suffix == ".toml" or (path / "config.toml").is_file()):
        return _from_recipe(args, path)
    if args.overrides:
        raise PlanError(
            f"{args.overrides[0]}: only a recipe or a run has settings to change: leave it out, or name a recipe"
        )
    if args.durations:
        return _from_durations(args)
    if path is not None and path.suffix == ".json" and path.name != "config.json":
        _take_plan(args, path)
    return _from_plans(args)


def _policies(args: argparse.Namespace, scenario: Scenario) -> list[str]:
    policies = args.weights.split(",") if args.weights else [scenario.weights]
    if unknown := [policy for policy in policies if policy not in ("exact", "latest")]:
        raise PlanError(
            f"--weights {args.weights!r}: expected exact, latest, or both joined by a comma, got {unknown[0]!r}"
        )
    return policies


def _parts(args: argparse.Namespace, scenario: Scenario) -> list[int]:
    words = args.parts.split(",") if args.parts else [str(scenario.parts)]
    if not all(word.isdecimal() and int(word) for word in words):
        raise PlanError(f"--parts {args.parts!r}: expected numbers of at least 1 joined by commas, such as 1,4")
    return [int(word) for word in words]


def _with_weights(scenario: Scenario, weights: str, parts: int, args: argparse.Namespace) -> Scenario:
    kv = args.kv_on_update or scenario.kv_on_update
    changes: dict[str, Any] = {"weights": weights, "kv_on_update": kv if weights == "latest" else "recompute"}
    changes |= {"parts": parts, "longest_first": args.longest_first}
    return dataclasses.replace(scenario, **changes)


def _levels(args: argparse.Namespace, default: str) -> list[int]:
    return staleness_levels(args.staleness or default)


def _from_durations(args: argparse.Namespace) -> list[Scenario]:
    from llamarl.simulator.scenario import durations_scenario

    if args.source or args.model:
        raise PlanError("--durations stands alone: leave the recipe, plan or --model out")
    refuse_flags(
        args, *_JOB_FLAGS, "--reward-s", "--hardware", "--devices", "--precision", "--max-segments", "--oversubscription",
        "--hosts", "--on", "--link", because="--durations says what every tick takes; leave that out, or simulate a recipe or --model",
    )  # fmt: skip
    try:
        values = [float(part) for part in args.durations.split(",")]
    except ValueError:
        values = []
    if len(values) not in (3, 4):
        raise PlanError(f"--durations {args.durations!r}: expected G,R,T or G,R,T,SYNC in seconds, for example 6,1,5")
    generator, reward, trainer, sync = (*values, 0.0)[:4]
    tokens = _TOKENS_OF_A_TICK if "latest" in (args.weights or "") else 1
    return [
        durations_scenario(
            generator_s=generator, reward_s=reward, trainer_s=trainer, sync_s=sync, max_staleness=level,
            tokens=tokens,
        )
        for level in _levels(args, "0,1,2,4")
    ]  # fmt: skip


_JOB_FLAGS = ("--prompts", "--group-size", "--prompt-tokens", "--response-tokens")


def _from_plans(args: argparse.Namespace) -> list[Scenario]:
    from llamarl.planner.search import best_separate, best_split
    from llamarl.simulator.sources import scenario_from_plan

    model = args.model or args.source
    if not model:
        raise PlanError("nothing to simulate: give a recipe, a run folder, a plan's JSON, --durations or --model")
    refuse_flags(args, "--hosts", "--on", because="a plan fills hosts of its hardware: give --link alone, or a recipe")
    hardware = args.planned_hardware or hardware_of(args.hardware, args.calibration)
    work = workload_of(args, model, None, reference_model=args.reference_model)
    segments = args.max_segments if args.max_segments is not None else 1
    options = options_of(
        args.precision,
        segments,
        max_pipeline=args.max_pipeline,
        runnable=args.runnable,
        share_prompts=args.share_prompts,
    )
    if args.oversubscription is not None:
        if args.oversubscription != 1.0 and options.max_segments == 1:
            raise PlanError(
                f"--oversubscription {args.oversubscription:g} keeps groups from tick to tick, which whole batches do not: "
                "add --max-segments 2 or more"
            )
        options = dataclasses.replace(options, oversubscription=args.oversubscription)
    devices = device_count(args.devices, hardware)

    def plans(options: Options) -> list[Plan]:
        candidates = best_split(hardware, work, options, devices)
        levels = _levels(args, "0,1,2,4")
        return [best_separate(hardware, work, options, devices, level, candidates) for level in levels]

    try:
        found = plans(options)
    except PlanError as error:
        if devices < 2 or not options.runnable:
            raise
        options = dataclasses.replace(options, runnable=False)
        try:
            found = plans(options)
        except PlanError:
            raise error from None
        print(f"not yet: llamarl train does not run this plan: {error}; see docs/planner.md", file=sys.stderr)
    scenarios = [scenario_from_plan(plan, work, hardware, options) for plan in found]
    return [_plan_apart(scenario, work, hardware, args.link) for scenario in scenarios] if args.link else scenarios


def _plan_apart(scenario: Scenario, work: Workload, hardware: Hardware, links: list[str]) -> Scenario:
    """Each role on hosts of its own; versions go to the generators' by the tree of hosts."""
    from llamarl.simulator.links import parse_links
    from llamarl.simulator.placed import apart, hosts_of_plan

    where = hosts_of_plan(scenario, hardware.device.devices_per_node)
    return apart(
        scenario,
        where,
        parse_links(links, sorted({host for hosts in where.values() for host in hosts})),
        controller=where["trainer"][0],
        weight_bytes=work.model.total_params * hardware.device.activation_bytes,
        by_tree=True,
    )


def _take_plan(args: argparse.Namespace, path: Path) -> None:
    """Fill in, from a plan's JSON, what the command line leaves open."""
    from llamarl.planner.hardware import hardware_from_dict
    from llamarl.simulator.plan_file import read_plan

    plan = read_plan(path)
    work, options = plan.workload, plan.options
    filled = {
        "model": plan.model.path,
        "devices": plan.separate[0].devices,
        "prompts": work.prompts_per_step,
        "group_size": work.group_size,
        "prompt_tokens": work.prompt_tokens,
        "reward_s": work.reward_s,
        "staleness": ",".join(str(p.max_staleness) for p in plan.separate),
        "precision": ",".join(options.precisions) or None,
        "max_segments": options.max_segments,
    }
    args.max_pipeline, args.reference_model = options.max_pipeline, work.reference_model
    args.runnable, args.share_prompts = options.runnable, options.share_prompts
    if plan.unrunnable:
        print(f"not yet: llamarl train does not run this plan: {plan.unrunnable}", file=sys.stderr)
    if args.hardware is None and args.calibration is None:  # as it was then, whatever is kept now
        device = dict(plan.hardware.device)
        args.planned_hardware = hardware_from_dict(str(device.pop("name", "")), device, plan.hardware.efficiency)
    for key, value in filled.items():
        if getattr(args, key) is None:
            setattr(args, key, value)
    if not args.response_tokens:
        args.response_tokens = _lengths_of_label(work.response, path)


def _lengths_of_label(label: str, path: Path) -> str:
    """``--response-tokens`` that gives the distribution a plan names."""
    words = label.replace(",", "").split()
    values = dict(zip(words[1::2], words[2::2], strict=False))
    match words:
        case ["constant", length]:
            return length
        case ["log-normal", *_] if {"mean", "sigma", "limit"} <= set(values):
            return f"{values['mean']}:lognormal:sigma={values['sigma']},limit={values['limit']}"
        case ["Pareto", *_] if {"mean", "alpha", "limit"} <= set(values):
            return f"{values['mean']}:pareto:alpha={values['alpha']},limit={values['limit']}"
    raise PlanError(f"{path}: its lengths were measured ({label}): give them with --response-tokens file:PATH")


def _from_recipe(args: argparse.Namespace, path: Path) -> list[Scenario]:
    from llamarl.config import load_config

    run_dir = path if path.is_dir() else None
    refuse_flags(
        args, "--devices",
        because="a recipe or run says its own layout: set generator.dp, trainer.fsdp, threads or run.cores in the recipe, or "
        "simulate plans for a number of devices with --model",
    )  # fmt: skip
    refuse_flags(
        args, "--precision", because="set generator.quantization in the recipe, or simulate plans with --model"
    )
    written = load_config(path / "config.toml" if run_dir else path, args.overrides)
    config = _changed(written, args)
    levels = _levels(args, str(config.schedule.max_staleness))
    return [_recipe_apart(scenario, config, args) for scenario in _of_recipe(args, config, written, run_dir, levels)]


def _recipe_apart(scenario: Scenario, config: RunConfig, args: argparse.Namespace) -> Scenario:
    """The recipe's executors where a run would place them."""
    if not args.link:
        if args.hosts or args.on:
            raise PlanError("--hosts without --link changes nothing here: say how fast and how far, --link 1gbit:1ms")
        return scenario
    from llamarl.planner.model_spec import find_model
    from llamarl.runtime.config import HERE
    from llamarl.simulator.links import parse_links
    from llamarl.simulator.placed import apart, hosts_of_recipe, weight_bytes_of

    where, hosts = hosts_of_recipe(config)
    nbytes = weight_bytes_of(config, find_model(args.model or config.model.path).total_params)
    return apart(scenario, where, parse_links(args.link, hosts), controller=HERE, weight_bytes=nbytes)


def _of_recipe(
    args: argparse.Namespace, config: RunConfig, written: RunConfig, run_dir: Path | None, levels: list[int]
) -> list[Scenario]:
    from llamarl.config import load_config, to_plain
    from llamarl.planner.recipe import question_from_config
    from llamarl.simulator.calibrate import settled_threads
    from llamarl.simulator.fitted_costs import fit_runs
    from llamarl.simulator.sources import on_shared_cores, scenario_from_recipe, scenario_from_run

    cores: int | None = None
    if run_dir is not None and (run_dir / "metrics.jsonl").is_file() and not args.hardware:
        refuse_flags(
            args,
            "--model",
            because="a run's measured times are those of its own model: add --hardware for rooflines instead",
        )
        if args.overrides:
            raise PlanError(
                f"{args.overrides[0]}: a run's measured times are those of its own settings: add --hardware for rooflines instead"
            )
        measured = load_config(run_dir / "config.toml")
        scenario = _overridden(scenario_from_run(config, run_dir, fit_runs([(measured, run_dir)])), args)
    else:
        hardware = hardware_of(args.hardware, args.calibration)
        if not (args.hardware or run_dir) and (calibrated := _calibrated(config, written, args, levels)):
            return calibrated
        question = question_from_config(to_plain(config), run_dir)
        cpu = hardware.device.train_precision == "fp32"
        threads = settled_threads(config) if cpu else {"generator": 1, "trainer": 1}
        work = workload_of(args, args.model or question.model, question)
        if cpu:
            cores = hardware.device.devices_per_node * max(1, len(config.hosts.workers))
        scenario = scenario_from_recipe(config, work, hardware, threads, cores=cores)
    found = [dataclasses.replace(scenario, max_staleness=level) for level in levels]
    return [on_shared_cores(scenario, cores) for scenario in found] if cores else found


def _changed(config: RunConfig, args: argparse.Namespace) -> RunConfig:
    from llamarl.config import to_plain, validate
    from llamarl.runtime.config import host_settings

    raw = to_plain(config)
    for section, key, value in (
        ("schedule", "prompts_per_step", args.prompts),
        ("generator", "group_size", args.group_size),
        ("generator", "max_segments", args.max_segments),
        ("generator", "oversubscription", args.oversubscription),
    ):
        if value is not None:
            raw[section][key] = value
    if args.max_segments is not None and args.oversubscription is None:
        most = float(args.max_segments)
        raw["generator"]["oversubscription"] = min(raw["generator"]["oversubscription"], most)
    try:
        raw["hosts"] |= host_settings(args.hosts or "", args.on or ())
    except ValueError as error:
        raise PlanError(str(error)) from None
    return validate(raw)


def _calibrated(
    config: RunConfig, written: RunConfig, args: argparse.Namespace, levels: list[int]
) -> list[Scenario] | None:
    """The recipe at each staleness with the costs and lengths that ``llamarl plan RECIPE --calibrate`` measured, if it did.

    Args:
        config: ``written`` with the batch that the command line asks for, whose own measurement is taken first.
    """
    from llamarl.simulator.calibrate import find_calibration
    from llamarl.simulator.sources import calibrated_scenario

    found = None if args.model else find_calibration((config, written), args.calibration, log=to_stderr)
    if found is None:
        return None
    schedules = [dataclasses.replace(config.schedule, max_staleness=level) for level in levels]
    return [
        _overridden(calibrated_scenario(dataclasses.replace(config, schedule=schedule), found), args)
        for schedule in schedules
    ]


def _overridden(scenario: Scenario, args: argparse.Namespace) -> Scenario:
    """Measured costs, with the lengths, prompts and rewards that the command line gives instead of the measured ones."""
    from llamarl.planner.lengths import parse_lengths
    from llamarl.simulator.tick_costs import RewardCost

    changes: dict[str, Any] = {}
    if args.response_tokens:
        changes["lengths"] = parse_lengths(args.response_tokens)
    if args.prompt_tokens is not None:
        if args.prompt_tokens < 1:
            raise PlanError(f"--prompt-tokens: prompt_tokens must be at least 1, got {args.prompt_tokens}")
        changes["prompt_tokens"] = args.prompt_tokens
    if (reward_s := reward_seconds(args)) is not None:
        changes["reward"] = RewardCost(tick_s=reward_s)
    return dataclasses.replace(scenario, **changes)


def _varied(scenario: Scenario, args: argparse.Namespace) -> Scenario:
    """Ticks, seed and everything that varies, as the command line says."""
    from llamarl.simulator.tick_costs import Variation

    own = scenario.variation
    slow = (own.slow_fraction, own.slow_factor)
    share, factor = _numbers(args.slow_replicas, "--slow-replicas", ":", slow, least=2)
    jitters = (own.generator_jitter, own.trainer_jitter) if args.jitter is None else (0.0, 0.0)
    generator_jitter, trainer_jitter = _numbers(args.jitter, "--jitter", ",", jitters, least=1)
    sample_s, sigma, workers = _numbers(args.reward_sample, "--reward-sample", ":", (0.0, 0.0, 1.0), least=1)
    changes: dict[str, Any] = {
        "seed": scenario.seed if args.seed is None else args.seed,
        "variation": Variation(
            slow_fraction=share, slow_factor=factor, generator_jitter=generator_jitter, trainer_jitter=trainer_jitter
        ),
        "failures": _failures(args),
    }
    if args.ticks is not None:
        changes["num_ticks"] = args.ticks
    if args.reward_sample:
        changes["reward"] = dataclasses.replace(
            scenario.reward, sample_s=sample_s, sample_sigma=sigma, workers=int(workers)
        )
    return dataclasses.replace(scenario, **changes)


def _failures(args: argparse.Namespace) -> Failures | None:
    from llamarl.simulator.scenario import Failures

    if args.mtbf_hours is None:
        return None
    return Failures(device_mtbf_hours=args.mtbf_hours, restart_s=args.restart_s, checkpoint_every=args.checkpoint_every)


def _numbers(
    text: str | None, flag: str, separator: str, default: tuple[float, ...], *, least: int
) -> tuple[float, ...]:
    """At least ``least`` numbers of ``text``, filled up from ``default``."""
    if text is None:
        return default
    parts = text.split(separator)
    try:
        values = tuple(float(part) for part in parts)
    except ValueError:
        values = ()
    if not least <= len(values) <= len(default):
        count = f"{least}" if least == len(default) else f"{least} to {len(default)}"
        raise PlanError(f"{flag} {text!r}: expected {count} numbers joined by {separator!r}")
    return values + default[len(values) :]
