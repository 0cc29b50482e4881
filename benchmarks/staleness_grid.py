"""Staleness against corrections on a task that does not saturate: at which staleness does each break?

    python benchmarks/staleness_grid.py --seeds 5 --runs runs/staleness_grid --json OUT --picture PNG

The bundled model and ``recipes/tiny.toml`` with 4 prompts a tick and 80 ticks, at whose end it is still learning. Seven
corrections at staleness 0 to 16, once at the recipe's falling rate and once at a constant one; the last policy is judged by
2,000 held-out prompts. Seeds are paired: the same prompts, draws and held-out prompts for every arm. What an arm loses is told
against the mean of the six corrections at staleness 0, of the same seed and rate: one run's end moves by some hundredths. An arm
is called broken from the staleness on from which the 95 % interval of its loss lies above 0.02.
Finished runs are kept in ``--runs``; each takes one core, so two cores do two at a time.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from asynchrony_quality import RECIPE, Settings, folder_name, run
from harness import write_report

CORRECTIONS: dict[str, Settings] = {
    "none": {"algorithm.name": '"reinforce"'},
    "AIPO, rho 2": {"algorithm.rho": 2.0},
    "AIPO, rho 10": {"algorithm.rho": 10.0},
    "truncated weights": {"algorithm.name": '"truncated_is"'},
    "decoupled PPO": {"algorithm.name": '"decoupled_ppo"'},
    "PPO clip": {"algorithm.name": '"ppo"'},
    "DPPO mask": {"algorithm.name": '"dppo"', "algorithm.clip_low": 0.15, "algorithm.clip_high": 0.15},
}
REFERENCES = [name for name in CORRECTIONS if name != "none"]
STALENESS = (0, 1, 2, 4, 8, 16)
RATES = {"falling": "cosine", "constant": "constant"}
FIXED: Settings = {
    "run.num_ticks": 80,
    "schedule.prompts_per_step": 4,
    "evaluation.every": 80,
    "evaluation.num_prompts": 2000,
    "run.runtime": '"inline"',
    "observability.rollouts": "false",
    "observability.trace": "false",
    "checkpoint.every": 0,
}
LOST = 0.02
"""Accuracy: less is not called broken."""
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""Student's quantile of a mean of so many differences, two-sided."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/staleness_grid"))
    parser.add_argument("--seeds", type=int, default=5, choices=T_95)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, a core each")
    parser.add_argument("--json", help="write the report here")
    parser.add_argument("--picture", type=Path, help="write the curves here (PNG; needs matplotlib)")
    args = parser.parse_args()
    arms = {
        (rate, name, k): {"schedule.max_staleness": k, "optimizer.schedule": f'"{schedule}"', **own}
        for rate, schedule in RATES.items()
        for k in STALENESS
        for name, own in CORRECTIONS.items()
    }

    def accuracy(job: tuple[int, tuple[str, str, int]]) -> float:
        seed, arm = job
        curve = run(args.runs, RECIPE, ", ".join(map(str, arm)), arms[arm], seed, FIXED)
        return curve[max(curve)]

    jobs = [(seed, arm) for seed in range(args.seeds) for arm in arms]  # what is there early has all arms
    with ThreadPoolExecutor(args.jobs) as pool:
        found = dict(zip(jobs, pool.map(accuracy, jobs), strict=True))
    accuracies = {arm: [found[seed, arm] for seed in range(args.seeds)] for arm in arms}
    rows = [row(arm, accuracies, effective(args.runs, arms[arm], args.seeds)) for arm in arms]
    results = {"grid": rows, "breaks": breaks(rows), "mask_ahead": mask_ahead(accuracies)}
    for rate in RATES:
        print(f"\n{rate} rate: accuracy, loss against staleness 0 with its 95 % interval, effective sample size")
        for one in (one for one in rows if one["rate"] == rate):
            print(
                f"  {one['correction']:<18} staleness {one['staleness']:>2}  {one['accuracy']:.3f}  {one['loss']:+.3f} "
                f"± {one['interval']:.3f}  {one['effective']:.2f}"
            )
    print("\nbreaks at staleness", json.dumps(results["breaks"], indent=1))
    print("\nDPPO's mask ahead, mean of staleness 4, 8, 16", json.dumps(results["mask_ahead"], indent=1))
    write_report(args.json, results, [])
    if args.picture:
        draw(rows, args.picture)


def row(
    arm: tuple[str, str, int], accuracies: dict[tuple[str, str, int], list[float]], effective_size: float
) -> dict[str, Any]:
    """Mean and paired loss of one arm."""
    rate, name, k = arm
    own, others = accuracies[arm], zip(*(accuracies[rate, other, 0] for other in REFERENCES), strict=True)
    losses = [statistics.mean(of_seed) - one for one, of_seed in zip(own, others, strict=True)]
    return {
        "rate": rate,
        "correction": name,
        "staleness": k,
        "accuracy": statistics.mean(own),
        "accuracies": own,
        "loss": statistics.mean(losses),
        "interval": half_width(losses),
        "effective": effective_size,
    }


def half_width(values: Sequence[float]) -> float:
    """Of the 95 % interval of their mean."""
    return T_95[len(values)] * statistics.stdev(values) / len(values) ** 0.5


def effective(folder: Path, settings: Settings, seeds: int) -> float:
    """Mean over seeds and the second half of the ticks of the weights' effective sample size, as a share."""
    values = []
    for seed in range(seeds):
        lines = (folder / folder_name(settings, seed) / "metrics.jsonl").read_text().splitlines()
        values += [r.get("ratio/effective_samples") for r in map(json.loads, lines[len(lines) // 2 :])]
    return statistics.mean(value for value in values if value is not None)


def breaks(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, int | None]]:
    """The least staleness at and beyond which each correction is surely worse; None: none of those tried."""
    found: dict[str, dict[str, int | None]] = {}
    for rate in RATES:
        found[rate] = {}
        for name in CORRECTIONS:
            own = [one for one in rows if (one["rate"], one["correction"]) == (rate, name)]
            whole = [one["staleness"] for one in own if one["loss"] - one["interval"] <= LOST]
            lost = [one["staleness"] for one in own if one["staleness"] > max(whole, default=-1)]
            found[rate][name] = min(lost, default=None)
    return found


def mask_ahead(accuracies: dict[tuple[str, str, int], list[float]]) -> dict[str, dict[str, tuple[float, float]]]:
    """How much further DPPO's mask ends than each other correction, paired, with the 95 % interval's half width."""
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for rate in RATES:
        found[rate] = {}
        for name in (name for name in CORRECTIONS if name != "DPPO mask"):
            pairs = [
                zip(accuracies[rate, "DPPO mask", k], accuracies[rate, name, k], strict=True) for k in STALENESS[-3:]
            ]
            ahead = [statistics.mean(own - other for own, other in seed) for seed in zip(*pairs, strict=True)]
            found[rate][name] = statistics.mean(ahead), half_width(ahead)
    return found


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(RATES), figsize=(10, 3.8), sharey=True, layout="constrained")
    for panel, rate in zip(panels, RATES, strict=True):
        for index, name in enumerate(CORRECTIONS):
            own = [one for one in rows if (one["rate"], one["correction"]) == (rate, name)]
            at = [place + 0.08 * (index - len(CORRECTIONS) // 2) for place in range(len(own))]
            panel.plot(at, [one["accuracy"] for one in own], color=f"C{index}", marker="o", ms=4, label=name)
            for place, one in zip(at, own, strict=True):
                seeds = one["accuracies"]
                panel.plot([place] * len(seeds), seeds, ".", color=f"C{index}", alpha=0.35, ms=4)
        panel.set(xticks=range(len(STALENESS)), xticklabels=STALENESS, xlabel="staleness", title=f"{rate} rate")
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("held-out accuracy of the last policy")
    panels[0].legend(fontsize=8, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
