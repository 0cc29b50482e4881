"""Does asynchrony cost quality? The tiny task at several staleness settings and seeds, with and without correction.

    python benchmarks/asynchrony_quality.py --json OUT --picture docs/images/asynchrony_quality.png

Each run is ``recipes/tiny.toml`` with a few keys changed; what is compared is the mean of the last three held-out
accuracies (a single evaluation moves by a few hundredths). Finished runs in ``--runs`` are kept and not made again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from harness import claim, write_report

ARMS: dict[str, dict[str, Any]] = {
    "staleness 0": {"schedule.max_staleness": 0},
    "staleness 1": {"schedule.max_staleness": 1},
    "staleness 4": {"schedule.max_staleness": 4},
    "staleness 4, no correction": {"schedule.max_staleness": 4, "algorithm.name": '"reinforce"'},
}
LAST = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the report here")
    parser.add_argument("--picture", help="write the curves here (PNG; needs matplotlib)")
    parser.add_argument("--runs", default="runs/asynchrony_quality", help="folder of the runs")
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    curves = {
        arm: [run(Path(args.runs), arm, settings, seed) for seed in range(args.seeds)] for arm, settings in ARMS.items()
    }
    final = {arm: [statistics.mean(list(c.values())[-LAST:]) for c in seeds] for arm, seeds in curves.items()}
    for arm, values in final.items():
        print(f"{arm:<28} {statistics.mean(values):.3f}  ({', '.join(f'{v:.3f}' for v in values)})")
    corrected = [final[arm] for arm in list(ARMS)[:3]]
    means = [statistics.mean(values) for values in corrected]
    spread = max(max(values) - min(values) for values in corrected)
    claims = [
        claim("largest difference of mean accuracy between staleness 0, 1, 4 with AIPO, against the seeds' spread",
              max(means) - min(means), spread, at_least=False)
    ]  # fmt: skip
    write_report(args.json, {"final": final, "curves": curves}, claims)
    if args.picture:
        draw(curves, Path(args.picture))


def run(folder: Path, arm: str, settings: dict[str, Any], seed: int) -> dict[int, float]:
    """Held-out accuracy by policy version."""
    run_dir = folder / f"{arm.replace(' ', '_').replace(',', '')}_seed_{seed}"
    if not (run_dir / "model").exists():
        print(f"{arm}, seed {seed} ...", flush=True)
        words = {**settings, "run.seed": seed, "run.dir": json.dumps(str(run_dir)), "observability.console": '"none"'}
        recipe = Path(__file__).resolve().parents[1] / "recipes" / "tiny.toml"
        flags = [word for key, value in words.items() for word in (f"--{key}", str(value))]
        resume = ["--resume", str(run_dir)] if (run_dir / "config.toml").exists() else []
        command = [sys.executable, "-m", "llamarl.cli.main", "train", str(recipe), *resume, *flags]
        subprocess.run(command, check=True, timeout=3600)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {int(r["eval/policy_version"]): r["eval/accuracy"] for r in rows if "eval/accuracy" in r}


def draw(curves: dict[str, list[dict[int, float]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for color, (arm, seeds) in zip(("C0", "C2", "C1", "C3"), curves.items(), strict=True):
        versions = sorted(seeds[0])
        values = [[seed[v] for seed in seeds] for v in versions]
        axis.plot(versions, [statistics.mean(v) for v in values], color=color, label=arm)
        axis.fill_between(versions, [min(v) for v in values], [max(v) for v in values], color=color, alpha=0.15, lw=0)
    axis.set(xlabel="policy version (optimizer steps)", ylabel="held-out accuracy", ylim=(0, 1))
    axis.legend(frameon=False, loc="lower right")
    axis.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
