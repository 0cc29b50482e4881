"""The question, and every layout of one role that could answer it.

``search.py`` puts the choices of both roles together. Here a role is alone with its devices and its memory: trainer and
generator layouts that fit, each with its time and its memory by part.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

from llamarl.errors import PlanError
from llamarl.planner.cores import core_rate, scaled
from llamarl.planner.generation import GeneratorDemand, generator_memory, generator_tick_s, weight_bytes
from llamarl.planner.hardware import Hardware
from llamarl.planner.lengths import Lengths
from llamarl.planner.model_spec import ModelSpec
from llamarl.planner.rooflines import (
    GeneratorLayout,
    context_parallel_sizes,
    expert_parallel_sizes,
    tensor_parallel_sizes,
    token_parallel_sizes,
)
from llamarl.planner.training import TrainerDemand, TrainerLayout, TrainerTime, trainer_memory, trainer_tick
from llamarl.trainer.config import num_at_once

__all__ = [
    "GeneratorChoice",
    "Options",
    "TrainerChoice",
    "Workload",
    "dealt",
    "fewest_of_each_share",
    "filling_choices",
    "fits",
    "generator_choice",
    "generator_choices",
    "micro_batches",
    "powers",
    "precisions_of",
    "replicas_of",
    "sharing_choices",
    "slot_counts",
    "split_sizes",
    "trainer_choices",
    "trainer_demand",
    "trainer_sizes",
]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One tick of the job."""

    model: ModelSpec
    response: Lengths
    prompts_per_step: int
    group_size: int
    prompt_tokens: int = 256
    reward_s: float = 0.0
    """Time of the reward executor for a tick, when it is not the pace maker."""
    reference_model: bool = False
    """The trainer also holds a frozen reference model and scores each token with it."""

    def __post_init__(self) -> None:
        for name in ("prompts_per_step", "group_size"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.prompt_tokens < 1:
            raise PlanError(f"prompt_tokens must be at least 1, got {self.prompt_tokens}")
        if not 0 <= self.reward_s < math.inf:
            raise PlanError(f"reward_s must be >= 0 seconds, got {self.reward_s}")
        longest = self.prompt_tokens + self.response.limit
        if 0 < self.model.max_context < longest:
            room = self.model.max_context - self.prompt_tokens
            raise PlanError(
                f"prompt ({self.prompt_tokens}) and longest response ({self.response.limit}) need {longest} tokens, "
                f"{self.model.name} has a context of {self.model.max_context}: "
                + (f"set limit={room} on the response length" if room > 0 else "shorten the prompt")
            )

    @property
    def sequences(self) -> int:
        return self.prompts_per_step * self.group_size

    @property
    def tokens(self) -> float:
        """Prompt and response tokens a tick."""
        return self.sequences * (self.prompt_tokens + self.response.mean)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the search may use."""

    precisions: tuple[str, ...] = ()
    """Generator precisions; empty: all the device has."""
    partial_rollouts: bool = True
    """Separate system, staleness >= 1: also try partial rollouts."""
    max_segments: int = 4
    oversubscription: float = 2.0
    """With partial rollouts, groups that a generator keeps in flight, in units of those that a tick delivers."""
    runnable: bool = True
    """Only tensor-parallel sizes that ``llamarl train`` takes (``tensor_parallel_sizes``). False: all that cut the attention
    heads evenly, for questions about another system, which may cut experts."""
    max_pipeline: int = 1
    """Largest pipeline size. A generator that fits nowhere with so many stages may have more, where llamarl cuts the model so."""
    share_prompts: bool | None = None
    """``trainer.share_prompts``, where the trainer can; None: whichever is faster."""
    whole_groups: bool = True
    """As llamarl runs: each generator replica and each trainer data rank gets whole groups, at least one.
    False: single responses are spread over any number of replicas and ranks."""
    even_replicas: bool = False
    """Each generator replica gets the same number of prompts. False: some may get one more than others, where that steps faster."""
    max_slots: int = 1024
    """Most sequences that decode at once in one replica."""
    captured: bool = True
    """Decode from captured graphs, in every system; where ``runnable``, in layouts in which llamarl's engine has them."""
    common_captured: bool = True
    """Common layout: decode from captured graphs; False launches every kernel from the host."""
    common_padded: bool = False
    """Common layout: static batches padded to the longest allowed response, in generation and in training."""
    common_sharded: bool = False
    """Common layout: optimizer, gradients and master weights are also sharded over the data-parallel copies."""
    common_release_cache: bool = False
    """Common layout: the cache is given back before training; False (DeepSpeed-Chat's default) keeps it allocated."""
    common_max_pipeline: int = 1


@dataclass(frozen=True, kw_only=True)
class TrainerChoice:
    layout: TrainerLayout
    time: TrainerTime
    memory: Mapping[str, float]
    core_s: float = 0.0
    """Seconds of one core that the tick takes, of a rank that uses what others leave (``layout.threads`` above 1)."""


@dataclass(frozen=True, kw_only=True)
class GeneratorChoice:
    layout: GeneratorLayout
    replicas: int
    demand: GeneratorDemand
    time_s: float
    memory: Mapping[str, float]

    @property
    def devices(self) -> int:
        return self.replicas * self.layout.devices

    @property
    def is_even(self) -> bool:
        """Whether every replica gets the same number of prompts, so that ``generator.dp`` alone says it."""
        return self.replicas * self.demand.sequences == self.demand.total_sequences


def replicas_of(work: Workload, options: Options, most: int) -> int:
    """Generator replicas that ``most`` can hold and the batch can feed evenly."""
    if not options.whole_groups:
        return min(most, work.sequences)
    return max(n for n in range(1, min(most, work.prompts_per_step) + 1) if work.prompts_per_step % n == 0)


@lru_cache(maxsize=1024)
def fewest_of_each_share(units: int, most: int) -> tuple[int, ...]:
    """Numbers of replicas or data ranks worth having, ascending: for each largest share of ``units`` that one can get, the fewest
    that leave nobody a larger one. Of 8 units and 7 at most: 1, 2, 3 (shares of 8, 4, 3) and 4 (2); 5 to 7 have shares of 2 too."""
    found, count = [], 1
    while count <= min(units, most):
        found.append(count)
        share = math.ceil(units / count)
        count = math.ceil(units / (share - 1)) if share > 1 else most + 1
    return tuple(found)


def powers(limit: int) -> list[int]:
    return [2**i for i in range(max(1, limit).bit_length())]


def slot_counts(share: int, most: int) -> list[int]:
    """Concurrencies to try: the whole share, then cuts of it into whole waves, then powers of two."""
    waves = {math.ceil(share / w) for w in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)}
    return sorted({s for s in (*waves, *powers(share)) if s <= most} or {min(share, most)}, reverse=True)


def dealt(prompts: int, replicas: int) -> list[int]:
    """[replicas] of so many prompts, as evenly as whole ones can be."""
    return [prompts // replicas + (place < prompts % replicas) for place in range(replicas)]


def split_sizes(devices: int, node: int) -> list[int]:
    """Trainer shares to try: every whole number on a small machine; on a large one, whole nodes (every 128th at most)."""
    if devices <= 2 * node:
        return list(range(1, devices))
    step = node * max(1, devices // node // 128)
    inside = [s for s in (1, 2, 4) if s < node]
    return sorted({*inside, *range(step, devices, step), *(devices - s for s in inside)})


def trainer_sizes(work: Workload, options: Options, devices: int, node: int) -> list[int]:
    """Numbers of devices at which some layout of the trainer has less to do on its busiest rank than with one fewer."""
    units = work.prompts_per_step if options.whole_groups else work.sequences
    tensor = tensor_parallel_sizes(work.model, min(node, devices), runnable=options.runnable)
    ranks = fewest_of_each_share(units, devices)
    return sorted({n for tp in tensor for count in ranks if (n := tp * count) <= devices})


def sharing_choices(model: ModelSpec, options: Options, group_size: int) -> tuple[bool, ...]:
    """Whether a group's prompt may be computed once, and whether once a response; llamarl's trainer does either."""
    if not (options.runnable and model.shares_prompts and options.whole_groups):
        return (False,)
    if options.share_prompts is not None:
        return (options.share_prompts,)
    return (True, False) if group_size > 1 else (False,)


def trainer_demand(work: Workload, *, together: int = 1) -> TrainerDemand:
    """What a tick of ``work`` asks of the trainer.

    Args:
        together: Sequences that stay on one data rank.
    """
    return TrainerDemand(
        lengths=work.response,
        prompt_tokens=work.prompt_tokens,
        sequences=work.sequences,
        together=together,
        group_size=work.group_size,
        reference_forward=work.reference_model,
    )


def fits(parts: Mapping[str, float], limit: float) -> bool:
    return sum(parts.values()) <= limit


@lru_cache(maxsize=200_000)
def generator_choice(
    hardware: Hardware, model: ModelSpec, layout: GeneratorLayout, demand: GeneratorDemand, replicas: int
) -> GeneratorChoice:
    """A generator with its time and memory; remembered, because neighbouring splits ask for the same."""
    return GeneratorChoice(
        layout=layout,
        replicas=replicas,
        demand=demand,
        time_s=generator_tick_s(hardware, model, layout, demand),
        memory=generator_memory(hardware, model, layout, demand),
    )


def generator_choices(
    hardware: Hardware,
    work: Workload,
    options: Options,
    devices: int,
    *,
    memory_limit: float,
    partial: bool,
    any_number: bool = False,
) -> Iterator[GeneratorChoice]:
    """Every generator that fits on ``devices``, best concurrency only for each layout, precision and number of replicas.

    Args:
        any_number: Of replicas, also fewer than fit, and those that do not divide the prompts, of which some then get one more than
            others. False: the most that share them evenly.
    """
    units, of_unit = (work.prompts_per_step, work.group_size) if options.whole_groups else (work.sequences, 1)
    precisions = precisions_of(hardware, work.model, options)
    most = work.model.layers if options.runnable and work.model.staged_by_llamarl else options.max_pipeline
    found = False
    for pp in powers(min(most, work.model.layers, devices)):
        if found and pp > options.max_pipeline:
            return
        for tp in tensor_parallel_sizes(work.model, devices // pp, runnable=options.runnable):
            node = hardware.device.devices_per_node
            cut = options.runnable and pp == 1 and tp < node and options.whole_groups
            layouts: list[tuple[int, int, str]] = []
            for cp in token_parallel_sizes(work.model, tp, min(node, devices)) if cut else [1]:
                held = devices // (tp * pp * cp)
                numbers = fewest_of_each_share(units, held) if any_number else (replicas_of(work, options, held),)
                if any_number and (options.even_replicas or cp > 1):  # no kind of replicas of its own has cp
                    numbers = tuple(number for number in numbers if units % number == 0)
                layouts += product([cp], numbers, precisions)
            for cp, replicas, precision in layouts:
                share = math.ceil(units / replicas) * of_unit
                layout = GeneratorLayout(tp, pp, precision, options.captured, options.runnable, cp)
                if weight_bytes(hardware, work.model, layout) > memory_limit:
                    continue
                best: GeneratorChoice | None = None
                worse = 0
                top = math.ceil(share * options.oversubscription) if partial else share
                for slots in slot_counts(top, min(options.max_slots, top)):
                    demand = GeneratorDemand(
                        lengths=work.response,
                        prompt_tokens=work.prompt_tokens,
                        group_size=work.group_size,
                        sequences=share,
                        total_sequences=work.sequences,
                        slots=slots,
                        partial=partial,
                        max_segments=options.max_segments if partial else 1,
                        oversubscription=options.oversubscription if partial else 1.0,
                    )
                    choice = generator_choice(hardware, work.model, layout, demand, replicas)
                    if not fits(choice.memory, memory_limit):
                        continue
                    if best is None or choice.time_s < best.time_s:
                        best, worse = choice, 0
                    elif partial and (worse := worse + 1) == 2:
                        break  # fewer at once only queue longer, and the profile of a long queue is slow to make
                if best:
                    found = True
                    yield best


def precisions_of(hardware: Hardware, model: ModelSpec, options: Options) -> tuple[str, ...]:
    """Precisions that a generator may have.

    Raises:
        PlanError: What was asked for is none that this model has.
    """
    asked = options.precisions or hardware.device.weight_precisions
    if model.quantized_by_llamarl or not options.runnable:
        return asked
    whole = hardware.device.train_precision
    if whole not in asked:
        raise PlanError(
            f"{model.name} in {', '.join(asked)}: llamarl does not quantize this architecture, it serves {whole}"
        )
    return (whole,)


def trainer_choices(
    hardware: Hardware, work: Workload, options: Options, devices: int, *, memory_limit: float
) -> Iterator[TrainerChoice]:
    """Every trainer that fits on ``devices``; tensor and context parallelism stay inside a node (or are the whole device count).

    Rows are cut over as few ranks as hold them, and only where the longest does not fit one: data ranks do the same work without
    exchanges.
    """
    demand = trainer_demand(work, together=work.group_size if options.whole_groups else 1)
    sharing = sharing_choices(work.model, options, work.group_size)
    node = hardware.device.devices_per_node
    for pp in powers(min(options.max_pipeline, work.model.layers)):
        for tp in tensor_parallel_sizes(work.model, min(node, devices // pp), runnable=options.runnable):
            for cp in context_parallel_sizes(work.model, tp, min(node, devices // pp)) if options.runnable else [1]:
                units = work.prompts_per_step if options.whole_groups else work.sequences
                most = min(devices // (tp * pp * cp), units)
                # Ranks beyond the fewest that leave nobody a larger share only hold smaller shards, and hand over less each.
                fewest = math.ceil(units / math.ceil(units / most)) if most else 0
                found = False
                for ranks in sorted({fewest, most}):
                    for fsdp in sorted(
                        {ranks, *(f for f in (1, 8, 64, node // tp) if 0 < f < ranks and ranks % f == 0)}
                    ):
                        spread = expert_parallel_sizes(work.model, tp, fsdp * cp) if options.runnable else [1]
                        for ep, recompute, share in product(spread, (False, True), sharing):
                            layout = TrainerLayout(
                                tp, pp, fsdp, ranks // fsdp, 1, recompute, options.runnable, cp=cp, ep=ep, share_prompts=share
                            )  # fmt: skip
                            for choice in micro_batches(hardware, work.model, demand, memory_limit, layout):
                                found = True
                                yield choice
                if found:
                    break


@lru_cache(maxsize=200_000)
def micro_batches(
    hardware: Hardware, model: ModelSpec, demand: TrainerDemand, memory_limit: float, layout: TrainerLayout
) -> tuple[TrainerChoice, ...]:
    """The layout with each size of micro-batch that fits; remembered, because neighbouring splits ask for the same."""
    return tuple(_micro_batches(hardware, model, demand, memory_limit, layout))


def _micro_batches(
    hardware: Hardware, model: ModelSpec, demand: TrainerDemand, memory_limit: float, layout: TrainerLayout
) -> Iterator[TrainerChoice]:
    share = demand.most_of(layout.data_ranks)
    for micro in _sizes(share, demand.group_size if layout.share_prompts else 1):
        candidate = replace(layout, micro_batch=micro)
        memory = trainer_memory(hardware, model, candidate, demand)
        if not fits(memory, memory_limit):
            break
        yield TrainerChoice(
            layout=candidate, time=trainer_tick(hardware, model, candidate, demand), memory=memory
        )  # fmt: skip


def _sizes(share: int, together: int) -> list[int]:
    """Of micro-batches to try, in sequences, up to ``share``: parts of the ``together`` that share a prompt, then whole groups of them."""
    whole = {together * n for n in powers(max(1, share // together)) if together * n <= share}
    return sorted({*(n for n in powers(share) if n < together), *whole, share})


def filling_choices(
    hardware: Hardware, work: Workload, options: Options, cores: int, *, memory_limit: float, held: int = 0
) -> Iterator[TrainerChoice]:
    """A lone trainer rank with a thread a core, beside a generator that has ``held`` of the cores to itself while it works.

    Times are of all cores, as where nobody else works; memory is that of one core of those that the generator leaves.
    """
    demand, sharing = trainer_demand(work), sharing_choices(work.model, options, work.group_size)
    at_once = num_at_once(0, threads=cores, num_parameters=work.model.total_params)
    rate = core_rate(cores)
    for recompute, share in product((False, True), sharing):
        most = max(1, work.sequences // at_once)
        for micro in _sizes(most, work.group_size) if share else powers(most):
            layout = TrainerLayout(
                micro_batch=micro, recompute=recompute, runnable=options.runnable, threads=cores, at_once=at_once, share_prompts=share
            )  # fmt: skip
            whole = trainer_memory(hardware, work.model, layout, demand)
            memory = {name: size / (cores - held) for name, size in whole.items()}
            if not fits(memory, memory_limit):
                break
            alone = trainer_tick(hardware, work.model, layout, demand)
            yield TrainerChoice(
                layout=layout, time=scaled(alone, 1.0 / rate), memory=memory, core_s=alone.total_s * cores / rate
            )
