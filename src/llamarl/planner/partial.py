"""Partial rollouts in decode steps: the generator's own rule, run for a few ticks of a few replicas.

    carried groups + new ones ─▶ decode ─▶ the tick ends when enough groups are complete ─▶ deliver, carry the rest

A tick ends with its n-th complete *group*, which waits for its longest response, so the batch drains within the tick; and a
group at its last version must be finished. No formula for that is at hand, but the schedule depends on lengths and slots
alone, not on how long a step takes: it is drawn once (fixed seed), and every hardware and layout is a weighted sum over it.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from llamarl.planner.lengths import Lengths

__all__ = ["PartialProfile", "expected_largest", "partial_profile"]

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_SAMPLES = 3072
"""Sequences in flight over all simulated replicas, roughly: many small replicas, or few large ones."""
_TICKS = 12


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
    """Run the generator's rule.

    Args:
        group_size: Responses of a group.
        deliver: Groups that a replica delivers a tick.
        active: Groups that it keeps in flight, ``deliver`` to ``max_segments * deliver``.
        slots: Sequences that it decodes at once.
    """
    rng = np.random.default_rng(0)
    replicas = max(1, min(32, _SAMPLES // (active * group_size)))
    born = np.zeros((replicas, 0), np.int64)
    order = np.zeros((replicas, 0))  # rank of completion of the complete ones, below 0
    length = np.zeros((replicas, 0, group_size), np.int64)
    written = np.zeros((replicas, 0, group_size), np.int64)
    found: list[tuple[Ints, Floats, Floats, Floats]] = []
    refilled, filled, peak, samples = 0.0, 0.0, 0.0, 0
    warm = 2 * max_segments
    for tick in range(warm + _TICKS):
        new = active - born.shape[1]
        drawn = lengths.sample(replicas * new * group_size, rng).reshape(replicas, new, group_size)
        born = np.concatenate([born, np.full((replicas, new), tick)], axis=1)
        order = np.concatenate([order, np.zeros((replicas, new))], axis=1)
        length = np.concatenate([length, drawn], axis=1)
        written = np.concatenate([written, np.zeros_like(drawn)], axis=1)
        left = length - written
        start, end = _starts(left.reshape(replicas, -1), slots)
        ends = np.where(left > 0, end.reshape(left.shape), 0).max(axis=2)
        complete = np.where(order < 0, order, ends)  # earlier ticks' first, in their order
        stop, chosen = _deliveries(born, complete, tick, max_segments, deliver)
        if tick >= warm:
            flat = written.reshape(replicas, -1)
            row, steps, count, mean, held = _segments(start, end, flat, stop, slots)
            found.append((row + samples, steps, count, mean))
            begun = (left > 0) & (start.reshape(left.shape) < stop[:, None, None])
            refilled += float(np.where(begun, written, 0).sum())
            filled += float(begun.any(axis=2).sum())
            peak = max(peak, held)
            samples += replicas
        made = np.clip(stop[:, None, None] - start.reshape(left.shape), 0, left)
        written = written + made
        done = (written == length).all(axis=2)
        kept = np.nonzero(~chosen)[1].reshape(replicas, active - deliver)
        rank = np.argsort(np.argsort(complete, axis=1, kind="stable"), axis=1)
        order = np.take_along_axis(np.where(done, rank - float(active), 0.0), kept, axis=1)
        born = np.take_along_axis(born, kept, axis=1)
        length = np.take_along_axis(length, kept[:, :, None], axis=1)
        written = np.take_along_axis(written, kept[:, :, None], axis=1)
    parts = [np.concatenate([part[i] for part in found]) for i in range(4)]
    return PartialProfile(
        ticks=_TICKS,
        replicas=replicas,
        row=parts[0].astype(np.int64),
        steps=parts[1],
        active=parts[2],
        written=parts[3],
        refilled=refilled / samples,
        groups=filled / samples,
        peak_written=peak,
        peak_active=int(parts[2].max()),
    )


def _starts(left: Ints, slots: int) -> tuple[Ints, Ints]:
    """([replicas, n] decode step before the first token, after the last) when a free slot goes to the next in line."""
    start = np.zeros_like(left)
    if slots < left.shape[1]:
        for replica, tokens in enumerate(left.tolist()):
            free = tokens[:slots]
            heapq.heapify(free)
            starts = []
            for count in tokens[slots:]:
                starts.append(free[0])
                heapq.heapreplace(free, free[0] + count)
            start[replica, slots:] = starts
    return start, start + left


def _deliveries(
    born: Ints, complete: Floats, tick: int, max_segments: int, deliver: int
) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """([replicas] step at which the tick ends, [replicas, groups] who leaves): the forced ones, then the first complete.

    Forced are the oldest ``max over h of #(deadline within h more ticks) - h * deliver``: else a later tick had too many.
    """
    slack = born + max_segments - 1 - tick
    forced_count = np.zeros(len(born), np.int64)
    for h in range(max_segments):
        forced_count = np.maximum(forced_count, (slack <= h).sum(axis=1) - h * deliver)
    age = np.argsort(np.argsort(born, axis=1, kind="stable"), axis=1)
    forced = age < forced_count[:, None]
    last_forced = np.where(forced, complete, -np.inf).max(axis=1)
    nth = np.partition(complete, deliver - 1, axis=1)[:, deliver - 1]
    stop = np.maximum(np.maximum(last_forced, nth), 0.0).astype(np.int64)
    first = np.argsort(np.argsort(np.where(forced, -np.inf, complete), axis=1, kind="stable"), axis=1)
    return stop, first < deliver


def _segments(
    start: Ints, end: Ints, written: Ints, stop: Ints, slots: int
) -> tuple[Ints, Floats, Floats, Floats, float]:
    """Runs of steps with a constant batch, up to ``stop``: replica, steps, batch, mean written; and the most tokens held.

    After the i-th end ``min(n, slots + i)`` sequences have started, so the batch is known without following slots.
    """
    replicas, n = end.shape
    by_end = np.argsort(end, axis=1, kind="stable")
    offset = (written - start).astype(np.float64)
    ended = np.zeros((replicas, n))
    np.cumsum(np.take_along_axis(offset, by_end, axis=1)[:, :-1], axis=1, out=ended[:, 1:])
    num_started = np.minimum(n, min(slots, n) + np.arange(n))
    started = np.cumsum(offset, axis=1)[:, num_started - 1]
    high = np.minimum(np.take_along_axis(end, by_end, axis=1), stop[:, None])
    low = np.concatenate([np.zeros((replicas, 1), np.int64), high[:, :-1]], axis=1)
    row, at = np.nonzero(high > low)
    active = (num_started - np.arange(n))[at].astype(np.float64)
    base = (started - ended)[row, at]
    steps = (high - low)[row, at].astype(np.float64)
    middle = (low[row, at] + high[row, at] - 1) / 2.0
    held = float((base + active * high[row, at]).max(initial=0.0))
    return row, steps, active, middle + base / active, held
