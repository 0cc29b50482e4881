"""What asynchrony gains on the same cores, by model size, and whether a plan made from a run foretells what it proposes.

    python benchmarks/asynchrony_speed.py --json OUT --picture PNG

Five Llama shapes with random weights and the bundled model's tokenizer and task. Of each, in turn, round by round: a core for each
role in turns (staleness 0) and at once (staleness 1), and both cores for each role in turns. Beside the measured speed-up stands the
theory's, (G + T) / max(G, T), from the generator's and trainer's seconds when they take turns. Then ``llamarl plan`` reads the first
of these runs, and the recipe that it proposes is run: its forecast of a step beside the measured one.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness import claim, paired_ratio, spread, write_report

SHAPES: dict[str, tuple[int, int, int, int, int]] = {
    "0.5M": (128, 352, 3, 4, 2),
    "3M": (256, 704, 4, 4, 2),
    "12M": (384, 1056, 7, 6, 2),
    "50M": (512, 1408, 17, 8, 4),
    "135M": (576, 1536, 38, 9, 3),
}
"""Width, width of the feed-forward part, layers, heads, key-value heads."""
EACH, BOTH, ASYNCHRONOUS = "in turns, a core each", "in turns, both cores each", "asynchronous, a core each"
ARMS: dict[str, dict[str, Any]] = {
    EACH: {"schedule.max_staleness": 0, "generator.threads": 1, "trainer.threads": 1},
    ASYNCHRONOUS: {"schedule.max_staleness": 1, "generator.threads": 1, "trainer.threads": 1},
    BOTH: {"schedule.max_staleness": 0, "generator.threads": 2, "trainer.threads": 2},
}
WARM_UP, LEFT_OUT = 2, 1
"""Ticks at the beginning, and at the end, where the generator is idle already."""
PLANNED = 0.2
"""A forecast is good if it is as near to what was measured."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ticks", type=int, default=8, help="timed ticks a run")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--json", help="write the report here")
    parser.add_argument("--picture", type=Path, help="draw the speed-ups here (matplotlib)")
    args = parser.parse_args()
    results, claims = {}, []
    for shape in args.shapes:
        with tempfile.TemporaryDirectory() as folder:
            found = results[shape] = measure(shape, Path(folder), args)
        planned = found["planned"]
        off = planned["step_s"]["median"] / planned["forecast_s"] - 1
        print(
            f"{shape}: {found['measured']['median']:.2f} ({found['measured']['low']:.2f} to {found['measured']['high']:.2f})"
            f" as fast as a core each in turns, theory {found['theory']:.2f}; {found['against_both']['median']:.2f} as fast as"
            f" both cores each in turns; plan: {planned['plan']}, {planned['forecast_s']:.3g} s,"
            f" measured {planned['step_s']['median']:.3g} s ({off:+.0%})",
            flush=True,
        )
        claims.append(claim(f"{shape}: measured step off the plan's", abs(off), PLANNED, at_least=False))
        write_report(args.json, results, claims)  # what is measured is kept
    if args.picture:
        draw(results, args.picture)


def measure(shape: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """All runs of one shape."""
    model = random_model(shape, folder / "model")
    runs: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
    for number in range(args.rounds):
        for arm, settings in ARMS.items():
            run = folder / f"run_{number}_{len(runs[arm])}_{list(ARMS).index(arm)}"
            runs[arm].append(timed("tiny", run, model, settings, args))
            print(f"  {shape}, round {number + 1}, {arm}: {runs[arm][-1]['median']:.3f} s a tick", flush=True)
    step = {arm: [run["median"] for run in several] for arm, several in runs.items()}
    generator, trainer = (
        spread([run[role] for run in runs[EACH]])["median"] for role in ("time/generator_s", "time/trainer_s")
    )
    return {
        "runs": runs,
        "generator_s": generator,
        "trainer_s": trainer,
        "theory": (generator + trainer) / max(generator, trainer),
        "measured": paired_ratio(step[EACH], step[ASYNCHRONOUS]),
        "against_both": paired_ratio(step[BOTH], step[ASYNCHRONOUS]),
        "planned": planned(folder, folder / "run_0_0_0", model, args),
    }


def planned(folder: Path, run: Path, model: Path, args: argparse.Namespace) -> dict[str, Any]:
    """What ``llamarl plan`` proposes on reading a run, and the proposal's ticks."""
    recipe = folder / "plan.toml"
    command = [sys.executable, "-m", "llamarl.cli.main", "plan", str(run), "--precision", "fp32", "--max-segments", "1"]
    told = subprocess.run([*command, "--recipe", str(recipe)], check=True, capture_output=True, text=True, timeout=600)
    title = recipe.read_text().splitlines()[0]
    forecast = re.search(r"forecast ~?([\d.]+) (ms|s) a step", recipe.read_text())
    assert forecast is not None, title
    wrote = re.search(r"wrote .*?: (.*?), the plan marked", told.stdout)
    assert wrote is not None, told.stdout
    runs = [timed(str(recipe), folder / f"planned_{number}", model, {}, args) for number in range(args.rounds)]
    return {
        "plan": wrote[1],
        "forecast_s": float(forecast[1]) / (1000 if forecast[2] == "ms" else 1),
        "step_s": spread([run["median"] for run in runs]),
        "recipe": recipe.read_text(),
        "told": told.stdout,
    }


def timed(recipe: str, run: Path, model: Path, settings: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """One run; medians of its timed ticks."""
    every = {
        "run.dir": json.dumps(str(run)),
        "run.num_ticks": WARM_UP + args.ticks + LEFT_OUT,
        "model.path": json.dumps(str(model)),
        "schedule.prompts_per_step": args.prompts,
        "generator.group_size": args.group_size,
        "generator.sampling.max_new_tokens": 64,
        "generator.max_segments": 1,
        "generator.oversubscription": 1.0,
        "optimizer.lr": 1e-6,
        "trainer.skip_zero_advantage": "false",  # a random model is never right, and would have nothing to train on
        "evaluation.every": 0,
        "checkpoint.every": 0,
        "checkpoint.every_minutes": 0,
        "observability.console": '"none"',
        **settings,
    }
    words = [word for key, value in every.items() for word in (f"--{key}", str(value))]
    subprocess.run([sys.executable, "-m", "llamarl.cli.main", "train", recipe, *words], check=True, timeout=3600)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = rows[WARM_UP : WARM_UP + args.ticks]
    keys = ("time/generator_s", "time/trainer_s", "time/reward_s", "response/length_mean")
    medians = {key: spread([row[key] for row in rows])["median"] for key in keys}
    return {"step_s": [row["time/step_s"] for row in rows], **medians} | {
        "median": spread([row["time/step_s"] for row in rows])["median"]
    }


def random_model(shape: str, folder: Path) -> Path:
    """A folder with a Llama model of that shape, random weights, and the bundled model's tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from llamarl.models.folders import resolve_model_path

    tiny = resolve_model_path("bundled:tiny")
    own = json.loads((tiny / "config.json").read_text())
    width, inner, layers, heads, kv_heads = SHAPES[shape]
    config = LlamaConfig(
        vocab_size=own["vocab_size"], hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=256, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=own["eos_token_id"], pad_token_id=own["pad_token_id"],
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    for file in tiny.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


def draw(results: dict[str, Any], path: Path) -> None:
    import matplotlib.pyplot as plt

    shapes = list(results)
    figure, axes = plt.subplots(figsize=(6, 3.5))
    axes.plot(shapes, [results[s]["theory"] for s in shapes], "k--", label="theory: (G + T) / max(G, T)")
    axes.plot(
        shapes, [results[s]["measured"]["median"] for s in shapes], "o-", label="over a core for each role, in turns"
    )
    axes.plot(
        shapes, [results[s]["against_both"]["median"] for s in shapes], "s-", label="over both cores for each, in turns"
    )
    axes.axhline(1, color="grey", lw=0.5)
    axes.set_xlabel("parameters")
    axes.set_ylabel("speed-up of the asynchronous step")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
