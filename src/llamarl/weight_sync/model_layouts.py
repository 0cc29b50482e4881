"""Layouts of a named model: parameters from its configuration alone, cuts from its own tensor-parallel plan.

Nothing is downloaded or allocated: the decoder is built on PyTorch's meta device.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from llamarl.errors import ModelError
from llamarl.models.sizes import KEY_VALUE_LAYERS
from llamarl.weight_sync.layout import ParameterSpec, Shard

__all__ = [
    "ModelParameters",
    "described",
    "fsdp_tp_placements",
    "model_parameters",
    "name_pattern",
    "tp_placements",
]

# Styles of transformers' plans, by what they do to a parameter.
_COLUMNS = ("colwise", "colwise_gather_output", "colwise_rep", "packed_colwise")
_ROWS = ("rowwise", "rowwise_split_input", "rowwise_rep", "packed_rowwise")
_REPLICATED = ("replicate", "replicated_with_grad_allreduce")


class ModelParameters(dict[str, ParameterSpec]):
    """Parameter name -> spec, tied ones once, with what tensor parallelism makes of each.

    Attributes:
        tp_dims: The dimension it cuts, of those that it cuts.
        packed: Of these, the ones that hold two matrices one after the other along that dimension (gate and up), each cut
            for itself.
        whole: Why each of the others is whole on every rank.
        at_most: Parts into which some are cut at most: a key-value head is not cut, more ranks hold the same one.
        tp_sizes: The sizes that fit the model, ascending; None: not known.
    """

    def __init__(
        self,
        specs: Mapping[str, ParameterSpec],
        tp_dims: Mapping[str, int],
        *,
        packed: Collection[str] = (),
        whole: Mapping[str, str] | None = None,
        at_most: Mapping[str, int] | None = None,
        tp_sizes: Sequence[int] | None = None,
    ) -> None:
        super().__init__(specs)
        self.tp_dims = dict(tp_dims)
        self.packed = frozenset(packed)
        self.whole = dict(whole or {})
        self.at_most = dict(at_most or {})
        self.tp_sizes = None if tp_sizes is None else tuple(tp_sizes)

    def with_specs(self, specs: Mapping[str, ParameterSpec], tp_dims: Mapping[str, int]) -> ModelParameters:
        """The same model with other parameters: none of them packed."""
        return ModelParameters(specs, tp_dims, whole=self.whole, at_most=self.at_most, tp_sizes=self.tp_sizes)

    @property
    def num_elements(self) -> int:
        total = 0
        for spec in self.values():
            size = 1
            for extent in spec.shape:
                size *= extent
            total += size
        return total

    def unpacked(self) -> ModelParameters:
        """Each packed parameter as its two halves (``name[0]``, ``name[1]``): boxes then say where its bytes lie."""
        specs: dict[str, ParameterSpec] = {}
        tp_dims: dict[str, int] = {}
        for name, spec in self.items():
            dim = self.tp_dims.get(name)
            halves = [name]
            if dim is not None and name in self.packed:
                halves = [f"{name}[0]", f"{name}[1]"]
                spec = replace(spec, shape=(*spec.shape[:dim], spec.shape[dim] // 2, *spec.shape[dim + 1 :]))
            specs |= {half: spec for half in halves}
            tp_dims |= {half: dim for half in halves if dim is not None}
        return self.with_specs(specs, tp_dims)


def model_parameters(
    config: str | Path | Mapping[str, Any], *, dtype: str = "bfloat16", cut_vocabulary: bool = True
) -> ModelParameters:
    """Parameters of the model that a Hugging Face ``config.json`` (its path, its folder, or its object) describes.

    Args:
        cut_vocabulary: Tensor parallelism cuts embedding and output layer along the vocabulary, as trainer and engine do.
            False: it leaves them whole, as the models' own plans say.

    Raises:
        ModelError: The file is missing, does not describe a model, or one of an architecture that transformers does not
            know.
    """
    try:
        own = described(config)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(own, trust_remote_code=False)
    except ModelError:
        raise
    except Exception as error:  # whatever the architecture's own code makes of values that make no sense
        where = "this object" if isinstance(config, Mapping) else f"{config}: config.json"
        cause = " ".join(str(error).split())
        raise ModelError(f"{where} is not usable as a model's config: {type(error).__name__}: {cause}") from error
    base = model.base_model
    plan = getattr(base.config, "base_model_tp_plan", None) or {}
    prefix = f"{model.base_model_prefix}."
    specs: dict[str, ParameterSpec] = {}
    tp_dims: dict[str, int] = {}
    packed: set[str] = set()
    whole: dict[str, str] = {}
    at_most: dict[str, int] = {}
    kv_heads = getattr(base.config, "num_key_value_heads", None)
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    vocabulary = [p for layer in ends if layer is not None for p in layer.parameters(recurse=False)]
    for name, parameter in model.named_parameters():
        specs[name] = ParameterSpec(tuple(parameter.shape), dtype)
        path = name_pattern(name.removeprefix(prefix))
        style = plan.get(path) or plan.get(
            path.rpartition(".")[0]
        )  # experts are parameters without a module of their own
        if plan and cut_vocabulary and any(parameter is own for own in vocabulary):
            tp_dims[name] = 0
        elif (dim := _cut_dim(style, parameter.ndim)) is not None:
            tp_dims[name] = dim
            if kv_heads and path.split(".")[-2] in KEY_VALUE_LAYERS:
                at_most[name] = kv_heads
            if str(style).startswith("packed_") and parameter.ndim == 2 and parameter.shape[dim] % 2 == 0:
                packed.add(name)
        elif style is None:
            whole[name] = "not in the model's tensor-parallel plan"
        elif style in _REPLICATED or style in _ROWS:  # the second: biases, which are added once
            whole[name] = "whole by the model's tensor-parallel plan"
        else:
            whole[name] = f"its style {style!r} cuts no parameter that is known here"
    return ModelParameters(
        specs, tp_dims, packed=packed, whole=whole, at_most=at_most, tp_sizes=_tp_sizes(base.config) if plan else (1,)
    )


def name_pattern(name: str) -> str:
    """``model.layers.3.mlp.experts.7.up_proj.weight`` -> ``model.layers.*.mlp.experts.*.up_proj.weight``."""
    return re.sub(r"\.\d+(?=\.)", ".*", name)


def _cut_dim(style: str | None, ndim: int) -> int | None:
    """The dimension that a style cuts: outputs are the last but one of a weight [..., out, in], and a bias's only one. Of experts,
    [experts, ., .], each rank has some whole (``models/expert_parallel.py``)."""
    if ndim == 3 and style in (*_COLUMNS, *_ROWS):
        return 0
    if style in _COLUMNS:
        return max(0, ndim - 2)
    return ndim - 1 if style in _ROWS and ndim >= 2 else None


def _tp_sizes(config: PretrainedConfig) -> list[int] | None:
    """Sizes that divide the attention heads, and divide the key-value heads or are a multiple of them."""
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int) or heads < 1:
        return None
    kv = getattr(config, "num_key_value_heads", None) or heads
    return [n for n in range(1, heads + 1) if heads % n == 0 and (kv % n == 0 or n % kv == 0)]


def described(config: str | Path | Mapping[str, Any]) -> PretrainedConfig:
    """What transformers makes of a ``config.json``: its path, its folder, or its object.

    Raises:
        ModelError: There is none.
    """
    if isinstance(config, Mapping):
        values = dict(config)
        return AutoConfig.for_model(values.pop("model_type"), **values)
    path = Path(config)
    folder = path.parent if path.is_file() else path
    if not (folder / "config.json").is_file():
        raise ModelError(f"{path}: no config.json there; give a Hugging Face config.json or the folder that holds it")
    return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def tp_placements(parameters: ModelParameters, axis: str = "tp") -> dict[str, tuple[Shard, ...]]:
    """Cuts of a tensor-parallel generator; what the plan does not cut is replicated."""
    return {name: (_tp_shard(parameters, name, axis),) for name in parameters.tp_dims}


def fsdp_tp_placements(parameters: ModelParameters, fsdp: str = "fsdp", tp: str = "tp") -> dict[str, tuple[Shard, ...]]:
    """Cuts of a trainer: tensor parallelism first, then FSDP along dimension 0 of what is left."""
    return {
        name: (*([_tp_shard(parameters, name, tp)] if name in parameters.tp_dims else []), Shard(fsdp, 0))
        for name, spec in parameters.items()
        if spec.shape
    }


def _tp_shard(parameters: ModelParameters, name: str, axis: str) -> Shard:
    return Shard(axis, parameters.tp_dims[name], parameters.at_most.get(name))
