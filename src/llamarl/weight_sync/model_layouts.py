"""Layouts of a named model: parameters from its configuration alone, cuts from its own
tensor-parallel plan.

Nothing is downloaded or allocated: the decoder is built on PyTorch's meta device.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from llamarl.errors import ModelError
from llamarl.models.adapters import adapter_shapes
from llamarl.models.folders import resolve_model_path
from llamarl.models.parallel import EXPERT_SHARD, EXPERTS, SHARD, Cut, ParallelLayout, ParameterShard
from llamarl.models.sizes import KEY_VALUE_LAYERS
from llamarl.weight_sync.layout import Grid, MeshLayout, ParameterSpec, Shard

__all__ = [
    "ModelParameters",
    "adapter_parameters",
    "fsdp_tp_placements",
    "layout_of_shards",
    "model_parameters",
    "tp_placements",
]

# Styles of transformers' plans, by what they do to a parameter.
_COLUMNS = ("colwise", "colwise_gather_output", "colwise_rep", "packed_colwise")
_ROWS = ("rowwise", "rowwise_split_input", "rowwise_rep", "packed_rowwise")


class ModelParameters(dict[str, ParameterSpec]):
    """Parameter name -> spec, tied ones once.

    Attributes:
        cuts: How tensor parallelism cuts those that it cuts; into some parts at most: a key-value
            head is not cut, more ranks hold the same one.
    """

    def __init__(self, specs: Mapping[str, ParameterSpec], cuts: Mapping[str, Shard]) -> None:
        super().__init__(specs)
        self.cuts = dict(cuts)


def model_parameters(config: str | Path | Mapping[str, Any], *, dtype: str = "bfloat16") -> ModelParameters:
    """Parameters of the model that a Hugging Face ``config.json`` (its path, its folder, or its object) describes.

    Tensor parallelism cuts embedding and output layer along the vocabulary, and the rest by the model's own plan.

    Raises:
        ModelError: The file is missing, does not describe a model, or one of an architecture that transformers does not
            know.
    """
    try:
        own = _described(config)
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
    cuts: dict[str, Shard] = {}
    kv_heads = getattr(base.config, "num_key_value_heads", None)
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    vocabulary = [p for layer in ends if layer is not None for p in layer.parameters(recurse=False)]
    for name, parameter in model.named_parameters():
        specs[name] = ParameterSpec(tuple(parameter.shape), dtype)
        path = re.sub(r"\.\d+(?=\.)", ".*", name.removeprefix(prefix))
        style = plan.get(path) or plan.get(
            path.rpartition(".")[0]
        )  # experts are parameters without a module of their own
        if plan and any(parameter is own for own in vocabulary):
            cuts[name] = Shard("tp", 0)
        elif (dim := _cut_dim(style, parameter.ndim)) is not None:
            by_head = path.split(".")[-2] in KEY_VALUE_LAYERS
            cuts[name] = Shard("tp", dim, kv_heads if kv_heads and by_head else None)
    return ModelParameters(specs, cuts)


def _cut_dim(style: str | None, ndim: int) -> int | None:
    """The dimension that a style cuts: outputs are the last but one of a weight [..., out, in], and
    a bias's only one. Of experts, [experts, ., .], each rank has some whole
    (``models/expert_parallel.py``)."""
    if ndim == 3 and style in (*_COLUMNS, *_ROWS):
        return 0
    if style in _COLUMNS:
        return max(0, ndim - 2)
    return ndim - 1 if style in _ROWS and ndim >= 2 else None


def _described(config: str | Path | Mapping[str, Any]) -> PretrainedConfig:
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
    return AutoConfig.from_pretrained(resolve_model_path(folder), local_files_only=True, trust_remote_code=False)


def tp_placements(parameters: ModelParameters) -> dict[str, tuple[Shard, ...]]:
    """Cuts of a tensor-parallel generator; what the plan does not cut is replicated."""
    return {name: (cut,) for name, cut in parameters.cuts.items()}


def fsdp_tp_placements(parameters: ModelParameters) -> dict[str, tuple[Shard, ...]]:
    """Cuts of a trainer: tensor parallelism first, then FSDP along dimension 0 of what is left."""
    tp = tp_placements(parameters)
    return {name: (*tp.get(name, ()), Shard("fsdp", 0)) for name, spec in parameters.items() if spec.shape}


def adapter_parameters(parameters: ModelParameters, *, rank: int, targets: Sequence[str]) -> ModelParameters:
    """The LoRA adapters beside a model's parameters, as they are handed over alone: float32. Where
    W is cut by rows, B is, and A is whole; where it is cut by columns, A is, and B is whole.

    Args:
        rank: Of the adapters.
        targets: Names of the layers that have one.
    """
    shapes = adapter_shapes({name: spec.shape for name, spec in parameters.items()}, rank=rank, targets=targets)
    cuts: dict[str, Shard] = {}
    for name in shapes:
        layer, _, factor = name.rpartition(".lora_")
        cut = parameters.cuts.get(f"{layer}.weight")
        if cut is not None and cut.dim == (1 if factor.startswith("A") else 0):
            cuts[name] = cut
    return ModelParameters({name: ParameterSpec(shape, "float32") for name, shape in shapes.items()}, cuts)


def layout_of_shards(shards: Mapping[str, ParameterShard], layout: ParallelLayout) -> MeshLayout:
    """What all ranks of a trainer hold, from what one of them says of itself."""
    parameters = {name: ParameterSpec(tuple(s.shape), s.dtype) for name, s in shards.items()}
    cuts = {name: tuple(cut for how in shard.cuts for cut in _cuts(how)) for name, shard in shards.items()}
    stages = {name: tuple(s.stages) for name, s in shards.items() if s.stages is not None}
    found = MeshLayout(
        parameters,
        {axis: layout.size(axis) for axis in ("pp", SHARD, "tp")},
        cuts,
        stages,
        {
            name: {axis: layout.size(axis) for axis in ("pp", EXPERT_SHARD, "ep", "tp")}
            for name, shard in shards.items()
            if any(cut.axis == EXPERTS for cut in shard.cuts)
        },
    )
    held: dict[tuple[Grid, object], bool] = {}
    for name, shard in shards.items():
        grid = found.grids[name]
        key = (grid, shard.box)
        if key not in held:
            empty = any(start >= stop for start, stop in shard.box)
            held[key] = grid.held(layout.rank) == (None if empty else tuple(shard.box))
        assert held[key], f"{name}: rank {layout.rank} holds {shard.box}, by the mesh's rule {grid.held(layout.rank)}"
    return found


def _cuts(cut: Cut) -> tuple[Shard, ...]:
    """Experts are cut over the tensor-parallel ranks, and what each of these has over those of
    ``ep``: whole experts, so evenly."""
    axes = ("tp", "ep") if cut.axis == EXPERTS else (cut.axis,)
    return tuple(Shard(axis, cut.dim, cut.at_most) for axis in axes)
