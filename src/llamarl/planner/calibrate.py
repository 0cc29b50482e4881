"""Measure this machine and fit the cost model to it.

    matmul, memory copy ─▶ peaks of a device      decode and train steps of the model ─▶ efficiencies and overheads

A device is what one rank computes on: a GPU, or one CPU core. The fit keeps the rooflines and changes constants alone, so a
calibrated plan extrapolates to other batch sizes, lengths and splits the way an uncalibrated one does. torch and
transformers are imported only when something is measured.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from llamarl.errors import PlanError
from llamarl.planner.costs import GeneratorLayout, decode_step_s
from llamarl.planner.hardware import Hardware, find_hardware, this_machine
from llamarl.planner.lengths import constant
from llamarl.planner.model_spec import ModelSpec, find_model
from llamarl.planner.training import TrainerDemand, TrainerLayout, trainer_tick

if TYPE_CHECKING:
    import torch

__all__ = ["Sample", "calibrate", "fit", "forecast_sample", "worst_error"]

_POOR = 0.5
"""A fit whose worst error is above this is measured once more, and then named as poor."""
_FITTED = {
    **dict.fromkeys(("matmul", "attention", "train_layer_overhead_s"), "fitted to measured training steps"),
    **dict.fromkeys(("decode_step_overhead_s", "decode_sequence_overhead_s"), "fitted to measured decode steps"),
    **dict.fromkeys(("memory", "decode_layer_overhead_s", "train_step_overhead_s"), "part of what was measured"),
}


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One measured step of one rank."""

    kind: str
    """``decode`` (one token for each of ``sequences``) or ``train`` (forward and backward of ``sequences``)."""
    sequences: int
    tokens: int
    """Context of each decoding sequence, or length of each training sequence."""
    seconds: float


def fit(peaks: Hardware, model: ModelSpec, samples: Sequence[Sample]) -> Hardware:
    """Constants that bring the cost model to the samples, in the least-squares sense.

    Training: one matmul efficiency and one host overhead a layer and pass. Decoding: a fixed overhead a step and one a sequence,
    on top of the roofline. All stay within their meaning (efficiency at most 1, overheads not negative).

    Args:
        peaks: Measured peaks; its efficiencies are replaced.

    Raises:
        PlanError: Fewer than two samples of a kind.
    """
    decode = [s for s in samples if s.kind == "decode"]
    train = [s for s in samples if s.kind == "train"]
    if len(decode) < 2 or len(train) < 2:
        raise PlanError(f"a fit needs 2 samples of decoding and 2 of training, got {len(decode)} and {len(train)}")
    hardware = peaks.with_efficiency(
        matmul=1.0, memory=1.0, attention=1.0, decode_layer_overhead_s=0.0, decode_step_overhead_s=0.0,
        decode_sequence_overhead_s=0.0, train_layer_overhead_s=0.0, train_step_overhead_s=0.0,
    )  # fmt: skip
    hardware = _fit_training(hardware, model, train)
    precision = hardware.device.train_precision
    base = [
        float(decode_step_s(hardware, model, GeneratorLayout(1, 1, precision), s.sequences, s.tokens)) for s in decode
    ]
    rest = np.array([s.seconds for s in decode]) - np.array(base)
    weight = 1.0 / np.array([s.seconds for s in decode])  # relative errors count alike
    counts = np.array([float(s.sequences) for s in decode])
    step, each = _non_negative_line(counts, rest, weight)
    fitted = hardware.with_efficiency(decode_step_overhead_s=step, decode_sequence_overhead_s=each)
    return replace(fitted, efficiency=replace(fitted.efficiency, sources={**fitted.efficiency.sources, **_FITTED}))


def forecast_sample(hardware: Hardware, model: ModelSpec, sample: Sample) -> float:
    """Seconds that the cost model gives for a measured step."""
    if sample.kind == "decode":
        layout = GeneratorLayout(1, 1, hardware.device.train_precision)
        return float(decode_step_s(hardware, model, layout, sample.sequences, sample.tokens))
    demand = TrainerDemand(lengths=constant(max(1, sample.tokens - 1)), prompt_tokens=1, sequences=sample.sequences)
    train = TrainerLayout(micro_batch=sample.sequences, recompute=False)
    return trainer_tick(hardware, model, train, demand).compute_s


def worst_error(hardware: Hardware, model: ModelSpec, samples: Sequence[Sample]) -> float:
    """Largest relative difference between a forecast and its measured step."""
    return max(abs(forecast_sample(hardware, model, sample) / sample.seconds - 1.0) for sample in samples)


def _fit_training(hardware: Hardware, model: ModelSpec, train: Sequence[Sample]) -> Hardware:
    """Efficiency and host overhead in turn: the first exact at the largest sample, the second the rest's mean shortfall."""
    largest = max(train, key=lambda s: s.sequences * s.tokens)
    others = [s for s in train if s is not largest]
    fitted, overhead = hardware, 0.0
    for _ in range(30):
        base = hardware.with_efficiency(train_layer_overhead_s=overhead)
        fitted = _fit_efficiency(base, model, largest)
        short = [(s.seconds - forecast_sample(fitted, model, s)) / (3.0 * model.layers) for s in others]
        step = statistics.fmean(short)
        if abs(step) < 1e-9:
            break
        overhead = max(0.0, overhead + 0.5 * step)
    return fitted


def _fit_efficiency(hardware: Hardware, model: ModelSpec, sample: Sample) -> Hardware:
    """The efficiency, at most 1, at which the forecast of ``sample`` is its measured time, by bisection."""
    low, high = 1e-4, 1.0
    if forecast_sample(hardware, model, sample) < sample.seconds:
        for _ in range(50):
            middle = (low * high) ** 0.5
            if (
                forecast_sample(hardware.with_efficiency(matmul=middle, attention=middle), model, sample)
                > sample.seconds
            ):
                low = middle
            else:
                high = middle
    return hardware.with_efficiency(matmul=high, attention=high)


def _non_negative_line(
    x: np.ndarray[Any, Any], y: np.ndarray[Any, Any], weight: np.ndarray[Any, Any]
) -> tuple[float, float]:
    """Weighted least squares y = a + b x with a, b >= 0."""
    matrix = np.stack([np.ones_like(x), x], axis=1) * weight[:, None]
    (a, b), *_ = np.linalg.lstsq(matrix, y * weight, rcond=None)
    if a < 0:
        a, b = 0.0, float((weight**2 * x * y).sum() / (weight**2 * x * x).sum())
    if b < 0:
        a, b = float((weight**2 * y).sum() / (weight**2).sum()), 0.0
    return max(0.0, float(a)), max(0.0, float(b))


def calibrate(
    model_path: str,
    *,
    decode_sizes: Sequence[tuple[int, int]] = ((1, 64), (4, 64), (16, 64), (4, 256)),
    train_sizes: Sequence[tuple[int, int]] = ((1, 64), (2, 64), (2, 128)),
    log: Callable[[str], None] = lambda line: None,
) -> tuple[Hardware, list[Sample]]:
    """Measure one device of this machine with one model, and fit.

    Args:
        model_path: Hugging Face folder or ``config.json``; weights are random, since only the shape takes time.

    Raises:
        PlanError: torch or transformers is missing, or the model's shape is not known as a file.
    """
    try:
        import torch
    except ImportError:
        raise PlanError("--calibrate needs torch and transformers: pip install llamarl") from None
    spec = find_model(model_path)
    threads = torch.get_num_threads()
    cuda = torch.cuda.is_available()
    try:
        if not cuda:
            torch.set_num_threads(1)  # a device is one core
        device = torch.device("cuda" if cuda else "cpu")
        peaks = _peaks(device)
        log(
            f"matmul {max(peaks.device.matmul_flops.values()) / 1e9:.1f} GFLOP/s, memory {peaks.device.memory_bytes_per_s / 1e9:.1f} GB/s"
        )
        module = _build(spec, model_path, device)

        def measure() -> tuple[Hardware, list[Sample]]:
            samples = []
            for sequences, tokens in decode_sizes:
                samples.append(_decode_sample(module, device, spec.vocab, sequences, tokens))
                log(f"decode {sequences} sequences at context {tokens}: {samples[-1].seconds * 1e3:.2f} ms")
            for sequences, tokens in train_sizes:
                samples.append(_train_sample(module, device, spec.vocab, sequences, tokens))
                log(f"train {sequences} sequences of {tokens} tokens: {samples[-1].seconds * 1e3:.1f} ms")
            return fit(peaks, spec, samples), samples

        fitted, samples = measure()
        if (worst := worst_error(fitted, spec, samples)) > _POOR:
            log(f"the fit is off by up to {worst:.0%}: measuring again")
            fitted, samples = min((fitted, samples), measure(), key=lambda found: worst_error(found[0], spec, found[1]))
    finally:
        torch.set_num_threads(threads)
    if (worst := worst_error(fitted, spec, samples)) > _POOR:
        log(
            f"poor fit, off by up to {worst:.0%}: plans from it are as far off. Was the machine at other work? Calibrate again"
        )
        title = fitted.device.title.replace("measured)", f"measured; poor fit, off by up to {worst:.0%})")
        fitted = replace(fitted, device=replace(fitted.device, title=title))
    for sample in samples:
        error = forecast_sample(fitted, spec, sample) / sample.seconds - 1.0
        log(f"fit: {sample.kind} {sample.sequences} x {sample.tokens}: {error:+.0%}")
    return fitted, samples


def _median_time(action: Callable[[], Any], device: torch.device, repeats: int = 4) -> float:
    import torch

    times = []
    for index in range(repeats + 1):  # the first warms up
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if index:
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def _peaks(device: torch.device) -> Hardware:
    """Peaks of one device, measured; links and the rest from the nearest named hardware."""
    import torch

    cuda = device.type == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    size = 8192 if cuda else 768
    a, b = torch.randn(size, size, dtype=dtype, device=device), torch.randn(size, size, dtype=dtype, device=device)
    flops = 2.0 * size**3 / _median_time(lambda: a @ b, device)
    count = (1 << 28) if cuda else (1 << 24)
    source, sink = torch.zeros(count, device=device), torch.zeros(count, device=device)
    rate = 2.0 * 4 * count / _median_time(lambda: sink.copy_(source), device)
    base = this_machine()
    if cuda:
        name = torch.cuda.get_device_name(device).lower()
        known = next((k for k in ("a100", "h100", "h200", "b200", "mi300x") if k in name), "a100")
        base = find_hardware(known)
        memory = float(torch.cuda.get_device_properties(device).total_memory)
        measured = {"bf16": flops}
        if "fp8" in base.device.matmul_flops:
            measured["fp8"] = flops * base.device.matmul_flops["fp8"] / base.device.matmul_flops["bf16"]
        precisions = tuple(p for p in base.device.weight_precisions if p in measured)
        title = f"{torch.cuda.get_device_name(device)} (measured)"
        node = torch.cuda.device_count()
    else:
        memory, measured, precisions = base.device.memory_bytes, {"fp32": flops}, ("fp32",)
        node = base.device.devices_per_node
        title = f"this machine ({node} CPU cores, one core a device, measured)"
    link = base.device.intra_node_bytes_per_s if cuda else rate / 4.0  # through shared memory: written, then read
    note = "measured by llamarl plan --calibrate"
    sources = {**base.device.sources, "matmul_flops": note, "memory_bytes_per_s": note}
    found = replace(
        base.device, name="this-machine", title=title, memory_bytes=memory, memory_bytes_per_s=rate, matmul_flops=measured,
        weight_precisions=precisions, devices_per_node=node, intra_node_bytes_per_s=link, sources=sources,
    )  # fmt: skip
    return Hardware(device=found, efficiency=base.efficiency)


def _build(spec: ModelSpec, model_path: str, device: torch.device) -> Any:
    """The transformers module of the shape, with random weights."""
    import torch

    try:
        from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
    except ImportError:
        raise PlanError("--calibrate needs transformers: pip install llamarl") from None
    torch.manual_seed(0)
    folder = Path(model_path).expanduser()
    if folder.is_file():
        folder = folder.parent
    if (folder / "config.json").is_file():
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    elif spec.experts or spec.kv_lora_rank:
        raise PlanError(f"--calibrate: give a folder with the config.json of {spec.name}, not a bundled shape")
    else:
        config = LlamaConfig(
            hidden_size=spec.hidden, intermediate_size=spec.intermediate, num_hidden_layers=spec.layers,
            num_attention_heads=spec.heads, num_key_value_heads=spec.kv_heads, head_dim=spec.head_dim,
            vocab_size=spec.vocab, tie_word_embeddings=spec.tied,
        )  # fmt: skip
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return AutoModelForCausalLM.from_config(config, dtype=dtype).to(device)


def _decode_sample(module: Any, device: torch.device, vocab: int, sequences: int, tokens: int) -> Sample:
    import torch

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocab, (sequences, tokens), generator=generator).to(device)
    module.eval()
    with torch.inference_mode():
        cache = module(ids, use_cache=True).past_key_values
        last = ids[:, -1:]

        def step() -> None:
            logits = module(last, past_key_values=cache, use_cache=True).logits[:, -1].float()
            torch.multinomial(torch.log_softmax(logits, -1).exp(), 1)

        seconds = _median_time(step, device)
    return Sample(kind="decode", sequences=sequences, tokens=tokens, seconds=seconds)


def _train_sample(module: Any, device: torch.device, vocab: int, sequences: int, tokens: int) -> Sample:
    import torch

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocab, (sequences, tokens), generator=generator).to(device)
    module.train()

    def step() -> None:
        module.zero_grad(set_to_none=True)
        logits = module(ids, use_cache=False).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids.flatten()).backward()

    seconds = _median_time(step, device)
    module.zero_grad(set_to_none=True)
    return Sample(kind="train", sequences=sequences, tokens=tokens, seconds=seconds)
