"""Adapters on a model that lies over a mesh: the same first values in any layout, and merged part by part.

    W [out, in]       colwise            rowwise            then FSDP2, by rows
    A [r, in]         whole              [r, in/tp]         r / fsdp
    B [out, r]        [out/tp, r]        whole              as the rows of W

B is cut as W is by whatever cuts W's rows, and A as W is by what cuts its columns (``parallel.py``). So each rank merges its part of W
from its own part of B and, of A, the rows that other FSDP2 ranks hold: these alone are gathered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from llamarl.errors import ModelError
from llamarl.models.decoder import decoder_layers
from llamarl.models.parallel import SHARD, ParallelLayout, ParameterShard, local_tensor
from llamarl.models.sizes import layers_of_stages

__all__ = ["check_adapters_of_stages", "keeping_adapters", "with_storage_of_one", "with_whole_factors"]

_ADAPTER, _A = ".lora_", ".lora_A."


@contextmanager
def with_storage_of_one(model: nn.Module) -> Iterator[None]:
    """Inside, linear layers without storage have that of one number, so that what is made beside them is real."""
    changed = [m for m in model.modules() if isinstance(m, nn.Linear) and m.weight.device.type == "meta"]
    kept = [module.weight for module in changed]
    for module in changed:
        module.weight = nn.Parameter(torch.zeros(()).expand(module.weight.shape))
    try:
        yield
    finally:
        for module, weight in zip(changed, kept, strict=True):
            module.weight = weight.requires_grad_(module.weight.requires_grad)


@contextmanager
def keeping_adapters(model: nn.Module) -> Iterator[None]:
    """Inside, every parameter of ``model`` may be given other storage: adapters have their values again afterwards."""
    values = {n: local_tensor(p.detach()).clone() for n, p in model.named_parameters() if _ADAPTER in n}
    yield
    parameters = dict(model.named_parameters())
    for name, value in values.items():
        local_tensor(parameters[name].detach()).copy_(value)


def check_adapters_of_stages(model: PreTrainedModel, num_stages: int) -> None:
    """Every pipeline stage has something to learn.

    Raises:
        ModelError: One has no adapter.
    """
    layers = decoder_layers(model)
    if num_stages > len(layers):
        return  # which is refused for itself
    for stage, own in enumerate(layers_of_stages(len(layers), num_stages)):
        if not any(_ADAPTER in name for i in own for name, _ in layers[i].named_parameters()):
            raise ModelError(
                f"trainer.pp = {num_stages}: stage {stage}, layers {own.start} to {own.stop - 1}, has none of the layers in "
                f"lora.targets: set trainer.pp lower, or name further layers"
            )


def with_whole_factors(
    adapters: Mapping[str, Tensor],
    shards: Mapping[str, ParameterShard],
    layout: ParallelLayout,
    *,
    device: torch.device,
) -> dict[str, Tensor]:
    """This rank's adapters with all rows of A, which FSDP2 cuts over ranks that all need them. Every rank of the axis calls it.

    Args:
        adapters: This rank's parts, wherever they lie; what is made of them lies there too.
        shards: What these are.
        device: Where collectives work.
    """
    found = dict(adapters)
    for name, part in adapters.items() if layout.size(SHARD) > 1 else ():
        if _A in name:
            rows, each = shards[name].shape[0], -(-shards[name].shape[0] // layout.size(SHARD))
            padded = torch.zeros((each, *part.shape[1:]), dtype=part.dtype, device=device)
            padded[: len(part)] = part
            parts = [torch.empty_like(padded) for _ in range(layout.size(SHARD))]
            dist.all_gather(parts, padded, group=layout.group(SHARD))
            found[name] = torch.cat(parts)[:rows].to(part.device)
    return found
