"""Forecast against reality on this machine: ``python benchmarks/forecast.py recipes/tiny.toml --json OUT``.

1. Calibrate: four short runs of the recipe, synchronous and at staleness 1, each with two batch sizes other than the
   recipe's. Their metrics and rollouts give costs as straight lines, once for roles that work alone and once for roles that
   overlap (which share memory and caches, so each is slower), and the lengths of responses.
2. Forecast, by simulation, settings that were not measured: the recipe's batch, synchronous, at staleness 1 and 2, and with
   partial rollouts.
3. Run them, and compare. The learning rate is next to nothing, so that lengths stay what they were.

The bar: step time within 15%; idle shares of generator and trainer within 0.15 (of the whole step, 1).
Measure on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness import claim, write_report

from llamarl.config import RunConfig, load_config
from llamarl.observability.metrics import read_metrics
from llamarl.simulator.simulate import simulate
from llamarl.simulator.sources import FittedCosts, fit_runs, scenario_from_run

QUIET = {
    "optimizer.lr": 1e-12,
    "evaluation.every": 0,
    "checkpoint.every": 0,
    "checkpoint.at_end": "false",
    "observability.console": '"none"',
}
WHOLE = {"generator.max_segments": 1, "generator.oversubscription": 1.0}
PARTIAL = {"generator.max_segments": 2, "generator.oversubscription": 1.5}
TARGETS: dict[str, dict[str, Any]] = {
    "synchronous": {"schedule.max_staleness": 0, **WHOLE},
    "staleness 1": {"schedule.max_staleness": 1, **WHOLE},
    "staleness 2": {"schedule.max_staleness": 2, **WHOLE},
    "staleness 1, partial rollouts": {"schedule.max_staleness": 1, **PARTIAL},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="recipes/tiny.toml")
    parser.add_argument("--json", help="write the report here")
    parser.add_argument("--ticks", type=int, default=24, help="of each measured run")
    parser.add_argument("--calibration-ticks", type=int, default=12, help="of each of the four calibration runs")
    parser.add_argument("--set", nargs=2, action="append", default=[], metavar=("KEY", "VALUE"), help="recipe override")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(args.recipe, Path(folder), dict(args.set))
        size = bench.config({}).schedule.prompts_per_step
        sizes = sorted({max(1, size // 2), size + max(1, size // 2)})
        costs: dict[str, FittedCosts] = {}
        lengths_from: dict[str, Path] = {}
        for kind, staleness in (("alone", 0), ("overlapping", 1)):
            runs = []
            for prompts in sizes:
                settings = {"schedule.prompts_per_step": prompts, "schedule.max_staleness": staleness, **WHOLE}
                runs.append(bench.run(f"calibrate-{kind}-{prompts}", settings, args.calibration_ticks))
            costs[kind], lengths_from[kind] = fit_runs(runs), runs[-1][1]
            print(f"{kind}: {costs[kind]}", flush=True)
        rows = {}
        for name, settings in TARGETS.items():
            config = bench.config({**settings, "run.num_ticks": args.ticks})
            kind = "alone" if config.schedule.max_staleness == 0 else "overlapping"
            forecast = forecast_of(config, lengths_from[kind], costs[kind], round_s=costs["alone"].round_s)
            _, run_dir = bench.run(name.replace(", ", "-").replace(" ", "-"), settings, args.ticks)
            rows[name] = compare(forecast, measured(run_dir, warm_up=2 + config.schedule.max_staleness))
            print(name, json.dumps(rows[name]), flush=True)
    step_error = max(abs(row["step_error"]) for row in rows.values())
    idle_error = max(abs(row[f"idle_{role}_error"]) for row in rows.values() for role in ("generator", "trainer"))
    results = {
        "recipe": args.recipe,
        "calibration_batches": sizes,
        "costs": {kind: describe(found) for kind, found in costs.items()},
        "settings": rows,
    }
    write_report(
        args.json,
        results,
        [
            claim("forecast step time, largest relative error", step_error, 0.15, at_least=False),
            claim("forecast idle share, largest difference", idle_error, 0.15, at_least=False),
        ],
    )


class Bench:
    """Runs a recipe with changed settings, each in a folder of its own."""

    def __init__(self, recipe: str, folder: Path, overrides: dict[str, str]) -> None:
        self.recipe, self.folder, self.overrides = recipe, folder, overrides

    def words(self, settings: dict[str, Any]) -> list[str]:
        merged = {**QUIET, **self.overrides, **settings}
        return [word for key, value in merged.items() for word in (f"--{key}", str(value))]

    def config(self, settings: dict[str, Any]) -> RunConfig:
        return load_config(self.recipe, self.words(settings))

    def run(self, name: str, settings: dict[str, Any], ticks: int) -> tuple[RunConfig, Path]:
        run_dir = self.folder / name
        words = self.words({**settings, "run.num_ticks": ticks, "run.dir": json.dumps(str(run_dir))})
        command = [sys.executable, "-m", "llamarl.cli.main", "train", self.recipe, *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=3600)
        if done.returncode:
            raise SystemExit(f"{name} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        return load_config(run_dir / "config.toml"), run_dir


def forecast_of(config: RunConfig, lengths_from: Path, costs: FittedCosts, *, round_s: float) -> dict[str, float]:
    """Simulated step time and idle shares of a setting that no run has measured."""
    scenario = scenario_from_run(config, lengths_from, costs, weights_latency_s=round_s, num_ticks=200)
    result = simulate(scenario)
    return {
        "step_s": result.step_s,
        "idle_generator": result.idle["generator"],
        "idle_trainer": result.idle["trainer"],
        **{f"{role}_s": seconds for role, seconds in result.role_s.items()},
    }


def measured(run_dir: Path, *, warm_up: int) -> dict[str, float]:
    """The same of a run: means after the ticks in which the generator could run ahead."""
    rows = read_metrics(run_dir)[warm_up:]

    def column(key: str) -> list[float]:
        return [float(row[key] or 0.0) for row in rows]

    found = {"step_s": sum(column("time/step_s")) / len(rows)}
    for role in ("generator", "reward", "trainer"):
        busy = column(f"time/{role}_s")
        found[f"{role}_s"] = sum(busy) / len(rows)
        if role != "reward":
            spans = [b / max(1e-9, 1.0 - idle) for b, idle in zip(busy, column(f"idle/{role}"), strict=True)]
            found[f"idle_{role}"] = 1.0 - sum(busy) / sum(spans)
    return found


def compare(forecast: dict[str, float], real: dict[str, float]) -> dict[str, Any]:
    row: dict[str, Any] = {"forecast": forecast, "measured": real}
    row["step_error"] = forecast["step_s"] / real["step_s"] - 1.0
    for role in ("generator", "trainer"):
        row[f"idle_{role}_error"] = forecast[f"idle_{role}"] - real[f"idle_{role}"]
    return row


def describe(costs: FittedCosts) -> dict[str, Any]:
    g, t = costs.generator, costs.trainer
    return {
        "generator": {"tick_s": g.tick_s, "step_s": g.step_s, "sequence_s": g.sequence_s},
        "trainer": {"tick_s": t.tick_s, "token_s": t.token_s},
        "reward_s": costs.reward.tick_s,
        "round_s": costs.round_s,
        "ticks": costs.num_ticks,
        "median_errors": dict(costs.errors),
    }


if __name__ == "__main__":
    main()
