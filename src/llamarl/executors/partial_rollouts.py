"""Which groups leave the generator at the end of a tick, so that no token ever gets too old. Pure.

The generator keeps ``active >= prompts_per_step`` groups in flight and delivers ``prompts_per_step`` a tick. A group
admitted at tick j must be delivered at tick j + max_segments - 1 at the latest. Delivering the fastest groups first
could leave more than ``prompts_per_step`` late ones for one tick, so the most urgent are forced earlier:

    forced(k) = max over h >= 0 of  #{groups with deadline <= k + h} - h * prompts_per_step

If at most ``max_segments * prompts_per_step`` groups are active (oversubscription <= max_segments), forced(k) never
exceeds ``prompts_per_step``: before tick k let n(h) be the groups with deadline <= k + h. Delivering forced(k) of the
earliest leaves n(h) - prompts_per_step <= h * prompts_per_step for all h, and newly admitted groups only count from
h = max_segments - 1 on, where the limit on active groups gives the same. By induction every deadline is met, and a
token made at tick j by version >= j - max_staleness is at most max_staleness + max_segments - 1 versions old.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["num_forced", "select_deliveries"]


def num_forced(admitted: Sequence[int], *, tick: int, max_segments: int, prompts_per_step: int) -> int:
    """How many of the earliest-admitted groups must be delivered at ``tick``.

    Args:
        admitted: Tick at which each undelivered group was admitted.
    """
    slack = sorted(j + max_segments - 1 - tick for j in admitted)  # ticks that remain after this one
    assert not slack or slack[0] >= 0, f"a group missed its deadline: {min(admitted)} at tick {tick}"
    return max([0, *(i + 1 - h * prompts_per_step for i, h in enumerate(slack))])


def select_deliveries(
    admitted: Sequence[int], completion_order: Sequence[int], *, tick: int, max_segments: int, prompts_per_step: int
) -> list[int] | None:
    """Indices of the groups to deliver at ``tick``, or None while decoding must go on.

    Args:
        admitted: Tick at which each undelivered group was admitted, in order of admission.
        completion_order: Indices of the complete groups, in the order in which they were completed.

    Returns:
        ``prompts_per_step`` indices in order of admission: the forced ones, then the earliest complete.
    """
    by_age = sorted(range(len(admitted)), key=lambda i: (admitted[i], i))
    count = num_forced(admitted, tick=tick, max_segments=max_segments, prompts_per_step=prompts_per_step)
    assert count <= prompts_per_step, f"{count} groups due at tick {tick}, only {prompts_per_step} can leave"
    forced = by_age[:count]
    complete = set(completion_order)
    if len(complete) < prompts_per_step or not complete.issuperset(forced):
        return None
    rest = [i for i in completion_order if i not in forced]
    return sorted([*forced, *rest[: prompts_per_step - len(forced)]])
