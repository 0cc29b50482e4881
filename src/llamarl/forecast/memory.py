"""What a rank holds at its fullest moment, by part. A plan fits where the parts and a margin of a tenth fit the device.

    generator   weights, the peak of the cache over a tick, the buffers of a step (T rows, N sequences sampled for):
                  MLP of a prefill  T (4 H + 2 D + 4 I / tp)   |  attention of a decode  the cache of a layer
                  draws             2 N V / tp in float32
    trainer     16 bytes a parameter of state (with Muon 12 of the matrices in layers), and the fullest moment of the
                fullest pipeline stage:
                  forward of the output layer    kept activations + two chunks of logits
                  backward of the output layer   kept activations + a chunk of logits + the layer's gradient
                  backward of a layer            kept activations (+ one layer's, where it is recomputed) + gradients
                  backward of the embedding      activations of the other micro-batches + the embedding's gradient

``benchmarks/memory_forecast.py`` and ``generator_memory.py`` compare both with bytes counted in real ranks.
"""

from __future__ import annotations

from collections.abc import Mapping

from llamarl.forecast.costs import GeneratorLayout, weight_bytes
from llamarl.forecast.hardware import Hardware
from llamarl.forecast.model import ModelSpec, StageLoad, stages_of
from llamarl.forecast.ticks import (
    GeneratorDemand,
    TrainerDemand,
    TrainerLayout,
    attention_values,
    expert_copies,
    profile_of,
)
from llamarl.settings.trainer import TWO_MOMENTS

__all__ = ["MARGIN", "STATE", "fits", "generator_memory", "kept_bytes", "trainer_memory"]

MARGIN = 0.10
"""Added to what is counted before it is compared with the device's memory."""
STATE = {"parameters": 4.0, "gradients": 4.0, "optimizer": 8.0}
"""Bytes a parameter of the sharded state: fp32 master weights, fp32 gradients, two fp32 moments."""
_LOGIT_ROWS = 512.0
"""Tokens whose logits the trainer holds at once: the default of ``trainer.logprob_chunk_tokens``."""
_MAX_BATCH_TOKENS = 2048
"""``generator.engine.max_batch_tokens`` where a recipe does not say."""
_PADDED = 1.1
"""Rows of a batch of decodes over what they hold: sequences share one where that is at most 1.25."""


def fits(parts: Mapping[str, float], limit: float) -> bool:
    """Whether the parts and the margin fit ``limit`` bytes."""
    return sum(parts.values()) * (1.0 + MARGIN) <= limit


def generator_memory(
    hardware: Hardware, model: ModelSpec, layout: GeneratorLayout, demand: GeneratorDemand
) -> dict[str, float]:
    """Bytes of the fullest generator rank, by part."""
    profile = profile_of(demand)
    # A group's prompt is held once.
    prompts = profile.peak_active * demand.prompt_tokens / min(demand.group_size, profile.peak_active)
    width = hardware.device.activation_bytes
    cache = (profile.peak_written + prompts) * model.kv_bytes_per_token(width) / min(layout.tp, model.kv_shards)
    sampled = profile.peak_active
    rows = max(sampled, min(_MAX_BATCH_TOKENS, prompts))
    prefill = rows * width * (4 * model.hidden + 2 * model.head_dim + 4 * model.intermediate / layout.tp)
    copied = _PADDED * cache / model.layers if hardware.is_cpu else 0.0  # a GPU reads blocks where they lie
    decode = copied + sampled * width * 4 * model.hidden
    draws = rows * width * model.hidden + 8.0 * sampled * model.vocab / layout.tp
    workspace = {"weights": weight_bytes(hardware, model, layout), "kv_cache": cache}
    return {**workspace, "workspace": max(prefill, decode, draws)}


# -- the trainer ------------------------------------------------------------------------------------------------------


def trainer_memory(
    hardware: Hardware, model: ModelSpec, layout: TrainerLayout, demand: TrainerDemand
) -> dict[str, float]:
    """Bytes of the fullest trainer rank, by part."""
    width = hardware.device.activation_bytes
    per_micro = min(layout.micro_batch, demand.most_of(layout.data_ranks))
    longest = float(demand.prompt_tokens + demand.lengths.limit)
    tokens = max(per_micro * demand.mean_tokens, longest) / layout.cp  # at least the longest sequence, whole
    layer = tokens * kept_bytes(model, layout, width)
    trained = max(per_micro * demand.lengths.mean, float(demand.lengths.limit)) / layout.cp
    every = []
    for stage in stages_of(model.layers, layout.pp, demand.microbatches(layout)):
        held = stage.sharded_params(model, tp=layout.tp, shards=layout.shards, ep=layout.ep)
        parts = {name: held * size for name, size in STATE.items()}
        in_matrices = held - stage.end_params(model) / layout.tp / layout.shards
        parts["optimizer"] -= (TWO_MOMENTS - demand.moment_bytes) * in_matrices
        parts |= _working(model, stage, layout, width, tokens=tokens, trained=trained, layer=layer)
        if layout.at_once > 1:  # gradients of those at work and of one that is done stand beside the sum
            parts["gradients"] *= layout.at_once + 2
            parts["activations"] *= layout.at_once
            parts["logits"] *= layout.at_once
        every.append(parts)
    return max(every, key=lambda parts: sum(parts.values()))


def kept_bytes(model: ModelSpec, layout: TrainerLayout, width: float) -> float:
    """Bytes a token that a layer keeps for its backward pass: inputs of its products and norms, and
    of the gated activation.

    Args:
        width: Bytes of an activation.
    """
    q, kv = attention_values(model, layout)
    # The output of attention is copied into the order of the rows where ranks exchange it, or a CPU has padded it.
    outputs = 2.0 if layout.cp > 1 or width == 4.0 else 1.0
    return _kept_outside(model, layout, width) + (q * (1.0 + outputs) + kv) * width / layout.tp


def _kept_outside(model: ModelSpec, layout: TrainerLayout, width: float) -> float:
    """Of ``kept_bytes``, what scores and values of attention do not keep."""
    norm = 4.0 + 2.0 * width  # its input in float32, the same normalized, and scaled for the products
    q, kv = attention_values(model, layout)
    head_norms = (q + kv / 2.0) * (4.0 + width) if model.qk_norm else 0.0
    sparse = model.sparse_layers / model.layers
    mlp = (1.0 - sparse) * model.intermediate + sparse * model.shared_expert_intermediate
    kept = 2.0 * model.hidden * norm + (4.0 * mlp * width + head_norms) / layout.tp
    if not model.experts:
        return kept
    # What goes into and out of a token's experts, the gate's products, a row's places, and what the router found.
    row = (2.0 * model.hidden + 4.0 * model.expert_intermediate + 1.0) * width + 16.0
    return kept + sparse * (_routed_rows(model, layout) * row + model.experts * 4.0)


def _routed_rows(model: ModelSpec, layout: TrainerLayout) -> float:
    """Rows a token that a rank's experts are given: one for each of its choices, also those of
    experts that lie elsewhere."""
    return model.experts_per_token * (expert_copies(model, layout) if layout.ep > 1 else 1.0)


def _working(
    model: ModelSpec,
    stage: StageLoad,
    layout: TrainerLayout,
    width: float,
    *,
    tokens: float,
    trained: float,
    layer: float,
) -> dict[str, float]:
    """Bytes of a stage's rank beside its state at the fullest moment.

    Args:
        tokens: Of a micro-batch, on this rank.
        trained: Those of them that the loss looks at.
        layer: Bytes that a layer keeps for the backward pass of a micro-batch.
    """  # fmt: skip
    tp, shards, h = layout.tp, layout.shards, model.hidden
    routed = model.routed_params / model.layers
    layer_params = (model.layer_params - routed) / tp + routed / (tp * layout.ep)
    kept = stage.layers * (tokens * h * width if layout.recompute else layer)
    head, end = model.head_params / tp, stage.end_params(model) / tp
    chunk = min(trained, _LOGIT_ROWS) * model.vocab / tp * 4.0
    others = kept * (stage.alive - 1)
    two_layers, ends = 2.0 * layer_params * width, end * width
    if shards == 1:  # nothing is gathered; below float32 a whole copy is computed with
        two_layers, ends = 0.0, stage.params(model, tp) * width if width != 4.0 else 0.0
    # What one rank alone adds to its float32 gradients at once, FSDP2 holds until a unit is done: the output layer's to the
    # end of the pass, a layer's while the one before it in the model is computed again.
    held = 0.0
    if shards > 1:
        held = (layer_params if layout.recompute else 0.0) * width + (head * width if stage.is_last else 0.0)
    way = tokens * width * (h + 2.0 * model.intermediate / tp)
    if model.sparse_layers:  # gradients of the rows that experts gave and of their gates
        way = tokens * width * (h + _routed_rows(model, layout) * (h + 2.0 * model.expert_intermediate))
    moments = [(ends + two_layers, others + kept + (layer if layout.recompute else 0.0) + way + held, 0.0)]
    if stage.is_last:
        after = tokens * h * (4.0 + 3.0 * width)  # the last norm, and the hidden states that are looked at
        parts = 2.0 if trained > _LOGIT_ROWS else 1.0  # of a chunk and of those before it
        moments.append((ends, others + kept + after, 2.0 * chunk))
        moments.append((ends, others + kept + after + parts * head * 4.0, chunk))
    if shards > 1:  # gradients of both ends are whole when the backward pass ends, and copied in float32 to be reduced
        moments.append((ends, others + end * (width + 4.0), 0.0))
    elif stage.is_first:
        moments.append((ends, others + head * width, 0.0))
    gathered, activations, logits = max(moments, key=sum)
    return {"gathered_layers": gathered, "activations": activations, "logits": logits}
