"""How well an engine's pipeline stages overlap: its own scheduler, waves and transfers, between stages whose passes take a set time.

    python benchmarks/engine_stages.py --json OUT

Each stage is a process with its part of a tiny model, and sleeps besides in each pass, so stages do not take cores from each other.
Equal sequences are decoded to equal lengths: W waves, each some of the sequences, go through p stages. The share of the time in
which no pass was under way, over all stages, is compared with (p - 1) / (W + p - 1), the filling and the emptying of the pipeline.
An engine that waited for all draws before it went on would stand still for 1 - 1 / p, or with p micro-batches a step for
(p - 1) / (2 p - 1). Passes are timed, so a sleep that is too long counts as work.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import claim, join_ranks, run_ranks, spread, write_report
from transformers import LlamaConfig, LlamaForCausalLM

from llamarl.engine.engine import NativeEngine
from llamarl.engine.scheduler import Chunk
from llamarl.engine.sequence import SamplingParams, Sequence
from llamarl.models.parallel import make_layout
from llamarl.settings.engine import EngineConfig

STAGES = (2, 3, 4)
SEQUENCES_OF_A_STAGE = 3
TOKENS = 16


def save_model(folder: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def stage(rank: int, num_stages: int, out: str, seconds: float, rounds: int) -> None:
    join_ranks(rank, num_stages, out)
    layout = make_layout(fsdp=1, tp=1, pp=num_stages, device="cpu", keys=("dp", "tp", "pp"))
    engine = NativeEngine(Path(out) / "model", EngineConfig(), eos_token_ids=(), layout=layout)
    slept: list[float] = []
    compute = engine._runner._forward

    def slow(chunks: list[Chunk], /) -> Any:
        found = compute(chunks)
        begun = time.monotonic()
        time.sleep(seconds)
        slept.append(time.monotonic() - begun)
        return found

    engine._runner._forward = slow  # type: ignore[method-assign]
    told = []
    for _ in range(rounds + 1):  # the first is a warm-up
        dist.barrier()
        slept.clear()
        params = SamplingParams(max_new_tokens=TOKENS)
        engine.add(
            [
                Sequence(prompt_index=i, sample_index=0, prompt_tokens=[3 + i], params=params, seed=i)
                for i in range(SEQUENCES_OF_A_STAGE * num_stages)
            ]
        )
        begun = time.monotonic()
        while engine.has_work:
            engine.step()
        told.append((begun, time.monotonic(), sum(slept), len(slept)))
    Path(out, f"{rank}.json").write_text(json.dumps(told[1:]))
    dist.destroy_process_group()


def measure(num_stages: int, seconds: float, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as out:
        save_model(Path(out) / "model")
        found = run_ranks(stage, num_stages, out, seconds, rounds, preload=["llamarl.engine.engine"])
    shares = []
    for of_round in zip(*found, strict=True):
        span = max(end for _, end, _, _ in of_round) - min(begun for begun, _, _, _ in of_round)
        shares.append(1 - sum(busy for _, _, busy, _ in of_round) / (num_stages * span))
    waves = found[0][0][3]
    return {"idle": spread(shares), "waves": waves, "theory": (num_stages - 1) / (waves + num_stages - 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the report here")
    parser.add_argument("--seconds", type=float, default=0.3, help="of a stage's pass")
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    results: dict[str, Any] = {"seconds": args.seconds, "tokens": TOKENS}
    claims = []
    for num_stages in STAGES:
        found = measure(num_stages, args.seconds, args.rounds)
        results[f"{num_stages} stages"] = found
        idle, theory = found["idle"]["median"], found["theory"]
        print(f"p = {num_stages}, {found['waves']} waves: idle {idle:.4f}, theory {theory:.4f}")
        assert found["waves"] == TOKENS * num_stages
        claims.append(
            claim(f"p = {num_stages}: idle share beyond filling and emptying", idle - theory, 0.05, at_least=False)
        )
    write_report(args.json, results, claims)


if __name__ == "__main__":
    main()
