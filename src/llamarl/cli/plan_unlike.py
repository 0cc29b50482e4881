"""``llamarl plan --devices 128:h100-sxm,128:a100-80gb``: devices of several kinds, and who of them does what."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamarl.cli.plan_files import OURS, write_settings
from llamarl.cli.plan_recipe import write_plan
from llamarl.cli.questions import options_of, refuse_flags, staleness_levels, workload_of
from llamarl.errors import PlanError

if TYPE_CHECKING:
    from llamarl.planner.choices import Options
    from llamarl.planner.recipe import RecipeQuestion
    from llamarl.planner.replica_times import Pool
    from llamarl.planner.unlike import UnlikePlan

__all__ = ["parse_pools", "run_unlike"]


def parse_pools(text: str) -> list[Pool]:
    """``128:h100-sxm,128:a100-80gb`` as pools.

    Raises:
        PlanError: A part is no number and kind, or the kind is unknown.
    """
    from llamarl.planner.hardware import find_hardware
    from llamarl.planner.replica_times import Pool

    pools = []
    for part in text.split(","):
        number, _, name = part.strip().partition(":")
        if not number.strip().isdigit() or not name.strip():
            raise PlanError(f"--devices {text!r}: {part.strip()!r} is no number and kind, such as 128:h100-sxm")
        hardware = find_hardware(name)
        if hardware.device.name == "this-machine":
            raise PlanError(f"--devices {text!r}: kinds are those of other machines, not {name.strip()}")
        pools.append(Pool(hardware=hardware, devices=int(number)))
    return pools


def run_unlike(
    args: argparse.Namespace,
    model: str,
    question: RecipeQuestion | None,
    *,
    config: dict[str, Any] | None = None,
    pools: Sequence[Pool] | None = None,
    hosts: Mapping[str, Sequence[str]] | None = None,
    folder: str | None = None,
) -> int:
    """Plan and print.

    Args:
        config: Recipe that ``--recipe`` writes with the plan's settings.
        pools: What ``--devices`` stands for; None: it says so itself.
        hosts: Kind of device -> its hosts, where their names are known.
        folder: Of the model; None: there is none, only its shape.

    Raises:
        PlanError: A flag that says something of one kind alone, or nothing fits.
    """
    from llamarl.planner.kinds_compared import compare_kinds
    from llamarl.planner.unlike_report import unlike_json, unlike_text

    refuse_flags(
        args,
        *("--hardware", "--calibration", "--link", "--picture", "--price-per-device-hour"),
        *(("--hosts",) if pools is None else ()),
        because="speaks of devices of one kind; --devices names several",
    )
    if args.every_rank:
        raise PlanError(
            "--every-rank: counts the replicas of one kind, and --devices names several: leave it out, or count each kind alone "
            "(--devices N --hardware NAME --every-rank)"
        )
    pools = pools or parse_pools(args.devices)
    work = workload_of(args, model, question, reference_model=args.reference_model)
    segments = args.max_segments if args.max_segments is not None else question.max_segments if question else 4
    refuse_flags(
        args, "--system", because="of several kinds of devices, each alone is planned both ways beside all together"
    )
    options = options_of(
        args.precision,
        segments,
        max_pipeline=args.max_pipeline,
        share_prompts=question.share_prompts if question else None,
    )
    levels = staleness_levels(args.staleness or "1")
    if len(levels) > 1:
        raise PlanError(f"--staleness {args.staleness}: one value for devices of several kinds")
    found = compare_kinds(pools, work, options, levels[0])
    best = found[0]
    if args.recipe and best.one is not None and not best.why_not_run:
        alone = hosts[best.trainer_hardware.device.name] if hosts else ()
        write_plan(args.recipe, best.one, config, model, work.model, best.trainer_hardware, options, alone)
    elif args.recipe:
        _write_recipe(args.recipe, best, config or {}, folder or model, options, hosts)
    if args.json:
        print(json.dumps(unlike_json(found, pools, work, options), indent=1))
    else:
        print(unlike_text(found, pools, work, options))
        if args.recipe and folder is None:
            print(
                f"  to do      set model.path there to the Hugging Face folder of {model}, which is a shape without weights, before "
                "training and before a dry-run (llamarl train THIS --dry-run --model.path FOLDER)"
            )
        if args.recipe:
            print(f"  wrote      {args.recipe}")
    return 0


def _write_recipe(
    path: Path,
    plan: UnlikePlan,
    config: dict[str, Any],
    model_path: str,
    options: Options,
    hosts: Mapping[str, Sequence[str]] | None,
) -> None:
    from llamarl.planner.unlike_recipe import unlike_settings

    settings = unlike_settings(plan, model_path, options.oversubscription, hosts)
    for role in ("generator", "trainer"):
        if config.get(role, {}).get("device", "auto") not in ("auto", "cuda"):
            settings[role]["device"] = "cuda"
    kinds = " + ".join(f"{share.devices} x {share.hardware.device.title}" for share in plan.shares)
    header = (
        f"{OURS}{plan.trainer.layout.devices} x {plan.trainer_hardware.device.title} train, {kinds} generate.\n"
        f"Forecast: {plan.step_s:.4g} s a step (generators {plan.generate_s:.4g} s, trainer {plan.trainer.time.total_s:.4g} s)."
    )
    if hosts is None:
        header += "\nIt takes hosts: llamarl train THIS --hosts A,B,.. --on trainer=A --on generator_0=B,.. (docs/replicas.md)."
    write_settings(path, config, settings, header, plan.shares[0].choice.demand.prompt_tokens)
