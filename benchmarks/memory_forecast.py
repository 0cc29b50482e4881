"""Memory of trainer ranks, measured, against the planner's forecast of the same model and layout.

    python benchmarks/memory_forecast.py --json memory_forecast.json       # two dozen layouts, minutes on two cores
    python benchmarks/memory_forecast.py --long                            # one sequence of 128k tokens in four layouts, half an hour

Every rank is a process over gloo. A Llama-shaped random model, and one with experts, is trained for three ticks of equal sequences; in the third, every tensor's storage is counted from the moment it is made until it is freed (a ``TorchDispatchMode``: what torch allocates,
whatever the process's heap does with it). Parameters, gradients and optimizer state are known by name; the rest of the peak (gathered
layers, activations, logits, what the backward pass needs in between) is compared as one number, and so is the whole peak.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from harness import claim, join_ranks, run_ranks, write_report
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AutoConfig, AutoModelForCausalLM

from llamarl.forecast.hardware import find_hardware
from llamarl.forecast.lengths import constant
from llamarl.forecast.memory import trainer_memory
from llamarl.forecast.model import spec_from_config
from llamarl.forecast.ticks import TrainerDemand, TrainerLayout
from llamarl.settings.algorithms import AlgorithmConfig
from llamarl.settings.trainer import OptimizerConfig, TrainerConfig
from llamarl.trainer.step import Trainer
from llamarl.types import Group, Prompt, Response, Score

MODEL: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 32, "vocab_size": 4096, "tie_word_embeddings": False, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
PROMPT, RESPONSE = 32, 96
GROUP = 2
"""Responses to a prompt; one where there is one sequence."""
_PATIENCE_S = 3600
PARTS = ("parameters", "gradients", "optimizer", "working", "sum")
CASES = [
    TrainerLayout(micro_batch=4, recompute=False),
    TrainerLayout(micro_batch=4),
    TrainerLayout(fsdp=2, micro_batch=2, recompute=False),
    TrainerLayout(fsdp=4, micro_batch=4),
    TrainerLayout(tp=2, micro_batch=4, recompute=False),
    TrainerLayout(tp=4, micro_batch=4, recompute=False),
    TrainerLayout(tp=8, micro_batch=4),
    TrainerLayout(pp=2, micro_batch=2, recompute=False),
    TrainerLayout(pp=4, micro_batch=1, recompute=False),
    TrainerLayout(tp=2, fsdp=2, micro_batch=4, recompute=False),
    TrainerLayout(pp=2, fsdp=2, micro_batch=2),
    TrainerLayout(pp=2, tp=2, fsdp=2, micro_batch=2, recompute=False),
    TrainerLayout(cp=2, micro_batch=4, recompute=False),
    TrainerLayout(cp=2, tp=2, micro_batch=4),
]
SPARSE = MODEL | {
    "model_type": "qwen3_moe", "moe_intermediate_size": 96, "num_experts": 16, "num_experts_per_tok": 4, "intermediate_size": 256,
}  # fmt: skip
SPARSE_CASES = [
    TrainerLayout(fsdp=2, micro_batch=2, recompute=False),
    TrainerLayout(fsdp=2, ep=2, micro_batch=2, recompute=False),
    TrainerLayout(fsdp=4, ep=2, micro_batch=2),
    TrainerLayout(fsdp=4, ep=4, micro_batch=4, recompute=False),
    TrainerLayout(fsdp=4, tp=2, ep=4, micro_batch=2),
    TrainerLayout(pp=2, fsdp=2, ep=2, micro_batch=2, recompute=False),
]
"""Of a model with experts, which are spread over ``ep`` ranks."""
LONG = MODEL | {
    "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "head_dim": 16, "max_position_embeddings": 131072,
}  # fmt: skip
LONG_RESPONSE = 131072 - PROMPT
LONG_CASES = [
    TrainerLayout(recompute=False),
    TrainerLayout(),
    TrainerLayout(cp=2, recompute=False),
    TrainerLayout(cp=4),
]
"""Of one sequence of 128k tokens, whose rows are cut over ``cp`` ranks."""


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that were made inside of it and are not yet freed, and the most there were."""

    def __init__(self, known: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._sizes = WeakIdKeyDictionary()  # storage -> [bytes], also read when it is freed
        self._resize = torch.UntypedStorage.resize_
        for tensor in known:
            self._see(tensor)

    def __enter__(self) -> LiveBytes:
        resize, see = self._resize, self._count

        @functools.wraps(resize)
        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            found = resize(storage, size)
            see(storage)
            return found

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]  # FSDP2 frees what it gathered so
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for value in tree_leaves(found):
            if isinstance(value, Tensor):
                self._see(value)
        return found

    def _see(self, tensor: Tensor) -> None:
        local = getattr(tensor, "_local_tensor", tensor)
        if local.device.type == "cpu":
            self._count(local.untyped_storage())

    def _count(self, storage: torch.UntypedStorage) -> None:
        known = self._sizes.get(storage)
        if known is None:
            known = self._sizes[storage] = [0]
            weakref.finalize(storage, self._freed, known)
        self.live += storage.nbytes() - known[0]
        known[0] = storage.nbytes()
        self.peak = max(self.peak, self.live)

    def _freed(self, size: list[int]) -> None:
        self.live -= size[0]


def demand_of(sequences: int, response: int = RESPONSE) -> TrainerDemand:
    """What the planner is told of such ticks."""
    return TrainerDemand(lengths=constant(response), prompt_tokens=PROMPT, sequences=sequences, group_size=GROUP)


def groups_of(sequences: int, seed: int, response: int = RESPONSE) -> list[Group]:
    """Groups of two equal-length responses with a signal; one sequence is a group without."""
    rng = np.random.default_rng(seed)
    found = []
    for index in range(-(-sequences // GROUP)):
        prompt = Prompt(index=index, tokens=rng.integers(3, 4000, PROMPT).astype(np.int32), text="")
        responses = tuple(
            Response(
                prompt_index=index,
                sample_index=sample,
                tokens=rng.integers(3, 4000, response).astype(np.int32),
                behavior_logprobs=np.full(response, -8.0, np.float32),
                policy_versions=np.full(response, seed, np.int32),
                loss_mask=np.ones(response, bool),
                text="",
                finish_reason="stop",
                outcome=Score(value=float(sample)),
            )
            for sample in range(min(GROUP, sequences))
        )
        found.append(Group(prompt=prompt, responses=responses))
    return found


def numel(tensors: Sequence[Tensor | None]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def choose_evenly(router: Any, args: Any, found: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Other experts in place of those that a router chose: each token's at random, the same in both passes. A random model's routers
    send nearly all tokens of some layers to one rank; the forecast takes them to choose evenly."""
    *others, index = found
    draws = torch.rand(len(index), router.num_experts, generator=torch.Generator().manual_seed(0))
    return (*others, draws.topk(index.shape[1], dim=1).indices)


def measure_rank(folder: str, layout: TrainerLayout, sequences: int, response: int) -> dict[str, float]:
    """One rank's bytes in its third tick; the two before are of short sequences."""
    trainer = Trainer(
        folder,
        TrainerConfig(
            fsdp=layout.fsdp, tp=layout.tp, pp=layout.pp, cp=layout.cp, ep=layout.ep, share_prompts=False, skip_zero_advantage=False, microbatches_at_once=1,
            max_tokens_per_microbatch=demand_of(sequences, response).budget(layout),
            activation_checkpointing="full" if layout.recompute else "none",
        ),
        OptimizerConfig(lr=1e-3),
        AlgorithmConfig(),
        temperature=1.0,
    )  # fmt: skip
    for module in trainer.policy.modules():
        if type(module).__name__.endswith("TopKRouter"):
            module.register_forward_hook(choose_evenly)
    of_rank = sequences // layout.fsdp
    for tick in range(2):
        trainer.train(groups_of(of_rank, tick), tick)
    state = trainer.weights.optimizer.update.state
    masters = list(trainer.weights.tensors.values())
    moments = [value for entry in state.values() for value in entry.values() if value.ndim]
    buffers = [b for b in trainer.policy.buffers()]
    found: dict[str, float] = {"parameters": numel(masters), "optimizer": numel(moments)}
    gradients = []
    trainer.before_update = lambda: gradients.append(numel([t.grad for t in masters]))
    counted = LiveBytes([*masters, *moments, *buffers])
    held = counted.live
    assert held == found["parameters"] + found["optimizer"] + numel(buffers)
    with counted:
        trainer.train(groups_of(of_rank, 2, response), 2)
    found["gradients"] = gradients[-1]
    found["sum"] = counted.peak
    found["working"] = counted.peak - found["parameters"] - found["optimizer"] - found["gradients"]
    return found


def _rank(rank: int, world: int, out: str, folder: str, layout: TrainerLayout, sequences: int, response: int) -> None:
    join_ranks(rank, world, out, _PATIENCE_S)
    found = measure_rank(folder, layout, sequences, response)
    Path(out, f"{rank}.json").write_text(json.dumps(found))
    if world > 1:
        dist.destroy_process_group()


def measure(folder: str, layout: TrainerLayout, sequences: int, response: int = RESPONSE) -> list[dict[str, float]]:
    """Bytes of every rank."""
    job = (folder, layout, sequences, response)
    preload = ["llamarl.trainer.step", "llamarl.forecast.memory"]
    with tempfile.TemporaryDirectory() as out:
        return run_ranks(_rank, layout.devices, out, *job, preload=preload, timeout_s=_PATIENCE_S)


def forecast(
    layout: TrainerLayout, sequences: int, config: Mapping[str, Any] = MODEL, response: int = RESPONSE
) -> dict[str, float]:
    """The planner's, of the fullest rank, in the parts that are measured."""
    hardware = find_hardware("h100-sxm")
    device = dataclasses.replace(hardware.device, weight_precisions=("fp32",), matmul_flops={"fp32": 1e12})
    hardware = dataclasses.replace(hardware, device=device)
    demand = demand_of(sequences, response)
    found = dict(trainer_memory(hardware, spec_from_config(config, "small"), layout, demand))
    parts = {name: found.pop(name) for name in ("parameters", "gradients", "optimizer")}
    return {**parts, "working": sum(found.values()), "sum": sum(parts.values()) + sum(found.values())}


def name_of(layout: TrainerLayout) -> str:
    axes = " x ".join(f"{a} {getattr(layout, a)}" for a in ("pp", "fsdp", "cp", "ep", "tp") if getattr(layout, a) > 1)
    return f"{axes or 'one rank'}, {layout.micro_batch} a micro-batch{', recomputed' if layout.recompute else ''}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of layouts")
    parser.add_argument("--long", action="store_true", help="one sequence of 128k tokens instead")
    args = parser.parse_args()
    torch.manual_seed(0)
    results, claims = [], []
    cases = [(MODEL, layout) for layout in CASES] + [(SPARSE, layout) for layout in SPARSE_CASES]
    response = RESPONSE
    if args.long:
        cases, response = [(LONG, layout) for layout in LONG_CASES], LONG_RESPONSE
    with tempfile.TemporaryDirectory() as folder:
        print(f"{'MB of the fullest rank: measured / forecast':56}" + "".join(f"{part:>15}" for part in PARTS))
        for number, (config, layout) in enumerate(cases):
            if args.only and number not in args.only:
                continue
            kind = str(config["model_type"])
            if not Path(folder, kind).exists():
                model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32)
                model.save_pretrained(Path(folder, kind))
            sequences = max(4, 2 * layout.pp) * layout.micro_batch * layout.fsdp  # full pipelines, gradients in place
            sequences = 1 if args.long else sequences
            began = time.perf_counter()
            ranks = measure(str(Path(folder, kind)), layout, sequences, response)
            took = time.perf_counter() - began
            fullest = max(ranks, key=lambda found: found["sum"])
            said = forecast(layout, sequences, config, response)
            cells = "".join(f"{fullest[key] / 1e6:>8.2f}/{said[key] / 1e6:<6.2f}" for key in PARTS)
            print(f"{name_of(layout):56}{cells}  {took:.0f} s", flush=True)
            results.append({"model": kind, "layout": dataclasses.asdict(layout), "ranks": ranks, "forecast": said})
            for key in PARTS:
                claims.append(
                    claim(f"{name_of(layout)}: {key} off by", abs(said[key] / fullest[key] - 1), 0.10, at_least=False)
                )
    write_report(args.json, {"layouts": results}, [c for c in claims if args.json or not c["ok"]])


if __name__ == "__main__":
    main()
