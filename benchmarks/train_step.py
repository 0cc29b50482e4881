"""Tokens a second of one optimizer step, llamarl against a plain transformers step on the same samples and cores.

    python benchmarks/train_step.py --json OUT                 # SmolLM2-135M's shape with random weights
    python benchmarks/train_step.py --model path/to/folder

The plain step is what a GRPO loop on ``transformers`` does: prompts padded on the left, responses on the right,
micro-batches in the order of the samples, logits of all response positions, log-softmax, AdamW. Both sides compute the
same AIPO gradient in float32; the two alternate (A B A B), each side's first step is warm-up. The bound is the machine's
own rate of a large matrix product, measured in the same run: ``torch.mm``'s (MKL), and oneDNN's, which the trainer uses and
which is twice as fast on some processors.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from harness import claim, spread, write_report
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from llamarl.models.onednn import linear
from llamarl.settings.algorithms import AlgorithmConfig
from llamarl.settings.trainer import OptimizerConfig, TrainerConfig
from llamarl.trainer.step import Trainer
from llamarl.types import Group, Prompt, Response, Score

RHO = 4.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the report here")
    parser.add_argument("--model", help="Hugging Face folder; default: SmolLM2-135M's shape, random weights")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--micro-batch", type=int, default=8, help="responses in a plain micro-batch")
    parser.add_argument("--max-tokens", type=int, default=2048, help="llamarl's trainer.max_tokens_per_microbatch")
    parser.add_argument("--repeats", type=int, default=3, help="timed steps of each side")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(args.model) if args.model else random_smollm2(Path(temporary))
        groups = samples(args, LlamaConfig.from_pretrained(folder).vocab_size)
        ours, theirs = llamarl_step(folder, groups, args), plain_step(folder, groups, args)
        times: dict[str, list[float]] = {"llamarl": [], "plain": []}
        cpu: dict[str, list[float]] = {"llamarl": [], "plain": []}
        rates, fastest = [matmul_rate()], [matmul_rate(onednn_product)]
        ours(), theirs()
        for _ in range(args.repeats):
            for side, step in (("llamarl", ours), ("plain", theirs)):
                before = time.process_time()
                times[side].append(timed(step))
                cpu[side].append(time.process_time() - before)
            rates.append(matmul_rate())
            fastest.append(matmul_rate(onednn_product))
        flops = useful_flops(folder, groups)
        sharing = shared_prompt_gain(folder, args)
    tokens = sum(g.num_tokens for g in groups)
    medians = {side: statistics.median(values) for side, values in times.items()}
    rate, best = statistics.median(rates), max(statistics.median(rates), statistics.median(fastest))
    results = {
        "samples": len(groups) * args.group_size,
        "tokens": tokens,
        "response_tokens": sum(len(r.tokens) for g in groups for r in g.responses),
        "threads": args.threads,
        "seconds": {side: spread(values) for side, values in times.items()},
        "cpu_seconds": {side: spread(values) for side, values in cpu.items()},
        "tokens_per_s": {side: tokens / seconds for side, seconds in medians.items()},
        "matmul_flop_per_s": spread(rates),
        "onednn_matmul_flop_per_s": spread(fastest),
        "useful_flop": flops,
        "shared_prompt": sharing,
        "share_of_matmul_rate": {side: flops / seconds / rate for side, seconds in medians.items()},
        "share_of_fastest_matmul_rate": {side: flops / seconds / best for side, seconds in medians.items()},
    }
    for side in times:
        print(
            f"{side:8} {medians[side]:.2f} s ({statistics.median(cpu[side]):.2f} s of processor time)  {results['tokens_per_s'][side]:.0f} tokens/s"
            f"  {results['share_of_matmul_rate'][side]:.2f} of torch.mm's rate ({rate / 1e9:.0f} GFLOP/s), {flops / medians[side] / best:.2f} of the fastest ({best / 1e9:.0f})"
        )
    claims = [
        claim("tokens/s over a plain transformers step", medians["plain"] / medians["llamarl"], 1.8),
        claim("share of torch.mm's measured rate", results["share_of_matmul_rate"]["llamarl"], 0.55),
        claim("share of the fastest product's measured rate", results["share_of_fastest_matmul_rate"]["llamarl"], 0.55),
    ]
    write_report(args.json, results, claims)


def shared_prompt_gain(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Eight responses to one prompt of 512 tokens, with and without computing the prompt once."""
    shape = argparse.Namespace(
        **{**vars(args), "prompts": 1, "group_size": 8, "prompt_tokens": 512, "max_tokens": 8192}
    )
    groups = samples(shape, LlamaConfig.from_pretrained(folder).vocab_size)
    steps = {
        name: llamarl_step(folder, groups, shape, share_prompts=on) for name, on in (("shared", True), ("apart", False))
    }
    wall: dict[str, list[float]] = {name: [] for name in steps}
    cpu: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(args.repeats + 1):
        for name, step in steps.items():
            before = time.process_time()
            seconds = timed(step)
            if repeat:  # the first is warm-up
                wall[name].append(seconds)
                cpu[name].append(time.process_time() - before)
    gain = statistics.median(wall["apart"]) / statistics.median(wall["shared"])
    print(f"8 responses on a 512-token prompt: {gain:.2f} times as fast with the prompt computed once")
    return {
        "response_tokens": sum(len(r.tokens) for g in groups for r in g.responses),
        "seconds": {name: spread(values) for name, values in wall.items()},
        "cpu_seconds": {name: spread(values) for name, values in cpu.items()},
        "gain": gain,
    }


def random_smollm2(folder: Path) -> Path:
    """A folder of SmolLM2-135M's shape; speed does not depend on the values."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, rope_parameters={"rope_type": "default", "rope_theta": 1e5},
        rms_norm_eps=1e-5, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def samples(args: argparse.Namespace, vocabulary: int) -> list[Group]:
    """Groups with response lengths from a log-normal distribution, cut to 16 .. 512 tokens."""
    rng = np.random.default_rng(args.seed)
    groups = []
    for p in range(args.prompts):
        prompt = Prompt(index=p, tokens=rng.integers(3, vocabulary, args.prompt_tokens).astype(np.int32), text="")
        responses = []
        for s in range(args.group_size):
            n = int(np.clip(rng.lognormal(math.log(96), 0.8), 16, 512))
            responses.append(
                Response(
                    prompt_index=p,
                    sample_index=s,
                    tokens=rng.integers(3, vocabulary, n).astype(np.int32),
                    behavior_logprobs=np.full(n, -math.log(vocabulary), np.float32),
                    policy_versions=np.zeros(n, np.int32),
                    loss_mask=np.ones(n, bool),
                    text="",
                    finish_reason="stop",
                    outcome=Score(value=float(rng.random())),
                )  # fmt: skip
            )
        groups.append(Group(prompt=prompt, responses=tuple(responses)))
    return groups


def llamarl_step(
    folder: Path, groups: list[Group], args: argparse.Namespace, *, share_prompts: bool = True
) -> Callable[[], None]:
    trainer = Trainer(
        folder, TrainerConfig(max_tokens_per_microbatch=args.max_tokens, share_prompts=share_prompts, skip_zero_advantage=False), OptimizerConfig(lr=1e-6),
        AlgorithmConfig(rho=RHO), temperature=1.0,
    )  # fmt: skip

    def step() -> None:
        metrics = trainer.train(groups, trainer.policy_version)
        assert metrics["step/skipped"] == 0.0

    return step


def plain_step(
    folder: Path, groups: list[Group], args: argparse.Namespace, device: torch.device | str = "cpu"
) -> Callable[[], None]:
    """The same gradient as a user of ``transformers`` would write it; on a GPU with bfloat16 by autocast."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False).to(device)  # type: ignore[arg-type]
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0)
    half = torch.autocast("cuda", torch.bfloat16, enabled=torch.device(device).type == "cuda")
    rows = [(g.prompt.tokens, r, _advantage(g, r)) for g in groups for r in g.responses]
    total = sum(len(r.tokens) for _, r, _ in rows)

    def step() -> None:
        for start in range(0, len(rows), args.micro_batch):
            batch = rows[start : start + args.micro_batch]
            prompt_len, response_len = max(len(p) for p, _, _ in batch), max(len(r.tokens) for _, r, _ in batch)
            ids = torch.zeros(len(batch), prompt_len + response_len, dtype=torch.int64)
            mask = torch.zeros_like(ids)
            behavior, keep = torch.zeros(len(batch), response_len), torch.zeros(len(batch), response_len)
            for i, (prompt, response, _) in enumerate(batch):
                n = len(response.tokens)
                ids[i, prompt_len - len(prompt) : prompt_len] = torch.from_numpy(prompt)
                ids[i, prompt_len : prompt_len + n] = torch.from_numpy(response.tokens)
                mask[i, prompt_len - len(prompt) : prompt_len + n] = 1
                behavior[i, :n] = torch.from_numpy(response.behavior_logprobs)
                keep[i, :n] = 1.0
            ids, mask, behavior, keep = (t.to(device) for t in (ids, mask, behavior, keep))
            with half:
                out = model(ids, attention_mask=mask, logits_to_keep=response_len + 1, use_cache=False)
            logits = out.logits[:, :-1]
            logprobs = F.log_softmax(logits.float(), dim=-1).gather(-1, ids[:, prompt_len:, None]).squeeze(-1)
            weight = (logprobs - behavior).detach().exp().clamp(max=RHO)
            advantages = torch.tensor([a for _, _, a in batch], device=device)[:, None]
            (-(weight * advantages * logprobs * keep).sum() / total).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _advantage(group: Group, response: Response) -> float:
    values = [r.outcome.value for r in group.responses if isinstance(r.outcome, Score)]
    assert isinstance(response.outcome, Score)
    return response.outcome.value - sum(values) / len(values)


def useful_flops(folder: Path, groups: list[Group]) -> float:
    """Multiplications and additions that the gradient needs: no padding, no recomputation, prompts once a group."""
    config = LlamaConfig.from_pretrained(folder)
    width, layers, head = config.hidden_size, config.num_hidden_layers, config.head_dim or 0
    attention = 2 * config.num_attention_heads + 2 * (config.num_key_value_heads or 0)
    per_token = 2 * layers * width * (attention * head + 3 * config.intermediate_size)
    total = 0.0
    for group in groups:
        prompt = len(group.prompt.tokens)
        pairs, tokens = prompt * (prompt + 1) / 2, prompt
        for response in group.responses:
            n = len(response.tokens)
            pairs += (n - 1) * prompt + (n - 1) * n / 2
            tokens += n - 1
            total += 3 * n * 2 * width * config.vocab_size
        total += 3 * (tokens * per_token + pairs * 2 * 2 * layers * config.num_attention_heads * head)
    return total


def matmul_rate(product: Callable[[Tensor, Tensor], Tensor] = torch.mm, size: int = 2048) -> float:
    """Floating-point operations a second of a large float32 product, best of five."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    return 2 * size**3 / min(timed(lambda: product(a, b)) for _ in range(5))


def onednn_product(a: Tensor, b: Tensor) -> Tensor:
    with torch.no_grad():
        return linear(a, b)


def timed(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
