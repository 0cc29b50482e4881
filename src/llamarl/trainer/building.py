"""From a Hugging Face folder to a policy or a value model that lies over the ranks of a mesh, trained or frozen.

folder ─▶ read whole, or every rank its own part ─▶ prove the output layer ─▶ adapters ─▶ cut (pp, tp, then fsdp) ─▶ compute dtype
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from llamarl.errors import ModelError
from llamarl.models.adapters import (
    add_adapters,
    base_name,
    base_parameters,
    check_adapters_of_stages,
    keeping_adapters,
    with_storage_of_one,
)
from llamarl.models.decoder import changes_with_length
from llamarl.models.experts import num_experts, watch_experts
from llamarl.models.loading import load_model, parameter_shapes
from llamarl.models.onednn import use_onednn_linears
from llamarl.models.parallel import (
    SHARD,
    Cut,
    ParallelLayout,
    apply_fully_shard,
    apply_tensor_parallel,
    make_layout,
    parameter_shards,
)
from llamarl.models.reward_model import load_reward_model, reward_skeleton
from llamarl.models.router_replay import let_replay
from llamarl.models.sharded_loading import StoredPart, give_storage, make_skeleton, read_parts, where_stored
from llamarl.models.sizes import why_experts_not_spread, why_heads_not_shared
from llamarl.models.small_copy import small_model
from llamarl.models.stages import check_stages, cut_into_stage
from llamarl.models.value import HEAD, load_value_model, value_skeleton
from llamarl.settings.trainer import CriticConfig, LoraConfig, ReferenceConfig, TrainerConfig
from llamarl.trainer.context_parallel import CONTEXT_ATTENTION, check_context_parallel
from llamarl.trainer.logprobs import LogitTransform
from llamarl.trainer.policy import Policy, ValueModel, check_output_layer

__all__ = ["Built", "Module", "build_policy", "build_reward_model", "build_value_model", "layout_of"]

Module = TypeVar("Module", Policy, ValueModel)


@dataclass(frozen=True, slots=True)
class Built(Generic[Module]):
    """A model on one rank, and what its optimizer must know of it."""

    module: Module
    cuts: dict[str, Cut]
    """Parameter -> how tensor parallelism cut it."""
    names: tuple[str, ...]
    """Of the parameters that are trained of the whole model, in its order, those of other stages
    too; all where none is."""
    base_names: tuple[str, ...]
    """Where adapters are trained, the same of the frozen ones, as they are called without adapters; else empty."""
    initial: dict[str, Tensor] | None
    """Float32 values of the trained parameters from before they were rounded to the compute dtype,
    of a lone rank in host memory; None if they still hold them."""


def layout_of(section: str, config: TrainerConfig | CriticConfig | ReferenceConfig, device: str) -> ParallelLayout:
    """Make the mesh that a section of the configuration asks for: (pp, fsdp, cp, tp) or (fsdp, tp).

    Raises:
        ValueError: As many ranks are not there.
    """
    axes = ("fsdp", "tp", "pp", "cp") if isinstance(config, TrainerConfig) else ("fsdp", "tp")
    sizes = {axis: getattr(config, axis) for axis in axes}
    ep = config.ep if isinstance(config, TrainerConfig) else 1
    return make_layout(**sizes, ep=ep, device=device, keys=tuple(f"{section}.{axis}" for axis in axes))


def build_policy(
    model_path: str | Path,
    layout: ParallelLayout,
    *,
    temperature: float,
    dtype: torch.dtype,
    chunk_tokens: int,
    attention: str,
    device: torch.device,
    trained: bool = True,
    entropy_needs_grad: bool = False,
    checkpoint_every: int = 0,
    lora: LoraConfig | None = None,
    lora_seed: int = 0,
    replay: bool = False,
) -> Built[Policy]:
    """This rank's part of the model in ``model_path``.

    Args:
        dtype: Of weights as computed with, and of activations.
        attention: Name in transformers' attention interface, as ``row_attention`` says; rows over ranks have their own.
        trained: False freezes every parameter.
        checkpoint_every: Every so many layers one recomputes its activations in the backward pass; 0 is none.
        lora: With it, adapters are added and the model itself is frozen.
        replay: Its routers choose what a micro-batch says (``Microbatch.experts``).

    Raises:
        ModelError: The model is not supported, or not with this ``tp``, ``pp``, ``cp`` or ``ep``.
        ValueError: ``temperature`` is 0.
    """
    attention = CONTEXT_ATTENTION if layout.cp > 1 else attention
    parts = None
    if layout.num_ranks > 1:  # no rank may need memory for the whole
        model = make_skeleton(model_path, attention=attention)
        parts = where_stored(model_path, model)
    if parts is None:
        model = load_model(model_path, dtype=torch.float32, device=_loaded_on(layout, device), attention=attention)
        untied = model.get_output_embeddings().weight is not model.get_input_embeddings().weight
        if trained and untied and model.config.tie_word_embeddings:
            if apart := {name for name, _ in model.named_parameters()} - parameter_shapes(model_path).keys():
                raise ModelError.at(
                    "model.path",
                    f": {model_path} holds another matrix as {', '.join(apart)} than the embedding, to which its "
                    "config.json ties it: set tie_word_embeddings to false there",
                )
    if replay:
        let_replay(model)
    experts = watch_experts(model)
    _check_experts(experts, layout)
    transform = LogitTransform.of_model(model.config, temperature)
    check_output_layer(_small_copy(model.config, attention) if parts is not None else model, transform)
    names = tuple(name for name, _ in model.named_parameters())
    base_names: tuple[str, ...] = ()
    _check_cuts(model.config, attention, layout)
    if lora is not None:  # while the model is whole: an adapter's first values depend on no layout
        base_names = names
        with with_storage_of_one(model):
            add_adapters(model, rank=lora.rank, alpha=lora.alpha, targets=lora.targets, seed=lora_seed)
        names = tuple(name for name, parameter in model.named_parameters() if parameter.requires_grad)
        check_adapters_of_stages(model, layout.pp)
    stage = cut_into_stage(model, layout.pp_rank, layout.pp)

    def wrap(model: PreTrainedModel) -> Policy:
        policy = Policy(
            model,
            transform,
            chunk_tokens=chunk_tokens,
            entropy_needs_grad=entropy_needs_grad,
            stage=stage,
            experts=experts,
        )
        if not trained:
            policy.requires_grad_(False)
        if checkpoint_every:
            policy.checkpoint_activations(every=checkpoint_every)
        return policy

    fill = None if parts is None else _reader(model_path, model, parts, layout, device)
    return _spread(model, wrap, layout, dtype, device, names=names, base_names=base_names, fill=fill)


def build_value_model(
    model_path: str | Path, layout: ParallelLayout, *, dtype: torch.dtype, attention: str, device: torch.device
) -> Built[ValueModel]:
    """This rank's part of the value model in ``model_path``, which may hold a language model.

    Raises:
        ModelError: The model has no value form, or does not divide by ``tp``.
    """
    parts = None
    if layout.num_ranks > 1:
        model = value_skeleton(model_path, attention=attention)
        parts = where_stored(model_path, model, new=HEAD)
    if parts is None:
        model = load_value_model(model_path, device=_loaded_on(layout, device), attention=attention)
    names = tuple(name for name, _ in model.named_parameters())
    fill = None if parts is None else _reader(model_path, model, parts, layout, device)
    return _spread(model, ValueModel, layout, dtype, device, names=names, fill=fill)


def build_reward_model(
    path: str | Path, layout: ParallelLayout, *, dtype: torch.dtype, attention: str, device: torch.device, key: str
) -> Built[ValueModel]:
    """This rank's part of the frozen classifier in ``path``, whose value at a text's last token is its score.

    Args:
        attention: Of packed sequences, or of those that share prompts.
        key: The configuration key to name in errors.

    Raises:
        ModelError: It is no classifier with one label and a linear head, or does not divide by ``tp``.
    """
    parts = None
    if layout.num_ranks > 1:
        model = reward_skeleton(path, attention=attention, key=key)
        parts = where_stored(path, model)
    if parts is None:
        whole: dict[str, Any] = {"dtype": torch.float32, "device": _loaded_on(layout, device)}
        model = load_reward_model(path, attention=attention, key=key, **whole)
    names = tuple(name for name, _ in model.named_parameters())
    fill = None if parts is None else _reader(path, model, parts, layout, device)
    model.requires_grad_(False)
    return _spread(model, ValueModel, layout, dtype, device, names=names, fill=fill)


def _reader(
    path: str | Path,
    model: PreTrainedModel,
    parts: Mapping[str, list[StoredPart]],
    layout: ParallelLayout,
    device: torch.device,
) -> Callable[[nn.Module, dict[str, Cut]], None]:
    """What gives a module around ``model`` its storage, once it is cut, and this rank's slices of the folder."""

    def read(module: nn.Module, cuts: dict[str, Cut]) -> None:
        with keeping_adapters(model):
            give_storage(module, device)
        parameters, cuts = base_parameters(model), {base_name(name): cut for name, cut in cuts.items()}
        read_parts(path, parameters, parameter_shards(parameters, cuts, layout, "float32"), parts)

    return read


def _loaded_on(layout: ParallelLayout, device: torch.device) -> torch.device:
    """Where a whole model is read: in host memory, from where a lone rank takes it rounded. Its
    float32 weights beside those that it computes with would be what bounds a GPU."""
    return torch.device("cpu") if layout.num_ranks == 1 else device


def _check_experts(experts: Sequence[nn.Module], layout: ParallelLayout) -> None:
    """Refuse experts over ranks that cannot each have as many."""
    count = num_experts(experts[0]) if experts else 0
    if layout.ep > 1 and (reason := why_experts_not_spread(count, tp=layout.tp, ep=layout.ep)):
        raise ModelError(f"trainer.ep = {layout.ep}: {reason}")


def _check_cuts(config: PretrainedConfig, attention: str, layout: ParallelLayout) -> None:
    """Refuse stages or parts of rows that do not fit the architecture."""
    if layout.pp > 1:
        check_stages(_small_copy(config, attention), layout.pp)
    if layout.cp > 1:
        key, heads = "trainer.cp", config.get_text_config().num_attention_heads
        if reason := why_heads_not_shared(heads, tp=layout.tp, cp=layout.cp):
            raise ModelError(f"{key} = {layout.cp}: {reason}")
        if changes_with_length(config):
            raise ModelError(
                f"{key} = {layout.cp}: this model's rotary embedding follows the longest position of a call, and each rank would see "
                f"another: set {key} to 1"
            )
        check_context_parallel(_small_copy(config, attention), layout.cp, key=key)


def _spread(
    model: PreTrainedModel,
    wrap: Callable[[PreTrainedModel], Module],
    layout: ParallelLayout,
    dtype: torch.dtype,
    device: torch.device,
    *,
    names: tuple[str, ...] = (),
    base_names: tuple[str, ...] = (),
    fill: Callable[[Module, dict[str, Cut]], None] | None = None,
) -> Built[Module]:
    """Cut by tensor parallelism, then by FSDP2, then round to the compute dtype.

    Args:
        names, base_names: See ``Built``; empty: ``model`` is whole.
        fill: Reads the weights of a model that has been built without storage.
    """
    cuts = apply_tensor_parallel(model, layout)
    if (
        layout.num_ranks == 1 and device.type == "cpu"
    ):  # on a mesh, weights are wrapped tensors that take the ordinary product
        use_onednn_linears(model)
    module = wrap(model)
    frozen = not any(parameter.requires_grad for parameter in model.parameters())
    if (base_names or frozen) and layout.size(SHARD) > 1:
        # what learns nothing needs no more bits than are computed with
        for parameter in base_parameters(model).values():
            parameter.data = parameter.data.to(dtype)
    apply_fully_shard(module, module.layers, layout, dtype)
    if fill is not None:
        fill(module, cuts)
    initial = None
    if layout.size(SHARD) == 1 and dtype != torch.float32:  # else FSDP2 rounds as it gathers
        initial = {name: p.detach() for name, p in module.parameters_by_name().items()}
        for parameter in module.parameters():
            parameter.data = parameter.data.to(dtype)
    if layout.num_ranks == 1:
        module.to(device)
    return Built(module, cuts, names, base_names, initial)


def _small_copy(config: PretrainedConfig, attention: str) -> PreTrainedModel:
    """What the architecture does after its output layer does not depend on sizes, and no rank of a
    mesh has memory for the whole."""
    small = small_model(config)
    small.set_attn_implementation(attention)
    return small
