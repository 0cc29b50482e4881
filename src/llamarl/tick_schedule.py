"""A tick of generation as a schedule: who may start, who decodes when, when the tick ends, who leaves. Pure.

    groups in flight ─▶ may start? ─▶ slots, in order of admission ─▶ the tick ends when enough are complete ─▶ leave, or carried

The generator asks step by step (:func:`num_startable`, :func:`select_due`), while its engine says
what is complete. Simulator and planner know the lengths, so they ask for the whole tick at once
(:func:`plan_tick`) and for the runs of decode steps in which the batch stays the same
(:func:`constant_batches`), which any cost model turns into seconds.

The generator keeps ``active >= prompts_per_step`` groups in flight and delivers
``prompts_per_step`` a tick (a replica whose share does not divide them one more at some ticks:
``later`` below says at which, and stands for ``h * prompts_per_step``). Each group has a deadline,
the last tick at which it may be delivered. Delivering the fastest groups first could leave more
than ``prompts_per_step`` late ones for one tick, so the most urgent are forced earlier:

    forced(k) = max over h >= 0 of  #{groups with deadline <= k + h} - h * prompts_per_step

*Feasible* before tick k means #{deadline <= k + h} <= (h + 1) * prompts_per_step for all h >= 0; then forced(k) never
exceeds ``prompts_per_step``, and once that many of the earliest have left, the rest is feasible before tick k + 1.

``schedule.weights = "exact"``: the deadline of a group admitted at tick j is j + max_segments - 1. With at most
``max_segments * prompts_per_step`` active groups (oversubscription <= max_segments) newly admitted
ones count only where that limit alone keeps the promise, so by induction every deadline is met, and
a token made at tick j by version >= j - max_staleness is at most max_staleness + max_segments - 1
versions old.

``schedule.weights = "latest"``: a token of version v also sets its group the deadline v +
max_staleness, so that no token is older than ``max_staleness``. Sampling with an old version makes
deadlines urgent; :func:`num_startable` says how many groups may be sampled under it so that all
deadlines stay feasible. docs/asynchrony.md has the proofs.

Legend: R replicas, A active groups of a replica in order of admission, g responses of a group, n = A g sequences.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = [
    "NEVER",
    "Batches",
    "Bools",
    "Floats",
    "Ints",
    "TickPlan",
    "constant_batches",
    "deadlines",
    "deliveries",
    "num_due",
    "num_startable",
    "plan_tick",
    "select_due",
    "slot_starts",
    "urgency_order",
]

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

NEVER = int(np.iinfo(np.int64).max)
"""Moment of what has not happened, version of a group without tokens."""


# -- who starts and who leaves ----------------------------------------------------------------------------------------


def deadlines(admitted: npt.ArrayLike, oldest_version: npt.ArrayLike, *, max_segments: int, max_staleness: int) -> Ints:
    """The last tick at which each group may be delivered under ``schedule.weights = "latest"``.

    Args:
        admitted: Tick of its admission, any shape.
        oldest_version: Oldest policy version among its tokens, same shape; ``NEVER`` while it has none.
    """
    oldest = np.asarray(oldest_version, np.int64)
    by_version = np.minimum(oldest, NEVER - max_staleness) + max_staleness
    return np.minimum(np.asarray(admitted, np.int64) + max_segments - 1, by_version)


def urgency_order(deadlines: npt.ArrayLike) -> Ints:
    """[..., A] indices by deadline; equal ones in order of admission."""
    return np.argsort(np.asarray(deadlines, np.int64), axis=-1, kind="stable")


def num_startable(
    version: int, *, tick: int, max_staleness: int, prompts_per_step: int, later: Sequence[int] | None = None
) -> int:
    """How many groups, the most urgent first, may have tokens of ``version`` at ``tick``.

    Such a token is due at ``version + max_staleness``, and until then, this tick included, no more groups can leave.

    Args:
        later: As of :func:`num_due`, ``max_staleness`` ticks.
    """
    slack = version + max_staleness - tick
    assert slack >= 0, f"version {version} is too old to sample with at tick {tick}"
    return prompts_per_step + int(_room(np.asarray(slack), prompts_per_step, later))


def num_due(deadlines: npt.ArrayLike, *, tick: int, prompts_per_step: int, later: Sequence[int] | None = None) -> Ints:
    """[...] how many of the most urgent groups must be delivered at ``tick``.

    Args:
        deadlines: [..., A].
        later: Groups that leave at each of the next ticks, up to the last deadline that can be;
            None: ``prompts_per_step``.
    """
    slack = np.sort(np.asarray(deadlines, np.int64) - tick, axis=-1)  # ticks that remain after this one
    assert (slack >= 0).all(), f"a group missed its deadline: {slack.min() + tick} at tick {tick}"
    crowded = np.arange(1, slack.shape[-1] + 1) - _room(slack, prompts_per_step, later)
    return np.asarray(crowded.max(axis=-1, initial=0), np.int64)


def _room(slack: Ints, prompts_per_step: int, later: Sequence[int] | None) -> Ints:
    """Groups that leave in the ``slack`` ticks after this one."""
    if later is None:
        return slack * prompts_per_step
    return np.concatenate([[0], np.cumsum(later)])[slack]


def deliveries(
    deadlines: npt.ArrayLike,
    completed_at: npt.ArrayLike,
    *,
    tick: int,
    prompts_per_step: int,
    later: Sequence[int] | None = None,
) -> tuple[Ints, Bools]:
    """When ``tick`` can end, and who leaves then: the forced groups, then the earliest complete.

    Args:
        deadlines: [..., A].
        completed_at: [..., A] moment at which each group is complete, in any unit; ``NEVER`` where no moment is known.
        later: As of :func:`num_due`.

    Returns:
        [...] the moment, ``NEVER`` while too few are complete or a forced one is not; [..., A] who leaves,
        ``prompts_per_step`` groups.
    """
    due, done = np.asarray(deadlines, np.int64), np.asarray(completed_at, np.int64)
    count = num_due(due, tick=tick, prompts_per_step=prompts_per_step, later=later)
    assert (count <= prompts_per_step).all(), (
        f"{count.max()} groups due at tick {tick}, only {prompts_per_step} can leave"
    )
    forced = _places(urgency_order(due)) < count[..., None]
    enough = np.partition(done, prompts_per_step - 1, axis=-1)[..., prompts_per_step - 1]
    moment = np.maximum(np.where(forced, done, np.iinfo(np.int64).min).max(axis=-1), enough)
    first = np.lexsort((done, ~forced), axis=-1)
    return moment, _places(first) < prompts_per_step


def _places(order: Ints) -> Ints:
    """[..., A] the place of each index in an order."""
    places = np.empty_like(order)
    np.put_along_axis(places, order, np.broadcast_to(np.arange(order.shape[-1]), order.shape), axis=-1)
    return places


def select_due(
    deadlines: npt.ArrayLike,
    completion_order: Sequence[int],
    *,
    tick: int,
    prompts_per_step: int,
    later: Sequence[int] | None = None,
) -> list[int] | None:
    """Indices of the groups that one replica delivers at ``tick``, or None while decoding must go on.

    Args:
        deadlines: [A], of each undelivered group, in order of admission.
        completion_order: Indices of the complete groups, in the order in which they were completed.
        later: As of :func:`num_due`.

    Returns:
        ``prompts_per_step`` indices in order of admission: the forced ones, then the earliest complete.
    """
    if len(completion_order) < prompts_per_step:
        return None
    due = np.asarray(deadlines, np.int64)
    completed_at = np.full(due.shape, NEVER)
    completed_at[list(completion_order)] = np.arange(len(completion_order))
    moment, leaves = deliveries(due, completed_at, tick=tick, prompts_per_step=prompts_per_step, later=later)
    return None if moment == NEVER else np.flatnonzero(leaves).tolist()


# -- the whole tick, lengths known ------------------------------------------------------------------------------------


def slot_starts(left: npt.NDArray[Any], slots: int) -> npt.NDArray[Any]:
    """[R, n] decode step before the first token of each sequence: the next in line takes the slot that is free first.

    Args:
        left: [R, n] tokens that each has yet to write, in order of admission; 0: none, it passes at once.
        slots: Sequences that a replica decodes at once, at least 1.
    """
    start = np.zeros_like(left)
    if slots < left.shape[1]:
        for replica, tokens in enumerate(left.tolist()):
            free_at = tokens[:slots]
            heapq.heapify(free_at)
            starts = []
            for count in tokens[slots:]:
                starts.append(free_at[0])
                heapq.heapreplace(free_at, free_at[0] + count)
            start[replica, slots:] = starts
    return start


@dataclass(frozen=True, eq=False)
class TickPlan:
    """What every replica does to the end of its tick, counted in decode steps from the start of the plan."""

    left: Ints
    """[R, A, g] tokens to write of groups that may be sampled; 0 elsewhere."""
    start: Ints
    """[R, A, g] decode step before the first token."""
    completed_at: Ints
    """[R, A] moment at which each group is complete if decoding never stops; ``NEVER``: it may not be sampled."""
    stop: Ints
    """[R] decode steps."""
    leaves: Bools
    """[R, A] who leaves then; as many in every replica."""

    def made(self, steps: Ints) -> Ints:
        """[R, A, g] tokens that the first ``steps`` decode steps of each replica write."""
        return np.clip(steps[:, None, None] - self.start, 0, self.left)


def plan_tick(
    left: Ints, completed_at: Ints, deadlines: Ints, *, now: int, tick: int, prompts_per_step: int, slots: int
) -> TickPlan:
    """Decode from ``now`` on until the groups to deliver are complete.

    Args:
        left: [R, A, g] tokens to write; 0 for finished responses and for groups that may not be sampled.
        completed_at: [R, A] moments before ``now`` of groups that are complete, ``NEVER`` for the others.
        deadlines: [R, A].
        now: Moment at which the plan begins, in decode steps; later than every moment in ``completed_at``.
    """
    start = slot_starts(_sequences(left), slots).reshape(left.shape)
    end = np.where(left > 0, start + left, 0).max(axis=2, initial=0)
    done = np.where((completed_at == NEVER) & (end > 0), now + end, completed_at)
    moment, leaves = deliveries(deadlines, done, tick=tick, prompts_per_step=prompts_per_step)
    assert not (moment == NEVER).any(), f"tick {tick} can never end: too few groups may be sampled"
    return TickPlan(left, start, done, np.maximum(moment - now, 0), leaves)


@dataclass(frozen=True, eq=False)
class Batches:
    """Runs of decode steps with a constant batch, one replica's after the other's."""

    replica: Ints
    steps: Floats
    active: Floats
    """Sequences decoding."""
    written: Floats
    """Mean tokens that an active sequence has written in the middle of the run; prompts not counted."""
    held: Floats
    """Tokens that all active sequences have written at its end."""


def constant_batches(
    left: npt.NDArray[Any], start: npt.NDArray[Any], written: npt.NDArray[Any], stop: npt.NDArray[Any], slots: int
) -> Batches:
    """The runs up to step ``stop`` of each replica.

    After the i-th end ``min(n, slots + i)`` sequences have started and i have ended, so between two
    ends the batch is known without following slots.

    Args:
        left: [R, n] or [R, A, g], with ``start`` as ``slot_starts`` gives it.
        written: Tokens that each sequence had written before, same shape.
        stop: [R]
    """
    left, start, written = _sequences(left), _sequences(start), _sequences(written)
    end = start + left
    num_replicas, n = end.shape
    by_end = np.argsort(end, axis=1, kind="stable")
    offset = (written - start).astype(np.float64)  # at step t an active sequence has written offset + t
    ended = np.zeros((num_replicas, n))
    np.cumsum(np.take_along_axis(offset, by_end, axis=1)[:, :-1], axis=1, out=ended[:, 1:])
    num_started = np.minimum(n, min(slots, n) + np.arange(n))
    started = np.cumsum(offset, axis=1)[:, num_started - 1]
    high = np.minimum(np.take_along_axis(end, by_end, axis=1), stop[:, None])
    low = np.concatenate([np.zeros_like(high[:, :1]), high[:, :-1]], axis=1)
    replica, at = np.nonzero(high > low)
    active = (num_started - np.arange(n))[at].astype(np.float64)
    base, first, last = (started - ended)[replica, at], low[replica, at], high[replica, at]
    middle = (first + last - 1) / 2.0
    return Batches(replica, (last - first).astype(np.float64), active, middle + base / active, base + active * last)


def _sequences(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """[R, n] of [R, A, g]."""
    return array.reshape(len(array), math.prod(array.shape[1:]))
