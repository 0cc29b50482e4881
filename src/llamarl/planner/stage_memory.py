"""What a rank of llamarl's own trainer holds, stage by stage: the moments at which its memory peaks.

    forward of the output layer    kept activations + two chunks of logits
    backward of the output layer   kept activations + a chunk of logits + the layer's gradient
    backward of a layer            kept activations (+ one layer's, where it is recomputed) + gradients on their way
    backward of the embedding      activations of the other micro-batches + the embedding's gradient

Kept are, for each micro-batch on its way (``p - s`` at stage s of p), inputs of products, norms and gates (``training.kept_bytes``). ``benchmarks/memory_forecast.py`` compares it with tensors counted in real ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from llamarl.models.sizes import layers_of_stages
from llamarl.planner.model_spec import ModelSpec

__all__ = ["StageLoad", "stage_memory", "stages_of"]


@dataclass(frozen=True, kw_only=True)
class StageLoad:
    """What a pipeline stage has of the model."""

    layers: int
    alive: int
    """Micro-batches that it keeps at once."""
    is_first: bool
    is_last: bool

    def end_params(self, model: ModelSpec) -> int:
        """Of embedding and output layer. A tied one lies on the first stage and on the last."""
        if self.is_first and self.is_last:
            return model.embedding_params
        return model.head_params if self.is_first or self.is_last else 0

    def params(self, model: ModelSpec, tp: int) -> float:
        """Of one tensor-parallel rank, before they are sharded."""
        return model.body_params(tp) / model.layers * self.layers + self.end_params(model) / tp

    def sharded_params(self, model: ModelSpec, *, tp: int, shards: int, ep: int = 1) -> float:
        """Of one rank, sharded: FSDP2 cuts experts along the first dimension, so of fewer experts than ranks some ranks have one and
        others none."""
        routed = model.routed_params / model.layers * self.layers / tp
        if not routed:
            return self.params(model, tp) / shards
        own = model.experts / (tp * ep)
        return (self.params(model, tp) - routed) / shards + routed / ep * math.ceil(own / (shards / ep)) / own


def stages_of(num_layers: int, pp: int, micro_batches: int) -> list[StageLoad]:
    """The stages of a pipeline, as the trainer cuts the layers and one forward, one backward keeps micro-batches."""
    return [
        StageLoad(
            layers=len(layers), alive=min(pp - stage, micro_batches), is_first=stage == 0, is_last=stage == pp - 1
        )
        for stage, layers in enumerate(layers_of_stages(num_layers, pp))
    ]


def stage_memory(
    model: ModelSpec,
    stage: StageLoad,
    *,
    tp: int,
    shards: int,
    tokens: float,
    trained_tokens: float,
    logit_rows: float,
    layer_bytes: float,
    recompute: bool,
    width: float,
    ep: int = 1,
    routed_rows: float = 0.0,
) -> dict[str, float]:
    """Bytes of a rank beside parameters, gradients and optimizer: ``gathered_layers``, ``activations``, ``logits`` at the fullest moment.

    Args:
        shards: Ranks over which FSDP2 cuts.
        tokens: Of a micro-batch, on this rank.
        trained_tokens: Those of them that the loss looks at.
        logit_rows: Tokens whose logits exist at once.
        layer_bytes: That a layer keeps for the backward pass of a micro-batch.
        width: Bytes of a number as computed with; 4 on a CPU.
        ep: Of the shards, how many have different experts.
        routed_rows: A token, that a rank's experts are given.
    """
    h, mlp = model.hidden, float(model.intermediate)
    routed = model.routed_params / model.layers
    layer_params = (model.layer_params - routed) / tp + routed / (tp * ep)
    kept = stage.layers * (tokens * h * width if recompute else layer_bytes)
    head, end = model.head_params / tp, stage.end_params(model) / tp
    rows = min(trained_tokens, logit_rows)
    chunk = rows * model.vocab / tp * 4.0
    others = kept * (stage.alive - 1)

    two_layers, ends = 2.0 * layer_params * width, end * width
    if shards == 1:  # nothing is gathered; below float32 a whole copy is computed with
        two_layers, ends = 0.0, stage.params(model, tp) * width if width != 4.0 else 0.0
    # What one rank alone adds to its float32 gradients at once, FSDP2 holds until a unit is done: the output layer's to the end of the
    # pass, a layer's while the one before it in the model is computed again.
    held = 0.0
    if shards > 1:
        held = (layer_params if recompute else 0.0) * width + (head * width if stage.is_last else 0.0)
    way = tokens * width * (h + 2.0 * mlp / tp)
    if model.sparse_layers:  # gradients of the rows that experts gave and of their gates
        way = tokens * width * (h + routed_rows * (h + 2.0 * model.expert_intermediate))
    moments = [(ends + two_layers, others + kept + (layer_bytes if recompute else 0.0) + way + held, 0.0)]
    if stage.is_last:
        after = tokens * h * (4.0 + 3.0 * width)  # the last norm, and the hidden states that are looked at
        parts = 2.0 if trained_tokens > logit_rows else 1.0  # of a chunk and of those before it
        moments.append((ends, others + kept + after, 2.0 * chunk))
        moments.append((ends, others + kept + after + parts * head * 4.0, chunk))
    if shards > 1:  # gradients of both ends are whole when the backward pass ends, and copied in float32 to be reduced
        moments.append((ends, others + end * (width + 4.0), 0.0))
    elif stage.is_first:
        moments.append((ends, others + head * width, 0.0))
    gathered, activations, logits = max(moments, key=sum)
    return {"gathered_layers": gathered, "activations": activations, "logits": logits}
