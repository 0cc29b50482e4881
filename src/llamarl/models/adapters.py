"""LoRA adapters (arXiv:2106.09685) by ``peft``: added to a decoder, merged for the hand-over,
written as an adapter folder.

y = W x + (alpha / rank) * B (A x)        W frozen; A [rank, in] random, B [out, rank] zero: version 0 is the base model
merged:  W + (alpha / rank) * B @ A       one float32 product, the same for trainer and generator

On a model that lies over a mesh adapters have the same first values in any layout, and are merged part by part::

    W [out, in]       colwise            rowwise            then FSDP2, by rows
    A [r, in]         whole              [r, in/tp]         r / fsdp
    B [out, r]        [out/tp, r]        whole              as the rows of W

B is cut as W is by whatever cuts W's rows, and A as W is by what cuts its columns (``parallel.py``). So
each rank merges its part of W from its own part of B and, of A, the rows that other FSDP2 ranks hold:
these alone are gathered.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from llamarl.errors import FileError, ModelError
from llamarl.models.decoder import adaptable_layers, decoder_layers
from llamarl.models.folders import hub_name, is_hub_id
from llamarl.models.loading import load_model_config
from llamarl.models.parallel import SHARD, ParallelLayout, ParameterShard, local_tensor
from llamarl.models.sharded_loading import stored_weights
from llamarl.models.sizes import layers_of_stages
from llamarl.reading import read_object
from llamarl.settings.trainer import LoraConfig

__all__ = [
    "ADAPTER_CONFIG",
    "AdapterReceiver",
    "StoredAdapter",
    "adapter_shapes",
    "add_adapters",
    "base_name",
    "base_parameters",
    "check_adapters_of_stages",
    "keeping_adapters",
    "merge_adapter",
    "merged",
    "read_adapter_folder",
    "whole_shards",
    "with_storage_of_one",
    "with_targets",
    "with_whole_factors",
    "write_adapter_folder",
]

ADAPTER_CONFIG = "adapter_config.json"
_ADAPTER_FILE = "adapter_model.safetensors"
_NOT_PLAIN = {
    "use_dora": False, "fan_in_fan_out": False, "lora_bias": False, "bias": "none", "modules_to_save": None, "rank_pattern": {},
    "alpha_pattern": {}, "layer_replication": None, "trainable_token_indices": None, "use_qalora": False,
    "target_parameters": None, "megatron_config": None, "alora_invocation_tokens": None, "arrow_config": None,
    "kasa_config": None, "monteclora_config": None, "use_bdlora": None,
}  # fmt: skip
"""Settings of ``peft`` under which an adapter is more than two factors a layer, and what they are where it is not."""
_CHANGES_BASE = ("pissa", "olora", "loftq", "corda", "lora_ga")
"""Ways of ``peft`` to begin an adapter that take something out of the base weights as well."""
Box = tuple[tuple[int, int], ...]
"""Global (start, stop) a dimension."""
_A, _B = ".lora_A.default.weight", ".lora_B.default.weight"


def add_adapters(model: PreTrainedModel, *, rank: int, alpha: float, targets: Sequence[str], seed: int) -> None:
    """Freeze ``model`` and put an adapter beside each target layer, in place. The same seed gives the same adapters.

    Raises:
        ModelError: The model has no layer of one of these names, or none that may have an adapter
            (``decoder.adaptable_layers``). The output layer stays frozen: its weight is multiplied
            chunk by chunk, without an adapter.
    """
    import peft

    if unknown := sorted(set(targets) - set(layers := adaptable_layers(model))):
        raise ModelError(
            f"lora.targets: {', '.join(unknown)} may have no adapter in {type(model).__name__}, but {', '.join(layers)} may"
        )
    # not into the model itself, which peft would know by its type, and of some sparse ones take
    # names of layers for experts
    body = nn.ModuleList(decoder_layers(model))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(_peft_config(rank, alpha, targets), body)
    model.requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name)


def with_targets(lora: LoraConfig, model_path: str | Path) -> LoraConfig:
    """``lora`` with the layers named that get an adapter, where it leaves them to the model in ``model_path``.

    Raises:
        ModelError: The model has none that may.
    """
    if lora.targets:
        return lora
    config = load_model_config(model_path)
    if not (layers := adaptable_layers(config)):
        raise ModelError(f"lora.rank is {lora.rank}, but {config.model_type} has no linear layer inside: set it to 0")
    return dataclasses.replace(lora, targets=layers)


def base_name(name: str) -> str:
    """A parameter's Hugging Face name, from the one it has beside an adapter."""
    return name.replace(".base_layer.", ".")


def base_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """A model's own parameters by their Hugging Face names, without those of adapters."""
    return {base_name(name): p for name, p in model.named_parameters() if ".lora_" not in name}


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


def adapter_shapes(
    shapes: Mapping[str, tuple[int, ...]], *, rank: int, targets: Sequence[str]
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the adapters beside the matrices whose layer is one of ``targets``."""
    assert targets, "a run says as it begins which layers have adapters"
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        if len(shape) == 2 and name.split(".")[-2] in targets:
            layer = name.removesuffix(".weight")
            found[layer + _A] = (rank, shape[1])
            found[layer + _B] = (shape[0], rank)
    return found


class AdapterReceiver:
    """A generator's side of an adapter-only hand-over: holds the base weights, takes adapters,
    merges into the engine's."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        *,
        rank: int,
        alpha: float,
        targets: Sequence[str],
        model_path: str | Path,
        boxes: Mapping[str, Box] | None = None,
    ) -> None:
        """
        Args:
            parameters: The engine's, holding version 0; ``merge`` writes into them.
            model_path: Folder of version 0. Where the engine holds it rounded, the base is read
                from there: rounding comes once, after the adapter is added, as when whole weights
                are handed over.
            boxes: Adapter -> which part of it a tensor-parallel rank takes; None: all of each.
        """
        self._scaling = alpha / rank
        self._parameters = {n: p for n, p in parameters.items() if p.ndim == 2 and n.split(".")[-2] in targets}
        parts: dict[str, Box] = {}
        for name in self._parameters if boxes is not None else ():
            assert boxes is not None
            layer = name.removesuffix(".weight")
            parts[name] = (boxes[layer + _B][0], boxes[layer + _A][1])
        self._base = _unrounded(self._parameters, model_path, parts)
        self.tensors: dict[str, Tensor] = {}
        """Where a version's adapters are loaded; float32."""
        device = next((parameter.device for parameter in self._parameters.values()), None)
        shapes = {name: tuple(parameter.shape) for name, parameter in self._parameters.items()}
        for name, shape in adapter_shapes(shapes, rank=rank, targets=targets).items():
            self.tensors[name] = torch.zeros(shape, device=device)

    @torch.no_grad()
    def merge(self) -> None:
        """The engine's parameters become base plus the adapters in ``tensors``."""
        for name, weight in merged(self._base, self.tensors, scaling=self._scaling):
            self._parameters[name].copy_(weight)


@dataclass(frozen=True)
class StoredAdapter:
    """A LoRA adapter folder, as ``peft`` writes them."""

    tensors: Mapping[str, Tensor]
    """``LAYER.lora_A.default.weight`` [rank, in] and ``LAYER.lora_B.default.weight`` [out, rank]."""
    scaling: float
    base: str
    """Folder or Hub id (``org/name@REVISION``) of the model that it was trained on, as the adapter names it; may be empty."""


def read_adapter_folder(folder: Path) -> StoredAdapter:
    """Read an adapter that ``write_adapter_folder``, or ``peft`` itself, wrote.

    Raises:
        ModelError: It cannot be read, or is not a plain LoRA adapter; the message says what it has more.
    """
    try:
        config = read_object(folder / ADAPTER_CONFIG)
        kind = config.get("peft_type")
        more = [key for key, plain in _NOT_PLAIN.items() if (config.get(key) or plain) != plain]
        if str(config.get("init_lora_weights", True)).lower().startswith(_CHANGES_BASE):
            more.append("init_lora_weights")
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
        scaling = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    except FileError as error:
        raise ModelError(str(error)) from error
    except (ValueError, TypeError, KeyError, ArithmeticError) as error:
        raise ModelError(f"{folder / ADAPTER_CONFIG} is not a usable adapter configuration: {error!r}") from error
    if kind != "LORA" or more:
        what = f"peft_type {kind!r}" if kind != "LORA" else ", ".join(f"{key} = {config[key]!r}" for key in more)
        raise ModelError(
            f"{folder} is no plain LoRA adapter ({what}): merge it into its base model with peft (merge_and_unload, "
            f"save_pretrained) and give that folder"
        )
    if not (folder / _ADAPTER_FILE).is_file():
        raise ModelError(f"{folder} has no {_ADAPTER_FILE}; adapters are read from safetensors alone")
    try:
        stored = load_file(folder / _ADAPTER_FILE)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{folder / _ADAPTER_FILE} cannot be read: {error}") from error
    tensors = {}
    for name, tensor in stored.items():
        layer, _, factor = name.removeprefix("base_model.model.").rpartition(".lora_")
        if factor not in ("A.weight", "B.weight") or tensor.ndim != 2:
            raise ModelError(f"{folder / _ADAPTER_FILE}: {name} is not a factor of a linear layer's adapter")
        tensors[f"{layer}.lora_{factor[0]}.default.weight"] = tensor
    base, revision = str(config.get("base_model_name_or_path") or ""), config.get("revision")
    at = f"@{revision}" if revision and is_hub_id(base) and "@" not in base and not os.path.isdir(base) else ""
    return StoredAdapter(tensors, scaling, base + at)


@torch.no_grad()
def merge_adapter(adapter: StoredAdapter, parameters: Mapping[str, Tensor], *, model_path: str | Path) -> None:
    """Add an adapter to an engine's parameters, which hold the model in ``model_path``.

    Raises:
        ModelError: The model lacks a layer of the adapter, or has it in another size.
    """
    layers = sorted({name.removesuffix(_A).removesuffix(_B) for name in adapter.tensors})
    for layer in layers:
        a, b, weight = (
            adapter.tensors.get(layer + _A),
            adapter.tensors.get(layer + _B),
            parameters.get(layer + ".weight"),
        )
        if weight is None or a is None or b is None or (len(b), a.shape[1]) != tuple(weight.shape):
            got = "no such layer" if weight is None else f"a layer of shape {tuple(weight.shape)}"
            raise ModelError(
                f"the adapter's {layer} does not fit the base model {model_path}, which has {got}: is it the model that the "
                f"adapter was trained on?"
            )
    changed = {f"{layer}.weight": parameters[f"{layer}.weight"] for layer in layers}
    tensors = {name: tensor.to(changed[_layer(name)].device) for name, tensor in adapter.tensors.items()}
    for name, weight in merged(_unrounded(changed, model_path), tensors, scaling=adapter.scaling):
        changed[name].copy_(weight)


def _layer(name: str) -> str:
    return name.removesuffix(_A).removesuffix(_B) + ".weight"


def _unrounded(
    parameters: Mapping[str, Tensor], model_path: str | Path, boxes: Mapping[str, Box] | None = None
) -> dict[str, Tensor]:
    """Copies of parameters that hold a folder's weights; in the folder's own precision where theirs has fewer bits.

    Args:
        boxes: Of those that hold a part of a weight: which.
    """
    if all(parameter.dtype == torch.float32 for parameter in parameters.values()):
        return {name: parameter.detach().clone() for name, parameter in parameters.items()}
    with stored_weights(model_path, parameters) as stored:
        parts = {name: tuple(slice(*bounds) for bounds in box) for name, box in (boxes or {}).items()}
        return {n: stored(n)[parts.get(n, ...)].to(parameter.device) for n, parameter in parameters.items()}


def write_adapter_folder(
    folder: Path, adapters: Mapping[str, Tensor], *, rank: int, alpha: float, targets: Sequence[str], base: Path
) -> None:
    """A folder that ``peft.PeftModel.from_pretrained`` loads on top of ``base``, which is named by its id and commit
    where it is the Hub's: the cache's path is of this machine alone."""
    folder.mkdir(parents=True, exist_ok=True)
    config = _peft_config(rank, alpha, targets)
    config.base_model_name_or_path, config.revision = hub_name(base) or (str(base), None)
    config.inference_mode = True
    config.save_pretrained(folder)
    config_file = folder / ADAPTER_CONFIG
    values = json.loads(config_file.read_text(encoding="utf-8"))
    values["target_modules"] = sorted(targets)  # peft writes a set, in an order that differs from process to process
    config_file.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    tensors = {
        f"base_model.model.{name.replace('.default.', '.')}": tensor.detach().float().cpu().contiguous()
        for name, tensor in adapters.items()
    }
    save_file(tensors, folder / _ADAPTER_FILE, metadata={"format": "pt"})
    os.chmod(folder / _ADAPTER_FILE, stat.S_IMODE(config_file.stat().st_mode))  # safetensors makes its files private


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
    values = {n: local_tensor(p.detach()).clone() for n, p in model.named_parameters() if ".lora_" in n}
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
        if not any(".lora_" in name for i in own for name, _ in layers[i].named_parameters()):
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
    """This rank's adapters with all rows of A, which FSDP2 cuts over ranks that all need them.
    Every rank of the axis calls it.

    Args:
        adapters: This rank's parts, wherever they lie; what is made of them lies there too.
        shards: What these are.
        device: Where collectives work.
    """
    found = dict(adapters)
    for name, part in adapters.items() if layout.size(SHARD) > 1 else ():
        if name.endswith(_A):
            rows, each = shards[name].shape[0], -(-shards[name].shape[0] // layout.size(SHARD))
            padded = torch.zeros((each, *part.shape[1:]), dtype=part.dtype, device=device)
            padded[: len(part)] = part
            parts = [torch.empty_like(padded) for _ in range(layout.size(SHARD))]
            dist.all_gather(parts, padded, group=layout.group(SHARD))
            found[name] = torch.cat(parts)[:rows].to(part.device)
    return found
