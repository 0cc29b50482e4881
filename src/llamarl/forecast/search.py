"""Search for the best layout of two systems under one cost model.

    synchronous    both roles take turns on all devices (``schedule.colocated``), each in a layout
    of its own; staleness 0 asynchronous   generator and trainer on devices of their own, joined by
    a weights edge of delay ``max_staleness + 1``

Trainer and generator are independent once the split is fixed, so the search takes every generator
that fits with the best trainer on what it leaves. What a device more brings comes in steps, since
prompts are dealt whole: of 128 prompts 16 to 18 replicas all have one with 8. Of numbers that leave
the busiest as much to do, the smallest is tried.

Several kinds of devices follow one rule: the fastest kind trains, and replicas of each kind get
prompts by the tokens a second that the kind makes.

On the cores of a CPU nothing is searched but threads, and once runs were measured none but theirs:
what a further thread brings depends on the model (of one below 20 million parameters, next to
nothing), and no roofline knows it.
"""

from __future__ import annotations

import contextlib
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

from llamarl.errors import PlanError
from llamarl.forecast.calibrate import Fit
from llamarl.forecast.costs import GeneratorLayout, turns_s, weight_bytes, weight_sync_s
from llamarl.forecast.hardware import Hardware
from llamarl.forecast.lengths import Lengths
from llamarl.forecast.memory import MARGIN, fits, generator_memory, trainer_memory
from llamarl.forecast.model import ModelSpec, context_parallel_sizes, expert_parallel_sizes, tensor_parallel_sizes
from llamarl.forecast.step_time import step_period
from llamarl.forecast.ticks import (
    GeneratorDemand,
    TrainerDemand,
    TrainerLayout,
    TrainerTime,
    generator_tick_s,
    trainer_tick,
)
from llamarl.plural import plural
from llamarl.settings.trainer import TWO_MOMENTS, num_at_once

__all__ = [
    "GeneratorChoice",
    "Options",
    "Plan",
    "TrainerChoice",
    "Workload",
    "asynchronous",
    "over_kinds",
    "recommend",
    "search_all",
    "split_candidates",
    "synchronous",
    "trainer_demand",
]

MOST_DEVICES = 65_536
"""Largest number of devices that is tried for a job that does not fit."""
MOST_SLOTS = 1024
"""Most sequences that decode at once in one replica."""
NEAR = 1.02
"""Step times up to so many times the fastest are as good: then less staleness decides."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One tick of the job."""

    model: ModelSpec
    response: Lengths
    prompts_per_step: int
    group_size: int
    prompt_tokens: int = 256
    reward_s: float = 0.0
    """Time of the reward executor for a tick."""
    moment_bytes: int = TWO_MOMENTS
    """That the optimizer keeps of each weight of a matrix in a layer."""

    def __post_init__(self) -> None:
        for name in ("prompts_per_step", "group_size", "prompt_tokens"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.reward_s < math.inf:
            raise PlanError(f"reward_s must be >= 0 seconds, got {self.reward_s}")
        longest = self.prompt_tokens + self.response.limit
        if 0 < self.model.max_context < longest:
            room = self.model.max_context - self.prompt_tokens
            raise PlanError(
                f"prompt ({self.prompt_tokens}) and longest response ({self.response.limit}) need {longest} tokens, "
                f"{self.model.name} has a context of {self.model.max_context}: "
                + (f"let responses have at most {room} (limit={room})" if room > 0 else "shorten the prompt")
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
    max_segments: int = 4
    """Versions that a response may span; above 1 partial rollouts are tried too, where there is staleness."""
    oversubscription: float = 2.0
    """With partial rollouts, groups that a generator keeps in flight, in units of those that a tick delivers."""
    other_system: bool = False
    """Generators as of the paper's system (``GeneratorLayout.other_system``), which llamarl does not run."""
    measured: tuple[Fit, ...] = ()
    """Runs on the cores of this CPU: no other threads than theirs are planned. Empty: any, by guess."""


@dataclass(frozen=True, kw_only=True)
class TrainerChoice:
    """A layout of the trainer that fits."""

    layout: TrainerLayout
    time: TrainerTime
    memory: Mapping[str, float]
    threads: int = 1
    """Of its one rank on the cores of a CPU."""


@dataclass(frozen=True, kw_only=True)
class GeneratorChoice:
    """Generator replicas of one layout, on one kind of device."""

    hardware: Hardware
    layout: GeneratorLayout
    replicas: int
    prompts: int
    """Of a tick, over these replicas."""
    demand: GeneratorDemand
    """Of the replica that gets most."""
    time_s: float
    memory: Mapping[str, float]

    @property
    def devices(self) -> int:
        return self.replicas * self.layout.tp

    @property
    def is_even(self) -> bool:
        """Whether every replica gets the same number of prompts, so that ``generator.dp`` alone says it."""
        return self.prompts % self.replicas == 0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A system with its layout and its forecast."""

    hardware: Hardware
    """That trains."""
    colocated: bool
    max_staleness: int
    devices: int
    """That there are; a plan may leave some without work."""
    trainer: TrainerChoice
    generators: tuple[GeneratorChoice, ...]
    """One kind of replicas a kind of device."""
    sync_s: float
    """Hand-over of the weights; on shared devices also what moves between the turns."""
    step_s: float
    binds: str
    """What sets the step time."""
    tokens_per_s: float

    @property
    def generator(self) -> GeneratorChoice:
        """The replicas that take longest."""
        return max(self.generators, key=lambda choice: choice.time_s)

    @property
    def other_kinds(self) -> bool:
        """Whether some replicas are on devices of another kind than the trainer's."""
        return any(not g.hardware.is_cpu and g.hardware.device != self.hardware.device for g in self.generators)

    @property
    def token_staleness(self) -> int:
        """Most versions any token may lag: the bound that the run enforces."""
        return self.max_staleness + self.generator.demand.max_segments - 1

    @property
    def trainer_devices(self) -> int:
        """On CPU cores its threads; where these share the generator's cores, what it leaves."""
        if self.hardware.is_cpu:
            left = self.devices if self.colocated else self.devices - self.generator_devices
            return min(self.trainer.threads, left)
        return self.trainer.layout.devices

    @property
    def generator_devices(self) -> int:
        return sum(choice.devices * _cores_of(choice.hardware, self.hardware) for choice in self.generators)

    @property
    def used(self) -> int:
        """Devices that have work."""
        if self.colocated:
            return max(self.trainer_devices, self.generator_devices)
        return self.trainer_devices + self.generator_devices

    @property
    def trainer_idle(self) -> float:
        return max(0.0, 1.0 - self.trainer.time.total_s / self.step_s)

    @property
    def waiting(self) -> float:
        """Share of all device time in which a device that has a role waits."""
        if self.colocated:
            return max(0.0, 1.0 - (self.trainer.time.total_s + self.generator.time_s + self.sync_s) / self.step_s)
        idle = self.trainer_devices * self.trainer_idle
        for choice in self.generators:
            cores = choice.devices * _cores_of(choice.hardware, self.hardware)
            idle += cores * max(0.0, 1.0 - (choice.time_s + self.sync_s) / self.step_s)
        return idle / self.used


def _cores_of(joined: Hardware, hardware: Hardware) -> int:
    """Devices that one of a choice stands for: cores of a CPU are joined to one."""
    return round(joined.device.memory_bytes / hardware.device.memory_bytes) if hardware.is_cpu else 1


def trainer_demand(work: Workload) -> TrainerDemand:
    """What a tick of ``work`` asks of the trainer."""
    return TrainerDemand(
        lengths=work.response,
        prompt_tokens=work.prompt_tokens,
        sequences=work.sequences,
        group_size=work.group_size,
        moment_bytes=work.moment_bytes,
    )


Candidate = tuple[TrainerChoice, tuple[GeneratorChoice, ...], float]
"""A trainer, the generators beside it, and their hand-over time."""


# -- layouts of one role ----------------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def _fewest_of_each_share(units: int, most: int) -> tuple[int, ...]:
    """Numbers of replicas worth having, ascending: for each largest share of ``units`` that one can
    get, the fewest that leave nobody a larger one. Of 8 units and 7 at most: 1, 2, 3 (shares of 8,
    4, 3) and 4 (2); 5 to 7 have shares of 2 too."""
    found, count = [], 1
    while count <= min(units, most):
        found.append(count)
        share = math.ceil(units / count)
        count = math.ceil(units / (share - 1)) if share > 1 else most + 1
    return tuple(found)


def _powers(limit: int) -> list[int]:
    return [2**i for i in range(max(1, limit).bit_length())]


def _slot_counts(share: int, most: int) -> list[int]:
    """Concurrencies to try, descending: cuts of the share into whole waves, and powers of two."""
    waves = {math.ceil(share / w) for w in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)}
    return sorted({s for s in (*waves, *_powers(share)) if s <= most} or {min(share, most)}, reverse=True)


def _precisions(hardware: Hardware, model: ModelSpec, options: Options) -> tuple[str, ...]:
    """Precisions that a generator may have.

    Raises:
        PlanError: What was asked for is none that llamarl serves this model in.
    """
    asked = options.precisions or hardware.device.weight_precisions
    whole = hardware.device.train_precision
    can = set(hardware.device.weight_precisions) if model.quantized_by_llamarl else {whole}
    if found := tuple(precision for precision in asked if precision in can):
        return found
    raise PlanError(
        f"{model.name} in {', '.join(asked)} on {hardware.device.title}: llamarl serves it in {', '.join(sorted(can))} there"
    )


@lru_cache(maxsize=200_000)
def _generator_choice(
    hardware: Hardware, model: ModelSpec, layout: GeneratorLayout, demand: GeneratorDemand, replicas: int, prompts: int
) -> GeneratorChoice | None:
    """A generator with its time and memory, if it fits; remembered, because neighbouring splits ask for the same."""
    memory = generator_memory(hardware, model, layout, demand)
    if not fits(memory, hardware.usable_memory_bytes):
        return None
    return GeneratorChoice(
        hardware=hardware,
        layout=layout,
        replicas=replicas,
        prompts=prompts,
        demand=demand,
        time_s=generator_tick_s(hardware, model, layout, demand),
        memory=memory,
    )


def generator_choices(
    hardware: Hardware, work: Workload, options: Options, devices: int, *, partial: bool, total: int = 0
) -> Iterator[GeneratorChoice]:
    """Every generator that fits on ``devices``; of concurrencies only the best for each layout, precision and number.

    Args:
        total: Responses of the tick over all generators, if these are not all.
    """
    model, limit = work.model, hardware.usable_memory_bytes / (1.0 + MARGIN)
    for tp in tensor_parallel_sizes(model, devices):
        numbers = _fewest_of_each_share(work.prompts_per_step, devices // tp)
        for replicas, precision in product(numbers, _precisions(hardware, model, options)):
            layout = GeneratorLayout(tp, precision, options.other_system)
            if weight_bytes(hardware, model, layout) > limit:
                continue
            share = math.ceil(work.prompts_per_step / replicas) * work.group_size
            best: GeneratorChoice | None = None
            worse = 0
            top = math.ceil(share * options.oversubscription) if partial else share
            for slots in _slot_counts(top, min(MOST_SLOTS, top)):
                demand = GeneratorDemand(
                    lengths=work.response,
                    prompt_tokens=work.prompt_tokens,
                    group_size=work.group_size,
                    sequences=share,
                    total_sequences=total or work.sequences,
                    slots=slots,
                    max_segments=options.max_segments if partial else 1,
                    oversubscription=options.oversubscription if partial else 1.0,
                )
                choice = _generator_choice(hardware, model, layout, demand, replicas, work.prompts_per_step)
                if choice and (best is None or choice.time_s < best.time_s):
                    best, worse = choice, 0
                elif choice and (worse := worse + 1) == 2:
                    break  # fewer at once only queue longer
            if best:
                yield best


def trainer_choices(hardware: Hardware, work: Workload, options: Options, devices: int) -> Iterator[TrainerChoice]:
    """Every trainer that fits on ``devices``; tensor and context parallelism stay inside a node.

    Rows are cut over as few ranks as hold them, and only where the longest does not fit one: data
    ranks do the same work without exchanges.
    """
    model, demand, node = work.model, trainer_demand(work), hardware.device.devices_per_node
    for tp in tensor_parallel_sizes(model, min(node, devices)):
        for cp in context_parallel_sizes(model, tp, min(node, devices)):
            most = min(devices // (tp * cp), work.prompts_per_step)
            # Ranks beyond the fewest that leave nobody a larger share only hold smaller shards, and hand over less each.
            fewest = math.ceil(work.prompts_per_step / math.ceil(work.prompts_per_step / most)) if most else 0
            found = False
            for fsdp in sorted({fewest, most} - {0}):
                for recompute in (False, True):
                    for ep in expert_parallel_sizes(model, tp, fsdp * cp):
                        layout = TrainerLayout(tp, 1, fsdp, 1, 1, recompute, cp=cp, ep=ep)
                        for choice in _micro_batches(hardware, model, demand, layout):
                            found = True
                            yield choice
            if found:
                break


@lru_cache(maxsize=200_000)
def _micro_batches(
    hardware: Hardware, model: ModelSpec, demand: TrainerDemand, layout: TrainerLayout
) -> tuple[TrainerChoice, ...]:
    """The layout with each size of micro-batch that fits; remembered, because neighbouring splits ask for the same."""
    share = demand.most_of(layout.data_ranks)
    found = []
    for micro in sorted({*_powers(share), share}):
        candidate = replace(layout, micro_batch=micro)
        memory = trainer_memory(hardware, model, candidate, demand)
        if not fits(memory, hardware.usable_memory_bytes):
            break
        time = trainer_tick(hardware, model, candidate, demand)
        found.append(TrainerChoice(layout=candidate, time=time, memory=memory))
    return tuple(found)


_Cores = tuple[int, Hardware]
"""Threads, and the cores that they have as one device."""


def _on_cores(hardware: Hardware, options: Options, cores: int, *, in_turns: bool) -> Iterator[tuple[_Cores, _Cores]]:
    """Threads of the generator and of the trainer that may be planned.

    Of runs with as many threads the last counts, of those in turns or at once as is planned if there
    are any. A trainer that shared the generator's cores was measured beside that generator alone.
    Without a run it is one that has as many threads as there are cores, and what the generator leaves.
    """
    if not options.measured:
        for own in (cores,) if in_turns else range(1, cores):
            yield (own, hardware.joined(own)), (cores, hardware.joined(cores if in_turns else cores - own))
        return
    runs = sorted(options.measured, key=lambda run: run.at_once != in_turns)
    generators, trainers = (
        {run.threads[role]: run for run in runs if not run.shares_cores} for role in ("generator", "trainer")
    )
    together = [(run, run) for run in runs if run.shares_cores and not in_turns]
    for one, other in (*product(generators.values(), trainers.values()), *together):
        own, others = one.threads["generator"], other.threads["trainer"]
        if (max(own, others) if in_turns or one.shares_cores else own + others) <= cores:
            yield (own, one.hardware.joined(own)), (others, other.hardware.joined(others))


def _core_candidates(
    hardware: Hardware, work: Workload, options: Options, cores: int, *, in_turns: bool
) -> Iterator[Candidate]:
    """One process a role, with the threads that may be planned."""
    modes = (False, True) if options.max_segments > 1 and not in_turns else (False,)
    for ((_, generates), (threads, trains)), partial in product(
        _on_cores(hardware, options, cores, in_turns=in_turns), modes
    ):
        at_once = num_at_once(0, threads=threads, num_parameters=work.model.total_params)
        trainers: list[TrainerChoice] = []
        for recompute in (False, True):
            layout = TrainerLayout(recompute=recompute, at_once=at_once)
            trainers += _micro_batches(trains, work.model, trainer_demand(work), layout)
        for trainer, generator in product(
            sorted(trainers, key=_rank)[:1], generator_choices(generates, work, options, 1, partial=partial)
        ):
            sync_s = 0.0  # a measured tick of the generator has it
            if not options.measured:
                sync_s = weight_sync_s(hardware, work.model, trainer_devices=1, replicas=[(1, generator.layout)])
            yield replace(trainer, threads=threads), (generator,), sync_s


def _rank(choice: TrainerChoice) -> tuple[float, int, int]:
    """Faster first; among equals (to a part in ten thousand) on fewer devices, then the larger micro-batch."""
    return float(f"{choice.time.total_s:.4g}"), choice.layout.devices, -choice.layout.micro_batch


def _trainers(hardware: Hardware, work: Workload, options: Options, most: int) -> list[TrainerChoice]:
    """On up to so many devices: the fastest, and slower ones that have more devices to hand a version over from."""
    found: list[TrainerChoice] = []
    for choice in sorted(trainer_choices(hardware, work, options, most), key=_rank):
        if not found or choice.layout.devices > found[-1].layout.devices:
            found.append(choice)
    return found


def _smaller_trainers(hardware: Hardware, work: Workload, options: Options, most: int) -> list[TrainerChoice]:
    """On up to 1, 2, 4, ... of so many devices, fewest first: each faster than all those on fewer."""
    choices = [one for count in _powers(most) for one in trainer_choices(hardware, work, options, count)]
    found: list[TrainerChoice] = []
    for choice in sorted(choices, key=lambda one: (one.layout.devices, _rank(one))):
        if not found or choice.time.total_s < found[-1].time.total_s:
            found.append(choice)
    return found


# -- the asynchronous system ------------------------------------------------------------------------------------------


def split_candidates(hardware: Hardware, work: Workload, options: Options, devices: int) -> list[Candidate]:
    """Each generator that leaves devices for a trainer, with the trainers worth having on what it leaves: the fastest, and
    the smaller ones that keep up.

    So every split is tried that could be the best: between two generators that differ in their
    largest share of a tick or in their layout, a device more only helps the trainer.
    """
    if hardware.is_cpu:
        return list(_core_candidates(hardware, work, options, devices, in_turns=False))
    modes = (False, True) if options.max_segments > 1 else (False,)
    on = lru_cache(maxsize=None)(lambda most: _trainers(hardware, work, options, most))
    smaller = lru_cache(maxsize=None)(lambda most: _smaller_trainers(hardware, work, options, most))
    found: list[Candidate] = []
    for partial in modes:
        for generator in generator_choices(hardware, work, options, devices - 1, partial=partial):
            trainers = list(on(devices - generator.devices))
            beside = hardware.device.devices_per_node - generator.devices  # versions stay on the node
            if 0 < beside < devices - generator.devices:
                trainers += on(beside)
            # of more devices each would wait for the generator
            trainers += [one for one in smaller(devices - generator.devices) if one.time.total_s <= generator.time_s]
            for trainer in trainers:
                replicas = [(generator.replicas, generator.layout)]
                sync = weight_sync_s(hardware, work.model, trainer_devices=trainer.layout.devices, replicas=replicas)
                found.append((trainer, (generator,), sync))
    return found


def asynchronous(
    hardware: Hardware,
    work: Workload,
    options: Options,
    devices: int,
    max_staleness: int,
    candidates: Sequence[Candidate] | None = None,
) -> Plan:
    """Best plan with generator and trainer on their own devices.

    The generator cannot decode while it takes new weights, so the hand-over counts in its own time
    as well as on the way round.

    Raises:
        PlanError: Nothing fits; the message names the smallest thing that would.
    """
    if max_staleness < 1:
        raise PlanError(f"max_staleness must be >= 1 trainer tick, got {max_staleness}; 0 is synchronous, in turns")
    if devices < 2:
        raise PlanError(f"an asynchronous job needs at least 2 devices, got {devices}: plan staleness 0, in turns")
    found = candidates if candidates is not None else split_candidates(hardware, work, options, devices)
    best: tuple[tuple[float, int, float], Plan] | None = None
    for trainer, generators, sync_s in found:
        plan = _joined(hardware, work, trainer, generators, sync_s, devices, max_staleness)
        # Among equals: whole batches before partial rollouts, which add staleness, and as many prompts for every replica. Steps
        # that agree to three digits are equal, and then fewer devices are better.
        generator = plan.generator
        plainer = (1.02 if generator.demand.partial else 1.0) * (1.0 if generator.is_even else 1.02)
        rank = (float(f"{plan.step_s * plainer:.3g}"), plan.used, plan.step_s)
        if best is None or rank < best[0]:
            best = (rank, plan)
    if best is None:
        raise PlanError(_nothing_fits(hardware, work, options, devices))
    return best[1]


def _joined(
    hardware: Hardware,
    work: Workload,
    trainer: TrainerChoice,
    generators: tuple[GeneratorChoice, ...],
    sync_s: float,
    devices: int,
    max_staleness: int,
) -> Plan:
    """The plan of roles on devices of their own; its step is the period of the job's graph."""
    slowest = max(generators, key=lambda choice: choice.time_s)
    step_s, sets_pace = step_period(
        generator_s=slowest.time_s + sync_s,
        reward_s=work.reward_s,
        trainer_s=trainer.time.total_s,
        sync_s=0.0,
        max_staleness=max_staleness,
    )
    return Plan(
        hardware=hardware,
        colocated=False,
        max_staleness=max_staleness,
        devices=devices,
        trainer=trainer,
        generators=generators,
        sync_s=sync_s,
        step_s=step_s,
        binds=_binds(sets_pace, trainer.time, slowest),
        tokens_per_s=work.tokens / step_s,
    )


def _binds(role: str, time: TrainerTime, generator: GeneratorChoice) -> str:
    """What sets the pace, in words."""
    if role == "generator":
        return f"generator: {'decode throughput' if generator.demand.partial else 'decode of the longest responses'}"
    if role == "trainer":
        parts = {name.removesuffix("_s"): seconds for name, seconds in vars(time).items()}
        return f"trainer: {max(parts, key=lambda name: parts[name])}"
    if role == "reward":
        return "reward"
    return "the whole round: roles wait for each other; more staleness would help"


# -- the synchronous system -------------------------------------------------------------------------------------------


def synchronous(hardware: Hardware, work: Workload, options: Options, devices: int) -> Plan:
    """Best plan with both roles in turns on all devices.

    Raises:
        PlanError: Nothing fits; the message names the smallest thing that would.
    """
    if devices < 1:
        raise PlanError(f"devices must be at least 1, got {devices}")
    best: tuple[float, TrainerChoice, GeneratorChoice, float] | None = None
    for trainer, generator, moved_s in _pairs_in_turns(hardware, work, options, devices):
        step = trainer.time.total_s + generator.time_s + moved_s + work.reward_s
        if best is None or step < best[0]:
            best = (step, trainer, generator, moved_s)
    if best is None:
        raise PlanError(_nothing_fits(hardware, work, options, devices))
    step_s, trainer, generator, sync_s = best
    return Plan(
        hardware=hardware,
        colocated=True,
        max_staleness=0,
        devices=devices,
        trainer=trainer,
        generators=(generator,),
        sync_s=sync_s,
        step_s=step_s,
        binds="the sum of both turns",
        tokens_per_s=work.tokens / step_s,
    )


def _pairs_in_turns(
    hardware: Hardware, work: Workload, options: Options, devices: int
) -> Iterator[tuple[TrainerChoice, GeneratorChoice, float]]:
    if hardware.is_cpu:  # host memory is where both roles are
        for trainer, (generator,), direct in _core_candidates(hardware, work, options, devices, in_turns=True):
            yield trainer, generator, direct
        return
    trainers = sorted(trainer_choices(hardware, work, options, devices), key=_rank)[:8]
    generators = list(generator_choices(hardware, work, options, devices, partial=False))
    for trainer, generator in product(trainers, generators):
        state = sum(trainer.memory.get(name, 0.0) for name in ("parameters", "optimizer"))
        replicas = [(generator.replicas, generator.layout)]
        direct = weight_sync_s(hardware, work.model, trainer_devices=devices, replicas=replicas)
        yield trainer, generator, turns_s(hardware, work.model, generator.layout, state, direct)


# -- all plans --------------------------------------------------------------------------------------------------------


def search_all(
    hardware: Hardware, work: Workload, options: Options, devices: int, staleness: Sequence[int] = (0, 1, 2, 4)
) -> list[Plan]:
    """Best plan at each staleness that fits: 0 in turns, above 0 on devices of their own.

    Raises:
        PlanError: None fits.
    """
    plans: list[Plan] = []
    problem: PlanError | None = None
    candidates: list[Candidate] | None = None
    for level in staleness:
        try:
            if level == 0:
                plans.append(synchronous(hardware, work, options, devices))
                continue
            if candidates is None:
                candidates = split_candidates(hardware, work, options, devices) if devices > 1 else []
            plans.append(asynchronous(hardware, work, options, devices, level, candidates))
        except PlanError as error:
            problem = problem or error
    if not plans:
        raise problem or PlanError("no staleness to plan for")
    return plans


def recommend(plans: Sequence[Plan]) -> Plan:
    """The plan with the least staleness among those near the fastest."""
    fastest = min(plan.step_s for plan in plans)
    near = [plan for plan in plans if plan.step_s <= fastest * NEAR]
    return min(near, key=lambda plan: (plan.token_staleness, plan.step_s))


# -- several kinds of devices -----------------------------------------------------------------------------------------


def over_kinds(
    pools: Sequence[tuple[Hardware, int]], work: Workload, options: Options, staleness: Sequence[int]
) -> list[Plan]:
    """Plans for devices of several kinds: all of them together, and the fastest kind alone.

    The kind of the highest rate trains; what it leaves generates beside the others. Each kind gets
    prompts by the tokens a second that it makes of its part, replicas of one kind as many as each
    other.

    Raises:
        PlanError: None fits.
    """
    fast, count = max(pools, key=lambda pool: pool[0].matmul_rate(pool[0].device.train_precision))
    others = [pool for pool in pools if pool[0] is not fast]
    slowest_link = min(hardware.device.inter_node_bytes_per_s for hardware, _ in pools)
    linked = replace(fast, device=replace(fast.device, inter_node_bytes_per_s=slowest_link))
    node, total = fast.device.devices_per_node, sum(devices for _, devices in pools)
    step = node * max(1, count // node // 32)
    candidates: list[Candidate] = []
    for most in sorted({n for n in (1, 2, 4, *range(step, count, step), count) if n <= count}):
        for trainer in _trainers(fast, work, options, most)[:1]:
            left = count - trainer.layout.devices
            parts = [(fast, left), *others] if left else others
            for partial in (False, True) if options.max_segments > 1 else (False,):
                found = _dealt(parts, work, options, partial=partial)
                # The fast kind alone is planned below.
                if any(choice.hardware.device != fast.device for choice in found):
                    replicas = [(choice.replicas, choice.layout) for choice in found]
                    sync = weight_sync_s(linked, work.model, trainer_devices=trainer.layout.devices, replicas=replicas)
                    candidates.append((trainer, found, sync))
    plans: list[Plan] = []
    for level in staleness:
        if level and candidates:
            plans.append(asynchronous(fast, work, options, total, level, candidates))
        with contextlib.suppress(PlanError):  # together they may fit
            plans += search_all(fast, work, options, count, [level])
    if not plans:
        raise PlanError(_nothing_fits(fast, work, options, count))
    return plans


def _dealt(
    parts: Sequence[tuple[Hardware, int]], work: Workload, options: Options, *, partial: bool
) -> tuple[GeneratorChoice, ...]:
    """The best generator on each part for its prompts; () where none fits on any. Kinds that get no
    prompt are left out.

    Prompts are dealt by memory rate first, then by the tokens a second that each part makes of those.
    """
    rates = [hardware.memory_rate * devices for hardware, devices in parts]
    found: list[GeneratorChoice | None] = []
    for _ in range(3):
        prompts = _shares(work.prompts_per_step, rates)
        found = [
            min(
                generator_choices(
                    hardware, replace(work, prompts_per_step=own), options, devices, partial=partial, total=work.sequences
                ),
                key=lambda choice: choice.time_s,
                default=None,
            )
            if own
            else None
            for (hardware, devices), own in zip(parts, prompts, strict=True)
        ]  # fmt: skip
        rates = [choice.prompts / choice.time_s if choice else 0.0 for choice in found]
        if not any(rates):
            return ()
    kept = tuple(choice for choice in found if choice)
    return kept if sum(choice.prompts for choice in kept) == work.prompts_per_step else ()


def _shares(prompts: int, rates: Sequence[float]) -> list[int]:
    """Whole prompts in the ratios of ``rates``: the largest remainders get what is left."""
    exact = [prompts * rate / sum(rates) for rate in rates]
    whole = [math.floor(share) for share in exact]
    order = sorted(range(len(rates)), key=lambda place: whole[place] - exact[place])
    for place in order[: prompts - sum(whole)]:
        whole[place] += 1
    return whole


# -- what does not fit ------------------------------------------------------------------------------------------------


def _least(holds: Callable[[int], bool]) -> int | None:
    counts = range(1, MOST_DEVICES + 1)
    index = bisect_left(counts, True, key=holds)
    return counts[index] if index < len(counts) else None


def _nothing_fits(hardware: Hardware, work: Workload, options: Options, devices: int) -> str:
    """The message for a job that does not fit on ``devices``: which role is too large, and the
    fewest devices that hold it."""
    head = f"{work.model.name} ({work.model.total_params / 1e9:.1f} B parameters) does not fit on {devices} x "
    head += f"{hardware.device.title} with {MARGIN:.0%} of memory as a margin"
    both = (any(True for _ in _on_cores(hardware, options, devices, in_turns=turns)) for turns in (False, True))
    if hardware.is_cpu and options.measured and not all(both):
        return (
            f"no run measured this on {plural(devices, 'core')}: a plan has the threads of runs, and in turns a trainer that had "
            "cores of its own; name another run, --fit RUN --fit OTHER"
        )
    if hardware.is_cpu:
        return f"{head}: use a smaller model, shorter responses or a machine with more memory"
    generator = _least(lambda n: any(True for _ in generator_choices(hardware, work, options, n, partial=False)))
    trainer = _least(lambda n: any(True for _ in trainer_choices(hardware, work, options, n)))
    if generator is None or trainer is None:
        role = "generator replica" if generator is None else "trainer's longest sequence"
        cure = "use shorter responses or larger devices"
        if generator is None and not work.model.cut_by_llamarl:
            cure = "llamarl does not cut its layers over several (tp is 1), so each has to hold them all"
        return f"{head}, nor on any number up to {MOST_DEVICES}: its {role} does not; {cure}"
    return (
        f"{head}: the trainer alone needs 16 bytes a parameter, sharded, on {trainer} or more devices, a generator replica "
        f"{generator}; {max(trainer, generator)} would do in turns, {max(trainer + generator, devices + 1)} with devices of "
        "their own"
    )
