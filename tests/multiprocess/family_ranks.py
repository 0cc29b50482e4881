"""One rank of two that hold a policy of each family, cut by tensor parallelism or FSDP2: log-probs and whole gradients.

``main`` runs in processes forked from a server that has imported this module, so that torch is imported once.
"""

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from tiny_models import tiny_model

from llamarl.models.parallel import ParameterShard, local_tensor, make_layout, parameter_shards
from llamarl.trainer.batch import TrainingSequence, make_microbatch
from llamarl.trainer.building import build_policy

__all__ = ["main", "tiny_model"]

PROMPTS = (4, 11, 17)
NUM_TARGETS = 9


def sequences() -> list[TrainingSequence]:
    rows = [[3 + (11 * i + 17 * n) % 90 for i in range(n + NUM_TARGETS)] for n in PROMPTS]
    return [TrainingSequence.to_score(row[:n], row[n:], group=n) for row, n in zip(rows, PROMPTS, strict=True)]


def _together(parts: dict[str, torch.Tensor], shards: dict[str, ParameterShard], world: int) -> dict[str, torch.Tensor]:
    """Whole tensors of the parts that all ranks hold."""
    held: list[Any] = [parts]
    boxes: list[Any] = [{name: shard.box for name, shard in shards.items()}]
    if world > 1:
        held, boxes = [None] * world, [None] * world
        dist.all_gather_object(held, parts)
        dist.all_gather_object(boxes, {name: shard.box for name, shard in shards.items()})
    found = {name: torch.full(shard.shape, torch.nan) for name, shard in shards.items()}
    for own, places in zip(held, boxes, strict=True):
        for name, part in own.items():
            found[name][tuple(slice(*bounds) for bounds in places[name])] = part
    return found


def main(rank: int, world: int, folder: Path, cases: list[str]) -> None:
    """``cases``: ``family:axis``, the axis over which the ranks lie; what rank 0 finds lies in ``folder``."""
    torch.set_num_threads(1)
    if world > 1:
        store = dist.FileStore(str(folder / f"store-{world}"), world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    for case in cases:
        family, axis = case.split(":")
        fsdp, tp = (world, 1) if axis == "fsdp" else (1, world)
        layout = make_layout(fsdp=fsdp, tp=tp, device="cpu")
        built = build_policy(
            folder / family, layout, temperature=1.0, dtype=torch.float32, chunk_tokens=16, attention="llamarl_packed",
            device=torch.device("cpu"), checkpoint_every=2,
        )  # fmt: skip
        policy = built.module
        logprobs, *_ = policy(make_microbatch(sequences(), [1.0] * len(PROMPTS), torch.device("cpu")))
        (logprobs * torch.linspace(-1.0, 1.0, len(logprobs)) / fsdp).sum().backward()  # ranks of data add up
        parameters = policy.parameters_by_name()
        shards = parameter_shards(parameters, built.cuts, layout, "float32")
        parts = {
            name: torch.zeros_like(local_tensor(p.detach())) if p.grad is None else local_tensor(p.grad)
            for name, p in parameters.items()
        }
        found = _together(parts, shards, world)
        if rank == 0:
            save_file(
                {**{name: value.contiguous() for name, value in found.items()}, "logprobs": logprobs.detach()},
                folder / f"{family}-{axis}-{world}.safetensors",
            )
    if world > 1:
        dist.destroy_process_group()
