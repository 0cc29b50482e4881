"""What a GPU must show before a run is trusted to it, on the bundled model, in half a minute: ``llamarl doctor --gpu``.

Each check is a function of the device that returns what it found or raises. All of them run on a
CPU as well (``--device cpu``): then they show that the checks work, and nothing about a GPU.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection

import numpy as np
import torch
import torch.distributed as dist

from llamarl.channels.base import ChannelKind, ChannelSpec
from llamarl.channels.weights import WeightsPayload, WeightsReceiver, WeightsSender
from llamarl.determinism import rank_environment
from llamarl.engine.engine import NativeEngine
from llamarl.engine.sequence import SamplingParams, Sequence
from llamarl.models.loading import load_tokenizer
from llamarl.plural import format_bytes, plural
from llamarl.settings.algorithms import AlgorithmConfig
from llamarl.settings.engine import EngineConfig
from llamarl.settings.trainer import OptimizerConfig, TrainerConfig
from llamarl.trainer.step import Trainer
from llamarl.transports.base import SinkTransport, SourceTransport
from llamarl.transports.shared_memory import SharedMemorySink, SharedMemorySource
from llamarl.types import Group, Prompt, Response, Score

__all__ = ["CHECKS"]

_MODEL = "bundled:tiny"
_WAIT_S = 60.0
_SPEC = ChannelSpec(name="weights", kind=ChannelKind.WEIGHTS, source="trainer", sink="generator", delay=1, capacity=1)


def memory(device: torch.device) -> str:
    if device.type == "cpu":
        return "of a CPU: nothing to show"
    free, total = torch.cuda.mem_get_info(device)
    return f"{format_bytes(free)} of {format_bytes(total)} free; llamarl train RECIPE --dry-run adds up what a recipe takes"


def training_step(device: torch.device) -> str:
    """Two trainers take the same step in bfloat16 and end with the same bits, another version than the first."""
    found = []
    for _ in range(2):
        config, optimizer = TrainerConfig(dtype="bfloat16"), OptimizerConfig(lr=1e-3)
        trainer = Trainer(_MODEL, config, optimizer, AlgorithmConfig(), temperature=1.0, device=str(device))
        before = {name: tensor.clone() for name, tensor in trainer.parameters_for_sync().items()}
        metrics = trainer.train(_groups(), 0)
        found.append({name: tensor.cpu() for name, tensor in trainer.parameters_for_sync().items()})
    if not all(torch.equal(found[0][name], found[1][name]) for name in before):
        raise RuntimeError("the same step gave other bits the second time: runs here would not repeat")
    if metrics["step/skipped"] or all(torch.equal(found[0][name], before[name].cpu()) for name in before):
        raise RuntimeError("the step left the weights as they were")
    return f"gradient norm {metrics['grad_norm']:.3g}, the same bits twice"


def decode(device: torch.device) -> str:
    """Greedy tokens from recorded graphs, of a CPU from padded steps, are those of steps launched one by one."""
    tokenizer = load_tokenizer(_MODEL)
    tokens = []
    for graphs in ("on" if device.type == "cuda" else "padded", "off"):
        config = EngineConfig(dtype="float32", kv_cache_bytes=1 << 24, cuda_graphs=graphs)
        engine = NativeEngine(_MODEL, config, tokenizer=tokenizer, device=device, eos_token_ids=())
        params = SamplingParams(max_new_tokens=24, temperature=0.0)
        sequences = [
            Sequence(prompt_index=i, sample_index=0, prompt_tokens=[5 + i, 7, 9], params=params, seed=i)
            for i in range(4)
        ]
        engine.add(sequences)
        while engine.has_work:
            engine.step()
        tokens.append([sequence.tokens for sequence in sequences])
        del engine
    if tokens[0] != tokens[1]:
        raise RuntimeError("recorded steps gave other tokens than launched ones: set generator.engine.cuda_graphs off")
    return "96 tokens, the same from graphs and without"


def hand_over(device: torch.device) -> str:
    """A version from another process's memory, on another GPU where there is one, by ``cuda_ipc``, with its checksum."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_send, args=(theirs, str(_other(device))), daemon=True)
    process.start()
    theirs.close()
    try:
        sink: SinkTransport = SharedMemorySink()
        if device.type == "cuda":
            from llamarl.transports.cuda_ipc import CudaIpcSink

            sink = CudaIpcSink(device, rank=0)
        end = WeightsReceiver(_SPEC, rank=0, num_source_ranks=1, num_sink_ranks=1, transport=sink)
        if not ours.poll(_WAIT_S):
            raise TimeoutError(f"the other process sent nothing within {_WAIT_S:g} s")
        found = end.receive((ours.recv(),), _WAIT_S)
        live = {"w": torch.zeros(1000, 1000, device=device)}
        assert found is not None
        found.load_into(live, deadline_s=_WAIT_S)
        ours.send(None)
        process.join(_WAIT_S)
        end.close()
    finally:
        process.kill()
    if not torch.equal(live["w"].cpu(), _version()):
        raise RuntimeError("what arrived is not what was sent")
    way = f"cuda_ipc from {_other(device)}" if device.type == "cuda" else "shared_memory"
    return f"4 MB by {way} between two processes"


def _version() -> torch.Tensor:
    return torch.randn(1000, 1000, generator=torch.Generator().manual_seed(1))


def _send(pipe: Connection, name: str) -> None:
    device = torch.device(name)
    source: SourceTransport = SharedMemorySource()
    if device.type == "cuda":
        from llamarl.transports.cuda_ipc import CudaIpcSource

        torch.cuda.set_device(device)
        source = CudaIpcSource(device, num_sink_ranks=1)
    end = WeightsSender(_SPEC, rank=0, num_source_ranks=1, num_sink_ranks=1, transport=source)
    tensors = {"w": _version().to(device)}
    pipe.send(end.send(1, WeightsPayload(version=1, tensors=tensors, wire_dtype=torch.float32, released=None)))
    pipe.poll(_WAIT_S)
    end.close()


def collective(device: torch.device) -> str:
    """The library of collectives starts, and sums to the same bits twice: over two GPUs where there are two, else over one."""
    others = [] if device.type == "cuda" and torch.cuda.device_count() < 2 else [_other(device)]
    ranks = [device, *others]
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"file://{os.path.join(folder, 'meeting')}"
        started = [
            context.Process(target=_sum_twice, args=(meeting, rank, len(ranks), str(one)), daemon=True)
            for rank, one in enumerate(ranks[1:], 1)
        ]
        for process in started:
            process.start()
        try:
            _sum_twice(meeting, 0, len(ranks), str(device))
        finally:
            for process in started:
                process.join(_WAIT_S)
                process.kill()
    if any(process.exitcode for process in started):
        raise RuntimeError("another rank failed: what it said stands above")
    return f"{_backend(device)}, {plural(len(ranks), 'rank')}{'' if others else ' (several take several GPUs)'}"


def _other(device: torch.device) -> torch.device:
    """A second GPU, where there is one."""
    if device.type == "cpu":
        return device
    return torch.device("cuda", ((device.index or 0) + 1) % torch.cuda.device_count())


def _backend(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"


def _sum_twice(meeting: str, rank: int, num_ranks: int, name: str) -> None:
    """One rank's part in sums of what every rank can work out for itself."""
    device = torch.device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    os.environ.update(
        {name: value for name, value in rank_environment(1).items() if name.startswith(("NCCL_", "GLOO_"))}
    )
    limit = timedelta(seconds=_WAIT_S)
    dist.init_process_group(_backend(device), init_method=meeting, rank=rank, world_size=num_ranks, timeout=limit)
    try:
        parts = [torch.randn(1 << 20, generator=torch.Generator().manual_seed(one)) for one in range(num_ranks)]
        found = []
        for _ in range(2):
            found.append(parts[rank].to(device, copy=True))
            dist.all_reduce(found[-1])
        if not torch.allclose(found[0].cpu(), torch.stack(parts).sum(0), atol=1e-5):
            raise RuntimeError("a sum over ranks is not what it was of")
        if not torch.equal(found[0], found[1]):
            raise RuntimeError("the same sum gave other bits the second time: runs over several GPUs would not repeat")
    finally:
        dist.destroy_process_group()


def _groups() -> list[Group]:
    rng = np.random.default_rng(0)
    groups = []
    for index in range(2):
        responses = tuple(
            Response(
                prompt_index=index, sample_index=i, tokens=rng.integers(5, 40, 6 + i).astype(np.int32),
                behavior_logprobs=np.full(6 + i, -3.0, np.float32), policy_versions=np.zeros(6 + i, np.int32),
                loss_mask=np.ones(6 + i, bool), text="", finish_reason="stop", outcome=Score(value=float(i % 2)),
            )
            for i in range(4)
        )  # fmt: skip
        prompt = Prompt(index=index, tokens=np.array([5, 6, 7 + index], np.int32), text="")
        groups.append(Group(prompt=prompt, responses=responses))
    return groups


CHECKS: tuple[tuple[str, str, Callable[[torch.device], str]], ...] = (
    ("memory", "what a recipe may take", memory),
    ("training step", "attention of packed rows in bfloat16, repeatable backward passes, AdamW", training_step),
    ("decode", "CUDA graphs of the engine", decode),
    ("hand-over", "GPU memory shared by two processes", hand_over),
    ("collective", "NCCL", collective),
)
"""Name, what it proves, the check."""
