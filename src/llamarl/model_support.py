"""What is known of a model's architecture before anything heavy is imported: planner, dry-run,
engine and trainer ask here.

    config.json ─▶ why_unsupported(config, use) ─▶ None, or the reason in words

This is no list of what may run. Any decoder of transformers' own generates, trains and runs in
replicas if it passes the check of ``executors/self_check.py``, which computes a small copy of it
both ways before a run. The table says what each family can do *beyond* that, and what of a
``config.json`` no check on a few tokens would find. A family that is not in it gets what needs no
such knowledge.

No torch and no transformers here. ``tests/unit/models/test_support.py`` holds the table against what engine, trainer
and critic really do with a small random model of each family.

To add a family: an entry here, its traits in ``tests/tiny_models.toml``, and the tests that iterate both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal

__all__ = ["FAMILIES", "NOT_COMPUTED", "USES", "Use", "is_known", "text_part", "why_unsupported"]

Use = Literal[
    "generate",
    "train",
    "critic",
    "reward_model",
    "tensor_parallel",
    "pipeline",
    "replicate",
    "int8",
    "fp8",
    "lora",
    "vllm",
    "router_replay",
]

USES: Mapping[Use, str] = {
    "generate": "generation",
    "train": "training (the policy, or a frozen reference that scores)",
    "critic": "a critic: the decoder with a value head",
    "reward_model": "a reward model in packed batches, which may lie over several ranks",
    "tensor_parallel": "tensor parallelism above 1, in generator, trainer, reference, critic and reward model",
    "pipeline": "pipeline stages, in trainer, reference and critic",
    "replicate": "generator replicas, and FSDP ranks of whatever is trained",
    "int8": "int8 weights in the generator, on CPU",
    "fp8": "fp8 weights in the generator, on CUDA",
    "lora": "LoRA adapters",
    "vllm": "vLLM as the engine",
    "router_replay": "replay of the generator's experts in the trainer (trainer.router)",
}
"""What a model can be asked for -> what that is."""

_HEAD_NORMS = ("use_qk_norm", "qk_layernorm")
"""Switches of norms over heads that older families have beside their tensor-parallel plan."""

_NO_EXPERTS: Mapping[Use, str] = {"router_replay": "it has no experts"}
_NO_VALUE_FORM: Mapping[Use, str] = {"critic": "transformers has no form of it with a value head named 'score'"}
_NO_SCORE_FORM: Mapping[Use, str] = {
    **_NO_VALUE_FORM,
    "reward_model": "transformers has no form of it that classifies sequences",
}
_NO_PLAN: Mapping[Use, str] = {"tensor_parallel": "transformers has no plan that cuts it"}
_NO_STAGES: Mapping[Use, str] = {"pipeline": "transformers has no plan that cuts it into stages"}
_PACKED_PLAN: Mapping[Use, str] = {
    "tensor_parallel": "its plan cuts packed matrices in ways that are not carried out here"
}
_NOT_IN_VLLM: Mapping[Use, str] = {"vllm": "nobody has tried it with llamarl"}
_DENSE: Mapping[Use, str] = {**_NOT_IN_VLLM, **_NO_EXPERTS}
_WHOLE_ATTENTION: Mapping[Use, str] = {"tensor_parallel": "its plan leaves attention whole on every rank"}
_SPARSE: Mapping[Use, str] = {
    **_NOT_IN_VLLM,
    "int8": "its experts are no linear layers, which alone are quantized",
    "fp8": "its experts are no linear layers, which alone are quantized",
}

FAMILIES: Mapping[str, Mapping[Use, str]] = {
    "llama": _NO_EXPERTS,
    "qwen2": _NO_EXPERTS,
    "qwen3": _NO_EXPERTS,
    "mistral": _NO_EXPERTS,
    "gemma2": _NO_EXPERTS,
    "gemma3_text": {**_NO_EXPERTS, **_NO_VALUE_FORM},
    "phi3": {**_NO_EXPERTS, **_PACKED_PLAN},
    "gemma": _DENSE,
    "granite": {**_DENSE, **_NO_SCORE_FORM},
    "smollm3": _DENSE,
    "olmo2": {**_DENSE, **_NO_VALUE_FORM, **_PACKED_PLAN},
    "olmo3": {**_DENSE, **_NO_VALUE_FORM, **_PACKED_PLAN},
    "glm4": {**_DENSE, **_PACKED_PLAN},
    "starcoder2": _DENSE,
    "stablelm": {**_DENSE, **_NO_PLAN, **_NO_STAGES},
    "phi": _DENSE,
    "cohere": {**_DENSE, **_NO_SCORE_FORM},
    "cohere2": {**_DENSE, **_NO_SCORE_FORM},
    "nemotron": {**_DENSE, **_NO_STAGES},
    "exaone4": _DENSE,
    "ernie4_5": {**_DENSE, **_NO_SCORE_FORM},
    "gpt_neox": {**_DENSE, **_NO_VALUE_FORM},
    "gpt2": {
        **_DENSE,
        **_NO_VALUE_FORM,
        **_NO_PLAN,
        **_NO_STAGES,
        "int8": "its layers are convolutions in name, and only linear layers are quantized",
        "fp8": "its layers are convolutions in name, and only linear layers are quantized",
        "lora": "it has no linear layer inside: its own are convolutions in name",
    },
    "opt": {**_DENSE, **_NO_VALUE_FORM, **_NO_PLAN, **_NO_STAGES},
    "qwen3_moe": _SPARSE,
    "olmoe": {**_SPARSE, **_NO_SCORE_FORM, **_PACKED_PLAN, **_NO_STAGES},
    "mixtral": _SPARSE,
    "deepseek_v3": {
        **_SPARSE,
        **_WHOLE_ATTENTION,
        "pipeline": "the biases of its routers are not brought together from stages",
    },
    "granitemoe": {**_SPARSE, **_NO_SCORE_FORM, **_WHOLE_ATTENTION, **_NO_STAGES},
}
"""``model_type`` -> what that family cannot be used for, and why. Their tokens and gradients are tested
against the library's own forward."""

_STATE = "its recurrent or convolution layers carry a state from token to token, which the engine does not keep"
_SINKS = "its attention has sinks, which are not computed here"

NOT_COMPUTED: Mapping[str, str] = {
    "gpt_oss": _SINKS,
    "mamba": _STATE,
    "mamba2": _STATE,
    "falcon_h1": _STATE,
    "jamba": _STATE,
    "qwen3_next": _STATE,
    "qwen3_5_text": _STATE,
}
"""``model_type`` -> why the check before a run refuses it: said early, of families that people ask for."""

_WITHOUT_KNOWLEDGE: tuple[Use, ...] = ("generate", "train", "replicate", "lora")
_UNKNOWN = {use: "it is known of the families in docs/models.md alone" for use in USES if use not in _WITHOUT_KNOWLEDGE}
"""Any other architecture. Whether it runs at all, the check before a run finds."""


def why_unsupported(config: Mapping[str, Any], use: Use) -> str | None:
    """Why a model cannot be used so; None if it can.

    Whether an architecture that is not in the table can be computed at all is not asked here. Sizes
    (does ``tp`` divide the heads?) are asked of ``models/sizes.py``.

    Args:
        config: The object of its ``config.json``.
    """
    if use == "vllm" and text_part(config) is not config:
        return "the text part of a model in several parts is not run by vLLM: take the native engine"
    whole, config = config, text_part(config)
    kind = config.get("model_type")
    if not isinstance(kind, str) or not kind:
        return f"config.json names no model_type, got {kind!r}" if kind else "config.json names no model_type"
    if kind in NOT_COMPUTED:
        return f"architecture {kind!r} is not supported: {NOT_COMPUTED[kind]}"
    lacks = FAMILIES.get(kind, _UNKNOWN)
    quantized = whole.get("quantization_config") or config.get("quantization_config")
    if use != "vllm" and isinstance(quantized, Mapping) and quantized:
        return (
            f"its weights are stored quantized (quantization_config in config.json, {quantized.get('quant_method')}), which is "
            "not undone here: name the model that they were made from, or a copy in bfloat16"
        )
    if config.get("use_bidirectional_attention"):
        return f"{kind} with use_bidirectional_attention is not a causal decoder"
    if _has_changing_longrope(config):
        return (
            f"{kind} with rotary embedding 'longrope' is not supported: transformers chooses its short or long factors by the "
            "longest sequence of a call, so log-probs would depend on what shares the batch"
        )
    if use in lacks:
        return f"architecture {kind!r} does not support {USES[use]}: {lacks[use]}"
    if use == "tensor_parallel" and (key := next((k for k in _HEAD_NORMS if config.get(k)), None)):
        return f"architecture {kind!r} with {key} does not support {USES[use]}: its plan does not speak of these norms"
    if use == "vllm" and kind == "qwen2" and config.get("use_sliding_window"):
        if 0 < config.get("max_window_layers", 0) < config.get("num_hidden_layers", 0):
            return "vLLM does not compute qwen2 with sliding windows in some layers only (max_window_layers)"
    return None


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the configuration of a model in several parts says of its decoder; of any other model, all it says."""
    text = config.get("text_config")
    if not isinstance(text, Mapping) or not text:
        return config
    return text if text.get("model_type") else {**text, "model_type": f"{config.get('model_type')}_text"}


def is_known(config: Mapping[str, Any]) -> bool:
    """Whether the architecture is in the table; of another one only the check before a run knows
    whether it can be computed."""
    return text_part(config).get("model_type") in FAMILIES


def _has_changing_longrope(config: Mapping[str, Any]) -> bool:
    """Whether positions may lie beyond the length up to which longrope has its short factors."""
    longest = config.get("max_position_embeddings", math.inf)
    for rope in _ropes(config):
        kind = rope.get("rope_type") or rope.get("type")
        if kind == "longrope" or (config.get("model_type") == "phi3" and kind in ("su", "yarn")):  # its former names
            short = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
            if short is None or longest > short:
                return True
    return False


def _ropes(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Rotary settings under the key of transformers 5 or the older one, one or one a kind of layer."""
    for key in ("rope_parameters", "rope_scaling"):
        ropes = config.get(key)
        if isinstance(ropes, Mapping):
            yield ropes
            yield from (rope for rope in ropes.values() if isinstance(rope, Mapping))
