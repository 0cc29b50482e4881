"""A curriculum by pass rates (``data.candidates``) against every item in its turn: accuracy, and the ticks that it takes.

    python benchmarks/curriculum.py --runs runs/curriculum --json OUT

Two tasks of 400 ledgers for the bundled model, by the settings of ``recipes/tiny.toml``. Of the easy one all have 2 to 9
entries; of the hard one a quarter has, and the others 14 to 20, whose steps are longer than a response may be. Held out
are 200 ledgers of 2 to 9 entries that neither has. On the hard task the curriculum gets ``--share`` of the ticks, and a
schedule of rates of that length; on the easy one as many. Compared is the mean of the last three held-out accuracies, seed
by seed. Ticks do not depend on the machine or on who shares it. Runs in ``--runs`` are kept and not made again.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from pathlib import Path
from typing import Any

from asynchrony_quality import last, run
from harness import claim, write_report

from llamarl.environments.sum_task import write_ledger

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "tiny.toml"
REWARD = """def score(response, answer):
    _, mark, given = response.rpartition("#")
    return float(bool(mark) and given.strip() == answer)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/curriculum"), help="folder of the runs")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--ticks", type=int, default=40)
    parser.add_argument("--share", type=float, default=0.8, help="of the ticks, for the curriculum on the hard task")
    parser.add_argument("--candidates", type=int, default=4)
    parser.add_argument("--tasks", nargs="+", choices=["hard", "easy"], default=["hard", "easy"])
    parser.add_argument("--json", help="write the report here")
    args = parser.parse_args()
    files = write_files(args.runs)
    chosen = {"data.candidates": args.candidates}
    arms: dict[str, dict[str, dict[str, Any]]] = {
        "hard": {"in turn": {}, "chosen": {**chosen, "run.num_ticks": round(args.share * args.ticks)}},
        "easy": {"in turn": {}, "chosen": chosen},
    }
    curves: dict[str, dict[str, list[dict[int, float]]]] = {
        task: {arm: [] for arm in arms[task]} for task in args.tasks
    }
    for task in args.tasks:
        for seed in range(args.seeds):
            settings = arms[task]
            fixed = {
                **common(files),
                "task.data": json.dumps(str(files / f"{task}.jsonl")),
                "run.num_ticks": args.ticks,
            }
            for arm, own in settings.items():
                curve = run(args.runs / task, RECIPE, f"{task}, {arm}", own, seed, fixed)
                curves[task][arm].append(curve)
                print(f"{task}, {arm}, seed {seed}: " + ", ".join(f"{v} {a:.3f}" for v, a in curve.items()), flush=True)
    final = {
        task: {arm: [last(curve) for curve in seeds] for arm, seeds in arms.items()} for task, arms in curves.items()
    }
    gains = {}
    for task, of in final.items():
        gains[task] = statistics.mean(ours - theirs for ours, theirs in zip(of["chosen"], of["in turn"], strict=True))
        print(f"{task}: {of}, mean gain {gains[task]:+.3f}")
    bars = {"hard": (f"in {args.share} of the ticks", 0.0), "easy": ("in as many ticks", -0.02)}
    claims = [claim(f"{task} task: accuracy gained, {bars[task][0]}", gains[task], bars[task][1]) for task in gains]
    write_report(args.json, {"final": final, "curves": curves}, claims)


def common(files: Path) -> dict[str, Any]:
    """Settings of every run."""
    return {
        "run.runtime": '"inline"',
        "task.name": '"function"',
        "task.reward": json.dumps(f"{files / 'reward.py'}:score"),
        "task.eval_data": json.dumps(str(files / "held_out.jsonl")),
        "evaluation.every": 5,
        "observability.rollouts": "false",
        "observability.trace": "false",
        "checkpoint.every": 0,
    }


def write_files(runs: Path) -> Path:
    """The tasks' files, in a folder of their own."""
    folder = (runs / "files").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(7)
    seen: set[str] = set()

    def ledgers(count: int, least: int, most: int) -> list[str]:
        lines: list[str] = []
        while len(lines) < count:
            digits = [draw.randrange(10) for _ in range(draw.randint(least, most))]
            if (question := write_ledger(digits)) not in seen:
                seen.add(question)
                lines.append(json.dumps({"question": question, "answer": str(sum(digits))}))
        return lines

    held_out, easy, long = ledgers(200, 2, 9), ledgers(400, 2, 9), ledgers(300, 14, 20)
    for name, lines in {"held_out": held_out, "easy": easy, "hard": easy[:100] + long}.items():
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    return folder


if __name__ == "__main__":
    main()
