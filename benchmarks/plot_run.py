"""Held-out accuracy over policy versions as a picture: python benchmarks/plot_run.py RUN_DIR [RUN_DIR ...] OUT.png

One run: also the reward of its training batches. Several: a line each, such as of three seeds.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from llamarl.observability.metrics import read_metrics


def pair(text: str) -> tuple[str, str]:
    """``LEFT=WORDS`` in its two halves.

    Raises:
        argparse.ArgumentTypeError: There is no ``=``.
    """
    left, mark, words = text.partition("=")
    if not mark:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form LEFT=WORDS")
    return left, words


def points(rows: list[dict[str, Any]], x: str, y: str) -> tuple[list[float], list[float]]:
    """The rows that have ``y``."""
    found = [(row[x], row[y]) for row in rows if row.get(y) is not None]
    return [one for one, _ in found], [other for _, other in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="folders of runs")
    parser.add_argument("picture", help="PNG to write")
    parser.add_argument("--key", type=pair, action="append", metavar="KEY=WORDS", help="other held-out metrics to draw")
    parser.add_argument("--level", type=pair, action="append", default=[], metavar="Y=WORDS", help="a dashed line")
    parser.add_argument("--title", help="default: the first run's folder")
    args = parser.parse_args()
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    keys = args.key or [("eval/accuracy", "held-out accuracy, temperature 1")]
    tables = [read_metrics(run) for run in args.runs]
    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    if len(tables) == 1:
        axis.plot(*points(tables[0], "step", "reward/mean"), color="0.7", lw=1, label="reward of the training batch")
    for run, rows in zip(args.runs, tables, strict=True):
        for key, words in keys:
            label = words if len(tables) == 1 else f"{words}, {Path(run).name}"
            axis.plot(*points(rows, "eval/policy_version", key), marker="o", ms=4, label=label)
    for level, words in args.level:
        axis.axhline(float(level), color="0.4", lw=1, ls="--")
        axis.annotate(
            words,
            (1, float(level)),
            xycoords=("axes fraction", "data"),
            xytext=(0, -3),
            color="0.4",
            fontsize=8,
            textcoords="offset points",
            ha="right",
            va="top",
        )
    minutes = sum(row["time/step_s"] or 0.0 for rows in tables for row in rows) / 60 / len(tables)
    axis.set(
        xlabel=f"policy version ({minutes:.0f} minutes a run)", ylim=(0, 1), title=args.title or Path(args.runs[0]).name
    )
    axis.legend(frameon=False, loc="lower right" if not args.level else "upper left", fontsize=9)
    axis.spines[["top", "right"]].set_visible(False)
    Path(args.picture).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.picture, dpi=110)


if __name__ == "__main__":
    main()
