"""Devices of several kinds in one job: which kind trains, which generate, and how many prompts of a tick each replica gets. Pure.

    128 x H100 ─┬─ trainer, one kind alone: its ranks wait for each other in every layer
                └─ generator replicas ─┐ each kind in a layout and precision of its own, each replica with whole prompts,
    128 x A100 ─── generator replicas ─┘ as many as it makes in the time that the slowest of the others needs

What each kind makes in how long is in ``replica_times.py``. Shares come from the plan and not from the clock: the same plan deals
the same prompts, whichever replica is early. A recipe says them as ``[[generator.replicas]]`` (``unlike_recipe.py``).
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from llamarl.errors import PlanError
from llamarl.planner.choices import (
    GeneratorChoice,
    Options,
    TrainerChoice,
    Workload,
    dealt,
    fewest_of_each_share,
    split_sizes,
    trainer_choices,
    trainer_sizes,
)
from llamarl.planner.fitting import least_devices, nothing_fits
from llamarl.planner.hardware import Hardware
from llamarl.planner.replica_times import GeneratorKinds, Pool, ReplicaTimes, deal, layouts_of
from llamarl.planner.rooflines import pulled_bytes
from llamarl.planner.search import Plan

__all__ = [
    "Share",
    "UnlikePlan",
    "check_pools",
    "dealt_evenly",
    "kinds_apart",
    "link_between",
    "plan_unlike",
]


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
    staged_by_llamarl: bool = True
    """Whether llamarl cuts the model into pipeline stages."""
    one: Plan | None = None
    """Of one kind alone: what the search for that kind says, be it in turns on the same devices."""
    refused: str = ""
    """What else stands between it and a run."""

    @property
    def in_turns(self) -> bool:
        """Whether trainer and generators share their devices."""
        return self.one is not None and self.one.system != "separate"

    def used(self, kind: str) -> int:
        """Devices of a kind that train or generate."""
        train = self.trainer.layout.devices if self.trainer_hardware.device.name == kind else 0
        generate = sum(share.devices for share in self.shares if share.hardware.device.name == kind)
        return max(train, generate) if self.in_turns else train + generate

    @property
    def kinds(self) -> set[str]:
        """Those that have work."""
        return {self.trainer_hardware.device.name, *(share.hardware.device.name for share in self.shares)}

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
        """What of it llamarl does not run; empty: a recipe says it."""
        if self.refused or self.one is not None:
            return self.refused
        stages = max(self.trainer.layout.pp, *(share.choice.layout.pp for share in self.shares))
        if stages == 1 or self.staged_by_llamarl:
            return ""
        return f"it has {stages} pipeline stages, llamarl has 1 for this model (--max-pipeline 1)"


def link_between(one: Hardware, other: Hardware) -> tuple[float, float]:
    """Bytes/s and latency between a device of each: over the network, at the slower one's rate."""
    rate = min(h.device.inter_node_bytes_per_s * h.efficiency.link for h in (one, other))
    return rate, max(h.efficiency.inter_node_latency_s for h in (one, other))


def _shares(
    chosen: Sequence[tuple[ReplicaTimes, int]],
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
        rate, latency = link_between(found.hardware, trainer)
        syncs.append(max(size, sent) / rate + latency)
    replicas = [number for _, number in chosen]
    if even:
        everyone = dealt(prompts, sum(replicas))
        ends = list(accumulate(replicas))
        counts = [everyone[end - number : end] for end, number in zip(ends, replicas, strict=True)]
    else:
        curves = [functools.partial(_busy_s, found, sync) for (found, _), sync in zip(chosen, syncs, strict=True)]
        counts = deal(curves, replicas, prompts)
    shares = []
    for (found, _), own, sync_s in zip(chosen, counts, syncs, strict=True):
        given = tuple(count for count in own if count)
        if not given:
            continue
        choice = found.choice(max(given))
        if choice is None:
            return ()
        choice = replace(choice, replicas=len(given))
        shares.append(Share(hardware=found.hardware, choice=choice, prompts=given, sync_s=sync_s))
    return tuple(shares)


def _busy_s(replica: ReplicaTimes, sync_s: float, prompts: int) -> float:
    return replica.time_s(prompts) + sync_s


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
        staged_by_llamarl=work.model.staged_by_llamarl,
        refused=work.model.unsupported or "",
    )


def plan_unlike(pools: Sequence[Pool], work: Workload, options: Options, max_staleness: int) -> UnlikePlan:
    """The best division of the pools: one kind trains on some or all of its devices, all others generate.

    Raises:
        PlanError: No division fits.
    """
    check_pools(pools)
    total = sum(pool.devices for pool in pools)
    best: UnlikePlan | None = None
    modes = (False, True) if options.partial_rollouts and options.max_segments > 1 and max_staleness else (False,)
    for partial in modes:
        generators = GeneratorKinds(pools, work, options, partial=partial)
        for trainer_pool in pools:
            hardware = trainer_pool.hardware
            for trainer, left in _trainers(trainer_pool, work, options):
                if best is not None and trainer.time.total_s >= best.step_s:
                    continue
                devices = {pool.name: left if pool is trainer_pool else pool.devices for pool in pools}
                late = {
                    (name, found.layout): pulled_bytes(found.hardware, work.model, found.layout)
                    / link_between(found.hardware, hardware)[0]
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
        raise PlanError(_nothing_fits(pools, work, options))
    return best


def _nothing_fits(pools: Sequence[Pool], work: Workload, options: Options) -> str:
    """The message for a job that no division of the pools holds: what either role needs of each kind."""
    named = " and ".join(f"{pool.devices} x {pool.name}" for pool in pools)
    head = f"{work.model.name} does not fit on {named} with one kind that trains"
    least = [(pool, *least_devices(pool.hardware, work, options)) for pool in pools]
    trainers = [f"{trainer} {pool.name}" for pool, trainer, _ in least if trainer]
    replicas = [f"{replica} {pool.name}" for pool, _, replica in least if replica]
    if not trainers or not replicas:
        pool = pools[0]
        return f"{head}: {nothing_fits(pool.hardware, work, options, pool.devices, separate=True)}"
    return f"{head}: the trainer needs at least {' or '.join(trainers)}, and a generator replica {' or '.join(replicas)}, beside it or in turns with it"


def _trainers(pool: Pool, work: Workload, options: Options) -> Iterator[tuple[TrainerChoice, int]]:
    """Trainers on a pool's devices, the fastest first, each on fewer devices than all before; and the devices that are left."""
    limit, node = pool.hardware.usable_memory_bytes, pool.hardware.device.devices_per_node
    sizes = {pool.devices, *split_sizes(pool.devices, node), *trainer_sizes(work, options, pool.devices, node)}
    found = [
        choice for size in sizes for choice in trainer_choices(pool.hardware, work, options, size, memory_limit=limit)
    ]
    least = pool.devices + 1
    for choice in sorted(found, key=lambda one: (one.time.total_s, one.layout.devices, -one.layout.micro_batch)):
        if choice.layout.devices < least:
            least = choice.layout.devices
            yield choice, pool.devices - least


def dealt_evenly(plan: UnlikePlan, work: Workload, options: Options) -> UnlikePlan | None:
    """The same devices and layouts with the same number of prompts for every replica; None: too many for some, or so it is already."""
    chosen = [
        (
            ReplicaTimes(
                share.hardware, work, options, share.choice.layout, share.choice.demand.partial, len(share.prompts)
            ),
            len(share.prompts),
        )
        for share in plan.shares
    ]
    trainer = plan.trainer.layout.devices
    shares = _shares(chosen, work.prompts_per_step, plan.trainer_hardware, trainer, even=True)
    if not shares or [share.prompts for share in shares] == [share.prompts for share in plan.shares]:
        return None
    return _planned(
        "the same, dealt evenly", work, (plan.trainer_hardware, plan.trainer), shares, plan.max_staleness, plan.devices
    )


def kinds_apart(pools: Sequence[Pool], work: Workload, options: Options, max_staleness: int) -> UnlikePlan | None:
    """The best plan in which one kind trains and one other generates, the prompts dealt evenly. None: none fits."""
    total = sum(pool.devices for pool in pools)
    modes = (False, True) if options.partial_rollouts and options.max_segments > 1 and max_staleness else (False,)
    found: list[UnlikePlan] = []
    for partial in modes:
        for pool in pools:
            for replicas, count in _evenlayouts_of(pool, work, options, partial):
                for other in pools:
                    trainer = next(_trainers(other, work, options), None) if other is not pool else None
                    if trainer is None:
                        continue
                    shares = _shares(
                        [(replicas, count)], work.prompts_per_step, other.hardware, trainer[0].layout.devices, even=True
                    )
                    if shares:
                        title = f"{other.name} trains, {pool.name} generates"
                        found.append(_planned(title, work, (other.hardware, trainer[0]), shares, max_staleness, total))
    return min(found, key=lambda plan: plan.step_s, default=None)


def _evenlayouts_of(pool: Pool, work: Workload, options: Options, partial: bool) -> Iterator[tuple[ReplicaTimes, int]]:
    for found in layouts_of(pool, work, options, partial):
        most = min(pool.devices // found.layout.devices, work.prompts_per_step)
        if most:
            yield found, fewest_of_each_share(work.prompts_per_step, most)[-1]


def check_pools(pools: Sequence[Pool]) -> None:
    """Raise PlanError for pools that are no question: one alone, the same kind twice, no devices."""
    if len(pools) < 2:
        raise PlanError("devices of one kind: give their number alone, --devices N --hardware NAME")
    if again := [name for name, count in Counter(pool.name for pool in pools).items() if count > 1]:
        raise PlanError(f"--devices names {', '.join(again)} twice")
    for pool in pools:
        if pool.devices < 1:
            raise PlanError(f"--devices needs at least 1 {pool.name}, got {pool.devices}")
