"""LoRA adapters (arXiv:2106.09685) by ``peft``: added to a decoder, merged for the hand-over, written as an adapter folder.

y = W x + (alpha / rank) * B (A x)        W frozen; A [rank, in] random, B [out, rank] zero: version 0 is the base model
merged:  W + (alpha / rank) * B @ A       one float32 product; the same function on the trainer's and the generator's side
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from llamarl.errors import ModelError
from llamarl.models.parallel import ParameterShard

__all__ = [
    "AdapterReceiver",
    "add_adapters",
    "base_name",
    "merged",
    "whole_shards",
    "write_adapter_folder",
]

_A, _B = ".lora_A.default.weight", ".lora_B.default.weight"


def add_adapters(model: PreTrainedModel, *, rank: int, alpha: float, targets: Sequence[str], seed: int) -> None:
    """Freeze ``model`` and put an adapter beside each target layer, in place. The same seed gives the same adapters.

    Raises:
        ModelError: The model has no layer of one of these names, or it is the output layer, which stays frozen: its weight
            is multiplied chunk by chunk, without an adapter.
    """
    import peft

    head = model.get_output_embeddings()
    names = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    }
    if unknown := sorted(set(targets) - names):
        raise ModelError(
            f"lora.targets: {', '.join(unknown)} is no linear layer inside {type(model).__name__}'s decoder; it has "
            f"{', '.join(sorted(names))}"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(_peft_config(rank, alpha, targets), model)
    model.requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name)


def base_name(name: str) -> str:
    """A parameter's Hugging Face name, from the one it has beside an adapter."""
    return name.replace(".base_layer.", ".")


@torch.no_grad()
def merged(
    weights: Mapping[str, Tensor], adapters: Mapping[str, Tensor], *, scaling: float
) -> Iterator[tuple[str, Tensor]]:
    """Every weight, in float32, with its adapter added where it has one; the others are the tensors themselves.

    Args:
        weights: Base weights by their Hugging Face names.
        adapters: ``LAYER.lora_A.default.weight`` [rank, in] and ``LAYER.lora_B.default.weight`` [out, rank].
        scaling: alpha / rank.
    """
    for name, weight in weights.items():
        a = adapters.get(name.removesuffix(".weight") + _A)
        if a is None:
            yield name, weight.detach().float()
            continue
        b = adapters[name.removesuffix(".weight") + _B]
        yield name, torch.addmm(weight.detach().float(), b.float(), a.float(), alpha=scaling)


def whole_shards(tensors: Mapping[str, Tensor]) -> dict[str, ParameterShard]:
    """Layout of tensors that one rank holds whole, as float32."""
    return {
        name: ParameterShard(shape=tuple(t.shape), dtype="float32", box=tuple((0, size) for size in t.shape), cuts=())
        for name, t in tensors.items()
    }


class AdapterReceiver:
    """A generator's side of an adapter-only hand-over: holds the base weights, takes adapters, merges into the engine's."""

    def __init__(self, parameters: Mapping[str, Tensor], *, rank: int, alpha: float, targets: Sequence[str]) -> None:
        """
        Args:
            parameters: The engine's, holding version 0; ``merge`` writes into them.
        """
        self._scaling = alpha / rank
        self._parameters = {n: p for n, p in parameters.items() if p.ndim == 2 and n.split(".")[-2] in targets}
        self._base = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        self.tensors: dict[str, Tensor] = {}
        """Where a version's adapters are loaded; float32."""
        for name, parameter in self._parameters.items():
            layer = name.removesuffix(".weight")
            self.tensors[layer + _A] = torch.zeros(rank, parameter.shape[1], device=parameter.device)
            self.tensors[layer + _B] = torch.zeros(parameter.shape[0], rank, device=parameter.device)

    @torch.no_grad()
    def merge(self) -> None:
        """The engine's parameters become base plus the adapters in ``tensors``."""
        for name, weight in merged(self._base, self.tensors, scaling=self._scaling):
            self._parameters[name].copy_(weight)


def write_adapter_folder(
    folder: Path, adapters: Mapping[str, Tensor], *, rank: int, alpha: float, targets: Sequence[str], base: str
) -> None:
    """A folder that ``peft.PeftModel.from_pretrained`` loads on top of ``base``."""
    folder.mkdir(parents=True, exist_ok=True)
    config = _peft_config(rank, alpha, targets)
    config.base_model_name_or_path, config.inference_mode = base, True
    config.save_pretrained(folder)
    tensors = {
        f"base_model.model.{name.replace('.default.', '.')}": tensor.detach().float().cpu().contiguous()
        for name, tensor in adapters.items()
    }
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def _peft_config(rank: int, alpha: float, targets: Sequence[str]) -> Any:
    import peft

    return peft.LoraConfig(
        r=rank,
        lora_alpha=alpha,  # type: ignore[arg-type]  # any number serves
        target_modules=list(targets),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )
