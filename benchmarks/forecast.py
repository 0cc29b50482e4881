"""Forecast against reality on this machine: ``python benchmarks/forecast.py --recipe tiny --json OUT``.

In rounds: one run of the recipe with whole batches at its own staleness is fitted (four constants), then the recipe is run again
synchronously, at its own staleness, and with half of the prompts, and each step is compared with the simulation by the fit. The
learning rate is next to nothing, so that lengths stay what they were; no evaluations. Measure on an idle machine: its speed may
drift by a fifth between a fit and a run, which no forecast knows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness import claim, write_report

from llamarl.observability.metrics import read_metrics

WARM_UP = 2
QUIET = (
    "--optimizer.lr 1e-12 --evaluation.every 0 --checkpoint.every 0 --checkpoint.every_minutes 0 --checkpoint.at_end false "
    "--observability.console none --generator.max_segments 1 --generator.oversubscription 1.0"
).split()
SCHEDULES = {"synchronous": {"max_staleness": 0}, "asynchronous": {}, "half the prompts": {"prompts_per_step": 0.5}}


def command(verb: str, source: str, *flags: str) -> str:
    words = [sys.executable, "-m", "llamarl.cli.main", verb, source, *flags]
    done = subprocess.run(words, capture_output=True, text=True, timeout=3600)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="tiny")
    parser.add_argument("--prompts", type=int, default=16, help="the recipe's schedule.prompts_per_step")
    parser.add_argument("--ticks", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="write the report here")
    args = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {name: [] for name in SCHEDULES}
    with tempfile.TemporaryDirectory(prefix="llamarl-forecast-") as made:
        for number in range(args.rounds):
            fitted = Path(made) / f"fit-{number}"
            ticks = ["--run.num_ticks", str(args.ticks)]
            command("train", args.recipe, *QUIET, *ticks, "--run.dir", str(fitted))
            for name, changes in SCHEDULES.items():
                settings: dict[str, Any] = dict(changes)
                if "prompts_per_step" in settings:
                    settings["prompts_per_step"] = int(args.prompts * settings["prompts_per_step"])
                words = [word for key, value in settings.items() for word in (f"--schedule.{key}", str(value))]
                folder = Path(made) / f"{name.replace(' ', '-')}-{number}"
                command("train", args.recipe, *QUIET, *ticks, *words, "--run.seed", "1", "--run.dir", str(folder))
                steps = [float(row["time/step_s"] or 0.0) for row in read_metrics(folder)][WARM_UP:]
                said = json.loads(command("simulate", str(fitted), *words, "--json"))["simulations"][0]["step_s"]
                found[name].append({"measured_s": statistics.fmean(steps), "forecast_s": said})
                print(f"round {number + 1}, {name}: {found[name][-1]}", flush=True)
    claims = [
        claim(
            f"{name}: error of the forecast step, median of rounds",
            statistics.median(abs(one["forecast_s"] / one["measured_s"] - 1.0) for one in rounds), 0.20, at_least=False,
        )
        for name, rounds in found.items()
    ]  # fmt: skip
    write_report(args.json, found, claims)


if __name__ == "__main__":
    main()
