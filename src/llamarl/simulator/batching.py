"""Continuous batching of many replicas at once, counted in decode steps. Pure numpy, no loop over replicas.

    sequences in admission order ─▶ slots, refilled when one ends ─▶ (start, end) of each, in steps
                                                                    └▶ segments of constant batch ─▶ seconds

Legend: R replicas, n sequences of a replica, i the i-th end of a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llamarl.simulator.costs import GeneratorCost

__all__ = ["Floats", "Ints", "Schedule", "decode_s", "schedule"]

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Schedule:
    """When each sequence runs if its replica decodes until all have ended."""

    start: Ints
    """[R, n] decode step before its first token; non-decreasing in n."""
    end: Ints
    """[R, n] decode step at which its last token is written."""
    slots: int


def schedule(remaining: Ints, slots: int) -> Schedule:
    """List scheduling: the next waiting sequence takes the slot that is free first.

    Args:
        remaining: [R, n] tokens that each sequence has yet to write, in admission order; 0: none, it passes at once.
        slots: Sequences that a replica decodes at once, at least 1.
    """
    replicas, count = remaining.shape
    start = np.zeros_like(remaining)
    if slots < count:
        rows = np.arange(replicas)
        free_at = remaining[:, :slots].copy()
        for i in range(slots, count):
            slot = free_at.argmin(axis=1)
            start[:, i] = free_at[rows, slot]
            free_at[rows, slot] += remaining[:, i]
    return Schedule(start, start + remaining, min(slots, count))


def decode_s(plan: Schedule, written: Ints, stop: Ints, prompt_tokens: int, cost: GeneratorCost) -> Floats:
    """[R] seconds of all decode steps up to step ``stop`` of each replica.

    After i ends, ``min(n, slots + i)`` sequences have started and i have ended, so between two ends the batch is known
    without following slots. The mean context is taken in the middle of the segment.

    Args:
        written: [R, n] tokens that each sequence had written before this tick.
        stop: [R] step at which the replica stops.
    """
    replicas, count = plan.end.shape
    order = np.argsort(plan.end, axis=1, kind="stable")
    ends = np.take_along_axis(plan.end, order, axis=1)
    offset = written - plan.start  # at step t an active sequence has written offset + t
    ended = np.zeros((replicas, count), dtype=np.int64)
    np.cumsum(np.take_along_axis(offset, order, axis=1)[:, :-1], axis=1, out=ended[:, 1:])
    num_started = np.minimum(count, plan.slots + np.arange(count))
    started = np.cumsum(offset, axis=1)[:, num_started - 1]
    high = np.minimum(ends, stop[:, None])
    low = np.zeros_like(high)
    low[:, 1:] = high[:, :-1]
    row, segment = np.nonzero(high > low)
    active = (num_started - np.arange(count))[segment].astype(np.float64)
    middle = (low[row, segment] + high[row, segment] - 1) / 2.0
    context = prompt_tokens + middle + (started - ended)[row, segment] / active
    steps = (high - low)[row, segment]
    return np.bincount(row, steps * cost.decode_step_s(active, context), replicas).astype(np.float64)
