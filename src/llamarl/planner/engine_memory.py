"""What a rank of llamarl's own engine holds beside weights and cache: the buffers of a step.

They peak at one of three moments, T being the step's rows and N the sequences that it samples for:

    MLP of a prefill        T (4 H + 2 D + 4 I / tp)      residual, normed, embedded, returned; rotary tables; gate, up, their product
    attention of a decode   the wave's cache of a layer   gathered and padded (not by the compiled loops)
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
) -> float:
    """Bytes that a step holds at most beside weights and cache.

    Args:
        active: Sequences that run at once, of which a wave takes its share.
        prompt_tokens: Of all prompts that are computed for them.
        cache_bytes: Of this rank, over its layers.
    """
    width = hardware.device.activation_bytes
    sampled = active / layout.pp
    rows = max(sampled, min(_MAX_BATCH_TOKENS, prompt_tokens / layout.pp)) / layout.cp
    prefill = rows * width * (4 * model.hidden + 2 * model.head_dim + 4 * model.intermediate / layout.tp)
    layer_cache = cache_bytes / (model.layers / layout.pp) / layout.pp
    decode = _PADDED * layer_cache + sampled / layout.cp * width * 4 * model.hidden
    draws = rows * width * model.hidden + 8.0 * sampled * model.vocab / (layout.tp * layout.cp)
    return max(prefill, decode, draws)
