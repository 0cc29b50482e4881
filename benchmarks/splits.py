"""Is the split that the planner proposes the fastest one? ``python benchmarks/splits.py --json OUT`` (two cores, 40 minutes).

1. As ``llamarl plan RECIPE --calibrate --splits`` does: calibrate with the recipe's own executors (one and two threads a role, int8),
   forecast every split of the cores, run the near ones against each other for up to seven minutes, and propose one.
2. Run splits of every kind once (in turn and at once, threads 1+1, 2+2, 1+2, 2+1, int8, half the concurrency, more staleness,
   partial rollouts or whole batches).
3. Run the proposed one, and all that came within a quarter of it, in many rounds of five ticks each, in changing order, as jobs that
   take turns. Steps are compared in blocks of ten rounds, so that the machine's drift from minute to minute falls out.

The bars: of the splits in its precision, none is faster with 95% confidence, by the median of the blocks' ratios, nor by more than 2%
(finals take 1% for equal, and then prefer less staleness); and the interval shuts out 5%. Another precision changes
what is computed, and is proposed only for a gain of more than 15%: that is the bar there. Measure on an idle machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forecast import ROOT, Bench, measured, warm_up
from harness import claim, paired_ratio, spread, write_report

from llamarl.runtime.placement import available_cores
from llamarl.simulator.calibration import calibrate_recipe
from llamarl.simulator.finals import in_order, propose_split
from llamarl.simulator.run_finals import run_finals
from llamarl.simulator.splits import Split, apply, forecast_splits, split_table, variants_of
from llamarl.simulator.taking_turns import Job

_NEAR = 1.25
"""Splits whose only run took at most this many times as long as the proposed one's are compared with it in rounds."""
_MOST_RIVALS = 4
"""Each job takes two gigabytes, and as much time as the proposed one."""
_TURN_TICKS = 5
_STUCK_S = 120
"""A tick that takes longer, without the others' turns, is stuck: the job says who waits for whom, and ends."""
_BLOCK = 10
"""Rounds of one block. Blocks are compared rather than rounds, whose ratios are not spread evenly: a tick ends with a batch."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default=str(ROOT / "recipes/tiny.toml"))
    parser.add_argument("--json", help="write the report here")
    parser.add_argument("--ticks", type=int, default=20, help="of each split's first run")
    parser.add_argument("--rounds", type=int, default=200, help="of five ticks, in which the near ones are compared")
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
        precision = config.generator.quantization
        finals = run_finals(config, splits, log=lambda line: print(line, flush=True))
        chosen = propose_split(splits, finals, precision)
        print("\n".join(found.describe()), split_table(splits, chosen, finals), sep="\n\n", flush=True)
        tried = chosen_to_try(splits, chosen)
        first = max(warm_up(apply(config, split.settings)) for split in tried)

        once: dict[str, float] = {}
        for split in tried:
            run_dir = bench.run(f"once-{len(once)}", words(split), args.ticks + first)
            once[split.name] = measured(run_dir, first)["step_s"]
            print(f"{split.name}: forecast {split.result.step_s:.3f} s, measured {once[split.name]:.3f} s", flush=True)
        near = [s for s in tried if s is not chosen and once[s.name] <= _NEAR * once[chosen.name]]
        near = sorted(near, key=lambda s: once[s.name])[:_MOST_RIVALS]
        steps = in_turns(bench, [chosen, *near], args.rounds, first)
    ratios = {split.name: paired_ratio(steps[chosen.name], steps[split.name]) for split in near}
    print(f"\nproposed: {chosen.name}, {statistics.median(steps[chosen.name]):.3f} s; its step by that of")
    for name, ratio in ratios.items():
        print(f"  {name}: {ratio['median']:.3f} (95%: {ratio['low']:.3f} to {ratio['high']:.3f})")
    results = {
        "recipe": args.recipe,
        "calibration": found.describe(),
        "proposed": chosen.name,
        "run_once_s": once,
        "blocks_s": {name: spread(values) for name, values in steps.items()},
        "ratios": ratios,
        "settings": {split.name: dict(split.settings) for split in tried},
        "forecasts": {split.name: split.result.step_s for split in splits},
        "seconds_in_all": time.monotonic() - began,
    }
    own = {s.name for s in tried if precision_of(s) == precision_of(chosen)}
    write_report(
        args.json,
        results,
        claims_of([r for n, r in ratios.items() if n in own], [r for n, r in ratios.items() if n not in own]),
    )


def claims_of(own: list[dict[str, float]], other: list[dict[str, float]]) -> list[dict[str, Any]]:
    """Of the proposed split's step by that of each near one, of its precision and of another.

    With none near, it is the fastest by more than a quarter.
    """
    none = {"median": 1 / _NEAR, "low": 1 / _NEAR, "high": 1 / _NEAR}
    own, other = own or [none], other or [none]
    return [
        claim("step of the proposed split by that of another of its precision, the largest lower end of 95% confidence",
              max(r["low"] for r in own), 1.0, at_least=False),
        claim("the same, the largest median", max(r["median"] for r in own), 1.02, at_least=False),
        claim("the same, the largest upper end", max(r["high"] for r in own), 1.05, at_least=False),
        claim("largest median against another precision", max(r["median"] for r in other), 1.15, at_least=False),
    ]  # fmt: skip


def precision_of(split: Split) -> str:
    return split.settings["generator.quantization"]


def words(split: Split) -> dict[str, str]:
    return {key: json.dumps(v) if isinstance(v, str) else str(v) for key, v in split.settings.items()}


def in_turns(bench: Bench, splits: list[Split], rounds: int, first: int) -> dict[str, list[float]]:
    """Name -> seconds a step in each block of rounds, of jobs that take turns."""
    turns: dict[str, list[float]] = {split.name: [] for split in splits}
    with contextlib.ExitStack() as stack:
        jobs: dict[str, Job] = {}
        for split in splits:
            settings = {"deadlines.step_s": _STUCK_S, **words(split)}
            command, run_dir = bench.command(f"turns-{len(jobs)}", settings, (rounds + 2) * _TURN_TICKS + first)
            job = Job(command[command.index("train") :], run_dir, warm_up=first)
            jobs[split.name] = stack.enter_context(job)
        for turn in range(rounds):
            for name in in_order(list(jobs), turn):
                turns[name].append(jobs[name].turn(_TURN_TICKS) / _TURN_TICKS)
            if turn % _BLOCK == _BLOCK - 1:
                means = (f"{name} {statistics.fmean(values):.3f} s" for name, values in turns.items())
                print(f"after {turn + 1} rounds: {'; '.join(means)}", flush=True)
    starts = range(0, rounds, _BLOCK)
    return {name: [statistics.fmean(values[at : at + _BLOCK]) for at in starts] for name, values in turns.items()}


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


def threads_of(settings: Mapping[str, Any]) -> tuple[Any, ...]:
    return settings["generator.threads"], settings["trainer.threads"], settings["generator.quantization"]


if __name__ == "__main__":
    main()
