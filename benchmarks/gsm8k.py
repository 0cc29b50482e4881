"""SmolLM2-135M on GSM8K, the whole chain: SFT, then RL at several staleness, each judged by every test question.

    python benchmarks/gsm8k.py --model PATH --train GSM8K/train.jsonl --test GSM8K/test.jsonl --runs runs/gsm8k \\
        --json OUT --picture PNG

One pass of SFT over the training answers; then, of the first ``--asked`` training questions, those that the
tuned model answers right at least once in four samples (groups without a right answer teach nothing, and nearly
all are such); on these ``recipes/gsm8k-smollm2.toml`` in three arms: staleness 0, staleness 1 and 4, both with
partial rollouts; seeds are paired (the same prompts and draws). Judged are the base model, the tuned one and
each arm's last, under the same prompt: greedy and at temperature 1, pass@1 and pass@n, format apart from
answers; arms of later seeds by a quarter of the samples. Two arms are compared question by question: the
interval of one seed says how sure the questions make it, the one over the seeds how sure the seeds do. Runs and
scores are kept in ``--runs``: what is finished is not made again, and an interrupted run goes on.
``--trl-env runs/trl-env`` adds TRL's GRPO from the same tuned model, on the prompts of the first seed (its
environment is made if it is missing).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from end_to_end import run_trl, trl_python
from harness import write_report
from learning_against_trl import trl_job
from reverse_text import run_once, settings
from staleness_grid import half_width

from llamarl.config import load_config
from llamarl.executors.measures import mean_of

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "gsm8k-smollm2.toml"
ARMS: dict[str, dict[str, Any]] = {
    "staleness_1": {},
    "staleness_0": {"schedule.max_staleness": 0, "generator.max_segments": 1, "generator.oversubscription": 1.0},
    "staleness_4": {"schedule.max_staleness": 4},
}
ONCE = "staleness_4"
"""The arm that the first seed alone has."""
PART = 300
"""Questions that a process judges, one a core: what an interruption costs."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hugging Face folder of SmolLM2-135M-Instruct")
    parser.add_argument("--train", type=Path, required=True, help="GSM8K's training rows")
    parser.add_argument("--test", type=Path, required=True, help="its test rows")
    parser.add_argument(
        "--math", type=Path, help="MATH-500: the base, the tuned and a trained model answer it greedily"
    )
    parser.add_argument("--runs", type=Path, default=Path("runs/gsm8k"))
    parser.add_argument("--n", type=int, default=8, help="samples of each test question at temperature 1")
    parser.add_argument(
        "--asked", type=int, default=4500, help="training questions of which those within reach are kept"
    )
    parser.add_argument("--ticks", type=int, default=40, help="of RL")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--trl-env", type=Path, help="virtual environment for TRL, which is then an arm too")
    parser.add_argument("--trl-precision", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--json", help="write the report here")
    parser.add_argument("--picture", type=Path)
    args = parser.parse_args()
    args.runs.mkdir(parents=True, exist_ok=True)
    of_sft = settings({"task.eval_data": args.test, "evaluation.num_prompts": 64, "evaluation.every": 78})
    of_sft += settings({"optimizer.lr": 1e-4, "checkpoint.every": 26, "trainer.dtype": "auto"})
    run_once(args.runs / "sft", ["sft", args.model, str(args.train), "--epochs", "1", *of_sft])
    tuned = args.runs / "sft" / "model"
    within_reach = choose(args, tuned)
    results: dict[str, Any] = {"questions": len(within_reach.read_text().splitlines()), "scores": {}, "curves": {}}
    add = Judge(args, results)
    add("sft", tuned, args.n)
    for seed in args.seeds:
        first = seed == args.seeds[0]
        for arm in ARMS:
            if first or arm != ONCE:
                name = f"{arm}_seed_{seed}"
                results["curves"][name] = rl(args, arm, seed, tuned, within_reach)
                add(name, args.runs / name / "model", args.n if first else max(1, args.n // 4))
    add("base", Path(args.model), args.n)  # late: its answers are the longest
    if args.trl_env:
        results["curves"]["trl_seed_0"], (model, n) = trl_arm(args, tuned, within_reach)
        add("trl_seed_0", model, n)
    if args.math:
        trained = f"staleness_1_seed_{args.seeds[0]}"
        for name in ("base", "sft", trained):
            at = {"base": Path(args.model), "sft": tuned, trained: args.runs / trained / "model"}[name]
            add.math(name, at)
    for name, found in results["scores"].items():
        print(name, {key: round(value, 4) for key, value in found.items() if isinstance(value, float)})
    for name, found in results["differences"].items():
        print(name, found)
    if args.picture:
        draw(results, args.picture)


class Judge:
    """Scores models, one after the other, and writes down after each what is known."""

    def __init__(self, args: argparse.Namespace, results: dict[str, Any]) -> None:
        self._args, self._results = args, results

    def __call__(self, name: str, model: Path, n: int) -> None:
        of_test = {"task.data": self._args.train.resolve()}
        self._keep(name, scores(self._args, name, model, n, self._args.test, of_test))

    def math(self, name: str, model: Path) -> None:
        of_math = {"task.name": "math", "task.data": self._args.train.resolve()}
        self._keep(f"{name}, MATH-500", scores(self._args, f"{name}_math", model, 1, self._args.math, of_math))

    def _keep(self, name: str, found: dict[str, Any]) -> None:
        self._results["scores"][name] = found
        self._results["differences"] = differences(self._results["scores"], self._args.seeds)
        write_report(self._args.json, self._results, [])


def rl(args: argparse.Namespace, arm: str, seed: int, tuned: Path, questions: Path) -> dict[str, Any]:
    """Train one arm and say what its ticks were."""
    own = {"run.seed": seed, "run.num_ticks": args.ticks, "model.path": tuned, **ARMS[arm]}
    own |= {"task.data": questions, "task.eval_data": args.test.resolve()}
    own["evaluation.every"] = 0  # judged at the end, on more
    folder = args.runs / f"{arm}_seed_{seed}"
    run_once(folder, ["train", str(RECIPE), *settings(own)])
    return curve(folder)


def differences(found: dict[str, Any], seeds: list[int]) -> dict[str, Any]:
    """Of shares of right answers at temperature 1, paired: each arm less SFT, staleness 1 less 0, 4 less both,
    TRL less staleness 1."""
    pairs = [(f"{arm}_seed_{seed}", "sft") for arm in ARMS for seed in seeds]
    pairs += [(f"staleness_1_seed_{seed}", f"staleness_0_seed_{seed}") for seed in seeds]
    pairs += [(f"staleness_4_seed_{seeds[0]}", f"staleness_{less}_seed_{seeds[0]}") for less in (0, 1)]
    pairs.append(("sft", "base"))
    pairs.append(("trl_seed_0", f"staleness_1_seed_{seeds[0]}"))
    said = {
        f"{one} less {other}": paired(found[one], found[other]) for one, other in pairs if {one, other} <= set(found)
    }
    for one, other in (("staleness_1", "staleness_0"), ("staleness_1", "sft"), ("staleness_0", "sft")):
        of_seeds = [said.get(f"{one}_seed_{k} less {other if other == 'sft' else f'{other}_seed_{k}'}") for k in seeds]
        means = [pair["mean"] for pair in of_seeds if pair]
        if len(means) > 1:
            said[f"{one} less {other}, over seeds"] = {"mean": statistics.mean(means), "interval": half_width(means)}
    return said


def paired(one: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    """Mean over questions of the difference of two shares of right answers, and half its 95 % interval's width."""
    shares = [a / one["n"] - b / other["n"] for a, b in zip(one["right"], other["right"], strict=True)]
    return {"mean": statistics.mean(shares), "interval": 1.96 * statistics.stdev(shares) / len(shares) ** 0.5}


def trl_arm(args: argparse.Namespace, tuned: Path, questions: Path) -> tuple[dict[str, Any], tuple[Path, int]]:
    """TRL's curve of the first seed, and what is to be judged of it."""
    folder = (args.runs / "trl_seed_0").resolve()
    kept = folder / "result.json"
    if not kept.exists():
        folder.mkdir(exist_ok=True)
        paths = {"model.path": tuned, "task.data": questions, "task.eval_data": args.test.resolve()}
        own = {"run.seed": args.seeds[0], "run.num_ticks": args.ticks} | {key: str(at) for key, at in paths.items()}
        job = trl_job(load_config(RECIPE, own), tuned, args.ticks)
        job |= {
            "precision": args.trl_precision,
            "answer_after": "####",
            "output_dir": str(folder),
            "save_every": 5,
            "resume": True,
        }
        kept.write_text(json.dumps(run_trl(trl_python(args.trl_env), job, limit_s=1 << 20)))
    found = json.loads(kept.read_text())
    curve = {"reward/mean": found["rewards"], "time/step_s": found["step_s"]}
    return curve, (folder / f"checkpoint-{args.ticks}", args.n)


def choose(args: argparse.Namespace, tuned: Path) -> Path:
    """The training questions that the tuned model answers right at least once in four samples."""
    kept = args.runs.resolve() / "within_reach.jsonl"
    if not kept.exists():
        rows = args.train.read_text().splitlines()[: args.asked]
        asked = judge_in_parts(args, "reach", tuned, rows, 4, {"task.data": args.test.resolve()})
        right = "\n".join({row["prompt"] for _, said in asked for row in said if row.get("reward", 0) >= 1})
        kept.write_text("".join(f"{row}\n" for row in rows if json.loads(row)["question"] in right))
    return kept


def judge(model: Path, words: list[str], kept: Path) -> None:
    """Keep what ``llamarl eval`` says of a model, as JSON."""
    command = [sys.executable, "-m", "llamarl.cli.main", "eval", str(model), "--recipe", str(RECIPE), "--json"]
    command += ["--evaluation.threads", "1", *words]
    kept.write_text(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def scores(
    args: argparse.Namespace, name: str, model: Path, n: int, questions: Path, task: dict[str, Any]
) -> dict[str, Any]:
    """What ``llamarl eval`` says of a model over all questions of a file, and how many of its samples were right at each."""
    asked = judge_in_parts(args, name, model, questions.read_text().splitlines(), n, task, "--greedy")
    right: list[int] = []
    for one, said in asked:
        sampled = [row.get("reward", 0) >= 1 for row in said[: one["prompts"] * n]]  # the greedy ones follow
        right += [sum(sampled[i : i + n]) for i in range(0, len(sampled), n)]
    return combine([(one["prompts"], one) for one, _ in asked]) | {"n": n, "right": right}


def judge_in_parts(
    args: argparse.Namespace, name: str, model: Path, rows: list[str], n: int, task: dict[str, Any], *words: str
) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """What ``llamarl eval`` says of each part of the questions, and each response; what was judged is kept."""
    folders, asking = [], []
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as side_by_side:
        for first in range(0, len(rows), PART):
            folder = args.runs / "judged" / f"{name}_n{n}_from_{first}"
            folders.append(folder)
            if (folder / "scores.json").exists():
                continue
            folder.mkdir(parents=True, exist_ok=True)
            part, asked = rows[first : first + PART], folder / "asked.jsonl"
            asked.write_text("\n".join(part) + "\n")
            own = settings(task | {"task.eval_data": asked.resolve()})
            counts = ["--prompts", str(len(part)), "--n", str(n), "--responses", str(folder / "said.jsonl")]
            asking.append(side_by_side.submit(judge, model, [*counts, *words, *own], folder / "scores.json"))
    for part_asked in asking:
        part_asked.result()
    return [
        (json.loads((folder / "scores.json").read_text()), list(map(json.loads, (folder / "said.jsonl").open())))
        for folder in folders
    ]


def combine(parts: list[tuple[int, dict[str, Any]]]) -> dict[str, Any]:
    """Means over all prompts of the means over each part's, with the interval of all."""
    whole = sum(count for count, _ in parts)
    names = [key for key, value in parts[0][1].items() if isinstance(value, float) and key != "accuracy_error"]
    found: dict[str, Any] = {key: sum(count * one[key] for count, one in parts) / whole for key in names}
    intervals = {key: mean_of([found[key]] * whole) for key in parts[0][1]["intervals"]}
    return found | {"prompts": whole, "intervals": {key: [one.low, one.high] for key, one in intervals.items()}}


def curve(run: Path) -> dict[str, Any]:
    """What each tick of a run says that a reader may ask for."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    keys = (
        "reward/mean",
        "groups/no_signal",
        "response/length_mean",
        "mismatch/kl",
        "entropy",
        "tokens/generated",
        "time/step_s",
    )
    return {key: [row[key] for row in rows] for key in keys}


def draw(results: dict[str, Any], path: Path) -> None:
    import matplotlib.pyplot as plt

    arms: dict[str, list[list[float]]] = {}
    for name, found in results["curves"].items():
        arms.setdefault(name.partition("_seed")[0], []).append(found["reward/mean"])
    figure, axes = plt.subplots(figsize=(6, 3.5))
    for i, (arm, seeds) in enumerate(arms.items()):
        for right in seeds if len(seeds) > 1 else ():
            axes.plot(_last_five(right), color=f"C{i}", alpha=0.35, lw=0.8)
        label = arm.replace("_", " ") + (f", mean of {len(seeds)} seeds" if len(seeds) > 1 else ", one seed")
        axes.plot(_last_five([statistics.mean(at) for at in zip(*seeds, strict=True)]), color=f"C{i}", label=label)
    axes.set_xlabel("tick")
    axes.set_ylabel("right answers of a tick's samples,\nmean of the last five ticks")
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def _last_five(values: list[float]) -> list[float]:
    return [statistics.mean(values[max(0, i - 4) : i + 1]) for i in range(len(values))]


if __name__ == "__main__":
    main()
