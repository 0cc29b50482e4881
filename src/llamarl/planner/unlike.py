"""Devices of several kinds in one job: which kind trains, which generate, and how many prompts of a tick each replica gets. Pure.

    128 x H100 ─┬─ trainer, one kind alone: its ranks wait for each other in every layer
                └─ generator replicas ─┐ each kind in a layout and precision of its own, each replica with whole prompts,
    128 x A100 ─── generator replicas ─┘ as many as it makes in the time that the slowest of the others needs

For a time T every layout of a kind makes ``replicas x prompts(T)``, and what one kind makes does not hang on another. So the least
T that all together make a tick in is found by bisection, with each kind's best layout at that T. Shares come from the plan and not
from the clock: the same plan deals the same prompts, whichever replica is early.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

from llamarl.errors import PlanError
from llamarl.planner.choices import (
    GeneratorChoice,
    Options,
    TrainerChoice,
    Workload,
    fits,
    generator_choice,
    powers,
    precisions_of,
    slot_counts,
    split_sizes,
    trainer_choices,
)
from llamarl.planner.generation import GeneratorDemand, weight_bytes
from llamarl.planner.hardware import Hardware
from llamarl.planner.rooflines import GeneratorLayout, pulled_bytes, tensor_parallel_sizes
from llamarl.planner.search import best_separate

__all__ = [
    "Pool",
    "Share",
    "UnlikePlan",
    "best_first",
    "deal",
    "dealt_evenly",
    "kinds_apart",
    "one_kind",
    "plan_unlike",
]

_ROUNDS = 24
"""Of bisection: T is found to a part in ten thousand."""


@dataclass(frozen=True, kw_only=True)
class Pool:
    """All devices of one kind."""

    hardware: Hardware
    devices: int

    @property
    def name(self) -> str:
        return self.hardware.device.name


@dataclass(frozen=True, kw_only=True)
class Share:
    """The generator replicas of one kind: one layout, and the prompts of a tick that each of them gets."""

    hardware: Hardware
    choice: GeneratorChoice
    """Of the replica with the most prompts."""
    prompts: tuple[int, ...]
    """[replicas], the most first."""
    sync_s: float

    @property
    def devices(self) -> int:
        return len(self.prompts) * self.choice.layout.devices

    @property
    def busy_s(self) -> float:
        """Its tick, with the hand-over."""
        return self.choice.time_s + self.sync_s


@dataclass(frozen=True, kw_only=True)
class UnlikePlan:
    """Who does what, and the step that comes of it."""

    title: str
    trainer_hardware: Hardware
    trainer: TrainerChoice
    shares: tuple[Share, ...]
    max_staleness: int
    step_s: float
    tokens_per_s: float
    devices: int
    """All that there are, used or not."""

    @property
    def generate_s(self) -> float:
        """The slowest replica's tick, with the hand-over."""
        return max(share.busy_s for share in self.shares)

    @property
    def waiting(self) -> float:
        """Share of all device time that waits."""
        busy = sum(share.devices * share.busy_s for share in self.shares)
        busy += self.trainer.layout.devices * self.trainer.time.total_s
        return max(0.0, 1.0 - busy / (self.devices * self.step_s))

    @property
    def why_not_run(self) -> str:
        """What of it no recipe can say; empty: one can."""
        if len({(share.hardware.device.name, share.choice.layout) for share in self.shares}) > 1:
            return "replicas of one [generator] have one layout and precision"
        counts = {count for share in self.shares for count in share.prompts}
        return "replicas of one [generator] get the same number of prompts" if len(counts) > 1 else ""


@dataclass
class _Replicas:
    """Times of one replica of a kind and layout, by its prompts; each is worked out once."""

    hardware: Hardware
    work: Workload
    options: Options
    layout: GeneratorLayout
    partial: bool
    replicas: int
    """Of the kind, if all of its devices generated."""
    _found: dict[int, GeneratorChoice | None] = field(default_factory=dict)

    def choice(self, prompts: int) -> GeneratorChoice | None:
        """The best number of sequences at once; None: too little memory."""
        if prompts not in self._found:
            self._found[prompts] = self._choose(prompts)
        return self._found[prompts]

    def _choose(self, prompts: int) -> GeneratorChoice | None:
        work, options = self.work, self.options
        share = prompts * work.group_size
        top = math.ceil(share * options.oversubscription) if self.partial else share
        # The longest response of a tick may come to any replica; a partial tick's time is that of the slowest of its kind.
        total = share * self.replicas if self.partial else work.sequences
        best: GeneratorChoice | None = None
        for slots in slot_counts(top, min(options.max_slots, top)):
            demand = GeneratorDemand(
                lengths=work.response,
                prompt_tokens=work.prompt_tokens,
                group_size=work.group_size,
                sequences=share,
                total_sequences=total,
                slots=slots,
                partial=self.partial,
                max_segments=options.max_segments if self.partial else 1,
                oversubscription=options.oversubscription if self.partial else 1.0,
            )
            found = generator_choice(self.hardware, work.model, self.layout, demand, 1)
            if not fits(found.memory, self.hardware.usable_memory_bytes):
                continue
            if best is not None and found.time_s >= best.time_s:
                break  # fewer at once only queue longer
            best = found
        return best

    @cached_property
    def _curve(self) -> tuple[list[int], list[float]]:
        """Numbers of prompts and their times, ascending: each about a third more than the one before."""
        most = self.work.prompts_per_step
        counts = sorted({1, most, *(n for i in range(2, 64) if (n := round(4 ** (i / 5))) < most)})
        found = [(count, choice.time_s) for count in counts if (choice := self.choice(count)) is not None]
        # A few groups may take longer than some more: a partial tick then waits for one group's longest response.
        times = list(accumulate((time_s for _, time_s in reversed(found)), min))[::-1]
        return [count for count, _ in found], times

    def prompts_in(self, seconds: float) -> int:
        """The most prompts that it makes in this time, between the points of the curve by straight lines; 0: none."""
        counts, times = self._curve
        at = bisect_right(times, seconds)
        if at in (0, len(times)):
            return counts[-1] if at and times else 0
        share = (seconds - times[at - 1]) / (times[at] - times[at - 1])
        return int(counts[at - 1] + share * (counts[at] - counts[at - 1]))

    def time_s(self, prompts: int) -> float:
        """By the same lines; infinite beyond what fits."""
        counts, times = self._curve
        if not counts or prompts > counts[-1]:
            return math.inf
        at = max(1, bisect_left(counts, prompts))
        if len(counts) == 1:
            return times[0]
        share = (prompts - counts[at - 1]) / (counts[at] - counts[at - 1])
        return times[at - 1] + share * (times[at] - times[at - 1])


class _Generators:
    """Every layout of every kind, for one workload."""

    def __init__(self, pools: Sequence[Pool], work: Workload, options: Options, *, partial: bool) -> None:
        self.work = work
        self.layouts = {pool.name: list(_layouts(pool, work, options, partial)) for pool in pools}

    def best(
        self, devices: dict[str, int], late: dict[tuple[str, GeneratorLayout], float]
    ) -> list[tuple[_Replicas, int]]:
        """For each kind that takes part: its layout and number of replicas, of the least time for a tick; empty: none fits.

        Args:
            devices: By kind.
            late: By kind and layout, seconds of a tick in which it cannot decode.
        """
        prompts = self.work.prompts_per_step

        def at(seconds: float) -> list[tuple[_Replicas, int, int]]:
            chosen = []
            for name, count in devices.items():
                options = [
                    (found, replicas, replicas * found.prompts_in(seconds - late[name, found.layout]))
                    for found in self.layouts[name]
                    if (replicas := min(count // found.layout.devices, prompts))
                ]
                if options and (best := max(options, key=lambda one: one[2]))[2]:
                    chosen.append(best)
            return chosen

        def enough(seconds: float) -> bool:
            return sum(made for _, _, made in at(seconds)) >= prompts

        low, high = 1e-6, 1.0
        while not enough(high):
            low, high = high, high * 4.0
            if high > 1e9:
                return []
        for _ in range(_ROUNDS):
            middle = (low * high) ** 0.5
            low, high = (low, middle) if enough(middle) else (middle, high)
        return [(found, replicas) for found, replicas, _ in _needed(at(high), prompts)]


def _needed(chosen: list[tuple[_Replicas, int, int]], prompts: int) -> list[tuple[_Replicas, int, int]]:
    """Without kinds whose replicas would get nothing once the others have all."""
    ordered = sorted(chosen, key=lambda one: -one[2])
    while len(ordered) > 1 and sum(made for _, _, made in ordered[:-1]) >= prompts:
        ordered.pop()
    return ordered


def _layouts(pool: Pool, work: Workload, options: Options, partial: bool) -> Iterator[_Replicas]:
    hardware = pool.hardware
    for pp in powers(min(options.max_pipeline, work.model.layers)):
        for tp in tensor_parallel_sizes(work.model, pool.devices // pp, runnable=options.runnable):
            for precision in precisions_of(hardware, work.model, options):
                layout = GeneratorLayout(tp, pp, precision, options.captured, options.runnable)
                if weight_bytes(hardware, work.model, layout) <= hardware.usable_memory_bytes:
                    yield _Replicas(hardware, work, options, layout, partial, pool.devices // layout.devices)


def _link(one: Hardware, other: Hardware) -> tuple[float, float]:
    """Bytes/s and latency between a device of each: over the network, at the slower one's rate."""
    rate = min(h.device.inter_node_bytes_per_s * h.efficiency.link for h in (one, other))
    return rate, max(h.efficiency.inter_node_latency_s for h in (one, other))


def _shares(
    chosen: Sequence[tuple[_Replicas, int]],
    prompts: int,
    trainer: Hardware,
    trainer_devices: int,
    *,
    even: bool = False,
) -> tuple[Share, ...]:
    """Deal the prompts: each to the replica that is then done first, or the same number to every one."""
    model = chosen[0][0].work.model
    pulled = [pulled_bytes(found.hardware, model, found.layout) for found, _ in chosen]
    sent = (
        sum(n * found.layout.devices * size for (found, n), size in zip(chosen, pulled, strict=True)) / trainer_devices
    )
    syncs = []
    for (found, _), size in zip(chosen, pulled, strict=True):
        rate, latency = _link(found.hardware, trainer)
        syncs.append(max(size, sent) / rate + latency)
    replicas = [number for _, number in chosen]
    if even:
        everyone = [prompts // sum(replicas) + (place < prompts % sum(replicas)) for place in range(sum(replicas))]
        ends = list(accumulate(replicas))
        counts = [everyone[end - number : end] for end, number in zip(ends, replicas, strict=True)]
    else:
        curves = [functools.partial(_busy_s, found, sync) for (found, _), sync in zip(chosen, syncs, strict=True)]
        counts = deal(curves, replicas, prompts)
    shares = []
    for (found, _), own, sync_s in zip(chosen, counts, syncs, strict=True):
        dealt = tuple(count for count in own if count)
        if not dealt:
            continue
        choice = found.choice(max(dealt))
        if choice is None:
            return ()
        choice = replace(choice, replicas=len(dealt))
        shares.append(Share(hardware=found.hardware, choice=choice, prompts=dealt, sync_s=sync_s))
    return tuple(shares)


def _busy_s(replica: _Replicas, sync_s: float, prompts: int) -> float:
    return replica.time_s(prompts) + sync_s


def deal(times_s: Sequence[Callable[[int], float]], replicas: Sequence[int], prompts: int) -> list[list[int]]:
    """Prompts of each replica of each kind, one after the other to the replica that is then done first.

    Replicas of a kind are alike, so they are dealt to in rounds: what differs is how many their kind has had.

    Args:
        times_s: By kind, seconds of a replica's tick by its prompts; they do not fall.
        replicas: By kind.

    Returns:
        [kinds][replicas of the kind]
    """
    had = [0] * len(replicas)
    for _ in range(prompts):
        kind = min(range(len(replicas)), key=lambda k: (times_s[k](had[k] // replicas[k] + 1), k))
        had[kind] += 1
    return [
        [count // number + (replica < count % number) for replica in range(number)]
        for count, number in zip(had, replicas, strict=True)
    ]


def _planned(
    title: str,
    work: Workload,
    trainer: tuple[Hardware, TrainerChoice],
    shares: tuple[Share, ...],
    staleness: int,
    devices: int,
) -> UnlikePlan:
    hardware, choice = trainer
    generate_s = max(share.busy_s for share in shares)
    around = (generate_s + work.reward_s + choice.time.total_s) / (staleness + 1)
    step = max(generate_s, choice.time.total_s, work.reward_s, around)
    return UnlikePlan(
        title=title,
        trainer_hardware=hardware,
        trainer=choice,
        shares=shares,
        max_staleness=staleness,
        step_s=step,
        tokens_per_s=work.tokens / step,
        devices=devices,
    )


def plan_unlike(pools: Sequence[Pool], work: Workload, options: Options, max_staleness: int) -> UnlikePlan:
    """The best division of the pools: one kind trains on some or all of its devices, all others generate.

    Raises:
        PlanError: No division fits.
    """
    _check(pools)
    total = sum(pool.devices for pool in pools)
    best: UnlikePlan | None = None
    modes = (False, True) if options.partial_rollouts and options.max_segments > 1 and max_staleness else (False,)
    for partial in modes:
        generators = _Generators(pools, work, options, partial=partial)
        for trainer_pool in pools:
            hardware = trainer_pool.hardware
            for trainer, left in _trainers(trainer_pool, work, options):
                if best is not None and trainer.time.total_s >= best.step_s:
                    continue
                devices = {pool.name: left if pool is trainer_pool else pool.devices for pool in pools}
                late = {
                    (name, found.layout): pulled_bytes(found.hardware, work.model, found.layout)
                    / _link(found.hardware, hardware)[0]
                    for name, layouts in generators.layouts.items()
                    for found in layouts
                }
                chosen = generators.best(devices, late)
                if not chosen:
                    continue
                shares = _shares(chosen, work.prompts_per_step, hardware, trainer.layout.devices)
                if not shares:
                    continue
                plan = _planned("each kind its share", work, (hardware, trainer), shares, max_staleness, total)
                slower = 1.02 if partial else 1.0  # among equals, whole batches: they add no staleness
                if best is None or plan.step_s * slower < best.step_s:
                    best = plan
    if best is None:
        named = " and ".join(f"{pool.devices} x {pool.name}" for pool in pools)
        raise PlanError(f"{work.model.name} does not fit on {named} with one kind that trains: give more devices")
    return best


def _trainers(pool: Pool, work: Workload, options: Options) -> Iterator[tuple[TrainerChoice, int]]:
    """The fastest trainer on each number of a pool's devices, and the devices that are left."""
    sizes = (
        [pool.devices, *split_sizes(pool.devices, pool.hardware.device.devices_per_node)] if pool.devices > 1 else [1]
    )
    for size in sizes:
        choices = trainer_choices(pool.hardware, work, options, size, memory_limit=pool.hardware.usable_memory_bytes)
        found = min(choices, key=lambda choice: (choice.time.total_s, -choice.layout.micro_batch), default=None)
        if found is not None:
            yield found, pool.devices - size


def dealt_evenly(plan: UnlikePlan, work: Workload, options: Options) -> UnlikePlan | None:
    """The same devices and layouts with the same number of prompts for every replica; None: too many for some."""
    chosen = [
        (
            _Replicas(
                share.hardware, work, options, share.choice.layout, share.choice.demand.partial, len(share.prompts)
            ),
            len(share.prompts),
        )
        for share in plan.shares
    ]
    trainer = plan.trainer.layout.devices
    shares = _shares(chosen, work.prompts_per_step, plan.trainer_hardware, trainer, even=True)
    if not shares:
        return None
    return _planned(
        "the same, dealt evenly", work, (plan.trainer_hardware, plan.trainer), shares, plan.max_staleness, plan.devices
    )


def one_kind(pool: Pool, work: Workload, options: Options, max_staleness: int) -> UnlikePlan:
    """The best plan of one pool alone.

    Raises:
        PlanError: The job does not fit there.
    """
    found = best_separate(pool.hardware, work, options, pool.devices, max_staleness)
    each = work.prompts_per_step // found.generator.replicas
    share = Share(
        hardware=pool.hardware,
        choice=found.generator,
        prompts=(each,) * found.generator.replicas,
        sync_s=found.sync_s,
    )
    return UnlikePlan(
        title=f"{pool.devices} x {pool.name} alone",
        trainer_hardware=pool.hardware,
        trainer=found.trainer,
        shares=(share,),
        max_staleness=max_staleness,
        step_s=found.step_s,
        tokens_per_s=found.tokens_per_s,
        devices=pool.devices,
    )


def kinds_apart(pools: Sequence[Pool], work: Workload, options: Options, max_staleness: int) -> UnlikePlan | None:
    """The best plan in which one kind trains and one other generates, every replica with as many prompts: what a recipe with
    ``hosts.on`` says. None: none fits."""
    total = sum(pool.devices for pool in pools)
    modes = (False, True) if options.partial_rollouts and options.max_segments > 1 and max_staleness else (False,)
    found: list[UnlikePlan] = []
    for partial in modes:
        for pool in pools:
            for replicas, count in _even_layouts(pool, work, options, partial):
                for other in pools:
                    trainer = next(_trainers(other, work, options), None) if other is not pool else None
                    if trainer is None or trainer[1]:
                        continue
                    shares = _shares(
                        [(replicas, count)], work.prompts_per_step, other.hardware, trainer[0].layout.devices, even=True
                    )
                    if shares:
                        title = f"{other.name} trains, {pool.name} generates"
                        found.append(_planned(title, work, (other.hardware, trainer[0]), shares, max_staleness, total))
    return min(found, key=lambda plan: plan.step_s, default=None)


def best_first(plans: Sequence[UnlikePlan]) -> list[UnlikePlan]:
    """The recommended plan, then the others by their steps: of those within 2% of the fastest, one that llamarl runs."""
    ordered = sorted(plans, key=lambda plan: plan.step_s)
    near = [plan for plan in ordered if plan.step_s <= 1.02 * ordered[0].step_s]
    best = next((plan for plan in near if not plan.why_not_run), ordered[0])
    return [best, *(plan for plan in ordered if plan is not best)]


def _even_layouts(pool: Pool, work: Workload, options: Options, partial: bool) -> Iterator[tuple[_Replicas, int]]:
    for found in _layouts(pool, work, options, partial):
        most = min(pool.devices // found.layout.devices, work.prompts_per_step)
        if most:
            yield found, max(n for n in range(1, most + 1) if work.prompts_per_step % n == 0)


def _check(pools: Sequence[Pool]) -> None:
    if len(pools) < 2:
        raise PlanError("devices of one kind: give their number alone, --devices N --hardware NAME")
    if again := [name for name, count in Counter(pool.name for pool in pools).items() if count > 1]:
        raise PlanError(f"--devices names {', '.join(again)} twice")
    for pool in pools:
        if pool.devices < 1:
            raise PlanError(f"--devices needs at least 1 {pool.name}, got {pool.devices}")
