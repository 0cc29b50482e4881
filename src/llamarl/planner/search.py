"""Search for the best layout: three systems, one cost model.

    common      synchronous, co-located, one tensor-parallel size for both roles (DeepSpeed-Chat-like)
    resharding  synchronous, co-located, each role in its own layout, weights moved between phases (the strong baseline)
    separate    generator and trainer on their own devices, joined by a weights edge of delay ``max_staleness + 1``

Device counts are whole, batches discrete. Trainer and generator are independent once the split is fixed, so the search
tries every generator that fits with the fastest trainer on what it leaves; the step time is the maximum cycle mean of the job's graph.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from llamarl.errors import PlanError
from llamarl.planner.choices import (
    GeneratorChoice,
    Options,
    TrainerChoice,
    Workload,
    filling_choices,
    generator_choice,
    generator_choices,
    micro_batches,
    powers,
    replicas_of,
    sharing_choices,
    slot_counts,
    trainer_choices,
    trainer_demand,
)
from llamarl.planner.cores import finished_s, scaled, shares_cores
from llamarl.planner.fitting import nothing_fits
from llamarl.planner.generation import GeneratorDemand
from llamarl.planner.hardware import Hardware
from llamarl.planner.model_spec import ModelSpec
from llamarl.planner.rooflines import GeneratorLayout, pulled_bytes, tensor_parallel_sizes, weight_sync_s
from llamarl.planner.step_time import max_cycle_mean, reinforcement_learning_graph
from llamarl.planner.training import TrainerLayout, TrainerTime

__all__ = [
    "Plan",
    "best_common",
    "best_resharding",
    "best_separate",
    "best_split",
    "recommend",
    "search_all",
]


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
        if self.trainer.core_s:  # both on the same cores
            busy = generate * (1.0 - self.generator_idle) * self.step_s + self.trainer.core_s
            return max(0.0, 1.0 - busy / (self.devices * self.step_s))
        idle = train * self.trainer_idle + generate * self.generator_idle
        return (idle + (self.devices - train - generate)) / self.devices


def _trainer_rank(choice: TrainerChoice) -> tuple[float, int, int]:
    """Faster first; among equals (to a part in ten thousand) on fewer devices, then the larger micro-batch, which launches less."""
    return float(f"{choice.time.total_s:.4g}"), choice.layout.devices, -choice.layout.micro_batch


def _tokens_rate(work: Workload, step_s: float) -> float:
    return work.tokens / step_s


def _check_devices(devices: int) -> None:
    if devices < 1:
        raise PlanError(f"devices must be at least 1, got {devices}; the smallest plan uses 1 (synchronous)")


def best_split(
    hardware: Hardware, work: Workload, options: Options, devices: int, splits: Sequence[int] | None = None
) -> list[tuple[TrainerChoice, GeneratorChoice, float]]:
    """Each generator that leaves devices for a trainer, with the trainers worth having on what it leaves, and their hand-over time.

    So every split is tried that could be the best: between two generators that differ in their largest share of a tick or in their
    layout, a device more only helps the trainer.

    Args:
        splits: Devices that the trainer may have at most; None: all that each generator leaves.
    """
    limit = hardware.usable_memory_bytes
    found: list[tuple[TrainerChoice, GeneratorChoice, float]] = []
    modes = (False, True) if options.partial_rollouts and options.max_segments > 1 else (False,)
    on = lru_cache(maxsize=None)(lambda most: _trainers(hardware, work, options, most))
    for share in splits if splits is not None else (0,):
        held = devices - (share or 1)
        for partial in modes:
            for generator in generator_choices(
                hardware, work, options, held, memory_limit=limit, partial=partial, any_number=True
            ):
                trainers = list(on(share or devices - generator.devices))
                beside = hardware.device.devices_per_node - generator.devices  # versions stay on the node
                if not share and 0 < beside < devices - generator.devices:
                    trainers += on(beside)
                if shares_cores(hardware, devices):
                    left = filling_choices(hardware, work, options, devices, memory_limit=limit, held=generator.devices)
                    trainers += sorted(left, key=_trainer_rank)[:1]
                for trainer in trainers:
                    sync = weight_sync_s(
                        hardware,
                        work.model,
                        trainer_devices=trainer.layout.devices,
                        replicas=generator.replicas,
                        layout=generator.layout,
                    )
                    found.append((trainer, generator, sync))
    return found


def _trainers(hardware: Hardware, work: Workload, options: Options, most: int) -> list[TrainerChoice]:
    """On up to so many devices: the fastest, and slower ones that have more devices to hand a version over from; empty: too few."""
    found: list[TrainerChoice] = []
    choices = trainer_choices(hardware, work, options, most, memory_limit=hardware.usable_memory_bytes)
    for choice in sorted(choices, key=_trainer_rank):
        if not found or choice.layout.devices > found[-1].layout.devices:
            found.append(choice)
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
    best: tuple[tuple[float, int, float], TrainerChoice, GeneratorChoice, float] | None = None
    for alone, generator, sync in found:
        if generator.demand.partial and max_staleness == 0:
            continue
        trainer = _beside(alone, generator, sync, devices) if max_staleness else alone
        step = max(
            generator.time_s + sync,
            trainer.time.total_s,
            work.reward_s,
            (generator.time_s + sync + work.reward_s + trainer.time.total_s) / (max_staleness + 1),
        )
        # Among equals: whole batches before partial rollouts, which add staleness, and as many prompts for every replica. Steps
        # that are alike to three digits are equal, and then fewer devices are better.
        plainer = (1.02 if generator.demand.partial else 1.0) * (1.0 if generator.is_even else 1.02)
        step *= plainer
        rank = (float(f"{step:.3g}"), generator.devices + trainer.layout.devices, step)
        if best is None or rank < best[0]:
            best = (rank, trainer, generator, sync)
    if best is None:
        raise PlanError(nothing_fits(hardware, work, options, devices, separate=True))
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
    step_s = period.period_s
    return Plan(
        system="separate",
        max_staleness=max_staleness,
        devices=devices,
        trainer=trainer,
        generator=generator,
        sync_s=sync,
        step_s=step_s,
        binds=f"{binds}: {_part(trainer.time, generator, binds)}",
        tokens_per_s=_tokens_rate(work, step_s),
        memory_limit=hardware.usable_memory_bytes,
    )


def _beside(trainer: TrainerChoice, generator: GeneratorChoice, sync_s: float, cores: int) -> TrainerChoice:
    """The trainer at work at the same time as the generator: longer, where it has what that leaves of the cores."""
    if not trainer.core_s:
        return trainer
    busy_s = generator.time_s + sync_s
    elapsed_s = finished_s([(0.0, trainer.core_s)], cores=cores, held=generator.devices, held_s=busy_s)
    return replace(trainer, time=scaled(trainer.time, elapsed_s / trainer.time.total_s))


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
    filling = filling_choices if shares_cores(hardware, devices) else trainer_choices
    trainers = sorted(filling(hardware, work, options, devices, memory_limit=limit), key=_trainer_rank)
    best: tuple[float, TrainerChoice, GeneratorChoice, float, str] | None = None
    for trainer in trainers[:8]:
        state = _static_bytes(trainer.memory)
        stays = (limit - state, 0.0, "training state stays on the device")
        goes = (limit, 2.0 * state, "training state goes to host memory while generating")
        for room, moved, how in (goes,) if _parks(hardware, options) else (stays, goes):
            for generator in generator_choices(hardware, work, options, devices, memory_limit=room, partial=False):
                sync = weight_sync_s(
                    hardware, work.model, trainer_devices=devices, replicas=generator.replicas, layout=generator.layout
                )
                if _parks(hardware, options):
                    sync = _turn_s(hardware, work.model, trainer.memory, generator.layout, sync)
                else:
                    sync += moved / (device.host_bytes_per_s * e.link)
                step = trainer.time.total_s + generator.time_s + sync + work.reward_s
                if best is None or step < best[0]:
                    best = (step, trainer, generator, sync, how)
    if best is None:
        raise PlanError(nothing_fits(hardware, work, options, devices, separate=False))
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


def _parks(hardware: Hardware, options: Options) -> bool:
    """Whether a plan for shared devices moves as ``schedule.colocated`` does on GPUs: through host memory, at every tick. On
    CPU cores host memory is where both roles are."""
    return options.runnable and hardware.device.train_precision != "fp32"


def _turn_s(
    hardware: Hardware, model: ModelSpec, trainer: Mapping[str, float], layout: GeneratorLayout, direct_s: float
) -> float:
    """Seconds of a tick in which nothing computes: weights and moments of the trainer to the host and back, and the version from
    there to the generator, over the host's link or, where that is slower, between devices."""
    rate = hardware.device.host_bytes_per_s * hardware.efficiency.link
    moved = 2.0 * sum(trainer.get(name, 0.0) for name in ("parameters", "optimizer", "reference"))
    return moved / rate + max(direct_s, pulled_bytes(hardware, model, layout) / rate)


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
    demand = replace(trainer_demand(work), padded=options.common_padded)
    sharing = sharing_choices(work.model, options, work.group_size) if not options.common_padded else (False,)
    best: tuple[float, TrainerChoice, GeneratorChoice, float] | None = None
    for pp in powers(min(options.common_max_pipeline, work.model.layers)):
        for tp in tensor_parallel_sizes(work.model, devices // pp, runnable=options.runnable):
            copies = replicas_of(work, options, devices // (tp * pp))
            fsdp = copies if options.common_sharded else 1
            shape = TrainerLayout(tp, pp, fsdp, copies // fsdp, 1, True, options.runnable)
            share = math.ceil(work.sequences / copies)
            precision = hardware.device.train_precision
            layout = GeneratorLayout(tp, pp, precision, options.common_captured, options.runnable)
            generators = []
            for slots in slot_counts(share, min(options.max_slots, share)):
                asked = GeneratorDemand(
                    lengths=work.response,
                    prompt_tokens=work.prompt_tokens,
                    group_size=work.group_size,
                    sequences=share,
                    total_sequences=work.sequences,
                    slots=slots,
                    padded=options.common_padded,
                )
                generators.append(generator_choice(hardware, work.model, layout, asked, copies))
            trainers = (
                trainer
                for share in sharing
                for trainer in micro_batches(hardware, work.model, demand, limit, replace(shape, share_prompts=share))
            )
            for trainer in trainers:
                for generator in generators:
                    if _common_bytes(trainer.memory, generator.memory, options.common_release_cache) > limit:
                        continue
                    sync = 0.0  # the generator reads the trainer's copy
                    if _parks(hardware, options):
                        sync = _turn_s(hardware, work.model, trainer.memory, layout, 0.0)
                    step = trainer.time.total_s + generator.time_s + sync + work.reward_s
                    if best is None or step < best[0]:
                        best = (step, trainer, generator, sync)
    if best is None:
        raise PlanError(nothing_fits(hardware, work, options, devices, separate=False, one_layout=True))
    step, trainer, generator, sync = best
    return Plan(
        system="common",
        max_staleness=0,
        devices=devices,
        trainer=trainer,
        generator=generator,
        sync_s=sync,
        step_s=step,
        binds="the sum of both phases",
        tokens_per_s=_tokens_rate(work, step),
        memory_limit=limit,
    )


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
            except PlanError:
                if level < 0:
                    raise
    if problem is not None and not plans:
        raise problem  # that of shared devices, which need the least memory
    return plans


def recommend(plans: Sequence[Plan], tolerance: float = 0.02) -> Plan:
    """The plan with the least staleness among those within ``tolerance`` of the fastest."""
    fastest = min(plan.step_s for plan in plans)
    near = [plan for plan in plans if plan.step_s <= fastest * (1.0 + tolerance)]
    return min(near, key=lambda plan: (plan.token_staleness, plan.step_s))
