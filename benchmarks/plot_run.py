"""Held-out accuracy and reward of one run as a picture: python benchmarks/plot_run.py RUN_DIR OUT.png"""

from __future__ import annotations

import argparse
from pathlib import Path

from llamarl.observability.metrics import read_metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", help="folder of a run")
    parser.add_argument("picture", help="PNG to write")
    args = parser.parse_args()
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = read_metrics(args.run)
    scored = [(r["eval/policy_version"], r["eval/accuracy"]) for r in rows if r.get("eval/accuracy") is not None]
    rewards = [(r["step"], r["reward/mean"]) for r in rows if r.get("reward/mean") is not None]
    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    axis.plot(*zip(*rewards, strict=True), color="0.7", lw=1, label="reward of the training batch")
    axis.plot(*zip(*scored, strict=True), color="C0", marker="o", label="held-out accuracy, temperature 1")
    minutes = sum(r["time/step_s"] or 0.0 for r in rows) / 60
    axis.set(xlabel=f"policy version ({minutes:.0f} minutes in all)", ylim=(0, 1), title=Path(args.run).name)
    axis.legend(frameon=False, loc="lower right")
    axis.spines[["top", "right"]].set_visible(False)
    Path(args.picture).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.picture, dpi=150)


if __name__ == "__main__":
    main()
