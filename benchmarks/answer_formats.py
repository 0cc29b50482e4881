"""Which of several answer formats reinforcement learning keeps, from pretraining on (after Zhao et al., arXiv:2504.07912).

    python benchmarks/answer_formats.py --runs runs/formats --json docs/results/formats.json --picture docs/images/answer_formats.png

An untrained model of the bundled one's shape (half a million parameters) learns by ``llamarl sft`` to add ledgers of 2 to 9
digits from right answers in three formats, a share of the questions each: written steps, running totals, the sum alone.
Then it is trained by rewards for the sum, as ``recipes/tiny.toml`` does, at several staleness and KL coefficients. Followed is,
tick by tick over all samples of a batch: the share of each format, the accuracy within it, the entropy. Ticks do not depend on
the machine or on who shares it. Runs in ``--runs`` are kept and not made again.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import subprocess
import sys
from collections import defaultdict
from itertools import accumulate
from pathlib import Path
from typing import Any

from asynchrony_quality import folder_name, run
from harness import write_report
from transformers import AutoConfig, AutoModelForCausalLM, set_seed

from llamarl.environments.sum_task import write_ledger, written_steps
from llamarl.models.folders import resolve_model_path
from llamarl.observability.rollouts import read_rollouts, rollout_ticks
from llamarl.types import Score

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "tiny.toml"
SHARES = {"steps": 0.2, "totals": 0.3, "sum alone": 0.5}
"""Of the rows that the model is pretrained on."""
ARMS: dict[str, dict[str, Any]] = {
    f"staleness {staleness}, KL {kl:g}": {"schedule.max_staleness": staleness, "algorithm.kl_coef": kl}
    for staleness in (0, 1, 4)
    for kl in (0.0, 0.1)
}
WINDOW = 5
"""Ticks that a point of the table is the mean of."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/formats"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ticks", type=int, default=100)
    parser.add_argument("--rows", type=int, default=20_000, help="to pretrain on, once each")
    parser.add_argument("--epochs", type=float, default=2)
    parser.add_argument("--json", help="write the report here")
    parser.add_argument("--picture", type=Path, help="write the curves here (PNG; needs matplotlib)")
    args = parser.parse_args()
    model = pretrain(args.runs, args.rows, args.epochs)
    fixed = {
        "model.path": json.dumps(str(model)),
        "run.num_ticks": args.ticks,
        "run.runtime": '"inline"',
        "observability.trace": "false",
        "checkpoint.every": 0,
    }
    found: dict[str, list[dict[str, Any]]] = {}
    for arm, settings in ARMS.items():
        found[arm] = []
        for seed in range(args.seeds):
            curve = run(args.runs, RECIPE, arm, settings, seed, fixed)
            told = {"held out": curve, **follow(args.runs / folder_name(settings, seed))}
            found[arm].append(rounded(told))
            ends = ", ".join(f"{name} {told['share'][name][-1]:.2f}" for name in SHARES)
            print(f"{arm}, seed {seed}: held out {max(curve)}: {curve[max(curve)]:.3f}; at the end {ends}", flush=True)
    write_report(args.json, {"shares of pretraining": SHARES, "arms": found}, [])
    if args.picture:
        draw(found, args.picture)


def pretrain(runs: Path, rows: int, epochs: float) -> Path:
    """The folder of the pretrained model."""
    done = runs / "pretrained" / "model"
    if done.exists():
        return done.resolve()
    source, blank = resolve_model_path("bundled:tiny"), runs / "untrained"
    shutil.copytree(source, blank, dirs_exist_ok=True)
    set_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source)).save_pretrained(blank)
    data = runs / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in examples(rows)), encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "llamarl.cli.main",
        "sft",
        str(blank),
        str(data),
        "--epochs",
        str(epochs),
        "--batch",
        "64",
    ]
    flags = ["--optimizer.lr", "2e-3", "--run.dir", str(runs / "pretrained"), "--evaluation.num_prompts", "200"]
    subprocess.run([*command, *flags, "--trainer.max_tokens_per_microbatch", "4096"], check=True, timeout=7200)
    return done.resolve()


def examples(count: int) -> list[dict[str, str]]:
    draw = random.Random(0)
    rows = []
    for _ in range(count):
        digits = [draw.randrange(10) for _ in range(draw.randint(2, 9))]
        written = {
            "steps": written_steps(digits),
            "totals": "\n".join([*map(str, list(accumulate(digits))[1:]), f"#{sum(digits)}"]),
            "sum alone": f"#{sum(digits)}",
        }
        (name,) = draw.choices(list(SHARES), list(SHARES.values()))
        rows.append({"prompt": write_ledger(digits), "completion": written[name]})
    return rows


def format_of(text: str) -> str:
    """By how a response begins."""
    first = text.split("\n", 1)[0]
    if first.startswith("#"):
        return "sum alone"
    return "steps" if "+" in first else "totals" if first.isdigit() else "other"


def follow(folder: Path) -> dict[str, Any]:
    """By window of ticks: share of each format among all samples, accuracy within it, entropy of the policy."""
    counts: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for tick in rollout_ticks(folder):
        for sample in read_rollouts(folder, tick):
            if isinstance(score := sample.response.outcome, Score):
                counts[tick // WINDOW][format_of(sample.response.text)].append(score.value)
    entropy: dict[int, list[float]] = defaultdict(list)
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        if "entropy" in row:
            entropy[int(row["step"]) // WINDOW].append(row["entropy"])
    windows = sorted(counts)
    total = {w: sum(map(len, counts[w].values())) for w in windows}
    names = [*SHARES, "other"]
    return {
        "tick": [w * WINDOW for w in windows],
        "share": {name: [len(counts[w][name]) / total[w] for w in windows] for name in names},
        "accuracy": {
            name: [statistics.mean(counts[w][name]) if counts[w][name] else None for w in windows] for name in names
        },
        "entropy": [statistics.mean(entropy[w]) if entropy[w] else None for w in windows],
    }


def rounded(value: Any) -> Any:
    """Numbers to four places: a share of 640 samples has no more."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return round(value, 4) if isinstance(value, float) else value


def draw(found: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Each arm's shares of formats over ticks, a line a seed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(3, 2, figsize=(10, 9), layout="constrained", sharex=True, sharey=True)
    for axis, (arm, seeds) in zip(axes.flat, found.items(), strict=True):
        for told in seeds:
            for color, name in enumerate([*SHARES, "other"]):
                label = name if told is seeds[0] else None
                axis.plot(told["tick"], told["share"][name], color=f"C{color}", label=label, alpha=0.8)
            axis.plot(
                told["tick"],
                told["entropy"],
                color="black",
                ls=":",
                lw=1,
                label="entropy, nats" if told is seeds[0] else None,
            )
        axis.set(title=arm, ylim=(0, 1), xlabel="tick", ylabel="share of samples")
        axis.spines[["top", "right"]].set_visible(False)
    axes.flat[0].legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    main()
