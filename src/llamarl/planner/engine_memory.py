"""What a rank of llamarl's own engine holds beside its cache: the weights of the fullest stage, and the buffers of a step.

    first stage     embedding, its layers          the last stage never has more layers than another (``models/sizes.py``), but has
    last stage      its layers, output layer       what is derived from the output layer beside it

A step's buffers peak at one of three moments, T being its rows and N the sequences that it samples for:

    MLP of a prefill        T (4 H + 2 D + 4 I / tp)      residual, normed, embedded, returned; rotary tables; gate, up, their product
    attention of a decode   the wave's cache of a layer   gathered and padded (not by the compiled loops)
    draws                   2 N V / tp in float32         logits and probabilities

``benchmarks/generator_memory.py`` compares it with bytes counted in real ranks.
"""

from __future__ import annotations

from llamarl.models.sizes import layers_of_stages
from llamarl.planner.hardware import BYTES_PER_WEIGHT, Hardware
from llamarl.planner.model_spec import ModelSpec
from llamarl.planner.rooflines import GeneratorLayout

__all__ = ["fullest_weight_bytes", "step_bytes"]

_MAX_BATCH_TOKENS = 2048
"""``generator.engine.max_batch_tokens`` where a recipe does not say."""
_PADDED = 1.1
"""Rows of a batch of decodes over what they hold: sequences share one where that is at most 1.25."""


def fullest_weight_bytes(hardware: Hardware, model: ModelSpec, layout: GeneratorLayout) -> float:
    """Bytes of weights, and of what is computed with in their place, on a rank of the stage that holds most."""
    width = hardware.device.activation_bytes
    train = hardware.device.train_precision
    derived = BYTES_PER_WEIGHT[layout.precision] * (layout.precision != train or train == "fp32")
    layer = model.body_params(layout.tp) / model.layers * (width + derived)
    ends = model.vocab * model.hidden / layout.tp
    if layout.pp == 1:
        return layer * model.layers + model.embedding_params / layout.tp * width + ends * derived
    first, *middle, last = [len(own) * layer for own in layers_of_stages(model.layers, layout.pp)]
    return max(first + ends * width, last + ends * (width + derived), *middle)


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
