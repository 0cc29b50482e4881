"""Forecast against reality on this machine: ``python benchmarks/forecast.py --smollm2 FOLDER --json OUT``.

For each recipe (``recipes/tiny.toml``; ``recipes/smollm2.toml`` where the folder of its weights is given):

1. Start both of its schedules as jobs: synchronous with whole batches, and the recipe's own asynchronous one. Stop them. (SmolLM2's, of
   8 GB each, one after the other, each with a calibration.)
2. Calibrate, as ``llamarl plan RECIPE --calibrate`` does: two short runs of the recipe's own executors, in turn and together. Before,
   between and after these the jobs run for a few ticks each: a machine's speed may drift by a quarter within a minute, and so
   calibration and runs see the same machine.
3. Forecast by simulation, from the calibration alone, and compare step time and the idle shares of generator and trainer with what the
   jobs took. Where the recipe evaluates, so do forecast and job (``--no-evaluation`` leaves it out).

The learning rate is next to nothing, so that lengths stay what they were. 2 and 3 in rounds; the error is the median of the rounds', and
all are in the report. The bar: step time within 15%; idle shares within 0.15 of the whole step. Measure on an idle machine (Linux):
about 9 minutes for five rounds of the tiny recipe on two cores.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import claim, write_report

from llamarl.config import RunConfig, load_config
from llamarl.observability.metrics import read_metrics
from llamarl.runtime.base import Report
from llamarl.simulator.calibration import calibrate_recipe, calibrated_scenario
from llamarl.simulator.kept_calibration import RecipeCalibration
from llamarl.simulator.simulate import simulate
from llamarl.simulator.taking_turns import Job

ROOT = Path(__file__).resolve().parents[1]
QUIET = {
    "optimizer.lr": 1e-12,
    "checkpoint.every": 0,
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
_HELD = 4
"""Rows of an evaluation and of the ticks beside it come at once, so a job may be stopped before it has written them all."""
_FORECAST_TICKS = 42
_MANY_TICKS = 1_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the report here")
    parser.add_argument("--smollm2", metavar="FOLDER", help="weights of SmolLM2-135M-Instruct: its recipe is run too")
    parser.add_argument("--only-smollm2", action="store_true", help="leave the tiny recipe out")
    parser.add_argument("--ticks", type=int, default=10, help="that count in each turn of the tiny recipe's jobs")
    parser.add_argument("--smollm2-ticks", type=int, default=3, help="the same of SmolLM2's")
    parser.add_argument("--rounds", type=int, default=5, help="of calibration, forecast and runs, of the tiny recipe")
    parser.add_argument("--smollm2-rounds", type=int, default=1, help="the same of SmolLM2's recipe")
    parser.add_argument("--calibration-ticks", type=int, default=9, help="of each calibration run (SmolLM2: at most 5)")
    parser.add_argument("--no-evaluation", action="store_true", help="turn the recipes' evaluations off")
    parser.add_argument("--set", nargs=2, action="append", default=[], metavar=("KEY", "VALUE"), help="recipe override")
    args = parser.parse_args()
    extra = {**({"evaluation.every": 0} if args.no_evaluation else {}), **dict(args.set)}
    recipes: list[tuple[str, str, dict[str, Any], int, int, int]] = []
    at_once: dict[str, list[list[str]]] = {"tiny": [list(SCHEDULES)], "smollm2": [[schedule] for schedule in SCHEDULES]}
    if not args.only_smollm2:
        recipes.append(
            ("tiny", str(ROOT / "recipes/tiny.toml"), extra, args.ticks, args.calibration_ticks, args.rounds)
        )
    if args.smollm2:
        settings = {**extra, "model.path": json.dumps(str(Path(args.smollm2).resolve()))}
        settings.setdefault("evaluation.every", 0)  # a few ticks would be one evaluation
        ticks = min(5, args.calibration_ticks)
        recipes.append(
            ("smollm2", str(ROOT / "recipes/smollm2.toml"), settings, args.smollm2_ticks, ticks, args.smollm2_rounds)
        )
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, recipe, settings, ticks, calibration_ticks, rounds in recipes:
            bench = Bench(recipe, Path(folder) / name, settings)
            found: list[dict[str, Any]] = []
            rows: dict[str, Any] = {}
            for schedules in at_once[name]:
                with contextlib.ExitStack() as stack:
                    watched = [stack.enter_context(Watched(bench, schedule, ticks)) for schedule in schedules]
                    rounds_of = [bench.compare(watched, calibration_ticks) for _ in range(rounds)]
                found += rounds_of
                rows |= medians([one["rows"] for one in rounds_of])
            results[name] = {"recipe": recipe, "rounds": found, "rows": rows}
    rows = {f"{name}, {schedule}": row for name, one in results.items() for schedule, row in one["rows"].items()}
    print("\n" + table(rows))
    claims = [
        claim("forecast step time, largest relative error", worst(rows, "step_s"), 0.15, at_least=False),
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

    def compare(self, watched: Sequence[Watched], calibration_ticks: int) -> dict[str, Any]:
        """One round: a calibration, whose forecasts are compared with the jobs' turns before, between and after its runs."""
        turns = 0

        def all_run(line: str) -> None:
            nonlocal turns
            for job in watched[:: -1 if turns % 2 else 1]:
                job.turn()
            turns += 1
            print(line, flush=True)

        found = calibrate_recipe(self.config({}), ticks=calibration_ticks, log=all_run)
        all_run("\n".join(found.describe()))
        rows = {}
        for job in watched:
            expected, real = forecast(job.config, found), means(job.taken())
            rows[job.schedule] = {"forecast": expected, "measured": real, "error": errors(expected, real)}
            print(f"{job.schedule}: {json.dumps(rows[job.schedule])}", flush=True)
        return {"calibration": found.describe(), "rows": rows}

    def command(self, name: str, settings: Mapping[str, Any], ticks: int) -> tuple[list[str], Path]:
        """The words that run it, and the run's folder."""
        run_dir = self.folder / name
        words = self.words({**settings, "run.num_ticks": ticks, "run.dir": json.dumps(str(run_dir))})
        return [sys.executable, "-m", "llamarl.cli.main", "train", self.recipe, *words], run_dir

    def run(self, name: str, settings: Mapping[str, Any], ticks: int) -> Path:
        command, run_dir = self.command(name, settings, ticks)
        done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
        if done.returncode:
            raise SystemExit(f"{name} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        return run_dir


class Watched:
    """A schedule's job that takes turns, and what its metrics say of them; a context manager."""

    def __init__(self, bench: Bench, schedule: str, ticks: int) -> None:
        settings = SCHEDULES[schedule]
        self.schedule = schedule
        self.config = bench.config({**settings, "run.num_ticks": _FORECAST_TICKS})
        self._ticks, self._skip = ticks, warm_up(self.config) + (_HELD if self.config.evaluation.every else 0)
        self._command, self._run_dir = bench.command(schedule, settings, _MANY_TICKS)
        self._taken: list[range] = []

    def turn(self) -> None:
        """First the ticks that were at work when it was stopped, then those that count."""
        first = self._job.rows + self._skip
        self._job.turn(self._skip + self._ticks)
        self._taken.append(range(first, first + self._ticks))

    def taken(self) -> list[dict[str, float]]:
        """The metrics' rows of all turns since it was last asked."""
        rows = [{key: float(value or 0.0) for key, value in row.items()} for row in read_metrics(self._run_dir)]
        found = [rows[i] for turn in self._taken for i in turn]
        self._taken.clear()
        return found

    def __enter__(self) -> Watched:
        words = self._command[self._command.index("train") :]
        self._job = Job(words, self._run_dir, self._skip, deadline_s=1800.0)
        return self

    def __exit__(self, *error: object) -> None:
        self._job.close()


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
