"""How long a pipeline stands still: the trainer's own schedule and transfers, between stages whose passes take a set time.

    python benchmarks/pipeline_bubble.py --json OUT

Each stage is a process. Its forward pass sleeps, its backward pass sleeps twice as long, so stages do not take cores from each other.
What share of the time from the first pass's begin to the last one's end no pass was under way, over all stages, is compared with
(p - 1) / (m + p - 1). Passes are timed, so a sleep that is too long counts as work.
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
from torch import Tensor

from llamarl.models.parallel import make_layout
from llamarl.trainer.pipeline import Links, run_stage, schedule

CASES = ((2, 2), (2, 8), (4, 4), (4, 8), (4, 16), (8, 16))
"""Stages, micro-batches."""


_busy: list[float] = []
"""Seconds of this stage's passes."""
_kept: list[int] = [0]
"""Micro-batches that wait for their backward pass, after each pass."""


def _pass(seconds: float) -> None:
    begun = time.monotonic()
    time.sleep(seconds)
    _busy.append(time.monotonic() - begun)


class _Slow(torch.autograd.Function):
    """Takes its time, and twice that backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        _pass(seconds)
        _kept.append(_kept[-1] + 1)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        _pass(2 * ctx.seconds)
        _kept.append(_kept[-1] - 1)
        return grad, torch.zeros(()), None


def stage(rank: int, num_stages: int, out: str, num_microbatches: int, seconds: float, width: int, rounds: int) -> None:
    join_ranks(rank, num_stages, out)
    layout = make_layout(fsdp=1, tp=1, pp=num_stages, device="cpu", keys=("fsdp", "tp", "pp"))
    links = Links(layout, width=width, dtype=torch.float32, device=torch.device("cpu"))
    tokens = [16 + i % 5 for i in range(num_microbatches)]  # no two neighbours of one size
    weight = torch.zeros((), requires_grad=True)

    def forward(i: int, received: Tensor | None) -> Tensor:
        x = torch.zeros(1, tokens[i], width, requires_grad=True) if received is None else received
        y: Tensor = _Slow.apply(x, weight, seconds)
        return y.sum() if layout.is_last_stage else y

    spans = []
    for _ in range(rounds + 1):  # the first is a warm-up
        dist.barrier()
        _busy.clear()
        begun = time.monotonic()
        links.begin(tokens, trains=True)
        run_stage(schedule(layout.pp_rank, num_stages, num_microbatches), links, forward)
        spans.append((begun, time.monotonic(), sum(_busy)))
    Path(out, f"{rank}.json").write_text(json.dumps({"spans": spans[1:], "most": max(_kept)}))
    dist.destroy_process_group()


def measure(num_stages: int, num_microbatches: int, seconds: float, width: int, rounds: int) -> dict[str, Any]:
    """Idle share of each round, and the most micro-batches that each stage kept."""
    with tempfile.TemporaryDirectory() as out:
        sizes = (num_microbatches, seconds, width, rounds)
        found = run_ranks(stage, num_stages, out, *sizes, preload=["llamarl.trainer.pipeline"])
    shares = []
    for round_number in range(rounds):
        begun = min(one["spans"][round_number][0] for one in found)
        ended = max(one["spans"][round_number][1] for one in found)
        busy = sum(one["spans"][round_number][2] for one in found)
        shares.append(1 - busy / (num_stages * (ended - begun)))
    return {
        "idle": spread(shares),
        "theory": (num_stages - 1) / (num_microbatches + num_stages - 1),
        "kept": [one["most"] for one in found],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the report here")
    parser.add_argument("--seconds", type=float, default=0.15, help="of a forward pass")
    parser.add_argument("--width", type=int, default=512, help="features of a hidden state")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    results: dict[str, Any] = {"seconds": args.seconds, "width": args.width}
    claims = []
    for num_stages, num_microbatches in CASES:
        found = measure(num_stages, num_microbatches, args.seconds, args.width, args.rounds)
        results[f"{num_stages} stages, {num_microbatches} micro-batches"] = found
        idle, theory = found["idle"]["median"], found["theory"]
        print(f"p = {num_stages}, m = {num_microbatches:2}: idle {idle:.4f}, theory {theory:.4f}, kept {found['kept']}")
        claims.append(
            claim(
                f"p = {num_stages}, m = {num_microbatches}: idle share against theory, relative",
                abs(idle / theory - 1),
                0.05,
                at_least=False,
            )
        )
        expected = [min(num_stages - s, num_microbatches) for s in range(num_stages)]
        claims.append(
            claim(f"p = {num_stages}, m = {num_microbatches}: micro-batches kept beyond p - stage",
                  sum(a - b for a, b in zip(found["kept"], expected, strict=True)), 0, at_least=False)
        )  # fmt: skip
    write_report(args.json, results, claims)


if __name__ == "__main__":
    main()
