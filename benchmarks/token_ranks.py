"""Prefill of a long prompt on two ranks: steps cut by tokens (``generator.cp = 2``) beside layers cut by heads (``generator.tp = 2``).

    python benchmarks/token_ranks.py --json OUT

Two processes on this machine's cores, one thread each, over gloo. Both engines live in the same two processes; in each round each of
them prefills the same prompt once, by turns (tp, cp, tp, cp, ...), up to its first token. Reported are both times, cp's by tp's round by
round, and the bytes that a rank sends, counted from the sizes: two sums a layer of all tokens, or two exchanges a layer of a part of them.
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
from harness import claim, join_ranks, paired_ratio, run_ranks, spread, write_report
from transformers import LlamaConfig, LlamaForCausalLM

from llamarl.engine.config import EngineConfig
from llamarl.engine.engine import NativeEngine
from llamarl.engine.sequence import SamplingParams, Sequence
from llamarl.models.parallel import make_layout

SIZES: dict[str, Any] = {
    "vocab_size": 1024, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 4,
}  # fmt: skip
RANKS = 2
STEP_TOKENS = 1024


def rank(number: int, num_ranks: int, out: str, tokens: int, rounds: int) -> None:
    join_ranks(number, num_ranks, out)
    config = EngineConfig(max_batch_tokens=STEP_TOKENS, max_sequences=1, block_size=16)
    engines = {}
    for axis in ("tp", "cp"):
        layout = make_layout(fsdp=1, **{"tp": 1, axis: RANKS}, device="cpu", keys=("dp", "tp", "pp", "cp"))  # type: ignore[arg-type]
        engines[axis] = NativeEngine(Path(out) / "model", config, eos_token_ids=(), layout=layout)
    prompt = [3 + (7 * k + k * k) % 1000 for k in range(tokens)]
    times: dict[str, list[float]] = {"tp": [], "cp": []}
    drawn = set()
    for _ in range(rounds + 1):  # the first is a warm-up
        for axis, engine in engines.items():
            params = SamplingParams(max_new_tokens=1, temperature=0.0)
            sequence = Sequence(prompt_index=0, sample_index=0, prompt_tokens=prompt, params=params, seed=0)
            engine.add([sequence])
            dist.barrier()
            begun = time.monotonic()
            while engine.has_work:
                engine.step()
            times[axis].append(time.monotonic() - begun)
            drawn.add(sequence.tokens[0])
    assert len(drawn) == 1, f"the engines drew different tokens: {drawn}"
    Path(out, f"{number}.json").write_text(json.dumps({axis: found[1:] for axis, found in times.items()}))
    dist.destroy_process_group()


def measure(tokens: int, rounds: int) -> dict[str, list[float]]:
    """By axis: seconds of each round, of the slower rank."""
    with tempfile.TemporaryDirectory() as out:
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**SIZES, max_position_embeddings=2 * tokens)).save_pretrained(Path(out) / "model")
        found = run_ranks(rank, RANKS, out, tokens, rounds, preload=["llamarl.engine.engine"], timeout_s=550)
    return {axis: [max(pair) for pair in zip(*(of[axis] for of in found), strict=True)] for axis in ("tp", "cp")}


def sent_bytes(tokens: int) -> dict[str, float]:
    """By axis: float32 bytes that one rank sends for the prompt; a sum is counted as a ring's."""
    head = SIZES["hidden_size"] // SIZES["num_attention_heads"]
    layers, rest = SIZES["num_hidden_layers"], (RANKS - 1) / RANKS
    exchanged = (2 * SIZES["num_attention_heads"] + 2 * SIZES["num_key_value_heads"]) * head
    return {
        "tp": layers * 2 * 2 * rest * tokens * SIZES["hidden_size"] * 4,
        "cp": layers * rest * tokens / RANKS * exchanged * 4,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the report here")
    parser.add_argument("--tokens", type=int, default=4096, help="of the prompt")
    parser.add_argument("--rounds", type=int, default=6)
    args = parser.parse_args()
    times, sent = measure(args.tokens, args.rounds), sent_bytes(args.tokens)
    ratio = paired_ratio(times["cp"], times["tp"])
    for axis in ("tp", "cp"):
        print(f"{axis} {RANKS}: {spread(times[axis])['median']:.3f} s, {sent[axis] / 1e6:.0f} MB sent by a rank")
    print(f"cp by tp, round by round: {ratio['median']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})")
    results = {
        "tokens": args.tokens, "sizes": SIZES, "step_tokens": STEP_TOKENS, "ratio": ratio, "sent_bytes": sent,
        **{axis: spread(found) for axis, found in times.items()},
    }  # fmt: skip
    write_report(args.json, results, [claim("cp's prefill by tp's", ratio["median"], 1.0, at_least=False)])


if __name__ == "__main__":
    main()
