"""Memory of generator ranks, measured, against the planner's forecast of the same model and layout.

    python benchmarks/generator_memory.py --json generator_memory.json       # four layouts, a minute or two on two cores

Every rank is a process over gloo that holds its part of a Llama-shaped random model in the native engine and samples equal responses
to groups that share their prompts. Weights are its parameters and what the engine derives from them, the cache is its blocks that were
in use at most, and the workspace is the peak of what steps made besides and had not yet freed (``memory_forecast.LiveBytes``).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import claim, join_ranks, run_ranks, write_report
from memory_forecast import MODEL, LiveBytes, numel
from transformers import AutoConfig, AutoModelForCausalLM

from llamarl.config import validate
from llamarl.engine.engine import NativeEngine
from llamarl.engine.sequence import SamplingParams, Sequence
from llamarl.executors.generator_ranks import generator_layout, replicas_of
from llamarl.forecast.costs import GeneratorLayout
from llamarl.forecast.hardware import find_hardware
from llamarl.forecast.lengths import constant
from llamarl.forecast.memory import generator_memory
from llamarl.forecast.model import spec_from_config
from llamarl.forecast.ticks import GeneratorDemand
from llamarl.settings.engine import EngineConfig

GROUPS, GROUP_SIZE, BLOCK = 16, 4, 16
WORKLOADS = {"prompts": (128, 64), "responses": (16, 112)}
"""Tokens of prompt and response: the workspace peaks while prompts are computed, or while tokens are sampled."""
CASES = [GeneratorLayout(tp=tp) for tp in (1, 2, 4, 8)]
"""The last has more ranks than key-value heads."""


def sequences(prompt: int, response: int) -> list[Sequence]:
    params = SamplingParams(max_new_tokens=response)
    rng = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, 4000, (GROUPS, prompt), generator=rng).tolist()
    return [
        Sequence(prompt_index=i, sample_index=j, prompt_tokens=tokens, params=params, seed=100 * i + j)
        for i, tokens in enumerate(prompts)
        for j in range(GROUP_SIZE)
    ]


def measure_rank(folder: str, layout: GeneratorLayout, lengths: tuple[int, int]) -> dict[str, float]:
    """One rank's bytes in a tick of whole responses, after one that came before."""
    config = validate({"model": {"path": folder}, "generator": {"tp": layout.tp, "device": "cpu"}})
    (replica,) = replicas_of(config, layout.tp)
    place = generator_layout(config, "cpu", replica)
    engine = NativeEngine(
        folder,
        EngineConfig(block_size=BLOCK, kv_cache_bytes=1 << 28, max_sequences=GROUPS * GROUP_SIZE),
        eos_token_ids=(),
        layout=place,
    )
    engine.add(sequences(*lengths))
    while engine.has_work:
        engine.step()
    engine.stats()
    engine.add(sequences(*lengths))
    held = [*engine.parameters_for_sync().values(), *engine._runner.model.buffers(), engine._runner._cache]
    counted = LiveBytes(held)
    before = counted.live
    with counted:
        while engine.has_work:
            engine.step()
    cache = engine.stats()["kv_bytes_used_max"]
    parameters = numel(list(engine.parameters_for_sync().values()))
    derived = sum(linear.drop_served() for linear in engine.served_linears)
    found = {
        "weights": float(parameters + derived),
        "kv_cache": float(cache),
        "workspace": float(counted.peak - before),
    }
    return {**found, "sum": sum(found.values())}


def _rank(rank: int, world: int, out: str, folder: str, layout: GeneratorLayout, lengths: tuple[int, int]) -> None:
    join_ranks(rank, world, out)
    Path(out, f"{rank}.json").write_text(json.dumps(measure_rank(folder, layout, lengths)))
    if world > 1:
        dist.destroy_process_group()


def measure(folder: str, layout: GeneratorLayout, lengths: tuple[int, int]) -> list[dict[str, float]]:
    """Bytes of every rank."""
    preload = ["llamarl.engine.engine", "llamarl.forecast.memory"]
    with tempfile.TemporaryDirectory() as out:
        return run_ranks(_rank, layout.tp, out, folder, layout, lengths, preload=preload)


def forecast(layout: GeneratorLayout, lengths: tuple[int, int], config: Mapping[str, Any] = MODEL) -> dict[str, float]:
    """The planner's, of the fullest rank, in the parts that are measured."""
    hardware = find_hardware("h100-sxm")
    device = dataclasses.replace(
        hardware.device, weight_precisions=("fp32",), matmul_flops={"fp32": 1e12}
    )  # as on processors: float32, whose matrices are packed
    hardware = dataclasses.replace(hardware, device=device)
    demand = GeneratorDemand(
        lengths=constant(lengths[1]),
        prompt_tokens=lengths[0],
        group_size=GROUP_SIZE,
        sequences=GROUPS * GROUP_SIZE,
        total_sequences=GROUPS * GROUP_SIZE,
        slots=GROUPS * GROUP_SIZE,
    )
    layout = dataclasses.replace(layout, precision="fp32")
    found = dict(generator_memory(hardware, spec_from_config(config, "small"), layout, demand))
    return {**found, "sum": sum(found.values())}


def name_of(layout: GeneratorLayout) -> str:
    return f"tp {layout.tp}" if layout.tp > 1 else "one"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of layouts")
    args = parser.parse_args()
    torch.manual_seed(0)
    parts = ("weights", "kv_cache", "workspace", "sum")
    results, claims = [], []
    with tempfile.TemporaryDirectory() as folder:
        described = AutoConfig.for_model(**MODEL)
        AutoModelForCausalLM.from_config(described, dtype=torch.float32).save_pretrained(folder)
        print(f"{'MB of the fullest rank: measured / forecast':48}" + "".join(f"{part:>16}" for part in parts))
        for number, layout in enumerate(CASES):
            if args.only and number not in args.only:
                continue
            for workload, lengths in WORKLOADS.items():
                ranks = measure(folder, layout, lengths)
                fullest = max(ranks, key=lambda found: found["sum"])
                said = forecast(layout, lengths)
                name = f"{name_of(layout)}, long {workload}"
                cells = "".join(f"{fullest[part] / 1e6:>9.2f}/{said[part] / 1e6:<6.2f}" for part in parts)
                print(f"{name:48}{cells}", flush=True)
                results.append(
                    {"layout": dataclasses.asdict(layout), "long": workload, "ranks": ranks, "forecast": said}
                )
                for part in parts:
                    off = abs(said[part] / fullest[part] - 1)
                    claims.append(claim(f"{name}: {part} off by", off, 0.10, at_least=False))
    write_report(args.json, {"layouts": results}, [c for c in claims if args.json or not c["ok"]])


if __name__ == "__main__":
    main()
