"""Partial rollouts in decode steps: the generator's own rule (``tick_schedule.py``), run for a few ticks of a few replicas.

    carried groups + new ones ─▶ decode ─▶ the tick ends when enough groups are complete ─▶ deliver, carry the rest

A tick ends with its n-th complete *group*, which waits for its longest response, so the batch drains within the tick; and a
group at its last version must be finished. No formula for that is at hand, but the schedule depends on lengths and slots
alone, not on how long a step takes: it is drawn once (fixed seed), and every hardware and layout is a weighted sum over it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from llamarl.planner.lengths import Lengths
from llamarl.tick_schedule import NEVER, Batches, Floats, Ints, constant_batches, plan_tick

__all__ = ["PartialProfile", "expected_largest", "partial_profile"]

_SAMPLES = 1536
"""Sequences in flight over all simulated replicas, roughly: many small replicas, or one large one, cut down to scale."""
_TICKS = 12
_TICK = 1 << 40
"""Moments: tick times this plus the decode step."""


@dataclass(frozen=True, eq=False)
class PartialProfile:
    """Ticks in the steady state, one sample a (replica, tick), as runs of decode steps with a constant batch."""

    ticks: int
    replicas: int
    row: Ints
    """[segments] sample that a segment belongs to: ``tick * replicas + replica``."""
    steps: Floats
    """[segments] decode steps."""
    active: Floats
    """[segments] sequences decoding."""
    written: Floats
    """[segments] mean tokens that an active sequence has written; the prompt not counted."""
    refilled: float
    """Mean carried tokens of a replica whose cache a tick fills again."""
    groups: float
    """Mean groups whose prompt a tick fills."""
    peak_written: float
    peak_active: int

    def slowest(self, seconds_of_segment: Floats, replicas: int) -> float:
        """Mean over the ticks of the slowest of ``replicas``, in seconds.

        Within a tick only: where lengths hardly vary, replicas are in step, some ticks long for all and some short for all.
        """
        sums: Floats = np.bincount(self.row, seconds_of_segment, self.ticks * self.replicas).astype(np.float64)
        each = sums.reshape(self.ticks, self.replicas)
        return float(np.mean([expected_largest(tick, replicas) for tick in each]))


def expected_largest(values: Floats, count: int) -> float:
    """Mean of the largest of ``count`` independent draws from the empirical distribution of ``values``."""
    ordered = np.sort(values)
    rank = np.arange(len(ordered) + 1) / len(ordered)
    return float((ordered * np.diff(rank**count)).sum())


@lru_cache(maxsize=1024)
def partial_profile(
    lengths: Lengths, group_size: int, deliver: int, active: int, slots: int, max_segments: int
) -> PartialProfile:
    """Run the generator's rule. A large replica is run as one of a part of its size, whose batches are then scaled up.

    Args:
        group_size: Responses of a group.
        deliver: Groups that a replica delivers a tick.
        active: Groups that it keeps in flight, ``deliver`` to ``max_segments * deliver``.
        slots: Sequences that it decodes at once.
    """
    scale = max(1, min(active * group_size // _SAMPLES, deliver // 8))
    deliver, active, slots = deliver // scale, max(deliver // scale, active // scale), max(1, slots // scale)
    rng = np.random.default_rng(0)
    replicas = max(1, min(32, _SAMPLES // (active * group_size)))
    born = np.zeros((replicas, 0), np.int64)
    done = np.zeros((replicas, 0), np.int64)
    length = np.zeros((replicas, 0, group_size), np.int64)
    written = np.zeros((replicas, 0, group_size), np.int64)
    found: list[Batches] = []
    refilled, filled = 0.0, 0.0
    warm = 2 * max_segments
    for tick in range(warm + _TICKS):
        new = (replicas, active - born.shape[1])
        drawn = lengths.sample(new[0] * new[1] * group_size, rng).reshape(*new, group_size)
        born = np.concatenate([born, np.full(new, tick)], axis=1)
        done = np.concatenate([done, np.full(new, NEVER)], axis=1)
        length = np.concatenate([length, drawn], axis=1)
        written = np.concatenate([written, np.zeros_like(drawn)], axis=1)
        plan = plan_tick(
            length - written, done, born + max_segments - 1, now=tick * _TICK, tick=tick, prompts_per_step=deliver, slots=slots
        )  # fmt: skip
        if tick >= warm:
            found.append(constant_batches(plan.left, plan.start, written, plan.stop, slots))
            begun = (plan.left > 0) & (plan.start < plan.stop[:, None, None])
            refilled += float(np.where(begun, written, 0).sum())
            filled += float(begun.any(axis=2).sum())
        done = np.where(plan.completed_at <= (tick * _TICK + plan.stop)[:, None], plan.completed_at, NEVER)
        written = written + plan.made(plan.stop)
        born, done = (array[~plan.leaves].reshape(replicas, -1) for array in (born, done))
        length, written = (array[~plan.leaves].reshape(replicas, -1, group_size) for array in (length, written))
    samples = _TICKS * replicas
    return PartialProfile(
        ticks=_TICKS,
        replicas=replicas,
        row=np.concatenate([runs.replica + at * replicas for at, runs in enumerate(found)]),
        steps=np.concatenate([runs.steps for runs in found]),
        active=np.concatenate([runs.active for runs in found]) * scale,
        written=np.concatenate([runs.written for runs in found]),
        refilled=refilled / samples * scale,
        groups=filled / samples * scale,
        peak_written=max(float(runs.held.max(initial=0.0)) for runs in found) * scale,
        peak_active=max(int(runs.active.max(initial=0)) for runs in found) * scale,
    )
