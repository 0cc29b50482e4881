"""Which groups leave the generator at the end of a tick, so that no token ever gets too old. Pure.

The generator keeps ``active >= prompts_per_step`` groups in flight and delivers ``prompts_per_step`` a tick. Each group
has a deadline, the last tick at which it may be delivered. Delivering the fastest groups first could leave more than
``prompts_per_step`` late ones for one tick, so the most urgent are forced earlier:

    forced(k) = max over h >= 0 of  #{groups with deadline <= k + h} - h * prompts_per_step

*Feasible* before tick k means #{deadline <= k + h} <= (h + 1) * prompts_per_step for all h >= 0; then forced(k) never
exceeds ``prompts_per_step``, and once that many of the earliest have left, the rest is feasible before tick k + 1.

``schedule.weights = "exact"``: the deadline of a group admitted at tick j is j + max_segments - 1. With at most
``max_segments * prompts_per_step`` active groups (oversubscription <= max_segments) newly admitted ones count only where
that limit alone keeps the promise, so by induction every deadline is met, and a token made at tick j by version
>= j - max_staleness is at most max_staleness + max_segments - 1 versions old.

``schedule.weights = "latest"``: a token of version v also sets its group the deadline v + max_staleness, so that no token
is older than ``max_staleness``. Sampling with an old version makes deadlines urgent; :func:`num_startable` says how many
groups may be sampled under it so that all deadlines stay feasible. docs/asynchrony.md has the proofs.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["deadline", "num_due", "num_forced", "num_startable", "select_deliveries", "select_due", "urgency_order"]


def deadline(admitted: int, oldest_version: int | None, *, max_segments: int, max_staleness: int) -> int:
    """The last tick at which a group may be delivered under ``schedule.weights = "latest"``.

    Args:
        admitted: Tick of its admission.
        oldest_version: Oldest policy version among its tokens; None while it has none.
    """
    by_age = admitted + max_segments - 1
    return by_age if oldest_version is None else min(by_age, oldest_version + max_staleness)


def urgency_order(deadlines: Sequence[int]) -> list[int]:
    """Indices by deadline; equal ones in order of admission."""
    return sorted(range(len(deadlines)), key=lambda i: (deadlines[i], i))


def num_startable(version: int, *, tick: int, max_staleness: int, prompts_per_step: int) -> int:
    """How many groups, the most urgent first, may have tokens of ``version`` at ``tick``.

    Such a token is due at ``version + max_staleness``, and until then, this tick included, no more groups can leave.
    """
    slack = version + max_staleness - tick
    assert slack >= 0, f"version {version} is too old to sample with at tick {tick}"
    return (slack + 1) * prompts_per_step


def num_due(deadlines: Sequence[int], *, tick: int, prompts_per_step: int) -> int:
    """How many of the most urgent groups must be delivered at ``tick``."""
    slack = sorted(d - tick for d in deadlines)  # ticks that remain after this one
    assert not slack or slack[0] >= 0, f"a group missed its deadline: {min(deadlines)} at tick {tick}"
    return max([0, *(i + 1 - h * prompts_per_step for i, h in enumerate(slack))])


def num_forced(admitted: Sequence[int], *, tick: int, max_segments: int, prompts_per_step: int) -> int:
    """``num_due`` of groups whose deadlines follow from admission alone.

    Args:
        admitted: Tick at which each undelivered group was admitted.
    """
    return num_due([j + max_segments - 1 for j in admitted], tick=tick, prompts_per_step=prompts_per_step)


def select_due(
    deadlines: Sequence[int], completion_order: Sequence[int], *, tick: int, prompts_per_step: int
) -> list[int] | None:
    """Indices of the groups to deliver at ``tick``, or None while decoding must go on.

    Args:
        deadlines: Of each undelivered group, in order of admission.
        completion_order: Indices of the complete groups, in the order in which they were completed.

    Returns:
        ``prompts_per_step`` indices in order of admission: the forced ones, then the earliest complete.
    """
    count = num_due(deadlines, tick=tick, prompts_per_step=prompts_per_step)
    assert count <= prompts_per_step, f"{count} groups due at tick {tick}, only {prompts_per_step} can leave"
    forced = urgency_order(deadlines)[:count]
    complete = set(completion_order)
    if len(complete) < prompts_per_step or not complete.issuperset(forced):
        return None
    rest = [i for i in completion_order if i not in forced]
    return sorted([*forced, *rest[: prompts_per_step - len(forced)]])


def select_deliveries(
    admitted: Sequence[int], completion_order: Sequence[int], *, tick: int, max_segments: int, prompts_per_step: int
) -> list[int] | None:
    """``select_due`` of groups whose deadlines follow from admission alone."""
    deadlines = [j + max_segments - 1 for j in admitted]
    return select_due(deadlines, completion_order, tick=tick, prompts_per_step=prompts_per_step)
