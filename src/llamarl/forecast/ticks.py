"""What a tick costs each role: decode steps of a generator replica, an optimizer step of the trainer.

A generator's tick is counted in decode steps first. Which sequences run at which step depends on
their lengths and on the slots, not on how long a step takes, so the schedule is worked out once,
and every hardware and layout is a weighted sum of it.

    whole batches    : n sequences, c slots; the tick ends when the last one ends (the drain leaves slots empty)
    partial rollouts : the tick ends with the n-th complete group, the unfinished are carried over
        and their caches filled
                       again under the next weights; the step waits for the slowest replica

The trainer cuts every matrix over ``tp``, layers over ``pp``, the tokens of a micro-batch over ``cp``, and parameters,
gradients and optimizer state of a data rank over ``fsdp`` (and ``cp``); ``dp`` repeats all that. Sequences are packed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from llamarl.forecast.costs import (
    GeneratorLayout,
    all_reduce_s,
    decode_step_s,
    exchange_s,
    gather_s,
    matmul_s,
    prefill_s,
)
from llamarl.forecast.hardware import Hardware
from llamarl.forecast.lengths import Lengths
from llamarl.forecast.model import ModelSpec, stages_of
from llamarl.settings.trainer import TWO_MOMENTS, TrainerConfig
from llamarl.tick_schedule import NEVER, Batches, constant_batches, plan_tick, slot_starts

__all__ = [
    "GeneratorDemand",
    "Profile",
    "TrainerDemand",
    "TrainerLayout",
    "TrainerTime",
    "attention_values",
    "expert_copies",
    "generator_tick_s",
    "profile_of",
    "trainer_tick",
]

Floats = npt.NDArray[np.float64]


# -- a generator's tick in decode steps -------------------------------------------------------------------------------


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
    """Sequences that decode at once."""
    max_segments: int = 1
    """Versions that a response may span; above 1, unfinished ones are carried over (partial rollouts)."""
    oversubscription: float = 1.0
    """Partial rollouts: groups in flight, in units of those that a tick delivers; 1 to ``max_segments``."""

    @property
    def partial(self) -> bool:
        return self.max_segments > 1


@dataclass(frozen=True, kw_only=True, eq=False)
class Profile:
    """A tick of one replica as runs of decode steps with a constant batch; of several sampled ones in a row."""

    steps: Floats
    """[runs] decode steps."""
    active: Floats
    """[runs] sequences decoding."""
    written: Floats
    """[runs] mean tokens that an active sequence has written so far; the prompt not counted."""
    peak_written: float
    """Most response tokens held at once, over all active sequences."""
    peak_active: int
    prompts: float
    """Prompts that a tick fills into the cache."""
    refilled: float = 0.0
    """Carried tokens whose cache a tick fills again."""
    row: npt.NDArray[np.int64] | None = None
    """[runs] sample that a run belongs to, ``tick * replicas + replica``; None: all belong to one."""
    ticks: int = 1
    replicas: int = 1

    def slowest(self, seconds: Floats, replicas: int) -> float:
        """Mean over the ticks of the slowest of ``replicas``, of the seconds of each run.

        Within a tick only: where lengths hardly vary, replicas are in step, some ticks long for all
        and some short for all.
        """
        if self.row is None:
            return float(seconds.sum())
        sums: Floats = np.bincount(self.row, seconds, self.ticks * self.replicas).astype(np.float64)
        return float(np.mean([_expected_largest(tick, replicas) for tick in sums.reshape(self.ticks, self.replicas)]))


def _expected_largest(values: Floats, count: int) -> float:
    """Mean of the largest of ``count`` independent draws from the empirical distribution of ``values``."""
    rank = np.arange(len(values) + 1) / len(values)
    return float((np.sort(values) * np.diff(rank**count)).sum())


@lru_cache(maxsize=65536)
def profile_of(demand: GeneratorDemand) -> Profile:
    """The schedule of a tick."""
    d = demand
    if d.partial:
        deliver = max(1, round(d.sequences / d.group_size))
        groups = max(deliver, int(deliver * d.oversubscription))
        return _partial_profile(d.lengths, d.group_size, deliver, groups, d.slots, d.max_segments)
    steps, active, written, peak = _whole_batch(d.lengths, d.sequences, d.slots, d.total_sequences)
    return Profile(
        steps=steps,
        active=active,
        written=written,
        peak_written=peak,
        peak_active=min(d.slots, d.sequences),
        prompts=d.sequences / d.group_size,
    )


@lru_cache(maxsize=4096)
def _whole_batch(lengths: Lengths, count: int, slots: int, total: int) -> tuple[Floats, Floats, Floats, float]:
    """Runs of ``count`` sequences on ``slots``, refilled at once, in the replica that holds the longest of ``total``.

    Lengths are the representative ones in a fixed shuffled order, but the longest is the expected
    maximum of all ``total`` responses of the tick: the step waits for the slowest replica.
    """
    values = lengths.representative(count).astype(np.float64)
    values[-1] = max(values[-1], lengths.expected_max(total))
    values = values[np.random.default_rng(0).permutation(count)][None]
    slots = min(slots, count)
    start = slot_starts(values, slots)
    runs = constant_batches(values, start, np.zeros_like(start), np.array([math.inf]), slots)
    return runs.steps, runs.active, runs.written, float(runs.held.max())


_SAMPLES = 1536
"""Sequences in flight over all sampled replicas, roughly: many small replicas, or one large one, cut down to scale."""
_TICKS = 12
_TICK = 1 << 40
"""Moments: tick times this plus the decode step."""


@lru_cache(maxsize=1024)
def _partial_profile(
    lengths: Lengths, group_size: int, deliver: int, active: int, slots: int, max_segments: int
) -> Profile:
    """Run the generator's own rule (``tick_schedule.py``) for a few ticks of a few replicas, with a fixed seed.

    A tick ends with its n-th complete group, which waits for its longest response; no formula for
    that is at hand. A large replica is run as one of a part of its size, whose batches are then
    scaled up.

    Args:
        deliver: Groups that a replica delivers a tick.
        active: Groups that it keeps in flight, ``deliver`` to ``max_segments * deliver``.
    """
    scale = max(1, min(active * group_size // _SAMPLES, deliver // 8))
    deliver, active, slots = deliver // scale, max(deliver // scale, active // scale), max(1, slots // scale)
    rng = np.random.default_rng(0)
    replicas = max(1, min(32, _SAMPLES // (active * group_size)))
    born = np.zeros((replicas, 0), np.int64)
    done = np.zeros((replicas, 0), np.int64)
    length = np.zeros((replicas, 0, group_size), np.int64)
    written = np.zeros((replicas, 0, group_size), np.int64)
    found: list[Batches] = []
    refilled, filled = 0.0, 0.0
    warm = 2 * max_segments
    for tick in range(warm + _TICKS):
        new = (replicas, active - born.shape[1])
        drawn = lengths.sample(new[0] * new[1] * group_size, rng).reshape(*new, group_size)
        born = np.concatenate([born, np.full(new, tick)], axis=1)
        done = np.concatenate([done, np.full(new, NEVER)], axis=1)
        length = np.concatenate([length, drawn], axis=1)
        written = np.concatenate([written, np.zeros_like(drawn)], axis=1)
        plan = plan_tick(
            length - written, done, born + max_segments - 1, now=tick * _TICK, tick=tick, prompts_per_step=deliver, slots=slots
        )  # fmt: skip
        if tick >= warm:
            found.append(constant_batches(plan.left, plan.start, written, plan.stop, slots))
            begun = (plan.left > 0) & (plan.start < plan.stop[:, None, None])
            refilled += float(np.where(begun, written, 0).sum())
            filled += float(begun.any(axis=2).sum())
        done = np.where(plan.completed_at <= (tick * _TICK + plan.stop)[:, None], plan.completed_at, NEVER)
        written = written + plan.made(plan.stop)
        born, done = (array[~plan.leaves].reshape(replicas, -1) for array in (born, done))
        length, written = (array[~plan.leaves].reshape(replicas, -1, group_size) for array in (length, written))
    samples = _TICKS * replicas
    return Profile(
        ticks=_TICKS,
        replicas=replicas,
        row=np.concatenate([runs.replica + at * replicas for at, runs in enumerate(found)]),
        steps=np.concatenate([runs.steps for runs in found]),
        active=np.concatenate([runs.active for runs in found]) * scale,
        written=np.concatenate([runs.written for runs in found]),
        refilled=refilled / samples * scale,
        prompts=filled / samples * scale,
        peak_written=max(float(runs.held.max(initial=0.0)) for runs in found) * scale,
        peak_active=max(int(runs.active.max(initial=0)) for runs in found) * scale,
    )


def generator_tick_s(hardware: Hardware, model: ModelSpec, layout: GeneratorLayout, demand: GeneratorDemand) -> float:
    """Seconds that the slowest replica needs for its share of a tick: what it fills into the cache,
    then every decode step."""
    profile = profile_of(demand)
    step = np.asarray(decode_step_s(hardware, model, layout, profile.active, demand.prompt_tokens + profile.written))
    replicas = max(1, round(demand.total_sequences / demand.sequences))
    filled = profile.refilled + profile.prompts * demand.prompt_tokens
    carried = profile.refilled / max(1.0, profile.prompts * demand.group_size)
    context = (demand.prompt_tokens + carried) / 2.0
    return profile.slowest(profile.steps * step, replicas) + prefill_s(hardware, model, layout, filled, context)


# -- what the trainer is asked ----------------------------------------------------------------------------------------


@dataclass(frozen=True, order=True)
class TrainerLayout:
    """How the trainer lies on its devices."""

    tp: int = 1
    pp: int = 1
    fsdp: int = 1
    dp: int = 1
    micro_batch: int = 1
    """Sequences of mean length in one micro-batch of a data-parallel rank."""
    recompute: bool = True
    """Activation checkpointing of every layer: a second forward pass instead of stored activations."""
    cp: int = 1
    """Ranks over which each micro-batch's tokens are cut (Ulysses); parameters are sharded over them as well."""
    ep: int = 1
    """Of the ``shards``, neighbours that have different experts, to which tokens travel (``trainer.ep``)."""
    at_once: int = 1
    """Micro-batches that a lone rank on a CPU computes at the same time (``trainer.microbatches_at_once``)."""

    @property
    def devices(self) -> int:
        return self.tp * self.pp * self.fsdp * self.dp * self.cp

    @property
    def data_ranks(self) -> int:
        """Ranks, or groups of them, that hold other samples."""
        return self.fsdp * self.dp

    @property
    def shards(self) -> int:
        """Parts into which a stage's parameters are cut, beside tensor parallelism."""
        return self.fsdp * self.cp


@dataclass(frozen=True, kw_only=True)
class TrainerDemand:
    """What a tick asks of the trainer."""

    lengths: Lengths
    prompt_tokens: int
    sequences: int
    group_size: int = 1
    """Responses to one prompt: they stay on one data rank."""
    moment_bytes: int = TWO_MOMENTS
    """That the optimizer keeps of each weight of a matrix in a layer."""

    def most_of(self, data_ranks: int) -> int:
        """Sequences of the data rank that gets most: groups are dealt whole."""
        return math.ceil(self.sequences / self.group_size / data_ranks) * self.group_size

    @property
    def mean_tokens(self) -> float:
        """Tokens of a sequence as computed on, prompt included."""
        return self.prompt_tokens + self.lengths.mean

    @property
    def mean_squared_tokens(self) -> float:
        p = self.prompt_tokens
        return p * p + 2.0 * p * self.lengths.mean + self.lengths.second_moment

    def budget(self, layout: TrainerLayout) -> int:
        """``trainer.max_tokens_per_microbatch`` of ``layout.micro_batch`` sequences of mean length."""
        return max(1, round(layout.micro_batch * self.mean_tokens))

    def microbatches(self, layout: TrainerLayout) -> int:
        """That the fullest data rank computes in a tick."""
        return math.ceil(self.most_of(layout.data_ranks) / layout.micro_batch)


# -- a trainer's tick -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TrainerTime:
    """Seconds of a tick by part; they add up to ``total_s``."""

    compute_s: float
    """Matrix products, attention and elementwise passes of the busiest rank."""
    exchanges_s: float
    """All-reduces of activations and exchanges between context- and expert-parallel ranks, which nothing hides."""
    sharding_s: float
    """Gathers and reduce-scatters that the compute does not cover."""
    bubble_s: float
    """Pipeline fill and drain, and the hops from stage to stage."""
    optimizer_s: float
    host_s: float

    @property
    def total_s(self) -> float:
        return sum(vars(self).values())

    @property
    def of_batch_s(self) -> float:
        """What grows with the batch."""
        return self.total_s - self.optimizer_s - self.host_s


def _forward_layer_s(
    hardware: Hardware, model: ModelSpec, tp: int, ep: int, tokens: float, attention_s: float
) -> float:
    """One layer's forward pass of a micro-batch of ``tokens`` on one rank, collectives not counted.

    Args:
        attention_s: Of it, what attention takes between its products.
    """
    h = model.hidden
    out = model.heads * (model.value_dim or model.head_dim)
    into_attention = model.attention_params / h - out  # columns of the products before it, biases and norms included
    time = matmul_s(hardware, tokens, h, into_attention / tp) + matmul_s(hardware, tokens, out / tp, h)
    dense_share = (model.layers - model.sparse_layers) / model.layers

    def mlp(rows: float, width: float) -> float:
        into = matmul_s(hardware, rows, h, (2.0 if model.gated else 1.0) * width / tp)
        return into + matmul_s(hardware, rows, width / tp, h)

    time += dense_share * mlp(tokens, model.intermediate) + attention_s
    active_width = model.intermediate * dense_share
    if model.sparse_layers:
        rows = tokens * model.experts_per_token / model.experts
        own = tp * ep  # tokens of ``ep`` ranks come to each of a rank's experts
        sparse = model.experts / own * mlp(rows * own, model.expert_intermediate) if rows * own >= 1 else 0.0
        rate = hardware.matmul_rate(hardware.device.train_precision)
        routed = 2.0 * tokens * model.experts_per_token * model.expert_params / tp / rate
        shared = mlp(tokens, model.shared_expert_intermediate) if model.shared_expert_intermediate else 0.0
        # Grouped kernels run all experts in one launch: at least the FLOPs, at most one product an expert.
        time += (1.0 - dense_share) * (max(routed, min(sparse, 2.0 * routed)) + shared)
        width = model.experts_per_token * model.expert_intermediate + model.shared_expert_intermediate
        active_width += (1.0 - dense_share) * width
    elementwise = tokens * (12.0 * h + 5.0 * active_width / tp) * hardware.device.activation_bytes
    return time + elementwise / hardware.memory_rate


def attention_values(model: ModelSpec, layout: TrainerLayout) -> tuple[float, float]:
    """Numbers a token and layer of queries, and of keys and values, over the tensor- and
    context-parallel ranks together, repeated heads counted as often."""
    q, kv = float(model.heads * model.head_dim), float(model.kv_values_per_token)
    if model.kv_lora_rank:  # keys and values of each head, made of the latent ones, are of one width in attention
        q = float(model.heads * (model.head_dim + model.rope_dim))
        kv = 2.0 * q
    elif layout.cp > 1:
        kv = 2.0 * math.lcm(max(1, model.kv_heads // layout.tp), layout.cp) * model.head_dim * layout.tp
    return q, kv


def _attention_s(hardware: Hardware, model: ModelSpec, layout: TrainerLayout, demand: TrainerDemand) -> float:
    """Seconds a sequence and layer that a rank spends on scores and values, on average, in a forward
    pass: each token attends to half of its own sequence."""
    each = model.attention_flops(1.0) / hardware.attention_rate
    return each * demand.mean_squared_tokens / 2.0 / (layout.tp * layout.cp)


def expert_copies(model: ModelSpec, layout: TrainerLayout) -> float:
    """How often a token travels, on average, if routers choose evenly: once to each of the ``ep``
    ranks that have one of its experts."""
    own, k = model.experts // (layout.tp * layout.ep), model.experts_per_token
    none_here = math.comb(model.experts - own, k) / math.comb(model.experts, k)  # the choices of a token differ
    return layout.ep * (1.0 - none_here)


def _exchanges_s(hardware: Hardware, model: ModelSpec, layout: TrainerLayout, tokens: float) -> float:
    """Messages of a layer and pass that nothing hides: two sums over ``tp``, exchanges over ``cp`` and ``ep``."""
    width = hardware.device.activation_bytes
    seconds = 2.0 * float(all_reduce_s(hardware, tokens * model.hidden * width, layout.tp))
    if (
        layout.cp > 1
    ):  # queries and outputs of a rank's heads, and keys and values, repeated where ranks cannot share them
        heads = math.lcm(max(1, model.kv_heads // layout.tp), layout.cp)
        values = 2.0 * (model.heads / layout.tp + heads) * (model.head_dim + model.rope_dim)
        seconds += exchange_s(hardware, tokens * values * width, layout.cp, layout.tp)
    if layout.ep > 1:  # there and back
        sent = tokens * expert_copies(model, layout) * (model.hidden + model.experts_per_token)
        there_s = exchange_s(hardware, sent * width, layout.ep, layout.tp)
        seconds += 2.0 * there_s * model.sparse_layers / model.layers
    return seconds


def _gathers_s(hardware: Hardware, model: ModelSpec, layout: TrainerLayout, forwards: float) -> float:
    """Sharding traffic of a layer and micro-batch: parameters before each pass, gradients back in float32."""
    if layout.shards == 1:
        return 0.0
    width, stride = hardware.device.activation_bytes, layout.tp * layout.pp
    experts = model.routed_params / model.layers / layout.tp if layout.ep > 1 else 0.0
    whole = model.layer_params / layout.tp - experts
    seconds = forwards * gather_s(hardware, whole * width, layout.shards, stride)
    seconds += gather_s(hardware, whole * 4.0, layout.shards, stride)
    if experts:  # of a rank's own, over the ranks that have the same
        same, own = layout.shards // layout.ep, experts / layout.ep
        seconds += forwards * gather_s(hardware, own * width, same, stride * layout.ep)
        seconds += gather_s(hardware, own * 4.0, same, stride * layout.ep)
    return seconds


def trainer_tick(hardware: Hardware, model: ModelSpec, layout: TrainerLayout, demand: TrainerDemand) -> TrainerTime:
    """Time of one optimizer step over all sequences of a tick."""
    e, width = hardware.efficiency, hardware.device.activation_bytes
    sequences, micro_batches = demand.most_of(layout.data_ranks), demand.microbatches(layout)
    per_micro = sequences / micro_batches
    tokens = per_micro * demand.mean_tokens / layout.cp
    attention_s = per_micro * _attention_s(hardware, model, layout, demand)
    forward = _forward_layer_s(hardware, model, layout.tp, layout.ep, tokens, attention_s)
    passes = 4.0 if layout.recompute else 3.0
    scored, vocabulary = per_micro * demand.lengths.mean / layout.cp, model.vocab / layout.tp
    head = matmul_s(hardware, scored, model.hidden, vocabulary)
    head += scored * vocabulary * 8.0 / hardware.memory_rate  # log-softmax: fp32 scores, read and written
    # Logits are computed again for their gradient, but where they are one chunk (trainer/logprobs.py).
    head *= 4.0 if scored > TrainerConfig.logprob_chunk_tokens else 3.0
    host = e.train_layer_overhead_s * passes
    messages = _exchanges_s(hardware, model, layout, tokens)
    traffic = _gathers_s(hardware, model, layout, 2.0)

    def of_stage(layers: int, has_head: bool) -> tuple[float, float, float]:
        """Compute, messages, and traffic that is not hidden, of a micro-batch there and back."""
        layers_s = forward * passes * layers
        # A GPU works while the host launches ahead; a CPU core is its own host.
        layers_s = layers_s + host * layers if hardware.is_cpu else max(layers_s, host * layers)
        compute = layers_s + head * has_head
        return compute, (passes - 1.0) * layers * messages, max(0.0, traffic * layers - e.overlap * compute)

    each = [of_stage(stage.layers, stage.is_last) for stage in stages_of(model.layers, layout.pp)]
    slowest = max(range(layout.pp), key=lambda stage: sum(each[stage]))  # sets the pace
    compute, exchanges, exposed = each[slowest]
    params = max(stage.params(model, layout.tp) for stage in stages_of(model.layers, layout.pp)) / layout.shards
    stride = layout.tp * layout.pp * layout.shards
    reduce = float(all_reduce_s(hardware, params * 4.0, layout.dp, stride))  # once a tick, over the copies
    bubble = sum(sum(times) for stage, times in enumerate(each) if stage != slowest)
    if layout.pp > 1:
        link = hardware.device.inter_node_bytes_per_s * e.link
        bubble += 2.0 * micro_batches * tokens * model.hidden * width / link
    scale = e.trainer_scale
    return TrainerTime(
        compute_s=scale * compute * micro_batches,
        exchanges_s=scale * exchanges * micro_batches,
        sharding_s=scale * (exposed * micro_batches + reduce),
        bubble_s=scale * bubble,
        optimizer_s=scale * params * 32.0 / hardware.memory_rate,  # all state is read and written, and the bf16 copy
        host_s=e.train_step_overhead_s,
    )
