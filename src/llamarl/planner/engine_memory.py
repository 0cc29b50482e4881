"""What a rank of llamarl's own engine holds beside weights and cache: the buffers of a step.

They peak at one of four moments, T being the step's rows, N the sequences that it samples for, L the tokens of the longest context that
a prefill goes on with:

    MLP of a prefill        T (4 H + 2 D + 4 I / tp)      residual, normed, embedded, returned; rotary tables; gate, up, their product
    attention of a prefill  a layer's K and V of L        read out of their blocks, on GPUs also repeated for all heads; the mask
    attention of a decode   the wave's cache of a layer   gathered and padded
    draws                   2 N V / tp in float32         logits and probabilities

``benchmarks/generator_memory.py`` compares it with bytes counted in real ranks.
"""

from __future__ import annotations

from llamarl.planner.hardware import Hardware
from llamarl.planner.model_spec import ModelSpec
from llamarl.planner.rooflines import GeneratorLayout

__all__ = ["step_bytes"]

_MAX_BATCH_TOKENS = 2048
"""``generator.engine.max_batch_tokens`` where a recipe does not say."""
_MOST_SCORES = 1 << 25
"""Of one call of attention with a mask (``models/paged_attention.py``)."""
_PADDED = 1.1
"""Rows of a batch of decodes over what they hold: sequences share one where that is at most 1.25."""


def step_bytes(
    hardware: Hardware,
    model: ModelSpec,
    layout: GeneratorLayout,
    *,
    active: float,
    prompt_tokens: float,
    cache_bytes: float,
    longest: float = 0.0,
) -> float:
    """Bytes that a step holds at most beside weights and cache.

    Args:
        active: Sequences that run at once, of which a wave takes its share.
        prompt_tokens: Of all prompts that are computed for them.
        cache_bytes: Of this rank, over its layers.
        longest: Tokens that a prefill's last step attends to, at most.
    """
    width = hardware.device.activation_bytes
    sampled = active / layout.pp
    rows = max(sampled, min(_MAX_BATCH_TOKENS, prompt_tokens / layout.pp)) / layout.cp
    prefill = rows * width * (4 * model.hidden + 2 * model.head_dim + 4 * model.intermediate / layout.tp)
    layer_cache = cache_bytes / (model.layers / layout.pp) / layout.pp
    decode = _PADDED * layer_cache + sampled / layout.cp * width * 4 * model.hidden
    draws = rows * width * model.hidden + 8.0 * sampled * model.vocab / (layout.tp * layout.cp)
    return max(prefill, _prefill_attention(hardware, model, layout, longest), decode, draws)


def _prefill_attention(hardware: Hardware, model: ModelSpec, layout: GeneratorLayout, longest: float) -> float:
    """Bytes of a later step of a long prompt, inside a layer's attention; 0 for a prompt of one step, which masks nothing."""
    if longest <= _MAX_BATCH_TOKENS:
        return 0.0
    width, cut = hardware.device.activation_bytes, layout.tp * layout.cp
    heads = model.heads / cut
    kv = model.kv_values_per_token / min(cut, model.kv_shards)
    past = longest * kv * width
    score = 1.0  # what may be seen, yes or no
    if width < 4:  # a GPU's kernel takes numbers, and as many key-value heads as there are others
        score += width
        past += longest * 2 * heads * model.head_dim * width * (model.heads != model.kv_heads)
    scores = min(_MAX_BATCH_TOKENS * longest, _MOST_SCORES)
    rows = _MAX_BATCH_TOKENS * width * (2 * model.hidden / layout.cp + 2 * heads * model.head_dim + kv)
    return past + score * scores + rows
