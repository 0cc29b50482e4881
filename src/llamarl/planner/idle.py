"""Devices that a plan leaves without work: how many of which kind, and why. Pure.

A trainer works in rounds of whole groups a data rank and a replica in whole prompts, so both gain from more devices in steps only: 16
replicas of 128 prompts have 8 each, and so have 17 of them at the fullest.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from llamarl.planner.choices import Options, TrainerChoice, Workload, trainer_choices, trainer_sizes
from llamarl.planner.hardware import Hardware
from llamarl.planner.replica_times import Pool, layouts_of
from llamarl.planner.rooflines import pulled_bytes, weight_sync_s
from llamarl.planner.search import Plan
from llamarl.planner.unlike import Share, UnlikePlan, link_between
from llamarl.plural import plural

__all__ = ["ALIKE", "Idle", "Spare", "idle_of", "idle_of_kinds", "spare_of"]

ALIKE = 1.01
"""Steps that differ by less are equal, and then fewer devices are better."""
_NEAR = 0.9
"""Of a step: a replica whose shortest tick takes so much of it can make next to nothing in a shorter one."""


@dataclass(frozen=True, kw_only=True)
class Idle:
    """Devices of one kind that neither train nor generate."""

    kind: str
    count: int
    of: int
    why: str

    def text(self) -> str:
        return f"{self.count} of {self.of} {self.kind}: {self.why}"


@dataclass(frozen=True, kw_only=True)
class Spare:
    """Devices of the trainer without which a step is less than 1 % longer."""

    enough: int
    of: int
    step_s: float
    """On these."""

    def text(self) -> str:
        return f"{self.enough} of the trainer's {plural(self.of, 'device')} would do for a step of {self.step_s:.3g} s"


def spare_of(plan: Plan, work: Workload, options: Options, hardware: Hardware) -> Spare | None:
    """Whether a trainer on fewer devices, beside the same generators, costs less than 1 % of a step."""
    if plan.system != "separate" or plan.trainer.core_s:
        return None
    generator, devices, limit = plan.generator, plan.trainer.layout.devices, hardware.usable_memory_bytes

    def step_s(count: int) -> float:
        sync_s = weight_sync_s(
            hardware, work.model, trainer_devices=count, replicas=generator.replicas, layout=generator.layout
        )
        trains = [one.time.total_s for one in trainer_choices(hardware, work, options, count, memory_limit=limit)]
        trains_s, generates_s = min(trains, default=math.inf), generator.time_s + sync_s
        return max(generates_s, trains_s, (generates_s + work.reward_s + trains_s) / (plan.max_staleness + 1))

    counts = [n for n in trainer_sizes(work, options, devices, hardware.device.devices_per_node) if n < devices]
    at = bisect_left(counts, True, key=lambda count: step_s(count) <= ALIKE * plan.step_s)
    return Spare(enough=counts[at], of=devices, step_s=step_s(counts[at])) if at < len(counts) else None


def idle_of(plan: Plan, work: Workload, options: Options, kind: str) -> Idle | None:
    """Of a plan for one kind; None: all have work.

    Args:
        kind: Its name.
    """
    train, generate = plan.trainer.layout.devices, plan.generator.devices
    if plan.trainer.core_s:  # a lone trainer has what the generator leaves
        return None
    used = train + generate if plan.system == "separate" else max(train, generate)
    left = plan.devices - used
    if left < 1:
        return None
    units = _units(work, options)
    needs = [
        _next_step("generator replicas", units, plan.generator.replicas, plan.generator.layout.devices),
        _next_rank(plan.trainer, units),
    ]
    if plan.system == "separate" and plan.generator.time_s + plan.sync_s < plan.trainer.time.total_s:
        needs.reverse()  # of the role that sets the pace first
    return Idle(kind=kind, count=left, of=plan.devices, why=_shorter(left, needs))


def idle_of_kinds(
    plan: UnlikePlan, pools: Sequence[Pool], work: Workload, options: Options, others: Sequence[UnlikePlan] = ()
) -> list[Idle]:
    """Of a plan for several kinds: those that have devices left.

    Args:
        others: Plans that were found beside it.
    """
    found: list[Idle | None] = []
    for pool in pools:
        used = plan.used(pool.name)
        if used == pool.devices:
            continue
        if used and plan.one is not None:
            found.append(idle_of(plan.one, work, options, pool.name))
            continue
        trains = plan.trainer_hardware.device.name == pool.name
        shares = [share for share in plan.shares if share.hardware.device.name == pool.name]
        left = pool.devices - used
        why = (
            _partly(plan, trains, shares, left, work, options)
            if used
            else _not_at_all(plan, pool, work, options, others)
        )
        found.append(Idle(kind=pool.name, count=left, of=pool.devices, why=why))
    return [idle for idle in found if idle is not None]


def _units(work: Workload, options: Options) -> int:
    return work.prompts_per_step if options.whole_groups else work.sequences


def _next_step(what: str, units: int, count: int, each: int) -> tuple[int, str]:
    """Devices that a smaller largest share needs, and that in words; 0: there is none."""
    share = -(-units // count)
    if share <= 1:
        return 0, f"{what} have a prompt each already"
    more = -(-units // (share - 1)) - count
    return more * each, f"fewer prompts for each of the {what} take {plural(more * each, 'device')} more"


def _next_rank(trainer: TrainerChoice, units: int) -> tuple[int, str]:
    layout = trainer.layout
    return _next_step("trainer's data ranks", units, layout.data_ranks, layout.devices // layout.data_ranks)


def _shorter(left: int, needs: Sequence[tuple[int, str]]) -> str:
    """Why so many devices make no step shorter, the pace-maker's reason first."""
    short = [words for need, words in needs if need > left or not need]
    found = "no split that uses them was found faster"
    return f"{found}; as it is laid out, {'; '.join(short)}" if short else found


def _partly(
    plan: UnlikePlan, trains: bool, shares: Sequence[Share], left: int, work: Workload, options: Options
) -> str:
    units = _units(work, options)
    generates_s, trains_s = plan.generate_s, plan.trainer.time.total_s
    if trains and trains_s >= generates_s:
        return _shorter(left, [_next_rank(plan.trainer, units)]) + "; the generators wait for the trainer as it is"
    if shares and left < shares[0].choice.layout.devices:
        return f"fewer than the {shares[0].choice.layout.devices} of a replica"
    if trains_s > generates_s:
        return "the trainer sets the pace, and the generators wait for it as it is"
    return "a replica more leaves the fullest one its prompts"


def _not_at_all(plan: UnlikePlan, pool: Pool, work: Workload, options: Options, others: Sequence[UnlikePlan]) -> str:
    """Why a whole kind has no part in the job."""
    with_it = [other for other in others if pool.name in other.kinds]
    fastest = min(with_it, key=lambda other: other.step_s, default=None)
    if fastest is not None and fastest.step_s < plan.step_s:
        if fastest.why_not_run:
            return f"with them ({fastest.title}) a step takes {fastest.step_s:.3g} s, in a layout that llamarl does not run"
        return f"with them ({fastest.title}) a step would gain under 1 %"
    beside = "" if fastest is None else f"; the fastest plan with them takes {fastest.step_s:.3g} s ({fastest.title})"
    return _what_they_lack(plan, pool, work, options) + beside


def _what_they_lack(plan: UnlikePlan, pool: Pool, work: Workload, options: Options) -> str:
    rate, latency = link_between(pool.hardware, plan.trainer_hardware)
    modes = (False, True) if options.partial_rollouts and options.max_segments > 1 and plan.max_staleness else (False,)
    times = [
        found.least_s + pulled_bytes(pool.hardware, work.model, found.layout) / rate + latency
        for partial in modes
        for found in layouts_of(pool, work, options, partial)
    ]
    least_s = min(times, default=math.inf)
    if math.isinf(least_s):
        return "no generator replica fits on them"
    if plan.in_turns:
        return "one kind alone, both roles in turns, is faster"
    if least_s >= _NEAR * plan.step_s:
        return (
            f"a replica there needs {least_s:.3g} s a tick, however few its prompts, of a step of {plan.step_s:.3g} s"
        )
    if plan.trainer.time.total_s >= plan.generate_s:
        return f"the trainer sets the pace ({plan.trainer.time.total_s:.3g} s), and the generators wait for it without them"
    return "what they would take over from the others shortens no step"
