"""Is the split that the planner proposes the fastest one? ``python benchmarks/splits.py --json OUT`` (two cores, 10 minutes).

1. Calibrate with the recipe's own executors, as ``llamarl plan RECIPE --calibrate --splits`` does: one and two threads a role, int8.
2. Forecast every split of the cores by simulation; the planner proposes one.
3. Run splits of every kind (in turn and at once, threads 1+1, 2+2, 1+2, 2+1, int8, half the concurrency, more staleness, partial
   rollouts or whole batches); the proposed one and the three fastest others of its precision four times more, in alternating
   order.

The bar: the proposed split's measured step is at most that of every other split of the recipe's precision, to 3%, by medians
(repeated runs of one split differ by several per cent, and the search itself takes splits within 2% of each other for equal
and prefers less staleness). Another precision is a change of what is computed, not of who computes it: it is proposed only for
a forecast gain of more than 15%, so that is the bar there. Measure on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forecast import ROOT, Bench, measured, warm_up
from harness import claim, spread, write_report

from llamarl.runtime.placement import available_cores
from llamarl.simulator.calibration import calibrate_recipe
from llamarl.simulator.splits import Split, apply, forecast_splits, recommend_split, split_table, variants_of

_AGAIN = 3
"""Fastest other splits that are run four times more."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default=str(ROOT / "recipes/tiny.toml"))
    parser.add_argument("--json", help="write the report here")
    parser.add_argument("--ticks", type=int, default=20, help="of each measured run")
    parser.add_argument("--calibration-ticks", type=int, default=7, help="of each calibration run (7, as the command)")
    parser.add_argument("--set", nargs=2, action="append", default=[], metavar=("KEY", "VALUE"), help="recipe override")
    args = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(args.recipe, Path(folder) / "runs", {"evaluation.every": 0, **dict(args.set)})
        config = bench.config({})
        variants = variants_of(config, config.run.cores or available_cores())
        found = calibrate_recipe(
            config, variants=variants, ticks=args.calibration_ticks, log=lambda line: print(line, flush=True)
        )
        splits = forecast_splits(config, found)
        chosen = recommend_split(splits, config.generator.quantization)
        print("\n".join(found.describe()), split_table(splits, chosen), sep="\n\n", flush=True)
        tried = chosen_to_try(splits, chosen)
        steps: dict[str, list[float]] = {split.name: [] for split in tried}

        def run(split: Split) -> None:
            name = f"{len(steps[split.name])}-{split.name}".replace(", ", "-").replace(" ", "-")
            settings = {key: json.dumps(v) if isinstance(v, str) else v for key, v in split.settings.items()}
            first = warm_up(apply(config, split.settings))
            steps[split.name].append(measured(bench.run(name, settings, args.ticks), first)["step_s"])
            print(
                f"{split.name}: forecast {split.result.step_s:.3f} s, measured {steps[split.name][-1]:.3f} s",
                flush=True,
            )

        for split in tried:
            run(split)
        others = sorted((s for s in tried if s is not chosen), key=lambda s: steps[s.name][0])
        rivals = [s for s in others if precision_of(s) == precision_of(chosen)]
        again = [chosen, *rivals[:_AGAIN]]
        for split in [*reversed(again), *again, *reversed(again), *again]:
            run(split)
    medians = {name: statistics.median(values) for name, values in steps.items()}
    step = medians[chosen.name]
    fastest = min(medians, key=lambda name: medians[name])
    print(f"\nproposed: {chosen.name}, {step:.3f} s; fastest measured: {fastest}, {medians[fastest]:.3f} s")
    results = {
        "recipe": args.recipe,
        "calibration": found.describe(),
        "proposed": chosen.name,
        "fastest_measured": fastest,
        "splits": {split.name: as_row(split, steps[split.name]) for split in tried},
        "forecasts": {split.name: split.result.step_s for split in splits},
        "seconds_in_all": time.monotonic() - began,
    }
    claims = [
        claim("step of the proposed split by that of the fastest other one of its precision",
              step / min(medians[split.name] for split in rivals), 1.03, at_least=False)
    ]  # fmt: skip
    elsewhere = [medians[split.name] for split in others if split not in rivals]
    if elsewhere:
        text = "the same against the fastest one of another precision"
        claims.append(claim(text, step / min(elsewhere), 1.15, at_least=False))
    write_report(args.json, results, claims)


def chosen_to_try(splits: list[Split], chosen: Split) -> list[Split]:
    """The proposed split, and the one forecast best of every kind: schedule, threads, precision, concurrency."""
    kinds: dict[tuple[Any, ...], Split] = {}
    for split in splits:  # fastest first
        s = split.settings
        kind = (
            s["schedule.max_staleness"] > 0, s["generator.threads"], s["trainer.threads"], s["generator.quantization"],
            "generator.engine.max_sequences" in s,
        )  # fmt: skip
        kinds.setdefault(kind, split)
    same = [
        s for s in splits
        if threads_of(s.settings) == threads_of(chosen.settings) and s.settings["schedule.max_staleness"] > 0
    ]  # fmt: skip
    tried = {split.name: split for split in [chosen, *same[:4], *kinds.values()]}
    keep = [s for s in tried.values() if s is chosen or s.result.step_s < 2.5 * splits[0].result.step_s]
    return keep[:14]


def precision_of(split: Split) -> str:
    return split.settings["generator.quantization"]


def threads_of(settings: Mapping[str, Any]) -> tuple[Any, ...]:
    return settings["generator.threads"], settings["trainer.threads"], settings["generator.quantization"]


def as_row(split: Split, measured_s: list[float]) -> dict[str, Any]:
    return {"settings": dict(split.settings), "forecast_s": split.result.step_s, "measured_s": spread(measured_s)}


if __name__ == "__main__":
    main()
