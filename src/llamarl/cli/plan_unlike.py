"""``llamarl plan --devices 128:h100-sxm,128:a100-80gb``: devices of several kinds, and who of them does what."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from llamarl.cli.questions import options_of, refuse_flags, staleness_levels, workload_of
from llamarl.errors import PlanError

if TYPE_CHECKING:
    from llamarl.planner.recipe import RecipeQuestion
    from llamarl.planner.unlike import Pool

__all__ = ["parse_pools", "run_unlike"]


def parse_pools(text: str) -> list[Pool]:
    """``128:h100-sxm,128:a100-80gb`` as pools.

    Raises:
        PlanError: A part is no number and kind, or the kind is unknown.
    """
    from llamarl.planner.hardware import find_hardware
    from llamarl.planner.unlike import Pool

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


def run_unlike(args: argparse.Namespace, model: str, question: RecipeQuestion | None) -> int:
    """Plan and print.

    Raises:
        PlanError: A flag that says something of one kind alone, or nothing fits.
    """
    from llamarl.planner.unlike import best_first, dealt_evenly, kinds_apart, one_kind, plan_unlike
    from llamarl.planner.unlike_report import unlike_json, unlike_text

    refuse_flags(
        args,
        *("--hardware", "--calibration", "--hosts", "--link", "--picture", "--recipe", "--price-per-device-hour"),
        because="speaks of devices of one kind; --devices names several",
    )
    pools = parse_pools(args.devices)
    work = workload_of(args, model, question, reference_model=args.reference_model)
    segments = args.max_segments if args.max_segments is not None else question.max_segments if question else 4
    options = options_of(args.precision, segments, max_pipeline=args.max_pipeline)
    levels = staleness_levels(args.staleness or "1")
    if len(levels) > 1:
        raise PlanError(f"--staleness {args.staleness}: one value for devices of several kinds")
    best = plan_unlike(pools, work, options, levels[0])
    plans = [best, dealt_evenly(best, work, options), kinds_apart(pools, work, options, levels[0])]
    for pool in pools:
        try:
            plans.append(one_kind(pool, work, options, levels[0]))
        except PlanError:  # too large for it alone
            continue
    found = best_first([plan for plan in plans if plan is not None])
    if args.json:
        print(json.dumps(unlike_json(found, pools, work.model.name), indent=1))
    else:
        print(unlike_text(found, pools, work.model.name))
    return 0
