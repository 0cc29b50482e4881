"""Plans for devices of several kinds beside those of each kind alone, and which of them to take. Pure.

A second kind is worth having only where the job is then faster than on the first alone in its best way: on devices of its own for
each role, or with both in turns on the same ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from llamarl.errors import PlanError
from llamarl.planner.choices import Options, Workload, dealt
from llamarl.planner.idle import ALIKE
from llamarl.planner.replica_times import Pool
from llamarl.planner.runnable import why_not_run
from llamarl.planner.search import search_all
from llamarl.planner.unlike import Share, UnlikePlan, check_pools, dealt_evenly, kinds_apart, plan_unlike

__all__ = ["best_first", "compare_kinds", "one_kind"]


def compare_kinds(pools: Sequence[Pool], work: Workload, options: Options, max_staleness: int) -> list[UnlikePlan]:
    """All plans worth showing, the recommended one first.

    Raises:
        PlanError: The pools are no question, or nothing fits on them.
    """
    check_pools(pools)
    found: list[UnlikePlan | None] = []
    problem: PlanError | None = None
    try:
        found.append(mixed := plan_unlike(pools, work, options, max_staleness))
        found += [dealt_evenly(mixed, work, options), kinds_apart(pools, work, options, max_staleness)]
        found += _without_one(pools, mixed, work, options, max_staleness)
    except PlanError as error:
        problem = error
    for pool in pools:
        try:
            found.append(one_kind(pool, work, options, max_staleness))
        except PlanError:  # too large for it alone
            continue
    plans = [plan for plan in found if plan is not None]
    alone = [plan for plan in plans if plan.one is not None]
    plans = [plan for plan in plans if not _said_by(plan, alone)]
    if problem is not None and not plans:
        raise problem
    return best_first(plans)


def one_kind(pool: Pool, work: Workload, options: Options, max_staleness: int) -> UnlikePlan:
    """The fastest plan of one pool alone that llamarl runs, or the fastest of all if it runs none.

    Raises:
        PlanError: The job does not fit there.
    """
    plans = search_all(pool.hardware, work, options, pool.devices, sorted({0, max_staleness}))
    runnable = [plan for plan in plans if not why_not_run(plan, work.model)]
    found = min(runnable or plans, key=lambda plan: (float(f"{plan.step_s:.3g}"), plan.token_staleness, plan.step_s))
    share = Share(
        hardware=pool.hardware,
        choice=found.generator,
        prompts=tuple(dealt(work.prompts_per_step, found.generator.replicas)),
        sync_s=found.sync_s,
    )
    return UnlikePlan(
        title=f"{pool.devices} x {pool.name} alone" + ("" if found.system == "separate" else ", in turns"),
        trainer_hardware=pool.hardware,
        trainer=found.trainer,
        shares=(share,),
        max_staleness=found.max_staleness,
        step_s=found.step_s,
        tokens_per_s=found.tokens_per_s,
        devices=pool.devices,
        staged_by_llamarl=work.model.staged_by_llamarl,
        one=found,
        refused="; ".join(why_not_run(found, work.model)),
    )


def best_first(plans: Sequence[UnlikePlan]) -> list[UnlikePlan]:
    """The recommended plan, then the others by their steps.

    Of those within 2% of the fastest one that llamarl runs; of these, among steps that are alike, that of the fewest kinds, then of
    the fewest devices, then one of whole batches, then the first of ``plans``.
    """
    ordered = sorted(plans, key=lambda plan: plan.step_s)
    near = [plan for plan in ordered if plan.step_s <= 1.02 * ordered[0].step_s]
    near = [plan for plan in near if not plan.why_not_run] or ordered
    alike = [plan for plan in near if plan.step_s <= ALIKE * near[0].step_s]
    best = min(alike, key=lambda plan: (len(plan.kinds), _used(plan), _partial(plan), plans.index(plan)))
    return [best, *(plan for plan in ordered if plan is not best)]


def _without_one(
    pools: Sequence[Pool], whole: UnlikePlan, work: Workload, options: Options, max_staleness: int
) -> list[UnlikePlan]:
    """Divisions of three and more kinds that leave one of them out and are as fast."""
    found = []
    for left_out in pools if len(pools) > 2 else ():
        rest = [pool for pool in pools if pool is not left_out]
        try:
            plan = plan_unlike(rest, work, options, max_staleness)
        except PlanError:
            continue
        if plan.step_s <= ALIKE * whole.step_s:
            found.append(replace(plan, title=f"without {left_out.name}", devices=whole.devices))
    return found


def _said_by(plan: UnlikePlan, alone: Sequence[UnlikePlan]) -> bool:
    """Whether a division that leaves all kinds but one without work is no faster than that kind's own plan."""
    own = [other for other in alone if other is not plan and other.kinds == plan.kinds]
    return any(other.step_s <= ALIKE * plan.step_s for other in own)


def _used(plan: UnlikePlan) -> int:
    return sum(plan.used(kind) for kind in plan.kinds)


def _partial(plan: UnlikePlan) -> bool:
    return any(share.choice.demand.partial for share in plan.shares)
