"""What stands between a plan and ``llamarl train``: the lines under ``not yet``.

The planner also answers for systems and models that llamarl does not run. Whatever it prints or writes then says so, from
the same table that train itself reads (``models/support.py``).
"""

from __future__ import annotations

from llamarl.planner.model_spec import ModelSpec
from llamarl.planner.rooflines import tensor_parallel_sizes
from llamarl.planner.search import Plan

__all__ = ["why_not_run"]


def why_not_run(plan: Plan, model: ModelSpec) -> list[str]:
    """Each reason why ``llamarl train`` does not run ``plan``; none: it does."""
    from llamarl.planner.plan_report import system_title

    reasons = []
    if model.unsupported:
        reasons.append(model.unsupported)
    generator, trainer = plan.generator.layout, plan.trainer.layout
    for role, stages in (("generator", generator.pp), ("trainer", trainer.pp)):
        if stages > 1 and not (model.unsupported or model.staged_by_llamarl):
            reasons.append(
                f"the {role} of {system_title(plan)} has {stages} pipeline stages, llamarl has 1 for {model.name} (--max-pipeline 1)"
            )
    tp = max(generator.tp, trainer.tp)
    sizes = tensor_parallel_sizes(model, tp)
    if not model.unsupported and not {generator.tp, trainer.tp} <= set(sizes):
        reasons.append(
            f"{system_title(plan)} has tensor-parallel size {tp}, llamarl has {', '.join(map(str, sizes))} for {model.name}"
        )
    if not (generator.runnable and trainer.runnable):
        reasons.append(
            "it is counted for a system that also cuts latent attention and holds codes alone, since none that llamarl runs fits"
        )
    return reasons
