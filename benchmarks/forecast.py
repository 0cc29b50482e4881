"""Forecast against reality on this machine: ``python benchmarks/forecast.py --smollm2 FOLDER --json OUT``.

For each recipe (``recipes/tiny.toml``; ``recipes/smollm2.toml`` where the folder of its weights is given), in rounds:

1. Calibrate, as ``llamarl plan RECIPE --calibrate`` does: two short runs of the recipe, in turn and together.
2. Run both of its schedules: synchronous with whole batches, and the recipe's own asynchronous one.
3. Forecast by simulation, from the calibration alone, and compare step time and the idle shares of generator and trainer.

Learning rate next to nothing, so that lengths stay what they were; no evaluations. The error is the median of the rounds', and all are
in the report. The bar: step time within 20%; idle shares within 0.15 of the whole step. Measure on an idle machine: a machine's speed
may drift by a fifth between a calibration and a run, which no forecast knows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness import claim, write_report

from llamarl.config import RunConfig, load_config
from llamarl.observability.metrics import read_metrics
from llamarl.runtime.base import Report
from llamarl.simulator.calibrate import RecipeCalibration, calibrate_recipe
from llamarl.simulator.simulate import simulate
from llamarl.simulator.sources import calibrated_scenario

ROOT = Path(__file__).resolve().parents[1]
QUIET = {
    "optimizer.lr": 1e-12,
    "evaluation.every": 0,
    "checkpoint.every": 0,
    "checkpoint.every_minutes": 0,
    "checkpoint.at_end": "false",
    "observability.console": '"none"',
}
WHOLE = {"generator.max_segments": 1, "generator.oversubscription": 1.0}
SCHEDULES: dict[str, dict[str, Any]] = {
    "synchronous": {"schedule.max_staleness": 0, **WHOLE},
    "asynchronous": {},
}
SEEDS = 5
ROLES = ("generator", "trainer")
_FORECAST_TICKS = 42


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the report here")
    parser.add_argument("--smollm2", metavar="FOLDER", help="weights of SmolLM2-135M-Instruct: its recipe is run too")
    parser.add_argument("--only-smollm2", action="store_true", help="leave the tiny recipe out")
    parser.add_argument("--ticks", type=int, default=20, help="that count of each of the tiny recipe's runs")
    parser.add_argument("--smollm2-ticks", type=int, default=4, help="the same of SmolLM2's")
    parser.add_argument("--rounds", type=int, default=3, help="of calibration, runs and forecast")
    parser.add_argument("--set", nargs=2, action="append", default=[], metavar=("KEY", "VALUE"), help="recipe override")
    args = parser.parse_args()
    recipes: list[tuple[str, str, dict[str, Any], int]] = []
    if not args.only_smollm2:
        recipes.append(("tiny", str(ROOT / "recipes/tiny.toml"), dict(args.set), args.ticks))
    if args.smollm2:
        settings = {**dict(args.set), "model.path": json.dumps(str(Path(args.smollm2).resolve()))}
        recipes.append(("smollm2", str(ROOT / "recipes/smollm2.toml"), settings, args.smollm2_ticks))
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, recipe, settings, ticks in recipes:
            bench = Bench(recipe, Path(folder) / name, settings)
            rounds = [bench.compare(i, ticks) for i in range(args.rounds)]
            results[name] = {"recipe": recipe, "rounds": rounds, "rows": medians([one["rows"] for one in rounds])}
    rows = {f"{name}, {schedule}": row for name, one in results.items() for schedule, row in one["rows"].items()}
    print("\n" + table(rows))
    claims = [
        claim("forecast step time, largest relative error", worst(rows, "step_s"), 0.2, at_least=False),
        *(
            claim(f"forecast idle share of the {role}, largest difference", worst(rows, f"idle_{role}"), 0.15, at_least=False)
            for role in ROLES
        ),
    ]  # fmt: skip
    write_report(args.json, results, claims)


class Bench:
    """One recipe with changed settings; each run in a folder of its own."""

    def __init__(self, recipe: str, folder: Path, settings: Mapping[str, Any]) -> None:
        self.recipe, self.folder, self.settings = recipe, folder, settings
        folder.mkdir(parents=True)

    def words(self, settings: Mapping[str, Any]) -> list[str]:
        merged = {**QUIET, **self.settings, **settings}
        return [word for key, value in merged.items() for word in (f"--{key}", str(value))]

    def config(self, settings: Mapping[str, Any]) -> RunConfig:
        return load_config(self.recipe, self.words(settings))

    def compare(self, number: int, ticks: int) -> dict[str, Any]:
        """One round: a calibration, whose forecasts are compared with a run of each schedule."""
        found = calibrate_recipe(self.config({}), log=lambda line: print(line, flush=True))
        print("\n".join(found.describe()), flush=True)
        rows = {}
        for schedule, settings in SCHEDULES.items():
            config = self.config({**settings, "run.num_ticks": _FORECAST_TICKS})
            first = warm_up(config)
            run_dir = self.run(f"{schedule}-{number}", settings, first + ticks + 1)
            expected, real = forecast(config, found), measured(run_dir, first)
            rows[schedule] = {"forecast": expected, "measured": real, "error": errors(expected, real)}
            print(f"{schedule}: {json.dumps(rows[schedule])}", flush=True)
        return {"calibration": found.describe(), "rows": rows}

    def run(self, name: str, settings: Mapping[str, Any], ticks: int) -> Path:
        run_dir = self.folder / name
        words = self.words({**settings, "run.num_ticks": ticks, "run.dir": json.dumps(str(run_dir))})
        command = [sys.executable, "-m", "llamarl.cli.main", "train", self.recipe, *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
        if done.returncode:
            raise SystemExit(f"{name} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        return run_dir


def warm_up(config: RunConfig) -> int:
    """First ticks that are left out: those in which the generator runs ahead, and one in which caches fill."""
    return config.schedule.max_staleness + config.generator.max_segments


def forecast(config: RunConfig, found: RecipeCalibration) -> dict[str, float]:
    """The same window of a simulated run as of the real one; mean over a few seeds."""
    tries = []
    for seed in range(SEEDS):
        reports = simulate(calibrated_scenario(config, found, seed=seed)).reports
        tries.append(of_reports(reports, warm_up(config), config.run.num_ticks))
    return {key: statistics.fmean(one[key] for one in tries) for key in tries[0]}


def of_reports(reports: tuple[Report, ...], first: int, num_ticks: int) -> dict[str, float]:
    ends = {(r.executor, r.tick): (r.started_s, r.finished_s) for r in reports}
    rows = []
    for tick in range(first, num_ticks - 1):
        row = {"time/step_s": ends["trainer", tick][1] - ends["trainer", tick - 1][1]}
        for role in ROLES:
            start, end = ends[role, tick]
            row[f"time/{role}_s"] = end - start
            row[f"idle/{role}"] = 1.0 - (end - start) / max(1e-12, end - ends[role, tick - 1][1])
        rows.append(row)
    return means(rows)


def measured(run_dir: Path, first: int) -> dict[str, float]:
    """Of a run's metrics, without its first ticks and without the last, in which the trainer writes the policy."""
    rows = [{key: float(value or 0.0) for key, value in row.items()} for row in read_metrics(run_dir)]
    return means(rows[first:-1])


def means(rows: list[dict[str, float]]) -> dict[str, float]:
    """Mean step and durations; idle shares of the whole window."""
    found = {"step_s": statistics.fmean(row["time/step_s"] for row in rows)}
    for role in ROLES:
        busy = [row[f"time/{role}_s"] for row in rows]
        spans = [b / max(1e-9, 1.0 - row[f"idle/{role}"]) for b, row in zip(busy, rows, strict=True)]
        found[f"{role}_s"] = statistics.fmean(busy)
        found[f"idle_{role}"] = 1.0 - sum(busy) / sum(spans)
    return found


def medians(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Schedule -> forecast, measured, error -> the median over the rounds of each number."""
    return {
        schedule: {
            kind: {key: statistics.median(one[schedule][kind][key] for one in rounds) for key in values}
            for kind, values in row.items()
        }
        for schedule, row in rounds[0].items()
    }


def errors(forecast: Mapping[str, float], real: Mapping[str, float]) -> dict[str, float]:
    """Relative for seconds, absolute for shares."""
    return {
        key: forecast[key] - real[key] if key.startswith("idle") else forecast[key] / real[key] - 1.0
        for key in ("step_s", "generator_s", "trainer_s", "idle_generator", "idle_trainer")
    }


def worst(rows: Mapping[str, Any], key: str) -> float:
    return max(abs(row["error"][key]) for row in rows.values())


def table(rows: Mapping[str, Any]) -> str:
    """Forecast, measured, error; seconds and shares."""
    lines = [
        f"{'':<24}{'step':>24}{'generator idle':>24}{'trainer idle':>24}{'generator tick':>24}{'trainer tick':>24}"
    ]
    lines.append(f"{'':<24}" + f"{'forecast measured error':>24}" * 5)
    for name, row in rows.items():
        cells = []
        for key in ("step_s", "idle_generator", "idle_trainer", "generator_s", "trainer_s"):
            f, m, e = row["forecast"][key], row["measured"][key], row["error"][key]
            if key.startswith("idle"):
                cells.append(f"{f:>8.0%} {m:>8.0%} {e * 100:>+5.0f}p")
            else:
                cells.append(f"{f:>8.3g} {m:>8.3g} {e:>+6.0%}")
        lines.append(f"{name:<24}" + "".join(f"{cell:>24}" for cell in cells))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
