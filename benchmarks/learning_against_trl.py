"""Learning curves of one recipe, llamarl's and TRL's: held-out accuracy over seconds of training, on the same cores.

    python benchmarks/learning_against_trl.py --model models/smollm2 --trl-env runs/trl-env --json OUT --picture PNG

Same model, prompts, group size, length, learning rate and its schedule; the reward is 1 for the right answer on both sides. The
two run one after the other, each with all cores. llamarl evaluates while it trains, on the same cores, and its seconds contain
that; TRL's versions are saved, and judged afterwards by ``llamarl eval``, outside of its seconds. Runs in ``--runs`` are kept and
not made again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from asynchrony_quality import STUDIES, folder_name, run
from end_to_end import export_prompts, run_trl, trl_python
from harness import write_report

from llamarl.config import load_config

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "smollm2.toml"
Curve = list[tuple[float, float]]
"""(seconds, accuracy)."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hugging Face folder of SmolLM2-135M-Instruct")
    parser.add_argument("--runs", type=Path, default=Path("runs/learning"), help="folder of the runs")
    parser.add_argument("--trl-env", default="runs/trl-env", help="virtual environment for TRL; made if missing")
    parser.add_argument("--seeds", type=int, default=3, help="of llamarl's runs; TRL has one")
    parser.add_argument("--arms", nargs="+", default=["float32", "bfloat16 both"], choices=list(STUDIES["defaults"]))
    parser.add_argument("--trl-precision", nargs="+", default=["float32"], choices=["float32", "bfloat16"])
    parser.add_argument("--micro-batch", type=int, default=8, help="TRL's")
    parser.add_argument("--json", help="write the report here")
    parser.add_argument("--picture", type=Path, help="write the curves here (PNG; needs matplotlib)")
    args = parser.parse_args()
    curves: dict[str, list[Curve]] = {}
    for arm in args.arms:
        settings = STUDIES["defaults"][arm]
        for seed in range(args.seeds):
            run(args.runs, RECIPE, arm, settings, seed, {"model.path": json.dumps(args.model)})
            rows = (args.runs / folder_name(settings, seed) / "metrics.jsonl").read_text().splitlines()
            curves.setdefault(f"llamarl, {arm}", []).append(our_curve([json.loads(row) for row in rows]))
    python = trl_python(Path(args.trl_env))
    for precision in args.trl_precision:
        curves[f"TRL, {precision}"] = [their_curve(python, args, precision)]
    for name, found in curves.items():
        for curve in found:
            print(f"{name}: " + ", ".join(f"{seconds:.0f} s {accuracy:.2f}" for seconds, accuracy in curve))
    write_report(args.json, {"curves": curves, "recipe": RECIPE.name}, [])
    if args.picture:
        draw(curves, args.picture)


def our_curve(rows: list[dict[str, Any]]) -> Curve:
    """Version v is there after v ticks; the first tick's seconds contain nothing of the start."""
    ends = [0.0, *itertools.accumulate(row["time/step_s"] for row in rows)]
    return [(ends[int(r["eval/policy_version"])], r["eval/accuracy"]) for r in rows if "eval/accuracy" in r]


def their_curve(python: Path, args: argparse.Namespace, precision: str) -> Curve:
    config = load_config(str(RECIPE))
    folder = args.runs / f"trl_{precision}"
    done = folder / "steps.json"
    if not done.exists():
        folder.mkdir(parents=True, exist_ok=True)
        prompts = export_prompts(args.model, config.run.num_ticks * config.schedule.prompts_per_step, RECIPE)
        job = {
            "model": args.model,
            "prompts": prompts,
            "prompts_per_step": config.schedule.prompts_per_step,
            "group_size": config.generator.group_size,
            "max_new_tokens": config.generator.sampling.max_new_tokens,
            "num_steps": config.run.num_ticks,
            "threads": len(os.sched_getaffinity(0)),
            "micro_batch": args.micro_batch,
            "precision": precision,
            "learning_rate": config.optimizer.lr,
            "schedule": config.optimizer.schedule,
            "warmup_steps": config.optimizer.warmup_ticks,
            "output_dir": str(folder.resolve()),
            "save_every": config.evaluation.every,
        }
        result = run_trl(python, job, drop_first=False)
        done.write_text(json.dumps(result["step_s"]))
    ends = [0.0, *itertools.accumulate(json.loads(done.read_text()))]
    curve = [(0.0, evaluate(args.model))]
    for version in range(config.evaluation.every, config.run.num_ticks + 1, config.evaluation.every):
        curve.append((ends[version], evaluate(folder / f"checkpoint-{version}")))
    return curve


def evaluate(model: str | Path) -> float:
    """Held-out accuracy of a folder, in float32."""
    words = ["eval", str(model), "--recipe", str(RECIPE), "--json", "--generator.engine.dtype", "float32"]
    done = subprocess.run(
        [sys.executable, "-m", "llamarl.cli.main", *words], check=True, capture_output=True, text=True, timeout=1200
    )
    return float(json.loads(done.stdout)["accuracy"])


def draw(curves: dict[str, list[Curve]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for index, (name, found) in enumerate(curves.items()):
        for number, curve in enumerate(found):
            seconds, accuracies = zip(*curve, strict=True)
            label = f"{name} ({len(found)} seeds)" if len(found) > 1 else name
            axis.plot(seconds, accuracies, color=f"C{index}", label=label if number == 0 else None, lw=1.4)
    last = [statistics.mean(a for _, a in curve[-2:]) for found in curves.values() for curve in found]
    axis.set(
        xlabel="seconds of training", ylabel="held-out accuracy", ylim=(0, min(1.0, max(last) + 0.15)), xscale="symlog"
    )
    axis.set_xlim(left=0)
    axis.legend(loc="lower right", frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
