"""The costed generator under ``schedule.weights = "latest"``: a tick is planned, and planned again at each new version.

    step(tick) ─▶ plan to the end of the tick ─▶ TimedStep
    revise(seconds, version) ─▶ what was decoded until then stays, the rest is planned anew under ``version`` ─▶ TimedStep

Each replica finishes the decode step that it is in, takes the version, and goes on; with ``kv_on_update = "recompute"`` it
first fills its cache again. Groups start and leave by the rules of the real generator (``executors/partial_rollouts.py``).

Legend: R replicas, A active groups of a replica, P groups that it delivers a tick, g responses of a group, s = max_staleness.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from llamarl.executors.base import ExecutorContext
from llamarl.executors.partial_rollouts import num_startable, select_due
from llamarl.simulator.batching import Floats, Ints, Schedule, decode_s, schedule
from llamarl.simulator.costed import GENERATOR_STREAM, LENGTHS_STREAM, Batch
from llamarl.simulator.costs import jitter
from llamarl.simulator.scenario import Scenario
from llamarl.simulator.virtual_clock import TimedStep

__all__ = ["LatestCostedGenerator", "mean_staleness"]

Bools = npt.NDArray[np.bool_]

_PLAN = 1 << 40
"""Completion keys: plan number times this plus the decode step, so that later plans sort behind earlier ones."""
_NEVER = np.iinfo(np.int64).max


def mean_staleness(
    *, generator_s: float, reward_s: float, trainer_s: float, sync_s: float, max_staleness: int
) -> float:
    """Mean staleness of a token in the steady state, if all durations are constant and tokens come at a constant rate.

    Where the generator sets the period, version v comes ``reward + trainer + sync`` after the end of batch v - 1, so a token
    sampled x seconds into a tick is ``ceil((reward + trainer + sync - x) / generator)`` versions old; the mean over x is the
    quotient. Elsewhere the generator waits at the start of each tick for the oldest version it may take, and takes that.
    """
    others = reward_s + trainer_s + sync_s
    bound = max(generator_s, reward_s, trainer_s, (generator_s + others) / (max_staleness + 1))
    return others / generator_s if bound <= generator_s * (1 + 1e-9) else float(max_staleness)


@dataclass(frozen=True, eq=False)
class _Groups:
    """What is active. Arrays are replaced, never changed."""

    admitted: Ints
    """[R, A] tick of admission."""
    done: Ints
    """[R, A] completion key; _NEVER: not complete."""
    length: Ints
    """[R, A, g]"""
    written: Ints
    """[R, A, g]"""
    made: Ints
    """[R, A, s + 1] tokens by version modulo s + 1: the versions in live groups are s + 1 consecutive ones."""

    def rows(self, pick: Ints | Bools) -> _Groups:
        return _Groups(*(getattr(self, f.name)[pick] for f in dataclasses.fields(self)))

    def with_rows(self, pick: Ints | Bools, other: _Groups) -> _Groups:
        arrays = []
        for f in dataclasses.fields(self):
            array = getattr(self, f.name).copy()
            array[pick] = getattr(other, f.name)
            arrays.append(array)
        return _Groups(*arrays)

    def chosen(self, index: Ints) -> _Groups:
        """The groups of [R, n] indices."""

        def take(array: Ints) -> Ints:
            return np.take_along_axis(array, index.reshape(*index.shape, *[1] * (array.ndim - 2)), axis=1)

        return _Groups(*(take(getattr(self, f.name)) for f in dataclasses.fields(self)))


@dataclass(frozen=True, eq=False)
class _Plan:
    """From some moment of the tick to its end, for some replicas, if no further version comes."""

    schedule: Schedule
    left: Ints
    """[R, A, g] tokens to write of groups that may be sampled; 0 elsewhere."""
    stop: Ints
    """[R] decode steps."""
    chosen: Ints
    """[R, P] groups that leave then."""
    decode_from_s: Floats
    """[R] seconds of the tick at which the first decode step begins."""
    finish_s: Floats
    """[R]"""


class LatestCostedGenerator:
    """Replicas with slots, carried groups and a speed each; all take a version when it arrives."""

    def __init__(self, scenario: Scenario, context: ExecutorContext) -> None:
        self.scenario = scenario
        self._deliver = scenario.prompts_per_step // scenario.replicas
        self._num_active = int(self._deliver * scenario.oversubscription)
        self._speed = scenario.variation.slow_replicas(scenario.replicas, scenario.seed)
        self._carried = self._empty()
        self._plans = 0

    def _empty(self) -> _Groups:
        s = self.scenario
        shape = (s.replicas, 0)
        zero = np.zeros(shape, np.int64)
        group = np.zeros((*shape, s.group_size), np.int64)
        return _Groups(zero, zero, group, group, np.zeros((*shape, s.max_staleness + 1), np.int64))

    def initial_token(self, channel: str, source_tick: int) -> Any:
        raise ValueError(f"channel {channel!r} leaves the generator with a delay; only the weights edge may have one")

    def step(self, tick: int, inputs: Mapping[str, Any]) -> TimedStep:
        """The whole tick under the newest version that is there when it begins."""
        s = self.scenario
        self._tick, self._version = tick, int(inputs["weights"])
        self._groups = self._admit(tick)
        self._before = int(self._groups.written.sum())
        rng = np.random.default_rng([s.seed, GENERATOR_STREAM, tick])
        self._factor = self._speed * jitter(s.variation.generator_jitter, s.replicas, rng)
        self._running = np.arange(s.replicas)
        self._chosen = np.zeros((s.replicas, self._deliver), np.int64)
        self._finish_s = np.zeros(s.replicas)
        self._steps = np.zeros(s.replicas, np.int64)
        begin = s.generator.tick_s + s.weights_load_s
        self._spans = [("weight_sync", 0.0, s.weights_load_s)]
        self._plan = self._make_plan(np.full(s.replicas, begin), fill_carried=s.kv_on_update == "recompute")
        return self._result()

    def revise(self, elapsed_s: float, version: int) -> TimedStep:
        """``version`` has arrived ``elapsed_s`` after the tick began."""
        s = self.scenario
        if version <= self._version:
            return self._result()
        plan = self._plan
        done = self._steps_by(plan, elapsed_s)
        ended = done >= plan.stop
        seconds = self._decoded_s(plan, done)  # at the contexts before it: settling moves them on
        self._settle(plan, done, ended)
        keep = ~ended
        self._running, self._version = self._running[keep], version
        begin = np.maximum(elapsed_s, plan.decode_from_s + seconds)[keep] + s.weights_load_s
        if len(begin):
            self._spans.append(("weight_sync", elapsed_s, elapsed_s + s.weights_load_s))
        self._plan = self._make_plan(begin, fill_carried=s.kv_on_update == "recompute")
        return self._result()

    # -- planning -----------------------------------------------------------------------------------------------------

    def _admit(self, tick: int) -> _Groups:
        s, old = self.scenario, self._carried
        new = self._num_active - old.admitted.shape[1]
        shape = (s.replicas, new, s.group_size)
        rng = np.random.default_rng([s.seed, LENGTHS_STREAM, tick])
        lengths = s.lengths.sample(s.replicas * new * s.group_size, rng).reshape(shape)

        def extend(array: Ints, values: Ints | int) -> Ints:
            return np.concatenate([array, np.broadcast_to(values, (s.replicas, new, *array.shape[2:]))], axis=1)

        return _Groups(
            extend(old.admitted, tick),
            extend(old.done, _NEVER),
            extend(old.length, lengths),
            extend(old.written, 0),
            extend(old.made, 0),
        )

    def _deadlines(self, groups: _Groups) -> Ints:
        """[R, A], as ``partial_rollouts.deadline`` has them."""
        s = self.scenario
        versions = self._versions()
        oldest = np.where(groups.made > 0, versions, _NEVER - s.max_staleness).min(axis=2)
        return np.minimum(groups.admitted + s.max_segments - 1, oldest + s.max_staleness)

    def _versions(self) -> Ints:
        """[s + 1] the version that each place of ``made`` stands for in this tick."""
        count = self.scenario.max_staleness + 1
        lowest = self._tick - count + 1
        return lowest + (np.arange(count) - lowest) % count

    def _make_plan(self, begin_s: Floats, *, fill_carried: bool) -> _Plan:
        """For the running replicas, from ``begin_s`` on under the version in use."""
        s, groups = self.scenario, self._groups.rows(self._running)
        replicas = len(self._running)
        self._plans += 1
        deadlines = self._deadlines(groups)
        startable = num_startable(
            self._version, tick=self._tick, max_staleness=s.max_staleness, prompts_per_step=self._deliver
        )
        urgency = np.argsort(deadlines, axis=1, kind="stable")
        may = np.zeros_like(deadlines, dtype=bool)
        np.put_along_axis(may, urgency[:, :startable], True, axis=1)
        left = np.where(may[:, :, None], groups.length - groups.written, 0)
        plan = schedule(left.reshape(replicas, -1), s.slots) if replicas else Schedule(left, left, 1)
        end = np.where(left > 0, plan.end.reshape(left.shape), 0).max(axis=2, initial=0)
        blocked = ~may & (groups.done == _NEVER)
        key = np.where(groups.done != _NEVER, groups.done, np.where(blocked, _NEVER, self._plans * _PLAN + end))
        unfinished = may & (groups.done == _NEVER)
        deadlines = np.where(unfinished, np.minimum(deadlines, self._version + s.max_staleness), deadlines)
        chosen, stop = self._select(deadlines, key)

        begun = (left > 0) & (plan.start.reshape(left.shape) < stop[:, None, None])
        fresh = groups.written.sum(axis=2) == 0
        fills = begun if fill_carried else begun & fresh[:, :, None]
        filled = np.where(fills, groups.written, 0).sum(axis=(1, 2)) + s.prompt_tokens * fills.any(axis=2).sum(axis=1)
        mean = filled / np.maximum(1, fills.sum(axis=(1, 2)))
        factor = self._factor[self._running]
        prefill_s = s.generator.prefill_s(filled.astype(np.float64), (s.prompt_tokens + mean) / 2.0) * factor
        made = _Plan(plan, left, stop, chosen, begin_s + prefill_s, begin_s)
        finish = made.decode_from_s + self._decoded_s(made, stop)
        return dataclasses.replace(made, finish_s=finish)

    def _decoded_s(self, plan: _Plan, steps: Ints) -> Floats:
        """[R] seconds of the first ``steps`` decode steps of a plan of the running replicas."""
        s = self.scenario
        replicas = len(self._running)
        if not replicas:
            return np.zeros(0)
        written = self._groups.rows(self._running).written.reshape(replicas, -1)
        return decode_s(plan.schedule, written, steps, s.prompt_tokens, s.generator) * self._factor[self._running]

    def _select(self, deadlines: Ints, key: Ints) -> tuple[Ints, Ints]:
        """([R, P] groups that leave, [R] decode steps until they can)."""
        chosen = np.empty((len(key), self._deliver), np.int64)
        stop = np.zeros(len(key), np.int64)
        order = np.argsort(key, axis=1, kind="stable")
        for row, (due, ranked, keys) in enumerate(zip(deadlines.tolist(), order.tolist(), key, strict=True)):
            at = np.sort(keys)
            count = 0
            while True:  # asked as the real generator asks: at the start, and whenever another group is complete
                now = max(int(at[count - 1]) - self._plans * _PLAN, 0) if count else 0
                count = int(np.searchsorted(at, self._plans * _PLAN + now, side="right"))
                found = select_due(due, ranked[:count], tick=self._tick, prompts_per_step=self._deliver)
                if found is not None:
                    break
                count += 1
            chosen[row], stop[row] = found, now
        return chosen, stop

    def _steps_by(self, plan: _Plan, elapsed_s: float) -> Ints:
        """[R] decode steps that have begun by ``elapsed_s``, at most those of the plan: by bisection."""
        low, high = np.zeros_like(plan.stop), plan.stop.copy()
        budget = elapsed_s - plan.decode_from_s
        while (low < high).any():  # smallest number of steps that last at least ``budget``
            middle = (low + high) // 2
            enough = self._decoded_s(plan, middle) >= budget
            high, low = np.where(enough, middle, high), np.where(enough, low, np.minimum(middle + 1, high))
        return low

    # -- progress -----------------------------------------------------------------------------------------------------

    def _progress(self, plan: _Plan, steps: Ints) -> _Groups:
        """The running replicas' groups after ``steps`` of a plan."""
        groups = self._groups.rows(self._running)
        made = np.clip(steps[:, None, None] - plan.schedule.start.reshape(plan.left.shape), 0, plan.left)
        written = groups.written + made
        by_version = groups.made.copy()
        by_version[:, :, self._version % (self.scenario.max_staleness + 1)] += made.sum(axis=2)
        end = np.where(plan.left > 0, plan.schedule.end.reshape(plan.left.shape), 0).max(axis=2, initial=0)
        complete = (written == groups.length).all(axis=2) & (groups.done == _NEVER)
        done = np.where(complete, self._plans * _PLAN + end, groups.done)
        return dataclasses.replace(groups, written=written, made=by_version, done=done)

    def _settle(self, plan: _Plan, steps: Ints, ended: Bools) -> None:
        """Make the first ``steps`` of the plan real; for replicas that have ended the tick, all of it."""
        progress = self._progress(plan, steps)
        gone = self._running[ended]
        self._chosen[gone], self._finish_s[gone] = plan.chosen[ended], plan.finish_s[ended]
        self._steps[self._running] += steps
        before = self._groups
        self._groups = before.with_rows(self._running, progress)

    def _result(self) -> TimedStep:
        """The tick as it ends if no further version comes."""
        s, plan, running = self.scenario, self._plan, self._running
        groups = self._groups.with_rows(running, self._progress(plan, plan.stop))
        chosen, finish, steps = self._chosen.copy(), self._finish_s.copy(), self._steps.copy()
        chosen[running], finish[running] = plan.chosen, plan.finish_s
        steps[running] += plan.stop
        leaving = groups.chosen(chosen)
        assert int(leaving.made.sum()) == int(leaving.length.sum()), "a group left before it was complete"
        by_version = leaving.made.sum(axis=(0, 1))
        versions = {int(v): int(n) for v, n in zip(self._versions(), by_version, strict=True) if n}
        sequences = leaving.length.size
        tokens = int(leaving.length.sum())
        stays = np.ones_like(groups.admitted, dtype=bool)
        np.put_along_axis(stays, chosen, False, axis=1)
        self._carried = groups.chosen(np.nonzero(stays)[1].reshape(s.replicas, self._num_active - self._deliver))
        duration = float(finish.max())
        return TimedStep(
            duration_s=duration,
            outputs={"completions": Batch(sequences, tokens + sequences * s.prompt_tokens, versions)},
            metrics={
                "tokens/generated": float(groups.written.sum() - self._before),
                "rollout/carried": float((self._carried.written < self._carried.length).sum()),
                "rollout/swaps": float(len(self._spans) - 1),
                "decode_steps": float(steps.max()),
                "busy_replica_s": float(finish.mean()),
            },
            spans=(*self._spans, ("generate", s.weights_load_s, duration)),
        )

    def save(self) -> Any:
        """Arrays are replaced, never changed, so the references are the state."""
        return self._carried, self._plans

    def load(self, state: Any) -> None:
        self._carried, self._plans = state
