"""What a training tick costs: FLOPs, recomputation, collectives, pipeline bubble, optimizer; and what it holds in memory.

Parallel axes: ``tp`` cuts every matrix, ``pp`` the layers, ``cp`` the tokens of a micro-batch, ``fsdp`` the parameters, gradients and
optimizer state of a data-parallel rank, over its ``cp`` ranks too; ``dp`` repeats all that (hybrid sharding). Sequences are packed
without padding into micro-batches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from llamarl.planner.hardware import Hardware
from llamarl.planner.lengths import Lengths
from llamarl.planner.model_spec import ModelSpec
from llamarl.planner.rooflines import all_reduce_s, exchange_s, gather_s, matmul_s
from llamarl.planner.shared_prompts import SharedRows, microbatch_tokens, shared_rows
from llamarl.planner.stage_memory import stage_memory, stages_of
from llamarl.trainer.packing import SIMILAR

__all__ = [
    "RUNNABLE_LOGIT_ROWS",
    "TrainerDemand",
    "TrainerLayout",
    "TrainerTime",
    "expert_copies",
    "kept_bytes",
    "kept_with_shared_prompts",
    "routed_bytes",
    "routed_rows",
    "trainer_memory",
    "trainer_tick",
]

_STATE_BYTES = {"parameters": 4.0, "gradients": 4.0, "optimizer": 8.0}
"""Bytes a parameter of the sharded state: fp32 master weights, fp32 gradients, two fp32 moments."""


RUNNABLE_LOGIT_ROWS = 512.0
"""Tokens whose logits llamarl's trainer holds at once: the default of ``trainer.logprob_chunk_tokens``."""


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
    runnable: bool = False
    """As llamarl's trainer: ranks beyond the key-value heads hold copies, FSDP2 gathers embedding and output layer together, and
    logits are those of a chunk of tokens."""
    threads: int = 1
    """CPU threads of a lone rank that uses what others leave of the cores; 1: every rank has a device."""
    at_once: int = 1
    """Micro-batches that such a rank computes at the same time (``trainer.microbatches_at_once``)."""
    cp: int = 1
    """Ranks over which each micro-batch's tokens are cut (Ulysses); parameters are sharded over them as well."""
    ep: int = 1
    """Of the ``shards``, neighbours that have different experts, to which tokens travel (``trainer.ep``)."""
    share_prompts: bool = False
    """A group's prompt is computed once for all of its responses in a micro-batch (``trainer.share_prompts``)."""

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

    @property
    def expert_ranks(self) -> int:
        """Over which whole experts are spread."""
        return self.tp * self.ep


@dataclass(frozen=True, kw_only=True)
class TrainerDemand:
    """What a tick asks of the trainer."""

    lengths: Lengths
    prompt_tokens: int
    sequences: int
    together: int = 1
    """Sequences of a group, which stay on one data rank."""
    group_size: int = 1
    """Responses to one prompt, which may be computed once for them."""
    padded: bool = False
    """Every sequence is filled up to the longest instead of packed."""
    reference_forward: bool = False
    """One more forward pass, for log-probs of a reference model held by the trainer."""

    def most_of(self, data_ranks: int) -> int:
        """Sequences of the data rank that gets most: groups are dealt whole."""
        return math.ceil(self.sequences / self.together / data_ranks) * self.together

    @property
    def mean_tokens(self) -> float:
        """Tokens of a sequence as computed on, prompt included."""
        return self.prompt_tokens + (self.lengths.limit if self.padded else self.lengths.mean)

    @property
    def mean_squared_tokens(self) -> float:
        if self.padded:
            return self.mean_tokens**2
        p = self.prompt_tokens
        return p * p + 2.0 * p * self.lengths.mean + self.lengths.second_moment

    @property
    def trained_tokens(self) -> float:
        """Tokens of a sequence whose log-probs are asked for, on average."""
        return float(self.lengths.limit) if self.padded else self.lengths.mean

    def budget(self, layout: TrainerLayout) -> int:
        """``trainer.max_tokens_per_microbatch`` of ``layout.micro_batch`` sequences of mean length."""
        sharing = self.group_size if layout.share_prompts else 1
        return max(1, round(microbatch_tokens(layout.micro_batch, self.prompt_tokens, self.lengths.mean, sharing)))

    def shared_rows(self, layout: TrainerLayout) -> SharedRows | None:
        """Of a sequence in such micro-batches; None where each has its own prompt."""
        if not layout.share_prompts:
            return None
        return shared_rows(self.lengths, self.prompt_tokens, self.group_size, self.budget(layout))

    def microbatches(self, layout: TrainerLayout) -> int:
        """That the fullest data rank computes in a tick."""
        sequences, rows = self.most_of(layout.data_ranks), self.shared_rows(layout)
        if rows is None:
            return math.ceil(sequences / layout.micro_batch)
        tokens = sequences * (rows.prompt_tokens + self.lengths.mean)
        return min(sequences, math.ceil(tokens / self.budget(layout) - 1e-6))


@dataclass(frozen=True, kw_only=True)
class TrainerTime:
    """Seconds of a tick by part; they add up to ``total_s``."""

    compute_s: float
    """Matrix products, attention and elementwise passes of the busiest rank."""
    tensor_parallel_s: float
    """All-reduces of activations and exchanges between context-parallel ranks, which nothing hides."""
    fsdp_s: float
    """Gathers and reduce-scatters that the compute does not cover."""
    bubble_s: float
    """Pipeline fill and drain, and the hops from stage to stage."""
    optimizer_s: float
    other_s: float

    @property
    def total_s(self) -> float:
        return self.compute_s + self.tensor_parallel_s + self.fsdp_s + self.bubble_s + self.optimizer_s + self.other_s


def _forward_layer_s(
    hardware: Hardware, model: ModelSpec, tp: int, tokens: float, attention_s: float, ep: int = 1
) -> float:
    """One layer's forward pass of a micro-batch of ``tokens`` on one rank, collectives not counted.

    Args:
        attention_s: Of it, what attention takes between its products.
    """
    precision = hardware.device.train_precision
    h = model.hidden
    out = model.heads * (model.value_dim or model.head_dim)
    into_attention = model.attention_params / h - out  # columns of the products before it, biases and norms included
    time = matmul_s(hardware, tokens, h, into_attention / tp)
    time += matmul_s(hardware, tokens, out / tp, h)
    up = 2.0 if model.gated else 1.0
    dense_share = (model.layers - model.sparse_layers) / model.layers

    def mlp(rows: float, width: float) -> float:
        into = matmul_s(hardware, rows, h, up * width / tp)
        return into + matmul_s(hardware, rows, width / tp, h)

    time += dense_share * mlp(tokens, model.intermediate)
    if model.sparse_layers:
        rows = tokens * model.experts_per_token / model.experts
        own = tp * ep  # tokens of ``ep`` ranks come to each of a rank's experts
        sparse = model.experts / own * mlp(rows * own, model.expert_intermediate) if rows * own >= 1 else 0.0
        routed = 2.0 * tokens * model.experts_per_token * model.expert_params / tp / hardware.matmul_rate(precision)
        shared = mlp(tokens, model.shared_expert_intermediate) if model.shared_expert_intermediate else 0.0
        # Grouped kernels run all experts in one launch: at least the FLOPs, at most one product an expert.
        time += (1.0 - dense_share) * (max(routed, min(sparse, 2.0 * routed)) + shared)
    time += attention_s
    active_width = model.intermediate * dense_share
    if model.experts:
        width = model.experts_per_token * model.expert_intermediate + model.shared_expert_intermediate
        active_width += (1.0 - dense_share) * width
    elementwise = tokens * (12.0 * h + 5.0 * active_width / tp) * hardware.device.activation_bytes
    return time + elementwise / hardware.memory_rate


def _attention_s(hardware: Hardware, model: ModelSpec, layout: TrainerLayout, demand: TrainerDemand) -> float:
    """Seconds a sequence and layer that a rank spends on scores and values, on average, in a forward pass.

    Of separate sequences each token attends to half of its own; a prompt that is shared likewise to itself, and its responses, with
    copies of its keys and values, to whole rectangles.
    """
    each, ranks = model.attention_flops(1.0) / hardware.attention_rate, layout.tp * layout.cp
    rows = demand.shared_rows(layout)
    if rows is None:
        return each * demand.mean_squared_tokens / 2.0 / ranks
    pairs = rows.prompts * demand.prompt_tokens**2 / 2.0 + rows.pairs / hardware.efficiency.masked_attention
    width = hardware.device.activation_bytes
    q, kv, kv_masked = _attention_values(model, layout, width)
    copied = (2.0 * rows.queries * q + rows.keys * (kv + kv_masked)) * 2.0 * width  # read and written
    return (each * pairs + copied / hardware.memory_rate) / ranks


def trainer_tick(hardware: Hardware, model: ModelSpec, layout: TrainerLayout, demand: TrainerDemand) -> TrainerTime:
    """Time of one optimizer step over all sequences of a tick."""
    e = hardware.efficiency
    sequences, micro_batches = demand.most_of(layout.data_ranks), demand.microbatches(layout)
    per_micro, rows = sequences / micro_batches, demand.shared_rows(layout)
    tokens = per_micro * (demand.mean_tokens if rows is None else rows.prompt_tokens + demand.lengths.mean) / layout.cp
    # llamarl's last stage has the whole output layer, and its stages are whole layers; another system may have evened that out.
    stages = [(model.layers / layout.pp, 1.0 / layout.pp)] * layout.pp
    if layout.runnable:
        cut = stages_of(model.layers, layout.pp, micro_batches)
        stages = [(float(stage.layers), float(stage.is_last)) for stage in cut]

    attention_s = per_micro * _attention_s(hardware, model, layout, demand)
    forward = _forward_layer_s(hardware, model, layout.tp, tokens, attention_s, layout.ep)
    passes = 3.0 + (1.0 if layout.recompute else 0.0) + (1.0 if demand.reference_forward else 0.0)
    vocabulary = model.vocab / layout.tp
    scored = per_micro * demand.trained_tokens / layout.cp if layout.runnable else tokens
    head = matmul_s(hardware, scored, model.hidden, vocabulary)
    head += scored * vocabulary * 8.0 / hardware.memory_rate  # log-softmax: fp32 scores, read and written
    head_passes = passes if layout.recompute else 3.0
    host = e.train_layer_overhead_s * passes
    # Two all-reduces a layer and pass; the backward pass is one pass here, though it computes twice as much.
    message = float(all_reduce_s(hardware, tokens * model.hidden * hardware.device.activation_bytes, layout.tp))
    exchanged = tokens * _exchanged_values(model, layout) * hardware.device.activation_bytes
    messages = 2.0 * message + exchange_s(hardware, exchanged, layout.cp, layout.tp)
    if layout.ep > 1:  # there and back
        sent = tokens * expert_copies(model, layout) * (model.hidden + model.experts_per_token)
        there_s = exchange_s(hardware, sent * hardware.device.activation_bytes, layout.ep, layout.tp)
        messages += 2.0 * there_s * model.sparse_layers / model.layers
    # Parameters travel in bf16 before each pass and gradients come back in fp32, once a micro-batch; they hide behind compute.
    layer_bytes = model.layer_params / layout.tp
    gathers = 2.0 + (1.0 if demand.reference_forward else 0.0)
    width = hardware.device.activation_bytes
    stride = layout.tp * layout.pp
    experts = model.routed_params / model.layers / layout.tp if layout.ep > 1 else 0.0
    traffic = gathers * gather_s(hardware, (layer_bytes - experts) * width, layout.shards, stride)
    traffic += gather_s(hardware, (layer_bytes - experts) * 4.0, layout.shards, stride)
    if experts:  # of a rank's own, over the ranks that have the same
        alike, own = layout.shards // layout.ep, experts / layout.ep
        traffic += gathers * gather_s(hardware, own * width, alike, stride * layout.ep)
        traffic += gather_s(hardware, own * 4.0, alike, stride * layout.ep)

    def of_stage(layers: float, head_share: float) -> tuple[float, float, float]:
        """Compute, messages, and traffic that is not hidden, of a micro-batch there and back."""
        layers_s = forward * passes * layers
        # A GPU works while the host launches ahead; a CPU core is its own host.
        cpu = hardware.device.train_precision == "fp32"
        layers_s = layers_s + host * layers if cpu else max(layers_s, host * layers)
        compute = layers_s + head * head_passes * head_share
        exposed = max(0.0, traffic * layers - e.overlap * compute) if layout.shards > 1 else 0.0
        return compute, (passes - 1.0) * layers * messages, exposed

    each = [of_stage(*stage) for stage in stages]
    slowest = max(range(layout.pp), key=lambda stage: sum(each[stage]))  # sets the pace
    compute, tp_messages, exposed = each[slowest]
    stage_params = _stage_params(model, layout)
    gradient = stage_params / layout.shards * 4.0
    reduce = float(all_reduce_s(hardware, gradient, layout.dp, stride * layout.shards))  # once a tick, over the copies
    virtual = 1 if layout.runnable else min(e.pipeline_interleave, stages[0][0])  # llamarl's stages are not interleaved
    bubble = sum(sum(times) for stage, times in enumerate(each) if stage != slowest) / virtual
    hops = 0.0
    if layout.pp > 1:
        hops = 2.0 * micro_batches * tokens * model.hidden * width / (hardware.device.inter_node_bytes_per_s * e.link)
    touched = sum(_STATE_BYTES.values()) + 16.0  # read all state, write it and the bf16 copy
    optimizer = stage_params / layout.shards * touched / hardware.memory_rate
    return TrainerTime(
        compute_s=compute * micro_batches,
        tensor_parallel_s=tp_messages * micro_batches,
        fsdp_s=exposed * micro_batches + reduce,
        bubble_s=bubble + hops,
        optimizer_s=optimizer,
        other_s=e.train_step_overhead_s,
    )


def expert_copies(model: ModelSpec, layout: TrainerLayout) -> float:
    """How often a token travels, on average, if routers choose evenly: once to each of the ``ep`` ranks that have one of its experts."""
    own, k = model.experts // layout.expert_ranks, model.experts_per_token
    none_here = math.comb(model.experts - own, k) / math.comb(model.experts, k)  # the choices of a token differ
    return layout.ep * (1.0 - none_here)


def _exchanged_values(model: ModelSpec, layout: TrainerLayout) -> float:
    """Numbers a token and layer that a context-parallel rank exchanges: queries and outputs of its tensor-parallel part's heads, and keys
    and values, of repeated heads where so many ranks cannot share them."""
    if layout.cp == 1:
        return 0.0
    heads = math.lcm(max(1, model.kv_heads // layout.tp), layout.cp)
    return 2.0 * (model.heads / layout.tp + heads) * (model.head_dim + model.rope_dim)


def _stage_params(model: ModelSpec, layout: TrainerLayout) -> float:
    """Parameters of one tensor-parallel rank of the pipeline stage that has most, before they are sharded."""
    if layout.runnable:
        return max(stage.params(model, layout.tp) for stage in stages_of(model.layers, layout.pp, 1))
    return model.total_params / layout.tp / layout.pp


def _attention_values(model: ModelSpec, layout: TrainerLayout, width: float) -> tuple[float, float, float]:
    """Numbers a token and layer of queries, of keys and values, and of these as a kernel with a mask takes them: on a GPU a head for each
    query head. All over the tensor- and context-parallel ranks together, repeated heads counted as often.

    Args:
        width: Bytes of an activation.
    """
    q, kv = float(model.heads * model.head_dim), float(model.kv_values_per_token)
    if model.kv_lora_rank:  # keys and values of each head, made of the latent ones, are of one width in attention
        q = float(model.heads * (model.head_dim + model.rope_dim))
        kv = 2.0 * q
    elif layout.cp > 1:
        kv = 2.0 * math.lcm(max(1, model.kv_heads // layout.tp), layout.cp) * model.head_dim * layout.tp
    return q, kv, kv if width == 4.0 else 2.0 * q


def kept_bytes(model: ModelSpec, layout: TrainerLayout, width: float) -> float:
    """Bytes a token that a layer keeps for its backward pass: inputs of its products and norms, and of the gated activation.

    Args:
        width: Bytes of an activation.
    """
    if not layout.runnable:  # sequence parallelism cuts everything over tp
        q, kv = float(model.heads * model.head_dim), float(model.kv_values_per_token)
        mlp = float(model.intermediate)
        if model.experts:
            mlp = model.experts_per_token * model.expert_intermediate + model.shared_expert_intermediate
        return (4.0 * model.hidden + 2.0 * q + kv + 4.0 * mlp) * width / layout.tp
    q, kv, _ = _attention_values(model, layout, width)
    # The output of attention is copied into the order of the rows where ranks exchange it, or a CPU has padded it.
    outputs = 2.0 if layout.cp > 1 or width == 4.0 else 1.0
    return _kept_outside(model, layout, width) + (q * (1.0 + outputs) + kv) * width / layout.tp


def _kept_outside(model: ModelSpec, layout: TrainerLayout, width: float) -> float:
    """Of ``kept_bytes``, what scores and values of attention do not keep."""
    norm = 4.0 + 2.0 * width  # its input in float32, the same normalized, and scaled for the products
    q, kv, _ = _attention_values(model, layout, width)
    head_norms = (q + kv / 2.0) * (4.0 + width) if model.qk_norm else 0.0
    sparse = model.sparse_layers / model.layers
    mlp = (1.0 - sparse) * model.intermediate + sparse * model.shared_expert_intermediate
    kept = 2.0 * model.hidden * norm + (4.0 * mlp * width + head_norms) / layout.tp
    return kept + sparse * routed_bytes(model, layout, width)


def kept_with_shared_prompts(
    model: ModelSpec, layout: TrainerLayout, width: float, *, tokens: float, rows: SharedRows
) -> float:
    """Bytes that a layer of llamarl's trainer keeps of a micro-batch whose prompts are shared, on one rank.

    Args:
        width: Bytes of an activation.
        tokens: Of the micro-batch, over its context-parallel ranks.
        rows: Of the whole micro-batch.
    """
    q, kv, kv_masked = _attention_values(model, layout, width)
    inside = rows.prompt_tokens * (2.0 * q + kv) + rows.queries * 2.0 * q + rows.keys * kv_masked + tokens * q
    cut = (tokens * _kept_outside(model, layout, width) + inside * width / layout.tp) / layout.cp
    return cut + rows.masks * width  # each rank has masks of all tokens for its heads


def routed_rows(model: ModelSpec, layout: TrainerLayout) -> float:
    """Rows a token that a rank's experts are given, in the sparse layers: one for each of its choices, also those of experts that other
    ranks have, which are left out of the products alone."""
    return model.experts_per_token * (expert_copies(model, layout) if layout.ep > 1 else 1.0)


def routed_bytes(model: ModelSpec, layout: TrainerLayout, width: float) -> float:
    """Bytes a token that a sparse layer's routed experts keep: what goes in and comes out, the gate's three products and a row's
    places before and after sorting; and what the router found."""
    if not model.experts:
        return 0.0
    row = (2.0 * model.hidden + 4.0 * model.expert_intermediate + 1.0) * width + 16.0
    return routed_rows(model, layout) * row + model.experts * 4.0


def trainer_memory(
    hardware: Hardware, model: ModelSpec, layout: TrainerLayout, demand: TrainerDemand
) -> dict[str, float]:
    """Bytes of the fullest trainer rank, by part."""
    width = hardware.device.activation_bytes
    sequences = demand.most_of(layout.data_ranks)
    per_micro = min(layout.micro_batch, sequences)
    longest = float(demand.prompt_tokens + demand.lengths.limit)
    rows = demand.shared_rows(layout)
    budget = per_micro * demand.mean_tokens if rows is None else float(demand.budget(layout))
    tokens = max(budget, longest) / layout.cp  # a micro-batch holds at least the longest sequence whole
    micro_batches = demand.microbatches(layout)
    if rows is None:
        layer, masks = tokens * kept_bytes(model, layout, width), 0.0
    else:
        fullest = _fullest(rows, demand, budget)
        layer = kept_with_shared_prompts(model, layout, width, tokens=tokens * layout.cp, rows=fullest)
        masks = fullest.masks  # once more as single bytes, for all layers
    if layout.runnable:
        trained = max(per_micro * demand.lengths.mean, float(demand.lengths.limit)) / layout.cp
        every = []
        for stage in stages_of(model.layers, layout.pp, micro_batches):
            held = stage.sharded_params(model, tp=layout.tp, shards=layout.shards, ep=layout.ep)
            parts = _state(held, width, demand)
            parts |= stage_memory(
                model, stage, tp=layout.tp, shards=layout.shards, ep=layout.ep, tokens=tokens, trained_tokens=trained,
                logit_rows=RUNNABLE_LOGIT_ROWS, layer_bytes=layer, recompute=layout.recompute, width=width,
                routed_rows=routed_rows(model, layout),
            )  # fmt: skip
            parts["activations"] += masks
            every.append(_at_once(parts, layout))
        return max(every, key=lambda parts: sum(parts.values()))
    stage_params = _stage_params(model, layout)
    parts = _state(stage_params / layout.shards, width, demand)
    if layout.shards > 1:
        parts["gathered_layers"] = (2.0 * model.layer_params / layout.tp + model.head_params / layout.tp) * width
    elif width != 4.0:
        parts["gathered_layers"] = stage_params * width  # a whole bf16 copy
    layers = model.layers / layout.pp
    checkpoint = tokens * model.hidden * width / layout.tp  # sequence parallelism cuts hidden states, too
    kept = (checkpoint * layers + layer) if layout.recompute else layer * layers
    parts["activations"] = kept * min(layout.pp, micro_batches)
    parts["logits"] = min(tokens, 4096.0) * model.vocab / layout.tp * 8.0  # log-probs are made in chunks of tokens
    return _at_once(parts, layout)


def _fullest(rows: SharedRows, demand: TrainerDemand, budget: float) -> SharedRows:
    """Of the micro-batch that has the longest response, and others of mean length as far as the budget goes."""
    p, limit = demand.prompt_tokens, demand.lengths.limit
    others = max(0.0, budget - p - limit) / (rows.prompt_tokens + demand.lengths.mean)
    alike = limit * SIMILAR <= demand.lengths.mean  # all in one padded batch, which has one mask
    return SharedRows(
        prompts=1.0 + others * rows.prompts,
        prompt_tokens=p + others * rows.prompt_tokens,
        queries=limit + others * rows.queries,
        keys=p + limit + others * rows.keys,
        pairs=limit * (p + limit) + others * rows.pairs,
        masks=limit * (p + limit) + (0.0 if alike else others * rows.masks),
    )


def _state(held_params: float, width: float, demand: TrainerDemand) -> dict[str, float]:
    parts = {name: held_params * size for name, size in _STATE_BYTES.items()}
    if demand.reference_forward:
        parts["reference"] = held_params * width
    return parts


def _at_once(parts: dict[str, float], layout: TrainerLayout) -> dict[str, float]:
    if layout.at_once > 1:  # gradients of those at work and of one that is done stand beside the sum
        parts["gradients"] *= layout.at_once + 2
        parts["activations"] *= layout.at_once
        parts["logits"] *= layout.at_once
    return parts
