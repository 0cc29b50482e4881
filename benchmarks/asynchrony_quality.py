"""What staleness, the clip rho, the loss, the precision and the faster defaults do to quality: several seeds of one task.

    python benchmarks/asynchrony_quality.py --json OUT --picture docs/images/asynchrony_quality.png
    python benchmarks/asynchrony_quality.py --studies rho staleness losses precision --json OUT --picture PNG
    python benchmarks/asynchrony_quality.py --studies defaults --recipe recipes/smollm2.toml --set model.path=models/smollm2

Each run is ``recipes/tiny.toml`` (or ``--recipe``) with a few keys changed; what is compared is the mean of the last three
held-out accuracies (a single evaluation moves by a few hundredths). Runs in ``--runs`` are kept: finished ones are not made again
and studies share them; one that was interrupted goes on from its checkpoint.
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

LAST = 3
Settings = dict[str, Any]


def aipo(staleness: int, **more: Any) -> Settings:
    return {"schedule.max_staleness": staleness, **more}


def loss(name: str, staleness: int) -> Settings:
    return {"schedule.max_staleness": staleness, "algorithm.name": json.dumps(name)}


def precision(trainer: str, engine: str) -> Settings:
    return {"trainer.dtype": json.dumps(trainer), "generator.engine.dtype": json.dumps(engine)}


STUDIES: dict[str, dict[str, Settings]] = {
    "asynchrony": {
        "staleness 0": aipo(0),
        "staleness 1": aipo(1),
        "staleness 4": aipo(4),
        "staleness 4, no correction": loss("reinforce", 4),
    },
    "staleness": {f"staleness {k}": aipo(k) for k in (0, 1, 2, 4, 8)},
    "rho": {
        f"rho {rho}, staleness 4": aipo(4, **{"algorithm.rho": json.dumps(rho)})
        for rho in (1.0, 2.0, 5.0, 10.0, "none")
    },
    "losses": {
        f"{label}, staleness {k}": settings
        for k in (4, 8)
        for label, settings in {
            "AIPO": aipo(k),
            "PPO clip": loss("ppo", k),
            "decoupled PPO": loss("decoupled_ppo", k),
            "no correction": loss("reinforce", k),
        }.items()
    },
    "precision": {"fp32 generator": aipo(1), "int8 generator": aipo(1, **{"generator.quantization": '"int8"'})},
    "defaults": {
        "first release": {
            "trainer.skip_zero_advantage": "false",
            **precision("float32", "float32"),
        },
        "float32": precision("float32", "float32"),
        "bfloat16 trainer": precision("bfloat16", "float32"),
        "bfloat16 both": precision("bfloat16", "bfloat16"),
    },
}
RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "tiny.toml"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", nargs="+", choices=STUDIES, default=["asynchrony"])
    parser.add_argument("--json", help="write the report here")
    parser.add_argument("--picture", help="write the curves here (PNG; needs matplotlib)")
    parser.add_argument("--runs", default="runs/asynchrony_quality", help="folder of the runs")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--recipe", type=Path, default=RECIPE, help="another recipe than the tiny one; name a --runs of its own"
    )
    parser.add_argument("--arms", nargs="+", help="only these of the studies' arms")
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="KEY=VALUE", help="further settings of all runs: JSON, else a string"
    )
    args = parser.parse_args()
    fixed: Settings = {key: as_word(value) for key, value in (word.split("=", 1) for word in args.set)}
    curves: dict[str, dict[str, list[dict[int, float]]]] = {}
    for study in args.studies:
        arms = {arm: settings for arm, settings in STUDIES[study].items() if arm in (args.arms or STUDIES[study])}
        curves[study] = {arm: [] for arm in arms}
        for seed in range(args.seeds):  # seed by seed, so that what is there early has all arms
            for arm, settings in arms.items():
                curves[study][arm].append(run(Path(args.runs), args.recipe, arm, settings, seed, fixed))
    final = {study: {arm: [last(c) for c in seeds] for arm, seeds in arms.items()} for study, arms in curves.items()}
    for study, accuracies in final.items():
        print(f"\n{study}")
        for arm, values in accuracies.items():
            print(f"  {arm:<28} {statistics.mean(values):.3f}  ({', '.join(f'{v:.3f}' for v in values)})")
    claims = []
    if "asynchrony" in final:
        corrected = [final["asynchrony"][f"staleness {k}"] for k in (0, 1, 4)]
        means = [statistics.mean(values) for values in corrected]
        spread = max(max(values) - min(values) for values in corrected)
        claims.append(
            claim("largest difference of mean accuracy between staleness 0, 1, 4 with AIPO, against the seeds' spread",
                  max(means) - min(means), spread, at_least=False)
        )  # fmt: skip
    write_report(args.json, {"final": final, "curves": curves}, claims)
    if args.picture:
        draw(curves, Path(args.picture))


def as_word(value: str) -> str:
    """A setting as the command line takes it: numbers and the like as they are, text in quotes."""
    try:
        json.loads(value)
    except json.JSONDecodeError:
        return json.dumps(value)
    return value


def last(curve: dict[int, float]) -> float:
    return statistics.mean(list(curve.values())[-LAST:])


def folder_name(settings: Settings, seed: int) -> str:
    """One folder for equal settings, whichever study asks."""
    words = [f"{key.split('.')[-1]}_{str(value).strip(chr(34))}" for key, value in sorted(settings.items())]
    return "_".join([*words, f"seed_{seed}"])


def run(folder: Path, recipe: Path, arm: str, settings: Settings, seed: int, fixed: Settings) -> dict[int, float]:
    """Held-out accuracy by policy version.

    Args:
        fixed: Settings of every run, which its folder's name leaves out.
    """
    run_dir = folder / folder_name(settings, seed)
    if not (run_dir / "model").exists():
        print(f"{arm}, seed {seed} ...", flush=True)
        own = {"run.seed": seed, "run.dir": json.dumps(str(run_dir)), "observability.console": '"none"'}
        words = {**fixed, **settings, **own}
        flags = [word for key, value in words.items() for word in (f"--{key}", str(value))]
        resume = ["--resume", str(run_dir)] if (run_dir / "config.toml").exists() else []
        command = [sys.executable, "-m", "llamarl.cli.main", "train", str(recipe), *resume, *flags]
        subprocess.run(command, check=True, timeout=3600)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {int(r["eval/policy_version"]): r["eval/accuracy"] for r in rows if "eval/accuracy" in r}


def draw(curves: dict[str, dict[str, list[dict[int, float]]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = min(2, len(curves))
    rows = -(-len(curves) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(7 * columns, 4.2 * rows), layout="constrained", squeeze=False)
    for axis in axes.flat[len(curves) :]:
        axis.remove()
    for axis, (study, arms) in zip(axes.flat, curves.items(), strict=False):
        for index, (arm, seeds) in enumerate(arms.items()):
            color = f"C{index}"
            versions = sorted(seeds[0])
            values = [[seed[v] for seed in seeds] for v in versions]
            axis.plot(versions, [statistics.mean(v) for v in values], color=color, label=arm)
            axis.fill_between(
                versions, [min(v) for v in values], [max(v) for v in values], color=color, alpha=0.12, lw=0
            )
        axis.set(xlabel="policy version (optimizer steps)", ylabel="held-out accuracy", ylim=(0, 1), title=study)
        axis.legend(loc="lower right", fontsize=8, framealpha=0.8, edgecolor="none")
        axis.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
