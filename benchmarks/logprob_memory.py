"""Peak memory of log-probs and their backward pass: chunks of hidden states against the whole logits.

    python benchmarks/logprob_memory.py --json OUT          # 8,192 tokens, a vocabulary of 131,072

Each case runs in a process of its own; its peak resident memory is counted from just before the call. The whole way runs
at ``--plain-tokens``, fewer than the chunked way where memory is short: its bytes a token are what matters.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
from typing import Any

import torch
from harness import claim, write_report

from llamarl.trainer.logprobs import LogitTransform, token_logprobs

MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the report here")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--plain-tokens", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=131072)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--chunk", type=int, default=256, help="trainer.logprob_chunk_tokens")
    args = parser.parse_args()
    cases = {
        "chunked": ("chunked", args.tokens),
        "chunked, a quarter of the tokens": ("chunked", args.tokens // 4),
        "plain": ("plain", args.plain_tokens),
    }
    spawn = multiprocessing.get_context("spawn")
    results: dict[str, Any] = {"tokens_times_vocabulary_mib": 4 * args.tokens * args.vocabulary / MIB}
    for name, (kind, tokens) in cases.items():
        with spawn.Pool(1) as pool:
            peak = pool.apply_async(peak_bytes, (kind, tokens, args.vocabulary, args.hidden, args.chunk)).get(
                timeout=600
            )
        results[name] = {"tokens": tokens, "peak_mib": peak / MIB, "bytes_per_token": peak / tokens}
        print(f"{name:34} {tokens:6} tokens  {peak / MIB:8.0f} MiB above the inputs")
    plain_at_full = results["plain"]["bytes_per_token"] * args.tokens
    chunked, quarter = (results[name]["peak_mib"] * MIB for name in list(cases)[:2])
    claims = [
        claim(
            f"peak of the plain way at {args.tokens} tokens (by its bytes a token) over ours",
            plain_at_full / chunked,
            10,
        ),
        claim("our peak at four times the tokens over our peak", chunked / quarter, 1.5, at_least=False),
    ]
    write_report(args.json, results, claims)


def peak_bytes(kind: str, tokens: int, vocabulary: int, hidden_size: int, chunk: int) -> int:
    """Peak resident memory of forward and backward, over what the inputs and the weight's gradient need."""
    torch.set_num_threads(1)
    hidden = torch.randn(tokens, hidden_size, requires_grad=True)
    weight = torch.randn(vocabulary, hidden_size, requires_grad=True)
    targets = torch.randint(0, vocabulary, (tokens,))
    hidden.grad, weight.grad = torch.ones_like(hidden), torch.ones_like(weight)
    (torch.randn(256, 256) @ torch.randn(256, 256)).sum()  # the libraries' own buffers
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if kind == "chunked":
        logprobs, _ = token_logprobs(hidden, weight, None, targets, LogitTransform(), chunk_tokens=chunk)
    else:
        log_p = torch.log_softmax(hidden @ weight.T, dim=-1)
        logprobs = log_p.gather(-1, targets[:, None])
        del log_p
    logprobs.sum().backward()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024


if __name__ == "__main__":
    main()
