"""Seconds a step, synchronous or with ``--staleness 1``, with ticks in parts against whole ticks, in turn, in one run, and what the simulator forecasts of it.

    python benchmarks/streaming.py --rounds 5 --json OUT

Decoding and training are waits (``costed_parts.py``; all rewards are alike, so nothing is computed), everything else is a true job of
processes: 8 prompts, 8 responses with log-normal lengths (mean 32, sigma 0.7, at most 64 tokens). Costs are a tenth of those in
docs/notes/streaming.md. Both settings of a round draw the same lengths.
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

from costed_parts import Costs
from harness import claim, paired_ratio, spread, write_report

from llamarl.observability.metrics import read_metrics
from llamarl.planner.lengths import lognormal
from llamarl.simulator.scenario import Scenario
from llamarl.simulator.simulate import simulate
from llamarl.simulator.tick_costs import LinearGeneratorCost, TrainerCost

WARM_UP = 2
MAX_TOKENS = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, nargs="+", default=[16, 64], help="generator.engine.max_sequences")
    parser.add_argument("--parts", type=int, default=8)
    parser.add_argument("--staleness", type=int, default=0, help="schedule.max_staleness")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5, help=f"timed steps a round, after {WARM_UP} of warm-up")
    parser.add_argument("--json", help="write the report here")
    args = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory(prefix="llamarl-streaming-") as made:
        for number in range(args.rounds):
            for slots in args.slots:
                for parts in (1, args.parts):
                    run = run_job(
                        Path(made) / f"{slots}-{parts}-{number}", slots, parts, args.staleness, args.steps, seed=number
                    )
                    found.setdefault(f"{slots} slots, {parts} parts", []).append(run)
                    print(f"round {number + 1}, {slots} slots, {parts} parts: {told(run)}", flush=True)
    times = {name: [run["step_s"] for run in runs] for name, runs in found.items()}
    prompt_tokens = round(statistics.fmean(run["prompt_tokens"] for runs in found.values() for run in runs))
    results: dict[str, Any] = {"step_s": {name: spread(of) for name, of in times.items()}, "runs": found}
    claims = []
    for slots in args.slots:
        whole, in_parts = f"{slots} slots, 1 parts", f"{slots} slots, {args.parts} parts"
        best = min((f"{of} slots, 1 parts" for of in args.slots), key=lambda name: statistics.median(times[name]))
        ratio, by_best = paired_ratio(times[in_parts], times[whole]), paired_ratio(times[in_parts], times[best])
        forecast = forecast_s(slots, args.parts, args.staleness, prompt_tokens) / forecast_s(
            slots, 1, args.staleness, prompt_tokens
        )
        results[f"{slots} slots"] = {"ratio": ratio, "forecast": forecast, "by_best_whole": by_best}
        print(
            f"{slots} slots: {args.parts} parts against whole {ratio['median']:.3f} (forecast {forecast:.3f}), "
            f"against whole with the best of these slots ({best.split(',')[0]}) {by_best['median']:.3f}"
        )
        text = f"{slots} slots: measured ratio by the forecast one"
        claims.append(claim(text, ratio["median"] / forecast, 1.05, at_least=False))
    write_report(args.json, results, claims)


def run_job(run_dir: Path, slots: int, parts: int, staleness: int, steps: int, *, seed: int) -> dict[str, Any]:
    """One run; mean seconds of a step and of each role, in the timed ticks."""
    here = Path(__file__).parent
    settings = {
        "run.dir": run_dir,
        "run.seed": seed,
        "run.num_ticks": WARM_UP + steps,
        "schedule.max_staleness": staleness,
        "schedule.parts": parts,
        "schedule.prompts_per_step": 8,
        "generator.group_size": 8,
        "generator.max_segments": 1,
        "generator.oversubscription": 1.0,
        "generator.sampling.max_new_tokens": MAX_TOKENS,
        "generator.engine.name": f"{here}/costed_parts.py:CostedEngine",
        "generator.engine.max_sequences": slots,
        "generator.threads": 1,
        "trainer.threads": 1,
        "executors.trainer.factory": f"{here}/costed_parts.py:PartCostedTrainer",
        "evaluation.every": 0,
        "checkpoint.every": 0,
        "checkpoint.at_end": "false",
        "observability.console": "none",
        "reward.max_failed_fraction": 1.0,
    }
    words = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    command = [sys.executable, "-m", "llamarl.cli.main", "train", "tiny", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise SystemExit(done.stdout[-2000:] + done.stderr[-2000:])
    rows = read_metrics(run_dir)[WARM_UP:]
    keys = ("time/step_s", "time/generator_s", "time/reward_s", "time/trainer_s", "idle/generator", "idle/trainer")
    means = {key: statistics.fmean(float(row[key] or 0.0) for row in rows) for key in keys}
    prompts = [
        len(record["prompt_tokens"])
        for file in (run_dir / "rollouts").glob("*.jsonl")
        for record in map(json.loads, file.read_text().splitlines())
    ]
    return {**means, "step_s": means["time/step_s"], "prompt_tokens": statistics.fmean(prompts)}


def told(run: dict[str, Any]) -> str:
    return (
        f"{run['step_s']:.3f} s a step, generator {run['time/generator_s']:.3f}, trainer {run['time/trainer_s']:.3f}, "
        f"of which idle {run['idle/generator']:.0%} and {run['idle/trainer']:.0%}"
    )


def forecast_s(slots: int, parts: int, staleness: int, prompt_tokens: int) -> float:
    """Of a step, of the costs alone."""
    costs = Costs()
    scenario = Scenario(
        title="costed",
        prompts_per_step=8,
        group_size=8,
        lengths=lognormal(costs.mean, costs.sigma, MAX_TOKENS),
        prompt_tokens=prompt_tokens,
        generator=LinearGeneratorCost(step_s=costs.decode_s, sequence_s=costs.sequence_s),
        trainer=TrainerCost(tick_s=costs.update_s, token_s=costs.token_s),
        slots=slots,
        parts=parts,
        max_staleness=staleness,
        num_ticks=200,
    )
    return simulate(scenario).step_s


if __name__ == "__main__":
    main()
