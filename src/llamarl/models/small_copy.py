"""A small random model of the same architecture: what a family computes does not depend on its sizes, but costs them.

    config ─▶ the same switches, patterns and position settings; few and narrow layers, few experts, few tokens,
              windows that a handful of tokens outgrows ─▶ model with weights wide enough that a mistake shows

Every kind of layer that the configuration's lists tell apart is kept: layers are cut from the end, never from between.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from llamarl.errors import ModelError

__all__ = ["NUM_TOKENS", "small_config", "small_model"]

NUM_TOKENS = 97
"""Vocabulary of a small copy."""

_HEAD_DIMS = (16, 32)  # the first that the architecture takes; else its own
_LAYERS = 4  # at least, where the model has as many: patterns that no list spells out have periods of 2 to 4
_MAX_LAYERS = 16
_WINDOW = 7
_WIDTH = 48
_CHOSEN = 2  # keys, or blocks of them, among which sparse attention chooses
_EXPERTS, _EXPERTS_PER_TOKEN = 8, 2
_MAX_ELEMENTS = 30_000_000
_LOGIT_STD = 1.5
_SCALINGS = 3  # with a soft cap, or one matrix for both ends, one does not hit it

_WIDTHS = re.compile(r"(^|_)(intermediate_size|intermediate_dim|ffn_hidden_size)(_|$)|^(ffn_dim|n_inner|d_ff)$")
_AT_MOST = {
    re.compile(r"^(sliding_window|attention_chunk_size|attention_window_size|window_size|index_block_size)$"): _WINDOW,
    re.compile(r"^index_topk(_blocks)?$"): _CHOSEN,
    re.compile(r"^(num_experts|num_local_experts|n_routed_experts|moe_num_experts)$"): _EXPERTS,
    re.compile(r"^(num_experts_per_tok|moe_top_?k|moe_k|top_k_experts|num_experts_per_token)$"): _EXPERTS_PER_TOKEN,
}
_FIRST_LAYERS = re.compile(r"^(first_k_dense_replace|num_dense_layers|max_window_layers)$")
_NOT_A_WIDTH = re.compile(r"position|window|vocab|context|length|token|theta|chunk|layers|experts|heads|head_dim|rank")


def small_config(config: PretrainedConfig, *, head_dim: int | None = None) -> PretrainedConfig:
    """``config`` with other sizes.

    Args:
        config: Of a decoder; of a model in several parts, its text part.
        head_dim: Features of an attention head; None: the configuration's own.

    Raises:
        ModelError: It does not say how many layers, heads or features it has.
    """
    names: Mapping[str, str] = getattr(config, "attribute_map", None) or {}
    values = config.to_dict()
    found: list[Any] = [
        getattr(config, n, None) for n in ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size")
    ]
    if not all(isinstance(n, int) and n > 0 for n in found):
        raise ModelError(
            "its config.json does not say num_hidden_layers, num_attention_heads, hidden_size and vocab_size"
        )
    layers, heads, hidden, _ = found
    own_head = getattr(config, "head_dim", None) or hidden // heads
    head = head_dim or own_head
    shared_heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_kv_heads", None) or heads
    few_heads, few_shared = (4, 4) if shared_heads == heads else (4, 1) if shared_heads == 1 else (4, 2)
    width = few_heads * head if hidden == heads * own_head else 3 * few_heads * head // 4
    kept = _num_layers(values, layers)

    def changed(key: str, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return list(value[:kept]) if len(value) == layers and layers > 1 else value
        if isinstance(value, bool) or not isinstance(value, int):
            return value
        if _WIDTHS.search(key):
            return _WIDTH
        if most := next((most for keys, most in _AT_MOST.items() if keys.search(key)), None):
            return min(value, most)
        if key == "num_kv_heads":
            return few_shared
        if value == hidden and value > width and not _NOT_A_WIDTH.search(key):
            return width
        return value

    values = {key: changed(key, value) for key, value in values.items()}
    sizes = {
        "num_hidden_layers": kept,
        "num_attention_heads": few_heads,
        "num_key_value_heads": few_shared,
        "hidden_size": width,
        "head_dim": head,
        "vocab_size": NUM_TOKENS,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "n_group": 2,
        "topk_group": 1,
    }
    for name, size in sizes.items():
        key = names.get(name, name)
        if values.get(key) is not None:
            values[key] = size
    for key in ("architectures", "auto_map", "quantization_config"):  # of how the weights are stored, and by whose code
        values.pop(key, None)
    return type(config).from_dict(values)


def _num_layers(values: Mapping[str, Any], layers: int) -> int:
    """Layers, counted from the first, among which every kind occurs that the lists of the configuration tell apart."""
    lists = [value for value in values.values() if isinstance(value, list | tuple) and len(value) == layers]
    kinds = [tuple(str(values[i]) for values in lists) for i in range(layers)]
    least = max((kinds.index(kind) + 1 for kind in set(kinds)), default=1)
    firsts = [v + 1 for k, v in values.items() if _FIRST_LAYERS.search(k) and isinstance(v, int) and v < layers]
    return min(layers, max(_LAYERS, least, min(_MAX_LAYERS, max(firsts, default=0))))


def small_model(config: PretrainedConfig) -> PreTrainedModel:
    """A small random copy, float32, in eval mode, with plain attention. The same configuration gives the same weights.

    Raises:
        ModelError: Of these sizes none makes a model that computes; the text says what the library said.
    """
    refusal = ""
    for head in (*_HEAD_DIMS, None):
        try:
            small = small_config(config, head_dim=head)
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                torch.manual_seed(0)
                with torch.device("meta"):
                    shape = AutoModelForCausalLM.from_config(small, trust_remote_code=False)
                if (size := sum(p.numel() for p in shape.parameters())) > _MAX_ELEMENTS:
                    refusal = f"its smallest copy has {size:,} parameters"
                    continue
                model = AutoModelForCausalLM.from_config(
                    small, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False
                ).eval()
                _widen(model)
            return model
        except Exception as error:  # whatever an architecture makes of sizes that do not suit it
            refusal = f"{type(error).__name__}: {error}"
    raise ModelError(f"no small copy of it can be made to check it: {refusal}")


def _widen(model: PreTrainedModel) -> None:
    """Weights in which everything counts: the library's own are so narrow that attention is nearly
    even, biases 0, norms 1. The output layer is scaled until the likeliest token is likely, not
    certain."""
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape)
        if parameter.dim() >= 2:
            scale = 1.0 if "embed" in name else 1.5 / math.sqrt(min(parameter.shape[-2:]))
            parameter.copy_(scale * noise)
        else:
            parameter.add_(0.2 * noise)
    tokens = torch.arange(3, 19)[None]
    for _ in range(_SCALINGS):
        logits = model(tokens, use_cache=False).logits.float()
        model.get_output_embeddings().weight.mul_((_LOGIT_STD / logits.std().clamp(min=1e-3)).clamp(max=100.0))
