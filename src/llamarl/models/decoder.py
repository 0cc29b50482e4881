"""What llamarl must know of any decoder to run it, read from its configuration or its modules,
whatever they call it."""

from __future__ import annotations

import torch
from torch import nn
from transformers import AutoModel, PretrainedConfig, PreTrainedModel

from llamarl.errors import ModelError
from llamarl.models.experts import expert_layers

__all__ = ["adaptable_layers", "changes_with_length", "decoder_layers", "logit_scale", "logit_softcap"]


def changes_with_length(config: PretrainedConfig) -> bool:
    """Whether a forward pass may write into the model: rotary frequencies that it sets by the
    longest position it sees. Two at the same time would take each other's."""
    ropes = getattr(config.get_text_config(), "rope_parameters", None) or {}
    kinds = {rope.get("rope_type") for rope in (ropes, *ropes.values()) if isinstance(rope, dict)}
    return any(kind == "longrope" or "dynamic" in (kind or "") for kind in kinds)


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Its layers, first to last: the one list in its body that has as many modules as the configuration has layers.

    Raises:
        ModelError: There is no such list, or several.
    """
    count = model.config.get_text_config().num_hidden_layers
    found = [m for m in model.base_model.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    # a list inside a layer may be as long; the layers' own comes first
    if not found:
        raise ModelError(f"{type(model).__name__} has no list of {count} layers")
    return list(found[0])


def adaptable_layers(model: PreTrainedModel | PretrainedConfig) -> tuple[str, ...]:
    """Names of the linear layers, in their order, that may have an adapter beside them: those
    inside the layers of a decoder.

    Of a sparse model those of its attention alone: ``peft`` takes the names of others
    (``gate_proj``, ...) for its experts, which are no linear layers.
    """
    if isinstance(model, PreTrainedModel):
        body = model
    else:
        with torch.device("meta"):
            body = AutoModel.from_config(model.get_text_config(), trust_remote_code=False)
    inside = "att" if expert_layers(body) else ""
    names = (
        name.rpartition(".")[2]
        for layer in decoder_layers(body)
        for name, module in layer.named_modules()
        if isinstance(module, nn.Linear) and inside in name
    )
    return tuple(dict.fromkeys(names))


def logit_scale(config: PretrainedConfig) -> float:
    """What the output layer's product is multiplied by: Cohere's ``logit_scale``, the inverse of
    Granite's ``logits_scaling``."""
    text = config.get_text_config()
    if getattr(text, "logit_scale", None):
        return float(text.logit_scale)
    divisor = getattr(text, "logits_scaling", None)
    return 1.0 / divisor if divisor else 1.0


def logit_softcap(config: PretrainedConfig) -> float | None:
    """Gemma's ``final_logit_softcapping``."""
    return getattr(config.get_text_config(), "final_logit_softcapping", None) or None
