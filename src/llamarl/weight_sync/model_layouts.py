"""Layouts of a named model: parameters from its configuration alone, cuts from its own tensor-parallel plan.

Nothing is downloaded or allocated: the decoder is built on PyTorch's meta device.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from llamarl.errors import ModelError
from llamarl.weight_sync.layout import ParameterSpec, Shard

__all__ = ["ModelParameters", "fsdp_tp_placements", "model_parameters", "tp_placements"]

_DIM_OF_STYLE = {"colwise": 0, "rowwise": 1}


class ModelParameters(dict[str, ParameterSpec]):
    """Parameter name -> spec, tied ones once, with the dimension that tensor parallelism cuts."""

    def __init__(self, specs: Mapping[str, ParameterSpec], tp_dims: Mapping[str, int]) -> None:
        super().__init__(specs)
        self.tp_dims = dict(tp_dims)

    @property
    def num_elements(self) -> int:
        total = 0
        for spec in self.values():
            size = 1
            for extent in spec.shape:
                size *= extent
            total += size
        return total

    def in_dtype(self, dtype: str) -> ModelParameters:
        """The same parameters in another dtype."""
        return ModelParameters({name: replace(spec, dtype=dtype) for name, spec in self.items()}, self.tp_dims)


def model_parameters(
    config: str | Path | Mapping[str, Any], *, dtype: str = "bfloat16", cut_vocabulary: bool = False
) -> ModelParameters:
    """Parameters of the model that a Hugging Face ``config.json`` (its path, its folder, or its object) describes.

    Args:
        cut_vocabulary: Let tensor parallelism cut embedding and output layer along the vocabulary, which the models'
            own plans do not.

    Raises:
        ModelError: The file is missing, or of an architecture that transformers does not know.
    """
    try:
        described = _described(config)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(described)
    except (ValueError, OSError, KeyError, TypeError) as error:
        where = "this object" if isinstance(config, Mapping) else f"{config}: config.json"
        raise ModelError(f"{where} is not usable as a model's config: {error}") from error
    base = model.base_model
    plan = getattr(base.config, "base_model_tp_plan", None) or {}
    prefix = f"{model.base_model_prefix}."
    specs: dict[str, ParameterSpec] = {}
    tp_dims: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        specs[name] = ParameterSpec(tuple(parameter.shape), dtype)
        module = re.sub(r"\.\d+\.", ".*.", name.removeprefix(prefix).rpartition(".")[0])
        dim = _DIM_OF_STYLE.get(plan.get(module, ""))
        if dim is not None and dim < parameter.ndim:
            tp_dims[name] = dim
    if cut_vocabulary:
        for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
            tp_dims |= {name: 0 for name, p in model.named_parameters() if layer is not None and p is layer.weight}
    return ModelParameters(specs, tp_dims)


def _described(config: str | Path | Mapping[str, Any]) -> PretrainedConfig:
    if isinstance(config, Mapping):
        values = dict(config)
        return AutoConfig.for_model(values.pop("model_type"), **values)
    path = Path(config)
    folder = path.parent if path.is_file() else path
    if not (folder / "config.json").is_file():
        raise ModelError(f"{path}: no config.json there; give a Hugging Face config.json or the folder that holds it")
    return AutoConfig.from_pretrained(folder, local_files_only=True)


def tp_placements(parameters: ModelParameters, axis: str = "tp") -> dict[str, list[Shard]]:
    """Cuts of a tensor-parallel generator; what the plan does not cut is replicated."""
    return {name: [Shard(axis, dim)] for name, dim in parameters.tp_dims.items()}


def fsdp_tp_placements(parameters: ModelParameters, fsdp: str = "fsdp", tp: str = "tp") -> dict[str, list[Shard]]:
    """Cuts of a trainer: tensor parallelism first, then FSDP along dimension 0 of what is left."""
    return {
        name: [*([Shard(tp, parameters.tp_dims[name])] if name in parameters.tp_dims else []), Shard(fsdp, 0)]
        for name, spec in parameters.items()
        if spec.shape
    }
