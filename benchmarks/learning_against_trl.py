"""Learning curves of one recipe, llamarl's and TRL's: held-out accuracy over seconds of training, on the same cores.

    python benchmarks/learning_against_trl.py --trl-env runs/trl-env --json OUT --picture PNG
    python benchmarks/learning_against_trl.py --recipe recipes/smollm2.toml --model models/smollm2    # hours

Same model, prompts, group size, length, learning rate and its schedule; the reward is 1 for the right answer on both sides. The
runs that learn are long, and may share the machine with others: accuracy does not depend on it. The seconds come from short runs
of the same settings at the end, in turn (A B A B), each with all cores: mean seconds a step, times steps. llamarl evaluates while
it trains, on the same cores, and its seconds contain that; TRL's versions are saved, and judged afterwards by ``llamarl eval``,
outside of its seconds. Runs in ``--runs`` are kept and not made again; ``--learn-only`` leaves the timing to a later call.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from asynchrony_quality import STUDIES, folder_name, run
from end_to_end import export_prompts, run_trl, trl_python
from harness import write_report

from llamarl.config import RunConfig, load_config
from llamarl.models.folders import resolve_model_path

Curve = list[tuple[float, float]]
"""(policy version, accuracy), later (seconds, accuracy)."""
RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "tiny.toml"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", type=Path, default=RECIPE, help="default: tiny.toml, the bundled model")
    parser.add_argument("--model", help="Hugging Face folder (default: the recipe's)")
    parser.add_argument("--runs", type=Path, default=Path("runs/learning"), help="folder of the runs")
    parser.add_argument("--trl-env", default="runs/trl-env", help="virtual environment for TRL; made if missing")
    parser.add_argument("--seeds", type=int, default=3, help="of llamarl's runs; TRL has one")
    parser.add_argument("--arms", nargs="+", default=["float32"], choices=list(STUDIES["defaults"]))
    parser.add_argument("--trl-precision", nargs="+", default=["float32"], choices=["float32", "bfloat16"])
    parser.add_argument("--micro-batch", type=int, default=8, help="TRL's")
    parser.add_argument("--json", help="write the report here")
    parser.add_argument("--picture", type=Path, help="write the curves here (PNG; needs matplotlib)")
    parser.add_argument("--learn-only", action="store_true", help="make the runs that learn, and measure nothing")
    parser.add_argument("--rounds", type=int, default=2, help="timed runs of each")
    parser.add_argument(
        "--timed-steps", type=int, default=4, help="of TRL in one run, the first is warm-up; llamarl has twice as many"
    )
    args = parser.parse_args()
    args.model = args.model or load_config(str(args.recipe)).model.path
    curves: dict[str, list[Curve]] = {}
    for arm in args.arms:
        settings = STUDIES["defaults"][arm]
        for seed in range(args.seeds):
            run(args.runs, args.recipe, arm, settings, seed, {"model.path": json.dumps(args.model)})
            rows = (args.runs / folder_name(settings, seed) / "metrics.jsonl").read_text().splitlines()
            curves.setdefault(f"llamarl, {arm}", []).append(our_curve([json.loads(row) for row in rows]))
    python = trl_python(Path(args.trl_env))
    for precision in args.trl_precision:
        curves[f"TRL, {precision}"] = [their_curve(python, args, precision)]
    step_s: dict[str, list[float]] = {name: [] for name in curves}
    for _ in range(0 if args.learn_only else args.rounds):
        for arm in args.arms:
            step_s[f"llamarl, {arm}"].append(our_step_s(args, STUDIES["defaults"][arm]))
        for precision in args.trl_precision:
            steps = run_trl(python, their_job(args, precision, num_steps=args.timed_steps))["step_s"][1:]
            step_s[f"TRL, {precision}"].append(statistics.mean(steps))
        print({name: [round(seconds, 1) for seconds in found] for name, found in step_s.items()}, flush=True)
    for name, found in curves.items():
        seconds = statistics.median(step_s[name]) if step_s[name] else 1.0  # else by steps
        curves[name] = found = [[(version * seconds, accuracy) for version, accuracy in curve] for curve in found]
        for curve in found:
            print(f"{name}: " + ", ".join(f"{at:.0f} {accuracy:.2f}" for at, accuracy in curve))
    write_report(args.json, {"curves": curves, "step_s": step_s, "recipe": args.recipe.name}, [])
    if args.picture:
        draw(curves, args.picture)


def our_curve(rows: list[dict[str, Any]]) -> Curve:
    return [(r["eval/policy_version"], r["eval/accuracy"]) for r in rows if "eval/accuracy" in r]


def our_step_s(args: argparse.Namespace, settings: dict[str, Any]) -> float:
    """Mean seconds a tick of a short run, evaluations included, after two of warm-up."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        own = {
            "run.dir": json.dumps(str(run_dir)),
            "run.num_ticks": 2 + 2 * args.timed_steps,
            "model.path": json.dumps(args.model),
            "checkpoint.every": 0,
            "observability.console": '"none"',
        }
        flags = [word for key, value in {**settings, **own}.items() for word in (f"--{key}", str(value))]
        command = [sys.executable, "-m", "llamarl.cli.main", "train", str(args.recipe), *flags]
        subprocess.run(command, check=True, timeout=3600)
        rows = [json.loads(row) for row in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return statistics.mean(row["time/step_s"] for row in rows[2:])


def their_job(args: argparse.Namespace, precision: str, num_steps: int) -> dict[str, Any]:
    config = load_config(str(args.recipe))
    job = trl_job(config, args.model, num_steps) | {"micro_batch": args.micro_batch, "precision": precision}
    return job | {"answer_after": "#"} if config.task.name == "steps" else job


def trl_job(config: RunConfig, model: str | Path, num_steps: int) -> dict[str, Any]:
    """What TRL must know to train as a recipe does, on the same prompts."""
    model = str(resolve_model_path(str(model)))
    return {
        "model": model,
        "prompts": export_prompts(model, num_steps * config.schedule.prompts_per_step, config),
        "prompts_per_step": config.schedule.prompts_per_step,
        "group_size": config.generator.group_size,
        "max_new_tokens": config.generator.sampling.max_new_tokens,
        "num_steps": num_steps,
        "threads": len(os.sched_getaffinity(0)),
        "micro_batch": 8,
        "learning_rate": config.optimizer.lr,
        "schedule": config.optimizer.schedule,
        "warmup_steps": config.optimizer.warmup_ticks,
    }


def their_curve(python: Path, args: argparse.Namespace, precision: str) -> Curve:
    config = load_config(str(args.recipe))
    evaluation, num_steps = config.evaluation, config.run.num_ticks
    folder = args.runs / f"trl_{precision}"
    if not (folder / f"checkpoint-{num_steps}").exists():
        folder.mkdir(parents=True, exist_ok=True)
        saved = {"output_dir": str(folder.resolve()), "save_every": evaluation.every}
        run_trl(python, their_job(args, precision, num_steps) | saved)
    kept = folder / "accuracy.json"
    found = json.loads(kept.read_text()) if kept.exists() else {"0": evaluate(args, args.model)}
    for version in range(evaluation.every, num_steps + 1, evaluation.every):
        if str(version) not in found:
            found[str(version)] = evaluate(args, folder / f"checkpoint-{version}")
            kept.write_text(json.dumps(found))
    return [(int(version), accuracy) for version, accuracy in found.items()]


def evaluate(args: argparse.Namespace, model: str | Path) -> float:
    """Held-out accuracy of a folder, in float32."""
    words = ["eval", str(model), "--recipe", str(args.recipe), "--json", "--generator.engine.dtype", "float32"]
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
    axis.set(xlabel="seconds of training", ylabel="held-out accuracy", ylim=(0, min(1.0, max(last) + 0.15)))
    axis.set_xlim(left=0)
    axis.legend(loc="lower right", frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
