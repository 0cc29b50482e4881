"""What asynchrony gains on the same two cores, by model size, and whether a plan made from runs foretells what it proposes.

    python benchmarks/asynchrony_speed.py --json OUT --picture PNG

Five Llama shapes with random weights and the bundled model's tokenizer and task. Of each, in turn, round by round: a core for each
role in turns (staleness 0), the same at once (staleness 1), and both cores for each role in turns. Beside the measured speed-up
stands the theory's, (G + T) / max(G, T), from the generator's and trainer's seconds when they take turns on a core each. Then
``llamarl plan`` reads the first round's runs in turns, and the recipe that it proposes is run as well: its step stands beside the
forecast, and beside that of a plan that has read the run at once too, which shows what the roles cost each other. Cores that other
work had meanwhile are counted: it needs idle ones.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import claim, core_seconds, paired_ratio, spread, write_report


@dataclass(frozen=True)
class Shape:
    """A Llama, and how long it is measured: less of the larger ones, so that all take twenty minutes."""

    width: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    prompts: int
    """A tick, of eight responses each."""
    ticks: int
    """That are timed."""


SHAPES = {
    "0.5M": Shape(128, 352, 3, 4, 2, prompts=4, ticks=12),
    "3M": Shape(256, 704, 4, 4, 2, prompts=4, ticks=12),
    "12M": Shape(384, 1056, 7, 6, 2, prompts=2, ticks=10),
    "50M": Shape(512, 1408, 17, 8, 4, prompts=2, ticks=6),
    "135M": Shape(576, 1536, 38, 9, 3, prompts=1, ticks=6),
}
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
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", help="write the report here")
    parser.add_argument("--picture", type=Path, help="draw the speed-ups here (matplotlib)")
    args = parser.parse_args()
    results, claims = {}, []
    for name in args.shapes:
        with tempfile.TemporaryDirectory() as folder:
            found = results[name] = measure(name, Path(folder), args.rounds)
        planned, speed_up = found["planned"], found["speed_up"]
        print(
            f"{name}: {', '.join(f'{ratio:.2f} of {arm}' for arm, ratio in speed_up.items())}; theory {found['theory']:.2f}; plan: "
            f"{planned['plan']}, {planned['forecast_s']:.3g} s, measured {planned['step_s']['median']:.3g} s ({planned['off']:+.0%}); "
            f"having read the run at once {found['informed']['plan']}, {found['informed']['forecast_s']:.3g} s; "
            f"{found['others']:.2f} cores at other work",
            flush=True,
        )
        claims.append(claim(f"{name}: measured step off the plan's", abs(planned["off"]), PLANNED, at_least=False))
        write_report(args.json, results, claims)  # what is measured is kept
    if args.picture:
        draw(results, args.picture)


def measure(name: str, folder: Path, rounds: int) -> dict[str, Any]:
    """All runs of one shape."""
    shape = SHAPES[name]
    model = random_model(shape, folder / "model")
    runs: dict[str, list[dict[str, Any]]] = {arm: [] for arm in [*ARMS, "planned"]}
    plan: dict[str, Any] = {}
    informed: dict[str, Any] = {}
    for number in range(rounds):
        for arm, settings in ARMS.items():
            runs[arm].append(timed("tiny", folder / f"{number} {arm}", model, settings, shape))
        if not plan:
            plan = proposed(folder / "plan.toml", [folder / f"0 {arm}" for arm in (EACH, BOTH)])
            informed = proposed(folder / "informed.toml", [folder / f"0 {arm}" for arm in ARMS])
        runs["planned"].append(timed(str(folder / "plan.toml"), folder / f"{number}_planned", model, {}, shape))
        for arm, several in runs.items():
            print(f"  {name}, round {number + 1}, {arm}: {several[-1]['median']:.3f} s a tick", flush=True)
    step = {arm: [run["median"] for run in several] for arm, several in runs.items()}
    generator, trainer = (
        spread([run[role] for run in runs[EACH]])["median"] for role in ("time/generator_s", "time/trainer_s")
    )
    measured = spread(step["planned"])
    return {
        "runs": runs,
        "generator_s": generator,
        "trainer_s": trainer,
        "theory": (generator + trainer) / max(generator, trainer),
        "speed_up": {arm: paired_ratio(step[EACH], step[arm])["median"] for arm in (ASYNCHRONOUS, BOTH)},
        "others": spread([run["others"] for several in runs.values() for run in several])["median"],
        "planned": {**plan, "step_s": measured, "off": measured["median"] / plan["forecast_s"] - 1},
        "informed": informed,
    }


def proposed(path: Path, runs: list[Path]) -> dict[str, Any]:
    """What ``llamarl plan`` proposes on reading runs: its words and its forecast of a step. Its recipe goes to ``path``."""
    command = [sys.executable, "-m", "llamarl.cli.main", "plan", str(runs[0]), "--max-segments", "1"]
    command += [word for run in runs for word in ("--fit", str(run))]
    told = subprocess.run([*command, "--recipe", str(path)], check=True, capture_output=True, text=True, timeout=600)
    recipe = path.read_text()
    forecast = re.search(r"forecast ([\d.]+) s a step", recipe)
    wrote = re.search(r"wrote .*?: (.*?), the plan marked", told.stdout)
    assert forecast and wrote, told.stdout
    threads = [tomllib.loads(recipe)[role]["threads"] for role in ("generator", "trainer")]
    return {
        "plan": f"{wrote[1]}, {threads[0]} + {threads[1]} threads",
        "forecast_s": float(forecast[1]),
        "told": told.stdout.replace(str(path.parent), "RUNS"),
    }


def timed(recipe: str, run: Path, model: Path, settings: dict[str, Any], shape: Shape) -> dict[str, Any]:
    """One run: its timed ticks, and the cores that other work had meanwhile."""
    every = {
        "run.dir": json.dumps(str(run)),
        "run.num_ticks": WARM_UP + shape.ticks + LEFT_OUT,
        "model.path": json.dumps(str(model)),
        "schedule.prompts_per_step": shape.prompts,
        "generator.group_size": 8,
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
    begun, at_work, own = time.perf_counter(), core_seconds()[0], _children_s()
    subprocess.run([sys.executable, "-m", "llamarl.cli.main", "train", recipe, *words], check=True, timeout=3600)
    others = core_seconds()[0] - at_work - (_children_s() - own)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = rows[WARM_UP : WARM_UP + shape.ticks]
    keys = ("time/generator_s", "time/trainer_s", "time/reward_s", "response/length_mean")
    return {
        "step_s": [row["time/step_s"] for row in rows],
        "median": spread([row["time/step_s"] for row in rows])["median"],
        **{key: spread([row[key] for row in rows])["median"] for key in keys},
        "others": others / (time.perf_counter() - begun),
    }


def _children_s() -> float:
    """Processor seconds of all processes that were begun here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def random_model(shape: Shape, folder: Path) -> Path:
    """A folder with a Llama model of that shape, random weights, and the bundled model's tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from llamarl.models.folders import resolve_model_path

    tiny = resolve_model_path("bundled:tiny")
    own = json.loads((tiny / "config.json").read_text())
    config = LlamaConfig(
        vocab_size=own["vocab_size"], hidden_size=shape.width, intermediate_size=shape.inner,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, max_position_embeddings=256, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=own["eos_token_id"], pad_token_id=own["pad_token_id"],
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    for file in tiny.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


def draw(results: dict[str, Any], path: Path) -> None:
    import matplotlib.pyplot as plt

    names = list(results)
    figure, (speed, foretold) = plt.subplots(1, 2, figsize=(10, 3.5))
    speed.plot(names, [results[name]["theory"] for name in names], "k--", label="theory: (G + T) / max(G, T)")
    for arm, mark in ((ASYNCHRONOUS, "o-"), (BOTH, "s-")):
        speed.plot(names, [results[name]["speed_up"][arm] for name in names], mark, label=arm)
    speed.axhline(1, color="grey", lw=0.5)
    speed.set_ylabel("times as fast as in turns, a core each")
    speed.legend(fontsize=7)
    for kind, mark, what in (("planned", "o", "read runs in turns"), ("informed", "x", "read the run at once too")):
        same = [name for name in names if results[name][kind]["plan"] == results[name]["planned"]["plan"]]
        steps = [results[name]["planned"]["step_s"]["median"] / results[name][kind]["forecast_s"] for name in same]
        foretold.plot(same, steps, mark, label=f"plan that {what}")
    foretold.legend(fontsize=7)
    foretold.axhspan(1 - PLANNED, 1 + PLANNED, color="grey", alpha=0.2)
    foretold.axhline(1, color="grey", lw=0.5)
    foretold.set_ylabel("measured step / planned")
    foretold.set_ylim(bottom=0)
    for axes in (speed, foretold):
        axes.set_xlabel("parameters")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
