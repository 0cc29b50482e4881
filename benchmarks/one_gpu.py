"""What one GPU does at the shapes that people train: decode steps, trainer steps, weights from one process to another.

    python benchmarks/one_gpu.py decode --shape 1.5b --json decode.json
    python benchmarks/one_gpu.py decode --shape 8b --points 64x1024 256x1024
    python benchmarks/one_gpu.py train --shape 1.5b
    python benchmarks/one_gpu.py hand_over --shape 1.5b
    python benchmarks/one_gpu.py decode --shape tiny --device cpu         # tries the script

Models have random weights in the shapes of Qwen2.5-1.5B and Llama-3.1-8B, written once to ``--models``. Beside every number stand
nature's bounds, measured in the same process: bytes a second of a copy within the device's memory (bytes read and written), and
operations a second of a bfloat16 product of 8192 x 8192 matrices. A decode step must read the weights and every cached K and V once;
a training step must do the multiplications of ``train_step.useful_flops``.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from harness import write_report
from safetensors.torch import save_file
from train_step import plain_step, samples, useful_flops
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config
from workloads import sequences_of

from llamarl.channels.base import ChannelKind, ChannelSpec
from llamarl.channels.weights import WeightsPayload, WeightsReceiver, WeightsSender
from llamarl.engine.engine import NativeEngine
from llamarl.settings.algorithms import AlgorithmConfig
from llamarl.settings.engine import EngineConfig
from llamarl.settings.trainer import OptimizerConfig, TrainerConfig
from llamarl.trainer.step import Trainer

SHAPES: dict[str, Callable[[], PretrainedConfig]] = {
    "tiny": lambda: Qwen2Config(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    ),
    "1.5b": lambda: Qwen2Config(
        vocab_size=151936, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12,
        num_key_value_heads=2, tie_word_embeddings=True, max_position_embeddings=32768,
    ),
    "8b": lambda: LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, tie_word_embeddings=False, max_position_embeddings=32768, bos_token_id=1, eos_token_id=2,
    ),
}  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {
    "auto": {},
    "copied": {"attention": "copied"},
    "no_graphs": {"cuda_graphs": "off"},
    "fp8": {"quantization": "fp8"},
}
"""Of decoding -> what differs from the defaults."""
ROWS_OF_TRAINER: dict[str, dict[str, Any]] = {
    "auto": {},
    "4096_tokens": {"max_tokens_per_microbatch": 4096},
    "shared": {"share_prompts": True},
    "flex": {"attention": "flex"},
}
_MOST_S = 120.0
_SPEC = ChannelSpec(name="weights", kind=ChannelKind.WEIGHTS, source="trainer", sink="generator", delay=1, capacity=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("decode", "train", "hand_over", "write"))
    parser.add_argument("--shape", choices=list(SHAPES), default="1.5b")
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir()) / "one_gpu", help="random models")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try the script (default cuda)")
    parser.add_argument(
        "--ways", nargs="+", help=f"of decode: {', '.join(WAYS)}; of train: {', '.join(ROWS_OF_TRAINER)}, plain"
    )
    parser.add_argument(
        "--points", nargs="+", default=["8x1024", "64x1024", "256x1024", "64x4096"], help="ROWSxCONTEXT"
    )
    parser.add_argument("--repeats", type=int, default=24, help="timed decode steps; an eighth of it of the others")
    parser.add_argument("--prompts", type=int, default=8, help="of train, 8 responses each")
    parser.add_argument("--json", help="write the report here")
    args = parser.parse_args()
    device = torch.device(args.device)
    folder = write_model(args.models / args.shape, SHAPES[args.shape](), device)
    if args.what == "write":
        return
    bounds = {"copy_bytes_per_s": copy_rate(device), "product_flop_per_s": product_rate(device)}
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else args.device
    print(
        f"{name}: copies {bounds['copy_bytes_per_s'] / 1e12:.2f} TB/s, products {bounds['product_flop_per_s'] / 1e12:.0f} TFLOP/s"
    )
    rows: list[dict[str, Any]] = []
    for row in {"decode": decode, "train": train, "hand_over": hand_over}[args.what](folder, device, bounds, args):
        rows.append(row)
        print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)
        write_report(args.json, {"device": name, "shape": args.shape, "bounds": bounds, "rows": rows}, [])


def write_model(folder: Path, config: PretrainedConfig, device: torch.device) -> Path:
    """A folder with random bfloat16 weights, unless it is there. Zeros would not do: products of them run faster."""
    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, trust_remote_code=False)
    tensors = {}
    for name, parameter in model.named_parameters():
        value = torch.empty(parameter.shape, dtype=torch.bfloat16, device=device)
        tensors[name] = (value.fill_(1.0) if "norm" in name else value.normal_(std=0.02)).cpu()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    return folder


def _seconds(call: Callable[[], Any], device: torch.device) -> float:
    wait(device)
    start = time.perf_counter()
    call()
    wait(device)
    return time.perf_counter() - start


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def copy_rate(device: torch.device) -> float:
    size = 1 << (32 if device.type == "cuda" else 24)
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / statistics.median(_seconds(lambda: target.copy_(source), device) for _ in range(8))


def product_rate(device: torch.device) -> float:
    size = 8192 if device.type == "cuda" else 512
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    return 2 * size**3 / statistics.median(_seconds(lambda: a @ b, device) for _ in range(8))


def peak(device: torch.device) -> int:
    """Bytes reserved at most since the last call."""
    if device.type != "cuda":
        return 0
    found = torch.cuda.max_memory_reserved(device)
    free(device)
    return found


def free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def decode(
    folder: Path, device: torch.device, bounds: dict[str, float], args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    for way in args.ways or ("auto", "copied", "no_graphs"):
        for point in args.points:
            rows, context = (int(part) for part in point.split("x"))
            try:
                yield {"way": way, **decode_steps(folder, device, bounds, dict(WAYS[way]), rows, context, args.repeats)}
            except Exception as error:
                yield {"way": way, "rows": rows, "context": context, "failed": f"{type(error).__name__}: {error}"}
            free(device)
    yield {"way": "transformers", **generate_steps(folder, device, 64, 256, args.repeats)}


def decode_steps(
    folder: Path,
    device: torch.device,
    bounds: dict[str, float],
    way: dict[str, Any],
    rows: int,
    context: int,
    repeats: int,
) -> dict[str, Any]:
    """Seconds of a step in which all sequences decode, what it launches, and the least that reading takes."""
    config, quantization = AutoConfigDims(folder), way.pop("quantization", "none")
    token_bytes = config.token_bytes
    prefills = -(-rows * (context + 64) // 8192) + 1
    longest = context + prefills + repeats + 16  # the first that begins still decodes when the last step is timed
    cache = int(1.05 * (rows + 1) * (longest + 32) * token_bytes) + (1 << 20)
    engine = NativeEngine(
        folder,
        EngineConfig(dtype="bfloat16", block_size=16, kv_cache_bytes=cache, max_sequences=rows, max_batch_tokens=8192, **way),
        device=device, quantization=quantization, eos_token_ids=(),
    )  # fmt: skip
    prompts = torch.randint(3, config.vocabulary, (rows, context), generator=torch.Generator().manual_seed(0)).tolist()
    engine.add(sequences_of([(prompt, longest - context) for prompt in prompts]))
    prefill = sum(_seconds(engine.step, device) for _ in range(prefills))
    first = sum(_seconds(engine.step, device) for _ in range(3))
    times = [_seconds(engine.step, device) for _ in range(repeats)]
    step = statistics.median(times)
    found: dict[str, Any] = {
        "rows": rows,
        "context": context,
        "prefill_s": prefill,
        "first_s": first,
        "step_ms": 1e3 * step,
    }
    found |= {"tokens_per_s": rows / step, **launches(engine.step, device)}
    engine.suspend()
    weights = weight_bytes(engine.parameters_for_sync(), 1 if quantization == "fp8" else 2)
    least = (weights + rows * (context + repeats / 2) * token_bytes) / bounds["copy_bytes_per_s"]
    del engine
    return found | {"bound_ms": 1e3 * least, "share_of_bound": least / step, "peak_gib": peak(device) / 2**30}


def weight_bytes(parameters: Mapping[str, torch.Tensor], width: int) -> int:
    """That a step reads: all but an embedding apart from the output layer; ``width`` bytes of each of the layers' products."""
    bytes_of = {
        name: p.numel() * (width if ".layers." in name and p.dim() == 2 else 2) for name, p in parameters.items()
    }
    apart = any(name.startswith("lm_head") for name in parameters)
    return sum(size for name, size in bytes_of.items() if not (apart and "embed_tokens" in name))


class AutoConfigDims:
    """What of a model's configuration a cache's size follows from."""

    def __init__(self, folder: Path) -> None:
        values = json.loads((folder / "config.json").read_text())
        self.vocabulary: int = values["vocab_size"]
        head = values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]
        self.token_bytes = 2 * 2 * values["num_hidden_layers"] * values["num_key_value_heads"] * head


def launches(step: Callable[[], Any], device: torch.device, count: int = 4) -> dict[str, Any]:
    """Kernels of a step and the time that they take, from the profiler; nothing on a CPU."""
    if device.type != "cuda":
        return {}
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(count):
            step()
        wait(device)
    kernels = [e for e in seen.events() if str(e.device_type).endswith("CUDA")]
    busiest: dict[str, float] = {}
    for event in kernels:
        busiest[event.name[:60]] = busiest.get(event.name[:60], 0.0) + event.device_time / 1e3 / count
    top = sorted(busiest.items(), key=lambda pair: -pair[1])[:16]
    return {
        "kernels": len(kernels) / count,
        "device_ms": sum(busiest.values()),
        "busiest": {name: round(ms, 3) for name, ms in top},
    }


@torch.inference_mode()
def generate_steps(folder: Path, device: torch.device, rows: int, context: int, steps: int) -> dict[str, Any]:
    """The same by ``transformers.generate``: seconds a token, from two lengths, so that the prompt's falls out."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, trust_remote_code=False).to(device)  # type: ignore[arg-type]
    ids = torch.randint(3, model.config.vocab_size, (rows, context), device=device)
    took = {}
    for new in (2, 2, 2 + steps):
        took[new] = _seconds(
            partial(
                model.generate,  # type: ignore[arg-type]
                ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, max_new_tokens=new, min_new_tokens=new, pad_token_id=0
            ),
            device,
        )  # fmt: skip
    step = (took[2 + steps] - took[2]) / steps
    return {"rows": rows, "context": context, "step_ms": 1e3 * step, "tokens_per_s": rows / step}


def train(
    folder: Path, device: torch.device, bounds: dict[str, float], args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    shape = argparse.Namespace(prompts=args.prompts, group_size=8, prompt_tokens=256, micro_batch=4, seed=0)
    groups = samples(shape, AutoConfigDims(folder).vocabulary)
    tokens, flops = sum(g.num_tokens for g in groups), useful_flops(folder, groups)
    for way in args.ways or (*ROWS_OF_TRAINER, "plain"):
        try:
            if way == "plain":
                step = plain_step(folder, groups, shape, device)
            else:
                step = trainer_step(folder, groups, device, ROWS_OF_TRAINER[way])
            built = peak(device)
            first = _seconds(step, device)
            times = [_seconds(step, device) for _ in range(max(1, args.repeats // 8))]
            seconds = statistics.median(times)
            row = {"way": way, "tokens": tokens, "first_s": first, "step_s": seconds, "tokens_per_s": tokens / seconds}
            row |= {
                "share_of_products": flops / seconds / bounds["product_flop_per_s"],
                "peak_gib": peak(device) / 2**30,
            }
            yield row | {"built_gib": built / 2**30, **launches(step, device, 1)}
            del step
        except Exception as error:
            yield {"way": way, "failed": f"{type(error).__name__}: {error}"}
        free(device)


def trainer_step(folder: Path, groups: Any, device: torch.device, settings: dict[str, Any]) -> Callable[[], None]:
    given = {"max_tokens_per_microbatch": 16384, "dtype": "bfloat16", "share_prompts": False, **settings}
    trainer = Trainer(
        folder, TrainerConfig(skip_zero_advantage=False, **given), OptimizerConfig(lr=1e-6), AlgorithmConfig(rho=4.0),
        temperature=1.0, device=str(device),
    )  # fmt: skip

    def step() -> None:
        assert trainer.train(groups, trainer.policy_version)["step/skipped"] == 0.0

    return step


def hand_over(
    folder: Path, device: torch.device, bounds: dict[str, float], args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Versions of bfloat16 weights out of another process's memory on the same device, with their checksums."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_trainer_process, args=(theirs, str(folder), str(device)), daemon=True)
    process.start()
    theirs.close()
    end = WeightsReceiver(_SPEC, rank=0, num_source_ranks=1, num_sink_ranks=1, transport=_transport(device, "Sink"))
    live = {name: torch.zeros(shape, dtype=torch.bfloat16, device=device) for name, shape in _answer(ours).items()}
    size = sum(t.numel() * 2 for t in live.values())
    try:
        for version in range(1, max(2, args.repeats // 6) + 1):
            ours.send(version)
            sent_s, handle = _answer(ours)
            found = end.receive((handle,), _MOST_S)
            assert found is not None
            loaded_s = _seconds(partial(found.load_into, live, deadline_s=_MOST_S), device)
            row = {"version": version, "bytes": size, "publish_s": sent_s, "load_s": loaded_s}
            yield row | {"gb_per_s": size / (sent_s + loaded_s) / 1e9, "bound_s": 2 * size / bounds["copy_bytes_per_s"]}
        ours.send(None)
        process.join(_MOST_S)
        end.close()
    finally:
        process.kill()


def _answer(pipe: Connection) -> Any:
    if not pipe.poll(_MOST_S):
        raise TimeoutError(f"the other process sent nothing within {_MOST_S:g} s")
    return pipe.recv()


def _transport(device: torch.device, side: str) -> Any:
    if device.type == "cuda":
        from llamarl.transports.cuda_ipc import CudaIpcSink, CudaIpcSource

        torch.cuda.set_device(0)
        card = torch.device("cuda", 0)
        return CudaIpcSink(card, rank=0) if side == "Sink" else CudaIpcSource(card, num_sink_ranks=1)
    from llamarl.transports.shared_memory import SharedMemorySink, SharedMemorySource

    return SharedMemorySink() if side == "Sink" else SharedMemorySource()


def _trainer_process(pipe: Connection, folder: str, name: str) -> None:
    from safetensors.torch import load_file

    device = torch.device(name)
    end = WeightsSender(_SPEC, rank=0, num_source_ranks=1, num_sink_ranks=1, transport=_transport(device, "Source"))
    tensors = {key: t.to(device) for key, t in load_file(Path(folder) / "model.safetensors").items()}
    pipe.send({key: tuple(t.shape) for key, t in tensors.items()})
    while (version := _answer(pipe)) is not None:
        payload = WeightsPayload(version=version, tensors=tensors, wire_dtype=torch.bfloat16, released=None)
        wait(device)
        start = time.perf_counter()
        handle = end.send(version, payload)
        wait(device)
        pipe.send((time.perf_counter() - start, handle))
    end.close()


if __name__ == "__main__":
    main()
