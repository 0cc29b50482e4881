"""Rooflines of the parts: matrix products, collectives, a decode step, prefill, a weight hand-over.

Every time is ``work / (peak * efficiency) + latency``, with the constants of ``hardware.py``.
Symbols: ``tp`` tensor-parallel ranks of a replica, ``active`` sequences that decode at once in a
replica, ``context`` their mean tokens so far.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llamarl.forecast.hardware import BYTES_PER_WEIGHT, Hardware
from llamarl.forecast.model import ModelSpec

__all__ = [
    "GeneratorLayout",
    "all_reduce_s",
    "captured_layer_s",
    "decode_step_s",
    "exchange_s",
    "gather_s",
    "group_link",
    "is_captured",
    "matmul_s",
    "prefill_s",
    "pulled_bytes",
    "rank_params",
    "turns_s",
    "weight_bytes",
    "weight_sync_s",
]

_KERNELS_A_LAYER = 14
"""That the engine starts in a decode step, compiled (``tests/unit/engine/test_compiled_layers.py`` counts them)."""
_KERNELS_A_LAYER_OF_FP8 = 57
"""As a card counted them while such layers were not compiled (docs/results/gpu.json); none has timed the 15 to 18 since."""

Numbers = npt.NDArray[np.float64] | float


@dataclass(frozen=True, order=True)
class GeneratorLayout:
    """How one generator replica lies on its devices."""

    tp: int = 1
    precision: str = "bf16"
    other_system: bool = False
    """Decode from captured graphs on any number of ranks, and of quantized weights the codes alone:
    what the paper's system may have, and llamarl's engine has not."""


def is_captured(hardware: Hardware, model: ModelSpec, layout: GeneratorLayout) -> bool:
    """Whether decode steps run from captured graphs: of one rank and of dense families
    (``engine/cuda_graphs.py``). On a CPU nobody launches ahead, and all host time adds up either
    way."""
    if layout.other_system or hardware.is_cpu:
        return True
    return layout.tp == 1 and model.quantized_by_llamarl and not model.rotary_by_length


def captured_layer_s(hardware: Hardware, layout: GeneratorLayout) -> float:
    """What a layer of a decode step takes besides its work where it is launched from a graph."""
    e = hardware.efficiency
    if layout.other_system or hardware.is_cpu:
        return e.fused_layer_overhead_s
    compiled = layout.precision == hardware.device.train_precision
    return (_KERNELS_A_LAYER if compiled else _KERNELS_A_LAYER_OF_FP8) * e.kernel_gap_s


def group_link(hardware: Hardware, ranks: int, stride: int = 1) -> float:
    """Bytes/s a rank of a group reaches in a ring.

    Inside a node: a rank's own link. Across nodes: NCCL runs one ring a network card, so a rank sees the cards of all
    members in its node together, but never more than its own link.

    Args:
        stride: Devices from one member to the next: 1 for tensor-parallel neighbours, ``tp * pp`` for a sharding group.
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
    """All-to-all in which each rank keeps its share of ``num_bytes`` and sends every other rank one as large.

    What leaves the node goes over the rank's own network card: all ranks send at once, so none has its neighbours'.
    """
    if ranks <= 1:
        return 0.0
    device, e = hardware.device, hardware.efficiency
    inside = min(ranks, max(1, device.devices_per_node // stride))
    volume = (inside - 1) / ranks / device.intra_node_bytes_per_s
    volume += (ranks - inside) / ranks / min(device.intra_node_bytes_per_s, device.inter_node_bytes_per_s)
    latency = e.intra_node_latency_s if inside == ranks else e.inter_node_latency_s
    return num_bytes * volume / e.link + latency + e.collective_launch_s


def matmul_s(hardware: Hardware, rows: float, inner: float, columns: float) -> float:
    """A [rows, inner] x [inner, columns] product at the trainer's precision: slower of arithmetic and traffic.

    Arithmetic runs in tiles, and the last wave of tiles leaves units idle: a product cut thin by tensor parallelism
    fills few units. Traffic is both operands and the result.
    """
    if rows <= 0 or columns <= 0:
        return 0.0
    e = hardware.efficiency
    flops = 2.0 * rows * inner * columns
    if e.compute_units > 1:
        tiles = math.ceil(rows / min(e.tile_rows, rows)) * math.ceil(columns / min(e.tile_columns, columns))
        waves = math.ceil(tiles / e.compute_units)
        # Kernels may cut the inner dimension too where tiles are few, down to 512 long: then units fill again.
        split = max(1.0, min(e.compute_units / tiles, inner / 512.0)) if tiles < e.compute_units else 1.0
        flops = max(flops, 2.0 * waves * e.compute_units * e.tile_rows * e.tile_columns * inner / split)
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


def decode_step_s(
    hardware: Hardware, model: ModelSpec, layout: GeneratorLayout, active: Numbers, context: Numbers
) -> Numbers:
    """Time in which each of ``active`` sequences of one replica gains one token; arrays in, arrays out.

    A layer: weights against bandwidth or FLOPs against the matmul rate, whichever is longer; then
    the cache's bytes, read once; then two all-reduces.
    """
    e, size = hardware.efficiency, hardware.device.activation_bytes
    active = np.asarray(active, dtype=np.float64)
    rate = hardware.matmul_rate(layout.precision)
    weights = _layer_weight_bytes(model, layout.precision, active) / layout.tp / hardware.memory_rate
    flops = 2.0 * model.active_layer_params * active / layout.tp / rate
    cache_shards = min(layout.tp, model.kv_shards)
    kv = active * context * model.kv_values_per_token * size / cache_shards / hardware.memory_rate
    attention = active * model.attention_flops(1.0) * context / layout.tp / hardware.attention_rate
    messages = 2.0 * np.asarray(all_reduce_s(hardware, active * model.hidden * size, layout.tp))
    device_layer = np.maximum(weights, flops) + np.maximum(kv, attention) + messages
    if is_captured(hardware, model, layout):
        layer = device_layer + captured_layer_s(hardware, layout)
    else:
        layer = np.maximum(device_layer, e.eager_layer_overhead_s)
    head_bytes = model.head_params * BYTES_PER_WEIGHT[layout.precision] / layout.tp
    head = np.maximum(head_bytes / hardware.memory_rate, 2.0 * model.head_params * active / layout.tp / rate)
    return e.generator_scale * (layer * model.layers + head) + e.decode_step_overhead_s


def prefill_s(hardware: Hardware, model: ModelSpec, layout: GeneratorLayout, tokens: float, context: float) -> float:
    """Time to fill the cache of ``tokens`` tokens, packed, in one replica; ``context`` is the mean they attend to."""
    if tokens <= 0:
        return 0.0
    rate, size = hardware.matmul_rate(layout.precision), hardware.device.activation_bytes
    flops = 2.0 * model.active_layer_params * model.layers * tokens / layout.tp
    weights = _layer_weight_bytes(model, layout.precision, tokens) * model.layers / layout.tp
    attention = model.attention_flops(context) * tokens * model.layers / layout.tp
    message = float(all_reduce_s(hardware, tokens * model.hidden * size, layout.tp))
    seconds = max(flops / rate, float(weights) / hardware.memory_rate) + attention / hardware.attention_rate
    return hardware.efficiency.generator_scale * (seconds + 2.0 * model.layers * message)


def rank_params(model: ModelSpec, layout: GeneratorLayout) -> float:
    """Parameters of a rank of llamarl's engine."""
    return model.body_params(layout.tp) + model.embedding_params / layout.tp


def weight_bytes(hardware: Hardware, model: ModelSpec, layout: GeneratorLayout) -> float:
    """Bytes of weights on a generator rank: the version as it arrived, and beside it what the
    engine derives from it (quantized codes; on CPU cores packed weights)."""
    width, computed = hardware.device.activation_bytes, BYTES_PER_WEIGHT[layout.precision]
    derived = layout.precision != hardware.device.train_precision or hardware.is_cpu
    head = model.head_params / layout.tp
    if layout.other_system:
        body = model.total_params - model.embedding_params
        return body * computed / layout.tp + model.embedding_params * width / layout.tp
    layers = model.body_params(layout.tp)
    return layers * width + model.embedding_params * width / layout.tp + (layers + head) * computed * derived


def pulled_bytes(hardware: Hardware, model: ModelSpec, layout: GeneratorLayout) -> float:
    """Bytes of one version that a generator rank receives."""
    return rank_params(model, layout) * hardware.device.activation_bytes


def weight_sync_s(
    hardware: Hardware, model: ModelSpec, *, trainer_devices: int, replicas: Sequence[tuple[int, GeneratorLayout]]
) -> float:
    """Direct hand-over of one version: the busiest rank's bytes over its link, and in one host their proof.

    Each generator rank pulls its own slice; the copies are spread over all trainer ranks. On one node the node's links
    carry it, else the network.

    Args:
        replicas: How many of each layout.
    """
    most = max(pulled_bytes(hardware, model, layout) for _, layout in replicas)
    copies = sum(count * layout.tp * rank_params(model, layout) for count, layout in replicas)
    sent = copies * hardware.device.activation_bytes / trainer_devices
    device, e = hardware.device, hardware.efficiency
    one_node = trainer_devices + sum(n * layout.tp for n, layout in replicas) <= device.devices_per_node
    if one_node:
        proof_s = e.hand_over_passes * most / hardware.memory_rate
        return max(most, sent) / (device.intra_node_bytes_per_s * e.link) + e.intra_node_latency_s + proof_s
    return max(most, sent) / (device.inter_node_bytes_per_s * e.link) + e.inter_node_latency_s


def turns_s(
    hardware: Hardware, model: ModelSpec, layout: GeneratorLayout, state_bytes: float, direct_s: float
) -> float:
    """Seconds of a tick on shared devices in which nothing computes (``schedule.colocated``).

    On GPUs the trainer's state goes to the host and back, and the version from there to the
    generator, over the host's link or, where that is slower, between devices.

    Args:
        state_bytes: Weights and moments of a trainer rank.
        direct_s: The hand-over between devices.
    """
    rate = hardware.device.host_bytes_per_s * hardware.efficiency.link
    return 2.0 * state_bytes / rate + max(direct_s, pulled_bytes(hardware, model, layout) / rate)
