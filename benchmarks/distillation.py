"""Ticks until a policy is nearly as good as a teacher: learning from that teacher, against learning from rewards.

    python benchmarks/distillation.py --runs runs/distillation --json OUT

The teacher is the bundled model after a run of ``recipes/tiny.toml``; the policies are that model as it is bundled: with
``algorithm.advantage = "distillation"`` on the sampled tokens, the same over the teacher's 16 likeliest tokens, and by the
recipe with rewards. All sample 128 responses a tick; with a teacher these are of 128 prompts, as nothing is compared within a
group, and a tick takes four optimizer steps. A policy has arrived at the first evaluated version whose held-out accuracy is
0.9 of the teacher's. Ticks do not depend on the machine or on who shares it. Runs in ``--runs`` are kept and not made again.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from asynchrony_quality import run
from harness import claim, write_report

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "tiny.toml"
TEACHER_SEED = 100
SHARE = 0.9
"""Of the teacher's accuracy."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/distillation"), help="folder of the runs")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ticks", type=int, default=16, help="of a run with the teacher on sampled tokens")
    parser.add_argument("--top-k-ticks", type=int, default=10, help="of one over the teacher's likeliest tokens")
    parser.add_argument(
        "--reward-ticks", type=int, default=60, help="of a run with rewards, whose rate falls as in 100"
    )
    parser.add_argument("--json", help="write the report here")
    args = parser.parse_args()
    common = {"observability.rollouts": "false", "observability.trace": "false", "checkpoint.every": 0}
    taught = max(run(args.runs / "teacher", RECIPE, "teacher", {}, TEACHER_SEED, common).items())[1]
    teacher = next((args.runs / "teacher").glob("*/model"))
    taught_by: dict[str, Any] = {
        "algorithm.advantage": "distillation",
        "reference.path": json.dumps(str(teacher.resolve())),
        "reference.threads": 1,
        "trainer.minibatches": 4,
        "schedule.prompts_per_step": 128,
        "generator.group_size": 1,
    }
    arms: dict[str, dict[str, Any]] = {
        "teacher-sampled": {
            **taught_by,
            "run.num_ticks": args.ticks,
            "optimizer.warmup_ticks": 3,
            "evaluation.every": 2,
        },
        "teacher-top-k": {
            **taught_by,
            "algorithm.teacher_top_k": 16,
            "run.num_ticks": args.top_k_ticks,
            "optimizer.lr": 1e-3,
            "optimizer.warmup_ticks": 1,
            "evaluation.every": 1,
        },
        "rewards": {"run.num_ticks": args.reward_ticks, "optimizer.decay_ticks": 100, "evaluation.every": 4},
    }
    curves: dict[str, list[dict[int, float]]] = {}
    arrived: dict[str, list[int]] = {}
    most = max(
        args.ticks, args.top_k_ticks, args.reward_ticks
    )  # a teacher's run that does not arrive counts as the longest of all
    for arm, settings in arms.items():
        for seed in range(args.seeds):
            curve = run(args.runs / arm, RECIPE, arm, {}, seed, {**common, **settings})
            reached = [version for version, accuracy in sorted(curve.items()) if accuracy >= SHARE * taught]
            if not reached:
                best = max(curve.values())
                print(f"{arm}, seed {seed}: {best:.3f} is not {SHARE} of {taught:.3f}; it counts as if at tick {most}")
            curves.setdefault(arm, []).append(curve)
            arrived.setdefault(arm, []).append(reached[0] if reached else most)
            print(f"{arm}, seed {seed}: " + ", ".join(f"{v} {a:.3f}" for v, a in sorted(curve.items())), flush=True)
    ratio = statistics.mean(arrived["teacher-top-k"]) / statistics.mean(arrived["rewards"])
    print(f"teacher {taught:.3f}; ticks to {SHARE} of it: {arrived}")
    claims = [claim("ticks with the teacher's top k, as a share of those with rewards", ratio, 1 / 3, at_least=False)]
    write_report(args.json, {"teacher": taught, "arrived": arrived, "curves": curves}, claims)


if __name__ == "__main__":
    main()
