"""Tiny random models of every supported family, with the traits that make their attention differ."""

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
_TRAITS: dict[str, dict[str, object]] = {
    "llama": {"tie_word_embeddings": True},
    "qwen2": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    "qwen3": {"head_dim": 16, "tie_word_embeddings": True},
    "mistral": {"sliding_window": 7, "head_dim": 8},
    "gemma2": {"sliding_window": 8, "head_dim": 16, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0},
    "gemma3_text": {"sliding_window": 8, "head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window_pattern": 2},
    "phi3": {"sliding_window": 11},
    "gemma": {"head_dim": 16},
    "granite": {
        "logits_scaling": 3.0,
        "embedding_multiplier": 2.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.2,
    },
    "smollm3": {"no_rope_layer_interval": 2, "use_sliding_window": False},
    "olmo2": {},
    "olmo3": {"sliding_window": 8, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
    "glm4": {"head_dim": 16, "partial_rotary_factor": 0.5},
    "starcoder2": {"sliding_window": 9, "tie_word_embeddings": True},
    "stablelm": {"partial_rotary_factor": 0.25, "use_parallel_residual": True, "use_qkv_bias": True},
    "phi": {"partial_rotary_factor": 0.5},
    "cohere": {"logit_scale": 0.5},
    "cohere2": {
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "logit_scale": 0.5,
        "head_dim": 16,
    },
    "nemotron": {"head_dim": 16, "partial_rotary_factor": 0.5},
    "exaone4": {"sliding_window": 8, "sliding_window_pattern": 3},
    "ernie4_5": {"head_dim": 16, "use_bias": True},
    "gpt_neox": {"rotary_pct": 0.25},
    "gpt2": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "qwen3_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "mlp_only_layers": [1],
        "head_dim": 16,
        "norm_topk_prob": True,
    },
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 2},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9},
    "deepseek_v3": {
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        "q_lora_rank": 24,
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "num_key_value_heads": 4,
    },
    "granitemoe": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "logits_scaling": 3.0,
        "embedding_multiplier": 2.0,
    },
}
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
