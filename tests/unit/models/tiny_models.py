"""Tiny random models of every supported family, with the traits that make their attention differ."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

_COMMON = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_TRAITS: dict[str, dict[str, object]] = {
    "llama": {"tie_word_embeddings": True},
    "qwen2": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    "qwen3": {"head_dim": 16, "tie_word_embeddings": True},
    "mistral": {"sliding_window": 7, "head_dim": 8},
    "gemma2": {"sliding_window": 8, "head_dim": 16, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0},
    "gemma3_text": {"sliding_window": 8, "head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window_pattern": 2},
    "phi3": {"sliding_window": 11},
}
FAMILIES = tuple(_TRAITS)


def tiny_config(family: str) -> PretrainedConfig:
    return AutoConfig.for_model(family, **{**_COMMON, **_TRAITS[family]})


def tiny_model(family: str, attention: str, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(family), attn_implementation=attention, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:  # the library's 0.02 would make attention nearly uniform
                parameter.normal_(0.0, 1.0 if "embed" in name else 0.3)
    return model.eval()
