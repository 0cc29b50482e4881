"""Rooflines of the parts: matrix products, collectives, a decode step, prefill, weight hand-over.

Every time here is ``work / (peak * efficiency) + latency``, with the constants of ``hardware.py``; nothing knows of a
model family or a published result. Symbols: ``tp`` tensor-parallel ranks of a replica, ``pp`` pipeline stages,
``active`` sequences that decode at once in a replica, ``context`` their mean tokens so far.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llamarl.models.sizes import fitting_sizes, whole_experts, why_key_value_heads_not_shared
from llamarl.planner.hardware import BYTES_PER_WEIGHT, Hardware
from llamarl.planner.model_spec import ModelSpec
from llamarl.planner.stage_memory import stages_of

__all__ = [
    "SCALE_GROUP",
    "GeneratorLayout",
    "all_reduce_s",
    "context_parallel_sizes",
    "decode_step_s",
    "exchange_s",
    "expert_parallel_sizes",
    "gather_s",
    "group_link",
    "is_captured",
    "matmul_s",
    "prefill_s",
    "pulled_bytes",
    "stage_params",
    "tensor_parallel_sizes",
    "token_parallel_sizes",
    "weight_sync_s",
    "weight_syncs_s",
]

Numbers = npt.NDArray[np.float64] | float

SCALE_GROUP = 128
"""Weights that share one float32 scale where codes travel, as ``plan-sync`` takes it."""


@dataclass(frozen=True, order=True)
class GeneratorLayout:
    """How one generator replica lies on its devices."""

    tp: int = 1
    pp: int = 1
    precision: str = "bf16"
    captured: bool = True
    """Decode runs from captured graphs, of a ``runnable`` layout where llamarl's engine has them (``is_captured``); False: each kernel is
    launched from the host, and the step lasts as long as the slower of host and device."""
    runnable: bool = False
    """As llamarl's engine holds weights: versions arrive in the trainer's precision and stay, codes of a lower one are derived
    beside them, and ranks beyond the key-value heads hold copies. False: codes alone arrive and are held."""
    cp: int = 1
    """Parts into which a step's tokens are cut, each computed by ``tp`` ranks with the whole weights; not beside ``pp``."""

    @property
    def devices(self) -> int:
        return self.tp * self.pp * self.cp


def tensor_parallel_sizes(model: ModelSpec, limit: int, *, runnable: bool = True) -> list[int]:
    """Tensor-parallel sizes up to ``limit``, ascending.

    Args:
        runnable: Those that ``llamarl train`` takes (``fitting_sizes``, ``whole_experts``), and 1 alone for a model whose layers it
            does not cut. False: any that cuts the attention heads evenly.
    """
    if not runnable:
        return [tp for tp in range(1, min(limit, model.heads) + 1) if model.heads % tp == 0]
    if not model.cut_by_llamarl:
        return [1] if limit >= 1 else []
    sizes = whole_experts(fitting_sizes(model.heads, model.kv_heads, model.intermediate), model.experts)
    return [tp for tp in sizes if tp <= limit]


def context_parallel_sizes(model: ModelSpec, tp: int, limit: int) -> list[int]:
    """Ranks over which ``llamarl train`` can cut rows of tokens, beside ``tp``: powers of two that share the query heads evenly.

    Args:
        limit: Of ``tp`` times them.
    """
    if model.rotary_by_length:
        return [1] if tp <= limit else []
    return [2**i for i in range(limit.bit_length()) if tp * 2**i <= limit and model.heads % (tp * 2**i) == 0]


def token_parallel_sizes(model: ModelSpec, tp: int, limit: int) -> list[int]:
    """Ranks over which llamarl's engine can cut a step's tokens beside ``tp`` (``generator.cp``): powers of two that share the query
    heads and, in caches, the key-value heads evenly; whole latent ones lie on each.

    Args:
        limit: Of ``tp`` times them.
    """
    sizes = context_parallel_sizes(model, tp, limit)
    own, heads = model.heads // tp, max(1, model.kv_heads // tp)
    return [cp for cp in sizes if why_key_value_heads_not_shared(own, heads, cp) is None]


def expert_parallel_sizes(model: ModelSpec, tp: int, shards: int) -> list[int]:
    """Of ``shards`` ranks over which parameters are cut, how many can have different experts (``trainer.ep``)."""
    if not model.experts:
        return [1]
    return [ep for ep in range(1, shards + 1) if shards % ep == 0 and model.experts % (tp * ep) == 0]


def group_link(hardware: Hardware, ranks: int, stride: int = 1) -> float:
    """Bytes/s a rank of a group reaches in a ring.

    Args:
        stride: Devices from one member to the next: 1 for tensor-parallel neighbours, ``tp * pp`` for a sharding group.

    Inside a node: a rank's own link. Across nodes: NCCL runs one ring a network card, so a rank sees the cards of all
    members in its node together, but never more than its own link.
    """
    device = hardware.device
    if ranks * stride <= device.devices_per_node:
        return device.intra_node_bytes_per_s * hardware.efficiency.link
    members = max(1, device.devices_per_node // stride)
    return min(device.intra_node_bytes_per_s, device.inter_node_bytes_per_s * members) * hardware.efficiency.link


def _tree_latency(hardware: Hardware, ranks: int, stride: int = 1) -> float:
    """Latency of one pass up or down a tree over ``ranks``: NVLink steps inside a node, network steps between."""
    inside = min(ranks, max(1, hardware.device.devices_per_node // stride))
    nodes = -(-ranks // inside)
    e = hardware.efficiency
    return math.log2(inside) * e.intra_node_latency_s + math.log2(nodes) * e.inter_node_latency_s


def all_reduce_s(hardware: Hardware, num_bytes: Numbers, ranks: int, stride: int = 1) -> Numbers:
    """Sum ``num_bytes`` over a group: twice up or down a tree for latency, ring bytes for bandwidth."""
    if ranks <= 1:
        return num_bytes * 0.0
    volume = 2.0 * num_bytes * (ranks - 1) / ranks / group_link(hardware, ranks, stride)
    return volume + 2.0 * _tree_latency(hardware, ranks, stride) + hardware.efficiency.collective_launch_s


def gather_s(hardware: Hardware, num_bytes: float, ranks: int, stride: int = 1) -> float:
    """All-gather to, or reduce-scatter from, ``num_bytes`` on every rank of a group, round a ring."""
    if ranks <= 1:
        return 0.0
    e = hardware.efficiency
    volume = num_bytes * (ranks - 1) / ranks / group_link(hardware, ranks, stride)
    nodes = -(-ranks // max(1, hardware.device.devices_per_node // stride))
    hops = (ranks - nodes) * e.intra_node_latency_s + (nodes if nodes > 1 else 0) * e.inter_node_latency_s
    return volume + hops + e.collective_launch_s


def exchange_s(hardware: Hardware, num_bytes: float, ranks: int, stride: int = 1) -> float:
    """All-to-all in which each rank of a group keeps its share of ``num_bytes`` and sends every other rank one as large."""
    if ranks <= 1:
        return 0.0
    e = hardware.efficiency
    latency = e.intra_node_latency_s if ranks * stride <= hardware.device.devices_per_node else e.inter_node_latency_s
    return num_bytes * (ranks - 1) / ranks / group_link(hardware, ranks, stride) + latency + e.collective_launch_s


def matmul_s(hardware: Hardware, rows: float, inner: float, columns: float) -> float:
    """A [rows, inner] x [inner, columns] product at the trainer's precision: slower of arithmetic and traffic.

    Arithmetic runs in tiles, and the last wave of tiles leaves units idle: a product cut thin by tensor parallelism
    fills few units. Traffic is both operands and the result.
    """
    if rows <= 0 or columns <= 0:
        return 0.0
    e = hardware.efficiency
    tile_rows, tile_columns = min(e.tile_rows, rows), min(e.tile_columns, columns)
    tiles = math.ceil(rows / tile_rows) * math.ceil(columns / tile_columns)
    waves = math.ceil(tiles / e.compute_units)
    if e.compute_units > 1:
        # Kernels may cut the inner dimension too where tiles are few, down to 512 long: then units fill again.
        split = max(1.0, min(e.compute_units / tiles, inner / 512.0)) if tiles < e.compute_units else 1.0
        flops = 2.0 * waves * e.compute_units * e.tile_rows * e.tile_columns * inner / split
    else:
        flops = 2.0 * rows * inner * columns
    flops = max(flops, 2.0 * rows * inner * columns)
    traffic = hardware.device.activation_bytes * (rows * (inner + columns) + inner * columns)
    return max(flops / hardware.matmul_rate(hardware.device.train_precision), traffic / hardware.memory_rate)


def _layer_weight_bytes(model: ModelSpec, precision: str, active: Numbers) -> Numbers:
    """Bytes of weights that a decode step of ``active`` tokens reads in an average layer.

    A sparse layer reads the experts that at least one token chose; with k of E chosen at random by each token that is
    E (1 - (1 - k / E) ** active).
    """
    size = BYTES_PER_WEIGHT[precision]
    fixed = model.attention_params + (model.layers - model.sparse_layers) / model.layers * model.dense_mlp_params
    if not model.experts:
        return fixed * size + 0.0 * active
    touched = model.experts * (1.0 - (1.0 - model.experts_per_token / model.experts) ** active)
    sparse = model.sparse_fixed_params + touched * model.expert_params
    return (fixed + model.sparse_layers / model.layers * sparse) * size


def is_captured(hardware: Hardware, model: ModelSpec, layout: GeneratorLayout) -> bool:
    """Whether decode steps run from captured graphs. llamarl's engine records those of one rank, of dense families that it knows
    (``engine/cuda_graphs.py``); on a CPU nobody launches ahead, and all host time adds up either way."""
    if not layout.runnable or hardware.device.train_precision == "fp32":
        return layout.captured
    recorded = (
        model.quantized_by_llamarl and not model.rotary_by_length
    )  # what graphs and quantized layers ask for alike
    return layout.captured and layout.devices == 1 and recorded


def decode_step_s(
    hardware: Hardware, model: ModelSpec, layout: GeneratorLayout, active: Numbers, context: Numbers
) -> Numbers:
    """Time in which each of ``active`` sequences of one replica gains one token.

    Per layer: weights against bandwidth or FLOPs against the matmul rate, whichever is longer; then the cache's bytes;
    then two all-reduces. With ``pp`` stages the sequences go through in ``pp`` waves of ``active / pp``. With ``cp`` each rank
    reads all weights for its share of the tokens, and two exchanges stand in for the sums.
    Works on arrays of ``active`` and ``context`` too.
    """
    e, size = hardware.efficiency, hardware.device.activation_bytes
    wave = np.maximum(np.asarray(active, dtype=np.float64) / layout.pp, np.minimum(active, 1.0))
    rate = hardware.matmul_rate(layout.precision)
    own = np.maximum(wave / layout.cp, np.minimum(wave, 1.0))
    weights = _layer_weight_bytes(model, layout.precision, own) / layout.tp / hardware.memory_rate
    flops = 2.0 * model.active_layer_params * own / layout.tp / rate
    cache_shards = min(layout.tp * layout.cp, model.kv_shards)
    kv = wave * context * model.kv_values_per_token * size / cache_shards / hardware.memory_rate
    attention = wave * model.attention_flops(1.0) * context / (layout.tp * layout.cp) / hardware.attention_rate
    messages = 2.0 * np.asarray(all_reduce_s(hardware, own * model.hidden * size, layout.tp))
    messages = messages + _heads_exchanged_s(hardware, model, layout, own)
    device_layer = np.maximum(weights, flops) + np.maximum(kv, attention) + messages
    if is_captured(hardware, model, layout):
        layer = device_layer + e.decode_layer_overhead_s
    else:
        layer = np.maximum(device_layer, e.eager_layer_overhead_s)
    head_width = BYTES_PER_WEIGHT[layout.precision] if layout.runnable else size
    head_bytes = model.head_params * head_width / layout.tp
    head = np.maximum(head_bytes / hardware.memory_rate, 2.0 * model.head_params * own / layout.tp / rate)
    hops: Numbers = 0.0
    if layout.pp > 1:
        link = hardware.device.inter_node_bytes_per_s * e.link
        hops = wave * model.hidden * size / link + e.inter_node_latency_s + e.collective_launch_s
    stage = layer * model.layers / layout.pp + hops
    # Every wave passes every stage; the last stage, which also holds the head, sets the rhythm.
    step = layout.pp * (stage + head)
    return step + e.decode_step_overhead_s + e.decode_sequence_overhead_s * np.asarray(active, dtype=np.float64)


def _heads_exchanged_s(hardware: Hardware, model: ModelSpec, layout: GeneratorLayout, own: Numbers) -> Numbers:
    """Two exchanges of a layer, around attention: a rank's ``own`` tokens' queries, keys and values, then what they attended to."""
    if layout.cp == 1:
        return own * 0.0
    size = hardware.device.activation_bytes
    width = (model.head_dim + model.rope_dim) * size
    heads, kv_heads = model.heads / layout.tp, max(1, model.kv_heads // layout.tp, layout.cp)
    to_heads, to_tokens = (heads + 2 * kv_heads) * width, heads * width
    fixed = exchange_s(hardware, 0.0, layout.cp, layout.tp)
    per_byte = exchange_s(hardware, 1e9, layout.cp, layout.tp) - fixed
    return 2.0 * fixed + own * (to_heads + to_tokens) * per_byte / 1e9


def prefill_s(hardware: Hardware, model: ModelSpec, layout: GeneratorLayout, tokens: float, context: float) -> float:
    """Time to fill the cache of ``tokens`` tokens, packed, in one replica; ``context`` is the mean they attend to."""
    if tokens <= 0:
        return 0.0
    rate = hardware.matmul_rate(layout.precision)
    flops = 2.0 * model.active_layer_params * model.layers * tokens / layout.devices
    weights = _layer_weight_bytes(model, layout.precision, tokens) * model.layers / (layout.tp * layout.pp)
    attention = model.attention_flops(context) * tokens * model.layers / layout.devices
    size = hardware.device.activation_bytes
    messages = (
        2.0
        * model.layers
        * float(all_reduce_s(hardware, tokens / layout.cp * model.hidden * size, layout.tp))
        / layout.pp
    )
    messages += model.layers * float(_heads_exchanged_s(hardware, model, layout, tokens / layout.cp))
    return max(flops / rate, float(weights) / hardware.memory_rate) + attention / hardware.attention_rate + messages


def stage_params(model: ModelSpec, layout: GeneratorLayout) -> list[float]:
    """[stages] Parameters of a rank of llamarl's engine: the first stage has the embedding, the last the output layer."""
    if layout.pp == 1:
        return [model.body_params(layout.tp) + model.embedding_params / layout.tp]
    return [stage.params(model, layout.tp) for stage in stages_of(model.layers, layout.pp, 1)]


def pulled_bytes(hardware: Hardware, model: ModelSpec, layout: GeneratorLayout) -> float:
    """Bytes of one version that a generator rank receives, of the stage that has most; those of ``plan-sync`` for the same layout."""
    width = hardware.device.activation_bytes
    if layout.runnable:
        return max(stage_params(model, layout)) * width
    body = model.total_params - model.embedding_params
    codes = BYTES_PER_WEIGHT[layout.precision]
    scales = 4.0 / SCALE_GROUP if codes < width else 0.0
    return (body * (codes + scales) + model.embedding_params * width) / layout.devices


def weight_sync_s(
    hardware: Hardware, model: ModelSpec, *, trainer_devices: int, replicas: int, layout: GeneratorLayout
) -> float:
    """Direct hand-over of one version: the busiest rank's bytes over its link.

    Each generator rank pulls its own slice (``pulled_bytes``); the copies are spread over all trainer ranks, cast before they
    leave. On one node the node's links carry it, else the network.
    """
    return weight_syncs_s(hardware, model, trainer_devices=trainer_devices, kinds=[(replicas, layout)])[0]


def weight_syncs_s(
    hardware: Hardware, model: ModelSpec, *, trainer_devices: int, kinds: Sequence[tuple[int, GeneratorLayout]]
) -> list[float]:
    """``weight_sync_s`` to replicas of several kinds at once: each pulls its own slices from trainer ranks that send to all.

    Args:
        kinds: How many replicas, and the layout of one.
    """
    sent, pulled = 0.0, []
    for replicas, layout in kinds:
        most = pulled_bytes(hardware, model, layout)
        stages = stage_params(model, layout) if layout.runnable else [1.0]
        sent += most * sum(stages) / (max(stages) * len(stages)) * layout.devices * replicas / trainer_devices
        pulled.append(most)
    device = hardware.device
    devices = trainer_devices + sum(replicas * layout.devices for replicas, layout in kinds)
    one_node = devices <= device.devices_per_node
    link = device.intra_node_bytes_per_s if one_node else device.inter_node_bytes_per_s
    latency = hardware.efficiency.intra_node_latency_s if one_node else hardware.efficiency.inter_node_latency_s
    return [max(most, sent) / (link * hardware.efficiency.link) + latency for most in pulled]
