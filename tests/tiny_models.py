"""Tiny random models of every supported family, with the traits that make their attention differ."""

import tomllib
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

COMMON = {
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
_TRAITS: dict[str, dict[str, object]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
FAMILIES = tuple(_TRAITS)
KINDS = (*FAMILIES[:7], "gpt2", "cohere2", "qwen3_moe")
"""One of each way of attending, of placing tokens and of choosing layers: for tests that take seconds a family."""
SPARSE = ("qwen3_moe", "olmoe", "mixtral", "deepseek_v3", "granitemoe")
"""Of these, the ones with experts."""
BY_LOGITS = tuple(family for family in SPARSE if family != "deepseek_v3")
"""Of these, the ones whose routers take the largest logits; DeepSeek's choose groups first, by biased scores."""

_OWN_NAMES = {
    "gpt2": {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
             "max_position_embeddings": "n_positions", "intermediate_size": "n_inner"},
}  # fmt: skip


def tiny_config(family: str, **traits: object) -> PretrainedConfig:
    names = _OWN_NAMES.get(family, {})
    common = {names.get(key, key): value for key, value in COMMON.items()}
    if family in ("gpt_neox", "gpt2", "opt"):  # every head has its own keys, and nobody says so
        del common["num_key_value_heads"]
    return AutoConfig.for_model(family, **{**common, **_TRAITS[family], **traits})


def tiny_model(family: str, attention: str, seed: int = 0, **traits: object) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = tiny_config(family, **traits)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:  # the library's 0.02 would make attention nearly uniform
                parameter.normal_(0.0, 1.0 if "embed" in name else 0.3)
    return model.eval()
