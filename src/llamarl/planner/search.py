"""Search for the best layout: three systems, one cost model.

    common      synchronous, co-located, one tensor-parallel size for both roles (DeepSpeed-Chat-like)
    resharding  synchronous, co-located, each role in its own layout, weights moved between phases (the strong baseline)
    separate    generator and trainer on their own devices, joined by a weights edge of delay ``max_staleness + 1``

Device counts are whole, batches discrete. Trainer and generator are independent once the split is fixed, so the search
tries every split and, for each role, every layout that fits; the step time is the maximum cycle mean of the job's graph.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from llamarl.errors import PlanError
from llamarl.planner.costs import GeneratorLayout, tensor_parallel_sizes, weight_sync_s
from llamarl.planner.generation import GeneratorDemand, generator_memory, generator_tick_s
from llamarl.planner.hardware import Hardware
from llamarl.planner.lengths import Lengths
from llamarl.planner.model_spec import ModelSpec
from llamarl.planner.step_time import max_cycle_mean, reinforcement_learning_graph
from llamarl.planner.training import TrainerDemand, TrainerLayout, TrainerTime, trainer_memory, trainer_tick

__all__ = ["GeneratorChoice", "Options", "Plan", "TrainerChoice", "Workload", "best_common", "best_resharding"]
__all__ += ["best_separate", "best_split", "recommend", "search_all", "split_sizes", "trainer_choices"]


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
    """With partial rollouts, slots a generator may keep busy, in units of its share of a tick."""
    max_pipeline: int = 1
    """Largest pipeline size; llamarl's trainer and engine run 1."""
    max_slots: int = 1024
    """Most sequences that decode at once in one replica."""
    captured: bool = True
    """Decode from captured graphs, in every system."""
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


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A system with its layout and its forecast."""

    system: str
    """``common``, ``resharding`` or ``separate``."""
    max_staleness: int
    devices: int
    trainer: TrainerChoice
    generator: GeneratorChoice
    sync_s: float
    """Hand-over of the weights (separate) or of weights and state between phases (resharding)."""
    step_s: float
    binds: str
    """What sets the step time."""
    tokens_per_s: float
    memory_limit: float
    notes: tuple[str, ...] = field(default=())

    @property
    def token_staleness(self) -> int:
        """Most versions any token may lag: the bound that the run enforces."""
        return self.max_staleness + (self.generator.demand.max_segments - 1 if self.generator.demand.partial else 0)

    @property
    def generator_idle(self) -> float:
        """Share of the step in which the generator's devices wait; a hand-over counts as work of the generator."""
        busy = self.generator.time_s + (self.sync_s if self.system == "separate" else 0.0)
        return max(0.0, 1.0 - busy / self.step_s)

    @property
    def trainer_idle(self) -> float:
        return max(0.0, 1.0 - self.trainer.time.total_s / self.step_s)

    @property
    def bubble(self) -> float:
        """Share of all device time that waits."""
        if self.system != "separate":
            return max(0.0, 1.0 - (self.trainer.time.total_s + self.generator.time_s + self.sync_s) / self.step_s)
        train, generate = self.trainer.layout.devices, self.generator.devices
        idle = train * self.trainer_idle + generate * self.generator_idle
        return (idle + (self.devices - train - generate)) / self.devices


def _powers(limit: int) -> list[int]:
    return [2**i for i in range(max(1, limit).bit_length())]


def _slots(share: int, most: int) -> list[int]:
    """Concurrencies to try: the whole share, then cuts of it into whole waves, then powers of two."""
    waves = {math.ceil(share / w) for w in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)}
    return sorted({s for s in (*waves, *_powers(share)) if s <= most} or {min(share, most)}, reverse=True)


def _fits(parts: Mapping[str, float], limit: float) -> bool:
    return sum(parts.values()) <= limit


@lru_cache(maxsize=200_000)
def _generator_cost(
    hardware_id: int, model: ModelSpec, layout: GeneratorLayout, demand: GeneratorDemand
) -> tuple[float, dict[str, float]]:
    hardware = _HARDWARE[hardware_id]
    memory = generator_memory(hardware, model, layout, demand)
    return generator_tick_s(hardware, model, layout, demand), memory


_HARDWARE: dict[int, Hardware] = {}


def _register(hardware: Hardware) -> int:
    """A hashable stand-in for hardware, so that costs can be remembered; the table keeps it alive."""
    _HARDWARE[id(hardware)] = hardware
    return id(hardware)


def generator_choices(
    hardware: Hardware,
    work: Workload,
    options: Options,
    devices: int,
    *,
    memory_limit: float,
    partial: bool,
) -> Iterator[GeneratorChoice]:
    """Every generator that fits on ``devices``, best concurrency only for each layout and precision."""
    key = _register(hardware)
    precisions = options.precisions or hardware.device.weight_precisions
    for pp in _powers(min(options.max_pipeline, work.model.layers)):
        for tp in tensor_parallel_sizes(work.model, devices // pp):
            replicas = min(devices // (tp * pp), work.sequences)
            share = math.ceil(work.sequences / replicas)
            for precision in precisions:
                layout = GeneratorLayout(tp, pp, precision, options.captured)
                best: GeneratorChoice | None = None
                top = math.ceil(share * options.oversubscription) if partial else share
                for slots in _slots(top, min(options.max_slots, top)):
                    demand = GeneratorDemand(
                        lengths=work.response,
                        prompt_tokens=work.prompt_tokens,
                        group_size=work.group_size,
                        sequences=share,
                        total_sequences=work.sequences,
                        slots=slots,
                        partial=partial,
                        max_segments=options.max_segments if partial else 1,
                    )
                    time, memory = _generator_cost(key, work.model, layout, demand)
                    if not _fits(memory, memory_limit) or (best and best.time_s <= time):
                        continue
                    best = GeneratorChoice(layout=layout, replicas=replicas, demand=demand, time_s=time, memory=memory)
                if best:
                    yield best


def trainer_choices(
    hardware: Hardware, work: Workload, options: Options, devices: int, *, memory_limit: float
) -> Iterator[TrainerChoice]:
    """Every trainer that fits on ``devices``; tensor parallelism stays inside a node (or is the whole device count)."""
    demand = TrainerDemand(
        lengths=work.response,
        prompt_tokens=work.prompt_tokens,
        sequences=work.sequences,
        reference_forward=work.reference_model,
    )
    node = hardware.device.devices_per_node
    for pp in _powers(min(options.max_pipeline, work.model.layers)):
        for tp in tensor_parallel_sizes(work.model, min(node, devices // pp)):
            ranks = min(devices // (tp * pp), work.sequences)
            for fsdp in sorted({ranks, *(f for f in (1, 8, 64, node // tp) if 0 < f < ranks and ranks % f == 0)}):
                for recompute in (False, True):
                    yield from _micro_batches(
                        hardware, work.model, demand, memory_limit,
                        TrainerLayout(tp, pp, fsdp, ranks // fsdp, 1, recompute),
                    )  # fmt: skip


def _micro_batches(
    hardware: Hardware, model: ModelSpec, demand: TrainerDemand, memory_limit: float, layout: TrainerLayout
) -> Iterator[TrainerChoice]:
    share = math.ceil(demand.sequences / layout.data_ranks)
    for micro in sorted({*(b for b in _powers(share)), share}):
        candidate = replace(layout, micro_batch=micro)
        memory = trainer_memory(hardware, model, candidate, demand)
        if not _fits(memory, memory_limit):
            break
        yield TrainerChoice(
            layout=candidate, time=trainer_tick(hardware, model, candidate, demand), memory=memory
        )  # fmt: skip


def _tokens_rate(work: Workload, step_s: float) -> float:
    return work.tokens / step_s


def split_sizes(devices: int, node: int) -> list[int]:
    """Trainer shares to try: every whole number on a small machine; on a large one, whole nodes (every 128th at most)."""
    if devices <= 2 * node:
        return list(range(1, devices))
    step = node * max(1, devices // node // 128)
    inside = [s for s in (1, 2, 4) if s < node]
    return sorted({*inside, *range(step, devices, step), *(devices - s for s in inside)})


def _check_devices(devices: int) -> None:
    if devices < 1:
        raise PlanError(f"devices must be at least 1, got {devices}; the smallest plan uses 1 (synchronous)")


def best_split(
    hardware: Hardware, work: Workload, options: Options, devices: int, splits: Sequence[int] | None = None
) -> list[tuple[TrainerChoice, GeneratorChoice, float]]:
    """For each split: fastest trainer with each generator candidate and its hand-over time."""
    limit = hardware.usable_memory_bytes
    found: list[tuple[TrainerChoice, GeneratorChoice, float]] = []
    modes = (False, True) if options.partial_rollouts and options.max_segments > 1 else (False,)
    for trainers in splits if splits is not None else split_sizes(devices, hardware.device.devices_per_node):
        choices = trainer_choices(hardware, work, options, trainers, memory_limit=limit)
        trainer = min(choices, key=lambda c: c.time.total_s, default=None)
        if trainer is None:
            continue
        for partial in modes:
            for generator in generator_choices(
                hardware, work, options, devices - trainers, memory_limit=limit, partial=partial
            ):
                sync = weight_sync_s(
                    hardware,
                    work.model,
                    trainer_devices=trainer.layout.devices,
                    replicas=generator.replicas,
                    layout=generator.layout,
                )
                found.append((trainer, generator, sync))
    return found


def best_separate(
    hardware: Hardware,
    work: Workload,
    options: Options,
    devices: int,
    max_staleness: int,
    candidates: Sequence[tuple[TrainerChoice, GeneratorChoice, float]] | None = None,
) -> Plan:
    """Best plan with generator and trainer on their own devices.

    The generator cannot decode while it takes new weights, so the hand-over counts in its own time as well as on the way round.

    Raises:
        PlanError: Nothing fits; the message names the smallest thing that would.
    """
    _check_devices(devices)
    if max_staleness < 0:
        raise PlanError(f"max_staleness must be >= 0 trainer ticks, got {max_staleness}; 0 is synchronous")
    if devices < 2:
        raise PlanError(
            "separate generator and trainer need 2 devices, got 1; one device can run co-located, synchronous"
        )
    found = candidates if candidates is not None else best_split(hardware, work, options, devices)
    best: tuple[tuple[float, int], TrainerChoice, GeneratorChoice, float] | None = None
    for trainer, generator, sync in found:
        if generator.demand.partial and max_staleness == 0:
            continue
        step = max(
            generator.time_s + sync,
            trainer.time.total_s,
            work.reward_s,
            (generator.time_s + sync + work.reward_s + trainer.time.total_s) / (max_staleness + 1),
        )
        # Among equals: whole batches before partial rollouts, which add staleness.
        rank = (step * (1.02 if generator.demand.partial else 1.0), generator.devices + trainer.layout.devices)
        if best is None or rank < best[0]:
            best = (rank, trainer, generator, sync)
    if best is None:
        raise PlanError(_nothing_fits(hardware, work, options, devices))
    _, trainer, generator, sync = best
    durations, edges = reinforcement_learning_graph(
        generator_s=generator.time_s + sync,
        reward_s=work.reward_s,
        trainer_s=trainer.time.total_s,
        sync_s=0.0,
        max_staleness=max_staleness,
    )
    period = max_cycle_mean(durations, edges)
    binds = period.cycle[0] if len(period.cycle) == 1 else "the whole round"
    return Plan(
        system="separate",
        max_staleness=max_staleness,
        devices=devices,
        trainer=trainer,
        generator=generator,
        sync_s=sync,
        step_s=period.period_s,
        binds=f"{binds}: {_part(trainer.time, generator, binds)}",
        tokens_per_s=_tokens_rate(work, period.period_s),
        memory_limit=hardware.usable_memory_bytes,
    )


def _part(time: TrainerTime, generator: GeneratorChoice, role: str) -> str:
    """The largest part of the role that sets the pace, in words."""
    if role == "generator":
        return "decode of the longest responses" if not generator.demand.partial else "decode throughput"
    if role == "trainer":
        parts = {
            "matrix products": time.compute_s,
            "tensor-parallel collectives": time.tensor_parallel_s,
            "sharding collectives": time.fsdp_s,
            "pipeline bubble": time.bubble_s,
            "optimizer": time.optimizer_s,
            "host overhead": time.other_s,
        }
        return max(parts, key=lambda name: parts[name])
    return "reward time" if role == "reward" else "roles wait for each other; more staleness would help"


def best_resharding(hardware: Hardware, work: Workload, options: Options, devices: int) -> Plan:
    """Best synchronous plan on shared devices with a layout for each role (HybridFlow- or ReaL-like).

    Between phases the generator's weights are made from the trainer's shards over the links. Training state stays on the device
    if everything fits, else it goes to host memory and back over the host link.
    """
    _check_devices(devices)
    limit = hardware.usable_memory_bytes
    e, device = hardware.efficiency, hardware.device
    trainers = sorted(
        trainer_choices(hardware, work, options, devices, memory_limit=limit), key=lambda c: c.time.total_s
    )
    best: tuple[float, TrainerChoice, GeneratorChoice, float, str] | None = None
    for trainer in trainers[:8]:
        state = _static_bytes(trainer.memory)
        for room, moved, how in (
            (limit - state, 0.0, "training state stays on the device"),
            (limit, 2.0 * state, "training state goes to host memory while generating"),
        ):
            for generator in generator_choices(hardware, work, options, devices, memory_limit=room, partial=False):
                sync = weight_sync_s(
                    hardware, work.model, trainer_devices=devices, replicas=generator.replicas, layout=generator.layout
                )
                sync += moved / (device.host_bytes_per_s * e.link)
                step = trainer.time.total_s + generator.time_s + sync + work.reward_s
                if best is None or step < best[0]:
                    best = (step, trainer, generator, sync, how)
    if best is None:
        raise PlanError(_nothing_fits(hardware, work, options, devices))
    step, trainer, generator, sync, how = best
    return Plan(
        system="resharding",
        max_staleness=0,
        devices=devices,
        trainer=trainer,
        generator=generator,
        sync_s=sync,
        step_s=step,
        binds="the sum of both phases",
        tokens_per_s=_tokens_rate(work, step),
        memory_limit=limit,
        notes=(how,),
    )


def _static_bytes(memory: Mapping[str, float]) -> float:
    """What a trainer rank holds between its steps."""
    return sum(memory.get(name, 0.0) for name in ("parameters", "gradients", "optimizer", "reference"))


def _common_bytes(trainer: Mapping[str, float], generator: Mapping[str, float], release_cache: bool) -> float:
    """What a device holds when both roles share it; the weights that generate are the trainer's half-precision copy."""
    state = _static_bytes(trainer)
    training = sum(trainer.values()) - state
    weights = generator["weights"]
    generating = sum(generator.values()) - weights
    if release_cache:
        return state + max(training, weights + generating)
    return state + max(training, weights) + generating


def best_common(hardware: Hardware, work: Workload, options: Options, devices: int) -> Plan:
    """Best synchronous plan with one layout for both roles, whose memory holds both (DeepSpeed-Chat-like).

    ``m = tp * pp`` devices form a replica that trains and generates; the rest is data parallelism. The generator uses the
    trainer's half-precision copy, so weights are not held twice. Activations and cache share the memory, as in the paper's constraint.
    """
    _check_devices(devices)
    limit = hardware.usable_memory_bytes
    demand = TrainerDemand(
        lengths=work.response,
        prompt_tokens=work.prompt_tokens,
        sequences=work.sequences,
        padded=options.common_padded,
        reference_forward=work.reference_model,
    )
    best: tuple[float, TrainerChoice, GeneratorChoice] | None = None
    key = _register(hardware)
    for pp in _powers(min(options.common_max_pipeline, work.model.layers)):
        for tp in tensor_parallel_sizes(work.model, devices // pp):
            copies = min(devices // (tp * pp), work.sequences)
            fsdp = copies if options.common_sharded else 1
            shape = TrainerLayout(tp, pp, fsdp, copies // fsdp, 1, True)
            share = math.ceil(work.sequences / copies)
            layout = GeneratorLayout(tp, pp, hardware.device.train_precision, options.common_captured)
            generators = []
            for slots in _slots(share, min(options.max_slots, share)):
                asked = GeneratorDemand(
                    lengths=work.response,
                    prompt_tokens=work.prompt_tokens,
                    group_size=work.group_size,
                    sequences=share,
                    total_sequences=work.sequences,
                    slots=slots,
                    padded=options.common_padded,
                )
                time, memory = _generator_cost(key, work.model, layout, asked)
                generators.append(
                    GeneratorChoice(layout=layout, replicas=copies, demand=asked, time_s=time, memory=memory)
                )
            for trainer in _micro_batches(hardware, work.model, demand, limit, shape):
                for generator in generators:
                    if _common_bytes(trainer.memory, generator.memory, options.common_release_cache) > limit:
                        continue
                    step = trainer.time.total_s + generator.time_s + work.reward_s
                    if best is None or step < best[0]:
                        best = (step, trainer, generator)
    if best is None:
        raise PlanError(_nothing_fits(hardware, work, options, devices))
    step, trainer, generator = best
    return Plan(
        system="common",
        max_staleness=0,
        devices=devices,
        trainer=trainer,
        generator=generator,
        sync_s=0.0,
        step_s=step,
        binds="the sum of both phases",
        tokens_per_s=_tokens_rate(work, step),
        memory_limit=limit,
    )


def _nothing_fits(hardware: Hardware, work: Workload, options: Options, devices: int) -> str:
    """What is too small, and the smallest number of devices (up to 65,536) that holds the job."""
    limit = hardware.usable_memory_bytes
    head = f"{work.model.name} ({work.model.total_params / 1e9:.1f} B parameters) does not fit"
    head += f" on {devices} x {hardware.device.title}"
    count = max(2, devices)
    while count < 65536:
        count *= 2
        half = count // 2
        trainer = next(iter(trainer_choices(hardware, work, options, half, memory_limit=limit)), None)
        generator = next(
            iter(generator_choices(hardware, work, options, half, memory_limit=limit, partial=False)), None
        )
        if trainer and generator:
            return f"{head}: the trainer alone needs 16 bytes a parameter, sharded; {count} devices would do"
    return f"{head}, nor on any number up to 65536: shorten the response limit or use devices with more memory"


def search_all(
    hardware: Hardware,
    work: Workload,
    options: Options,
    devices: int,
    staleness: Sequence[int] = (0, 1, 2, 4),
) -> list[Plan]:
    """Best plan of each system that fits: common, resharding, then separate at each staleness.

    Raises:
        PlanError: None fits.
    """
    _check_devices(devices)
    plans: list[Plan] = []
    problem: PlanError | None = None
    for system in (best_common, best_resharding):
        try:
            plans.append(system(hardware, work, options, devices))
        except PlanError as error:
            problem = error
    if devices >= 2:
        candidates = best_split(hardware, work, options, devices)
        for level in staleness:
            try:
                plans.append(best_separate(hardware, work, options, devices, level, candidates))
            except PlanError as error:
                if level < 0:
                    raise
                problem = error
    if not plans:
        raise problem or PlanError(_nothing_fits(hardware, work, options, devices))
    return plans


def recommend(plans: Sequence[Plan], tolerance: float = 0.02) -> Plan:
    """The plan with the least staleness among those within ``tolerance`` of the fastest."""
    fastest = min(plan.step_s for plan in plans)
    near = [plan for plan in plans if plan.step_s <= fastest * (1.0 + tolerance)]
    return min(near, key=lambda plan: (plan.token_staleness, plan.step_s))
