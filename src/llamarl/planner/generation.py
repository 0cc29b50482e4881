"""What one generator replica does in a tick: continuous batching, counted in decode steps.

Which sequences run at which decode step depends on their lengths and on the slots, not on how long a step takes. So
the schedule is worked out once in steps (``batch_profile``), and any hardware, layout or precision is then one weighted
sum over it.

    whole batch      : n sequences, c slots; the tick ends when the last one ends (the drain leaves slots empty)
    partial rollouts : the tick ends with the n-th complete group, and what is unfinished is carried over, its cache filled
                       again under the next weights (``partial.py``); the step waits for the slowest replica
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from llamarl.planner.engine_memory import step_bytes
from llamarl.planner.hardware import BYTES_PER_WEIGHT, Hardware
from llamarl.planner.lengths import Lengths
from llamarl.planner.model_spec import ModelSpec
from llamarl.planner.partial import PartialProfile, partial_profile
from llamarl.planner.rooflines import GeneratorLayout, decode_step_s, prefill_s, stage_params
from llamarl.planner.stage_memory import stages_of
from llamarl.tick_schedule import constant_batches, slot_starts

__all__ = [
    "BatchProfile",
    "GeneratorDemand",
    "batch_profile",
    "generator_memory",
    "generator_tick_s",
    "group_ends_s",
    "padded_profile",
    "weight_bytes",
]

_SEGMENTS = 64


@dataclass(frozen=True, eq=False)
class BatchProfile:
    """A tick of one replica as runs of decode steps with a constant number of active sequences."""

    steps: npt.NDArray[np.float64]
    """[segments] decode steps."""
    active: npt.NDArray[np.float64]
    """[segments] sequences decoding."""
    written: npt.NDArray[np.float64]
    """[segments] mean tokens an active sequence has written so far; the prompt not counted."""
    peak_written: float
    """Most response tokens held at once, over all active sequences."""
    peak_active: int

    @property
    def num_steps(self) -> float:
        return float(self.steps.sum())


@lru_cache(maxsize=4096)
def batch_profile(lengths: Lengths, count: int, slots: int, total: int) -> BatchProfile:
    """Schedule of ``count`` sequences on ``slots``, refilled at once, in the replica that holds the longest of ``total``.

    Lengths are the representative ones of the distribution in a fixed shuffled order, but the longest is the expected maximum of all
    ``total`` responses of the tick: the step waits for the slowest replica.
    """
    values = _tick_lengths(lengths, count, total)
    slots = min(slots, count)
    start = slot_starts(values[None], slots)
    runs = constant_batches(values[None], start, np.zeros_like(start), np.array([math.inf]), slots)
    return _merged(np.stack([runs.steps, runs.active, runs.written], axis=1), float(runs.held.max()), slots)


def _tick_lengths(lengths: Lengths, count: int, total: int) -> npt.NDArray[np.float64]:
    values = lengths.representative(count).astype(np.float64)
    values[-1] = max(values[-1], lengths.expected_max(total))
    return values[np.random.default_rng(0).permutation(count)]


def padded_profile(lengths: Lengths, count: int, slots: int) -> BatchProfile:
    """Static batches: ceil(count / slots) waves, and every wave decodes all its rows up to the limit."""
    slots = min(slots, count)
    waves = -(-count // slots)
    limit = float(lengths.limit)
    one = np.ones(1)
    return BatchProfile(one * waves * limit, one * slots, one * limit / 2.0, limit * slots, slots)


def _merged(rows: npt.NDArray[np.float64], peak: float, slots: int) -> BatchProfile:
    """Neighbouring segments joined to at most ``_SEGMENTS``, step-weighted: step time is near linear inside one."""
    if len(rows) > _SEGMENTS:
        bins = np.minimum((np.cumsum(rows[:, 0]) / rows[:, 0].sum() * _SEGMENTS).astype(int), _SEGMENTS - 1)
        steps = np.bincount(bins, rows[:, 0], _SEGMENTS).astype(np.float64)
        keep = steps > 0
        active = np.bincount(bins, rows[:, 0] * rows[:, 1], _SEGMENTS)[keep] / steps[keep]
        tokens = np.bincount(bins, rows[:, 0] * rows[:, 1] * rows[:, 2], _SEGMENTS)[keep] / steps[keep]
        return BatchProfile(steps[keep], active, tokens / active, peak, slots)
    return BatchProfile(rows[:, 0], rows[:, 1], rows[:, 2], peak, slots)


@dataclass(frozen=True, kw_only=True)
class GeneratorDemand:
    """What a tick asks of one replica."""

    lengths: Lengths
    prompt_tokens: int
    group_size: int
    sequences: int
    """Responses of this replica a tick."""
    total_sequences: int
    """Responses of all replicas a tick."""
    slots: int
    partial: bool = False
    """Partial rollouts: carry unfinished sequences over."""
    max_segments: int = 1
    """Versions a carried sequence may span."""
    oversubscription: float = 1.0
    """Partial rollouts: groups in flight, in units of those that a tick delivers; 1 to ``max_segments``."""
    padded: bool = False
    """Static, padded batches instead of continuous ones."""
    shared_prefix: bool = True
    """The group's prompt is prefilled and held once."""


@lru_cache(maxsize=65536)
def _profile(demand: GeneratorDemand) -> BatchProfile:
    d = demand
    if d.padded:
        return padded_profile(d.lengths, d.sequences, d.slots)
    return batch_profile(d.lengths, d.sequences, d.slots, d.total_sequences)


def _partial_profile(demand: GeneratorDemand) -> PartialProfile:
    d = demand
    deliver = max(1, round(d.sequences / d.group_size))
    active = max(deliver, int(deliver * d.oversubscription))
    return partial_profile(d.lengths, d.group_size, deliver, active, d.slots, d.max_segments)


def generator_tick_s(hardware: Hardware, model: ModelSpec, layout: GeneratorLayout, demand: GeneratorDemand) -> float:
    """Seconds the slowest replica needs for its share of a tick: prefill of the prompts, then every decode step."""
    if demand.partial:
        return _partial_tick_s(hardware, model, layout, demand)
    profile = _profile(demand)
    step = np.asarray(decode_step_s(hardware, model, layout, profile.active, demand.prompt_tokens + profile.written))
    copies = demand.group_size if demand.shared_prefix else 1
    prompts = demand.sequences * demand.prompt_tokens / copies
    return float((profile.steps * step).sum()) + prefill_s(hardware, model, layout, prompts, demand.prompt_tokens / 2)


def group_ends_s(hardware: Hardware, model: ModelSpec, layout: GeneratorLayout, demand: GeneratorDemand) -> list[float]:
    """Seconds into a tick of whole batches at which each of a replica's groups is complete, ascending; the last is the tick's end."""
    d = demand
    values = _tick_lengths(d.lengths, d.sequences, d.total_sequences)[None]
    ends = (slot_starts(values, min(d.slots, d.sequences)) + values)[0]
    steps = np.sort([ends[i : i + d.group_size].max() for i in range(0, d.sequences, d.group_size)])
    profile = _profile(d)
    step_s = np.asarray(decode_step_s(hardware, model, layout, profile.active, d.prompt_tokens + profile.written))
    at = np.concatenate([[0.0], np.cumsum(profile.steps)])
    seconds = np.concatenate([[0.0], np.cumsum(profile.steps * step_s)])
    first_s = generator_tick_s(hardware, model, layout, d) - float(seconds[-1])
    return [first_s + float(second) for second in np.interp(steps, at, seconds)]


def _partial_tick_s(hardware: Hardware, model: ModelSpec, layout: GeneratorLayout, demand: GeneratorDemand) -> float:
    profile = _partial_profile(demand)
    step = np.asarray(decode_step_s(hardware, model, layout, profile.active, demand.prompt_tokens + profile.written))
    replicas = max(1, round(demand.total_sequences / demand.sequences))
    filled = profile.refilled + profile.groups * demand.prompt_tokens
    carried = profile.refilled / max(1.0, profile.groups * demand.group_size)
    context = (demand.prompt_tokens + carried) / 2.0
    return profile.slowest(profile.steps * step, replicas) + prefill_s(hardware, model, layout, filled, context)


def weight_bytes(hardware: Hardware, model: ModelSpec, layout: GeneratorLayout) -> float:
    """Bytes of weights on a generator rank.

    Cut everywhere, with embedding and head at the trainer's precision; where ``layout.runnable``, what llamarl's engine holds: the
    version as it arrived, and what it derives from it (quantized codes; on CPU cores packed weights) beside it.
    """
    body, width = model.total_params - model.embedding_params, hardware.device.activation_bytes
    computed = BYTES_PER_WEIGHT[layout.precision]
    if not layout.runnable:
        return body * computed / layout.devices + model.embedding_params * width / layout.tp
    train = hardware.device.train_precision
    derived = layout.precision != train or train == "fp32"
    head = model.head_params / layout.tp
    if layout.pp == 1:
        layers = model.body_params(layout.tp)
        return layers * width + model.embedding_params * width / layout.tp + (layers + head) * computed * derived
    return max(
        held * width + (held - head * stage.is_first) * computed * derived  # nothing is derived from the embedding
        for held, stage in zip(stage_params(model, layout), stages_of(model.layers, layout.pp, 1), strict=True)
    )


def generator_memory(
    hardware: Hardware, model: ModelSpec, layout: GeneratorLayout, demand: GeneratorDemand
) -> dict[str, float]:
    """Bytes of the fullest generator rank, by part."""
    profile = _partial_profile(demand) if demand.partial else _profile(demand)
    shards = layout.pp * min(layout.tp * layout.cp, model.kv_shards)
    prompts = float(profile.peak_active * demand.prompt_tokens)
    if demand.shared_prefix:
        prompts = prompts / min(demand.group_size, profile.peak_active)
    if demand.padded:
        prompts = float(profile.peak_active * demand.prompt_tokens)
    tokens = profile.peak_written + prompts
    cache = tokens * model.kv_bytes_per_token(hardware.device.activation_bytes) / shards
    if layout.runnable:
        workspace = step_bytes(
            hardware,
            model,
            layout,
            active=profile.peak_active,
            prompt_tokens=prompts,
            cache_bytes=cache,
            longest=demand.prompt_tokens + (demand.lengths.limit if demand.partial else 0),
        )
    else:
        workspace = 4.0 * profile.peak_active * model.vocab / (layout.tp * layout.cp) + 8.0 * 2048 * (
            model.hidden + model.intermediate
        )
    return {
        "weights": weight_bytes(hardware, model, layout),
        "kv_cache": cache,
        "workspace": workspace,
    }
