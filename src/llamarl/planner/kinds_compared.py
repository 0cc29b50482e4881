"""Plans for devices of several kinds beside those of each kind alone, and which of them to take. Pure.

A second kind is worth having only where the job is then faster than on the first alone in its best way: on devices of its own for
each role, or with both in turns on the same ones.
"""

from __future__ import annotations

from collections.abc import Sequence

from llamarl.errors import PlanError
from llamarl.planner.choices import Options, Workload, dealt
from llamarl.planner.replica_times import Pool
from llamarl.planner.runnable import why_not_run
from llamarl.planner.search import search_all
from llamarl.planner.unlike import Share, UnlikePlan, check_pools, dealt_evenly, kinds_apart, plan_unlike

__all__ = ["ALIKE", "best_first", "compare_kinds", "one_kind"]

ALIKE = 1.01
"""Steps that differ by less are equal, and then fewer kinds and fewer devices are better."""


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
    the fewest devices, then the first of ``plans``.
    """
    ordered = sorted(plans, key=lambda plan: plan.step_s)
    near = [plan for plan in ordered if plan.step_s <= 1.02 * ordered[0].step_s]
    near = [plan for plan in near if not plan.why_not_run] or ordered
    alike = [plan for plan in near if plan.step_s <= ALIKE * near[0].step_s]
    best = min(alike, key=lambda plan: (len(plan.kinds), _used(plan), plans.index(plan)))
    return [best, *(plan for plan in ordered if plan is not best)]


def _said_by(plan: UnlikePlan, alone: Sequence[UnlikePlan]) -> bool:
    """Whether a division that leaves all kinds but one without work is no faster than that kind's own plan."""
    own = [other for other in alone if other is not plan and other.kinds == plan.kinds]
    return any(other.step_s <= ALIKE * plan.step_s for other in own)


def _used(plan: UnlikePlan) -> int:
    return sum(plan.used(kind) for kind in plan.kinds)
