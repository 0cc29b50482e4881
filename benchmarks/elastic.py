"""What shards cost (``generator.shards``): V batches one after the other on one replica, against one batch of all prompts.

    python benchmarks/elastic.py --json elastic.json

The generator alone, without trainer and hand-over, one thread: ticks of the same prompts in turn with one shard and with V, A B A B,
after a tick of each that is not timed. A tick ends when all responses have (``max_segments`` 1), so both sample the same prompts;
rounding aside also the same tokens, and what is compared is seconds a token. Two models:

    bundled:tiny   16 prompts of 8 responses, as its recipe has it
    135m           SmolLM2-135M's shape with random weights: 8 prompts of 8 responses of 16 tokens
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import paired_ratio, spread, write_report
from train_step import random_smollm2

from llamarl.config import RunConfig, validate
from llamarl.controller.graph import llamarl_graph
from llamarl.determinism import pin
from llamarl.executors.base import ExecutorContext
from llamarl.executors.generator import GeneratorExecutor
from llamarl.models.folders import resolve_model_path

TINY, LARGE = "bundled:tiny", "135m"
_WORK = {TINY: (16, 80), LARGE: (8, 16)}
"""Model -> prompts a tick, longest response."""
_GROUP = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, nargs="+", default=[2, 4, 8], help="each against one shard")
    parser.add_argument("--rounds", type=int, default=12, help="of bundled:tiny, each a tick of either")
    parser.add_argument("--rounds-135m", type=int, default=10, help="the same of the other, of 4 shards alone; 0: none")
    parser.add_argument("--json", metavar="OUT")
    args = parser.parse_args()
    pin(1)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for shards in args.shards:
            results[f"{TINY}, {shards} shards"] = compare(TINY, resolve_model_path(TINY), shards, args.rounds)
        if args.rounds_135m:
            folder = _large(Path(temporary))
            results[f"{LARGE}, 4 shards"] = compare(LARGE, folder, 4, args.rounds_135m)
    for name, found in results.items():
        ratio, seconds = found["ratio"], found["seconds_per_1000_tokens"]
        print(
            f"{name}: {ratio['median']:.3f} times as long (95 %: {ratio['low']:.3f} to {ratio['high']:.3f}); s a 1,000 tokens "
            f"{seconds['one']['median']:.4f} ({seconds['one']['min']:.4f} to {seconds['one']['max']:.4f}) and "
            f"{seconds['shards']['median']:.4f} ({seconds['shards']['min']:.4f} to {seconds['shards']['max']:.4f})"
        )
    write_report(args.json, results, [])


def compare(model: str, folder: Path, shards: int, rounds: int) -> dict[str, Any]:
    """Seconds a 1,000 tokens with one shard and with several, round by round."""
    both = {"one": _generator(model, folder, 1), "shards": _generator(model, folder, shards)}
    found: dict[str, list[float]] = {name: [] for name in both}
    for tick in range(rounds + 1):
        for name, generator in both.items():
            started = time.perf_counter()
            result = generator.step(tick, {})
            took = time.perf_counter() - started
            tokens = sum(share["tokens/generated"] for share in result.share_metrics)
            if tick:
                found[name].append(1000 * took / tokens)
    for generator in both.values():
        generator.close()
    return {
        "rounds": rounds,
        "seconds_per_1000_tokens": {name: spread(values) for name, values in found.items()},
        "ratio": paired_ratio(found["shards"], found["one"]),
    }


def _generator(model: str, folder: Path, shards: int) -> GeneratorExecutor:
    config = _recipe(model, folder, shards)
    writes = llamarl_graph(config).outputs["generator"]
    context = ExecutorContext(
        name="generator", rank=0, num_ranks=1, device="cpu", run_dir=None, seed=0, writes=writes
    )  # reads no weights: those of the folder serve
    generator = GeneratorExecutor(config, context)
    generator.setup()
    return generator


def _recipe(model: str, folder: Path, shards: int) -> RunConfig:
    prompts, longest = _WORK[model]
    return validate(
        {
            "model": {"path": str(folder)},
            "task": {"name": "steps"},
            "schedule": {"prompts_per_step": prompts},
            "generator": {
                "group_size": _GROUP,
                "shards": shards,
                "threads": 1,
                "device": "cpu",
                "sampling": {"max_new_tokens": longest},
                "engine": {"kv_cache_bytes": 1 << 28},
            },
        }
    )


def _large(temporary: Path) -> Path:
    """Its shape, and the tiny model's tokenizer: what the tokens mean does not change how long they take."""
    folder = random_smollm2(temporary)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(resolve_model_path(TINY) / name, folder / name)
    return folder


if __name__ == "__main__":
    main()
