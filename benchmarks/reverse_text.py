"""A real model learns a task that others publish a curve of: texts written backwards, after a short fine-tuning.

    python benchmarks/reverse_text.py --model PATH --texts GSM8K/train.jsonl --held-out GSM8K/test.jsonl --runs runs/reverse \\
        --json OUT --picture PNG

The task of prime-rl's first example: system prompt, 20 steps of 8 prompts with 16 responses, at most 128 tokens, and as reward how
far the answer between its tags is the text backwards (the share that ``difflib`` finds in common). What differs: the texts are
sentences of 16 to 40 characters of GSM8K's questions; SmolLM2-135M-Instruct in place of Qwen3-0.6B; ``--sft-steps`` of 32 rows.
Runs are kept in ``--runs``: finished ones are not made again, and an interrupted one goes on.
"""

from __future__ import annotations

import argparse
import difflib
import json
import random
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness import write_report

PUBLISHED = (0.05, 0.8)
"""Mean reward before SFT and after 20 steps of RL, by prime-rl's page of the example."""
SYSTEM = "Reverse the text character-by-character. Put your answer in <reversed_text> tags."
LENGTHS = range(16, 41)
_TAGGED = re.compile(r"<reversed_text>\s*(.*?)\s*</reversed_text>", re.DOTALL)


def reward(prompt: str, response: str, answer: str) -> float:
    """Share of characters that the tagged answer and the right one have in common, in order, in [0, 1]; 0 without tags."""
    tagged = _TAGGED.search(response)
    return difflib.SequenceMatcher(None, tagged[1], answer).ratio() if tagged else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    parser.add_argument("--texts", type=Path, required=True, help="GSM8K's training questions, JSON lines")
    parser.add_argument("--held-out", type=Path, required=True, help="its test questions")
    parser.add_argument("--runs", type=Path, default=Path("runs/reverse_text"))
    parser.add_argument("--sft-steps", type=int, default=80)
    parser.add_argument("--staleness", type=int, nargs="+", default=[1, 0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--lr", default="3e-6", help="of RL")
    parser.add_argument("--ticks", type=int, default=20)
    parser.add_argument("--json", help="write the report here")
    parser.add_argument("--picture", type=Path)
    args = parser.parse_args()
    args.runs.mkdir(parents=True, exist_ok=True)
    train, held_out = sentences(args.texts), sentences(args.held_out)
    held_out = [text for text in held_out if text not in set(train)]
    half = len(train) // 2  # RL asks what SFT has not shown
    rows(args.runs / "sft.jsonl", train[:half], lambda text: {"prompt": text, "completion": tagged(text)})
    rows(args.runs / "rl.jsonl", train[half:], lambda text: {"question": text, "answer": text[::-1]})
    rows(args.runs / "held_out.jsonl", held_out, lambda text: {"question": text, "answer": text[::-1]})
    tuned = args.runs / "sft" / "model"
    words = settings({"run.num_ticks": args.sft_steps, "optimizer.lr": 3e-4, "data.system_prompt": json.dumps(SYSTEM)})
    run_once(args.runs / "sft", ["sft", args.model, str(args.runs / "sft.jsonl"), *words])
    results: dict[str, Any] = {"held_out": len(held_out), "published": PUBLISHED, "curves": {}}
    for seed in args.seeds:
        for staleness in args.staleness:
            run = args.runs / f"staleness_{staleness}_seed_{seed}"
            run_once(run, ["train", str(recipe(args, tuned, staleness, seed))])
            lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
            results["curves"][run.name] = {
                "reward": [line["reward/mean"] for line in lines],
                "held_out": {line["eval/policy_version"]: line["eval/reward_mean"] for line in lines if "eval/reward_mean" in line},
                "step_s": [line["time/step_s"] for line in lines],
            }  # fmt: skip
            print(run.name, {v: round(r, 3) for v, r in results["curves"][run.name]["held_out"].items()}, flush=True)
            write_report(args.json, results, [])
    if args.picture:
        draw(results, args.picture)


def sentences(questions: Path) -> list[str]:
    """Different sentences of the questions, in an order that a seed draws."""
    found = set()
    for line in questions.read_text().splitlines():
        parts = re.split(r"(?<=[.?!])\s+", json.loads(line)["question"])
        found |= {part for part in parts if len(part) in LENGTHS and part.isascii()}
    texts = sorted(found)
    random.Random(0).shuffle(texts)
    return texts


def tagged(text: str) -> str:
    return f"<reversed_text>\n{text[::-1]}\n</reversed_text>"


def rows(path: Path, texts: list[str], row: Any) -> None:
    path.write_text("".join(json.dumps(row(text)) + "\n" for text in texts))


def recipe(args: argparse.Namespace, model: Path, staleness: int, seed: int) -> Path:
    """A file with the settings of one RL run; its reward is this file's."""
    path = args.runs / f"staleness_{staleness}_seed_{seed}.toml"
    tables: dict[str, dict[str, Any]] = {
        "run": {"num_ticks": args.ticks, "seed": seed},
        "model": {"path": str(model.resolve())},
        "task": {
            "name": "function",
            "data": str((args.runs / "rl.jsonl").resolve()),
            "eval_data": str((args.runs / "held_out.jsonl").resolve()),
            "reward": f"{Path(__file__).resolve()}:reward",
        },
        "data": {"system_prompt": SYSTEM},
        "schedule": {"prompts_per_step": 8, "max_staleness": staleness},
        "generator": {"group_size": 16, "threads": 1},
        "generator.sampling": {"max_new_tokens": 128, "temperature": 1.0},
        "trainer": {"threads": 2},
        "optimizer": {"lr": float(args.lr)},
        "evaluation": {"every": 5, "num_prompts": 128, "temperature": 0.0},
        "checkpoint": {"every": 5},
        "observability": {"console": "plain"},
    }
    text = "".join(
        f"[{table}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items())
        for table, keys in tables.items()
    )
    path.write_text(text)
    return path


def settings(values: Mapping[str, Any]) -> list[str]:
    return [word for key, value in values.items() for word in (f"--{key}", str(value))]


def run_once(run: Path, command: list[str]) -> None:
    """Make a run, go on with one that was interrupted, leave one that is finished."""
    if (run / "model").exists():
        return
    llamarl = [sys.executable, "-m", "llamarl.cli.main"]
    resumed = run.exists()
    words = ["train", "--resume", str(run)] if resumed else [*command, "--run.dir", str(run)]
    subprocess.run([*llamarl, *words], check=True)


def draw(results: dict[str, Any], path: Path) -> None:
    import matplotlib.pyplot as plt
    import numpy as np
    from matplotlib.ticker import MaxNLocator

    figure, axes = plt.subplots(figsize=(6, 3.5))
    of_staleness: dict[str, list[list[float]]] = {}
    for name, curve in results["curves"].items():
        of_staleness.setdefault(name.split("_")[1], []).append(curve["reward"])
    for staleness, curves in sorted(of_staleness.items()):
        (line,) = axes.plot(np.mean(curves, axis=0), lw=2, label=f"staleness {staleness}, mean of {len(curves)} seeds")
        for one in curves:
            axes.plot(one, color=line.get_color(), lw=0.7, alpha=0.5)
    before, after = results["published"]
    axes.axhline(after, color="grey", ls="--", lw=1, label=f"published after 20 steps (before SFT: {before})")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("step")
    axes.set_ylabel("mean reward of the step's samples")
    axes.legend(fontsize=7, loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
