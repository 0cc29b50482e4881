"""From a Hugging Face folder to a policy that lies over the ranks of a mesh, trained or frozen.

folder ─▶ read whole, or every rank its own part ─▶ prove the output layer ─▶ adapters ─▶ cut (tp, then fsdp) ─▶ compute dtype
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from llamarl.models.adapters import add_adapters
from llamarl.models.loading import load_model
from llamarl.models.onednn import use_onednn_linears
from llamarl.models.parallel import ParallelLayout, apply_fully_shard, apply_tensor_parallel, parameter_shards
from llamarl.models.sharded_loading import can_stream, give_storage, make_skeleton, read_parts
from llamarl.trainer.config import LoraConfig
from llamarl.trainer.logprobs import LogitTransform
from llamarl.trainer.policy import Policy, check_output_layer

__all__ = ["BuiltPolicy", "build_policy"]

_SMALL = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 32, "vocab_size": 128,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class BuiltPolicy:
    """A policy on one rank, and what its optimizer must know of it."""

    policy: Policy
    cuts: dict[str, int]
    """Parameter -> the dimension that tensor parallelism cut."""
    initial: dict[str, Tensor] | None
    """Float32 values of the trained parameters from before they were rounded to the compute dtype; None if they still hold them."""


def build_policy(
    model_path: str | Path,
    layout: ParallelLayout,
    *,
    temperature: float,
    dtype: torch.dtype,
    chunk_tokens: int,
    share_prompts: bool,
    device: torch.device,
    trained: bool = True,
    entropy_needs_grad: bool = False,
    checkpoint_every: int = 0,
    lora: LoraConfig | None = None,
    lora_seed: int = 0,
) -> BuiltPolicy:
    """This rank's part of the model in ``model_path``.

    Args:
        dtype: Of weights as computed with, and of activations.
        share_prompts: Whether micro-batches hold a group's prompt once.
        trained: False freezes every parameter.
        checkpoint_every: Every so many layers one recomputes its activations in the backward pass; 0 is none.
        lora: With it, adapters are added and the model itself is frozen; one rank only.

    Raises:
        ModelError: The model is not supported, or not with this ``tp``.
        ValueError: ``temperature`` is 0.
    """
    attention = "llamarl_shared_prompts" if share_prompts else "llamarl_packed"
    streamed = False
    if layout.num_ranks > 1:  # no rank may need memory for the whole
        model = make_skeleton(model_path, attention=attention)
        streamed = can_stream(model_path, model)
    if not streamed:
        model = load_model(model_path, dtype=torch.float32, device=device, attention=attention)
    transform = LogitTransform.of_model(model.config, temperature)
    check_output_layer(_small_copy(model.config, attention) if streamed else model, transform)
    if lora is not None:
        add_adapters(model, rank=lora.rank, alpha=lora.alpha, targets=lora.targets, seed=lora_seed)
    cuts = apply_tensor_parallel(model, layout)
    if layout.num_ranks == 1:  # on a mesh, weights are wrapped tensors that take the ordinary product
        use_onednn_linears(model)
    policy = Policy(model, transform, chunk_tokens=chunk_tokens, entropy_needs_grad=entropy_needs_grad)
    if not trained:
        policy.requires_grad_(False)
    if checkpoint_every:
        policy.checkpoint_activations(every=checkpoint_every)
    apply_fully_shard(policy, policy.layers, layout, dtype)
    if streamed:
        give_storage(policy, device)
        parameters = dict(model.named_parameters())
        read_parts(model_path, parameters, parameter_shards(parameters, cuts, layout, "float32"))
    if layout.fsdp > 1 or dtype == torch.float32:  # FSDP2 rounds as it gathers
        return BuiltPolicy(policy, cuts, None)
    initial = {name: p.detach().clone() for name, p in policy.parameters_by_name().items()}
    for parameter in policy.parameters():
        parameter.data = parameter.data.to(dtype)
    return BuiltPolicy(policy, cuts, initial)


def _small_copy(config: PretrainedConfig, attention: str) -> PreTrainedModel:
    """The same architecture with random weights and few of them: what it does after its output layer does not depend on sizes,
    and no rank of a mesh has memory for the whole."""
    values = config.to_dict() | _SMALL | {"pad_token_id": None}
    if values.get("layer_types"):
        values["layer_types"] = values["layer_types"][:1]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        small = type(config).from_dict(values)
        return AutoModelForCausalLM.from_config(small, dtype=torch.float32, attn_implementation=attention).eval()
