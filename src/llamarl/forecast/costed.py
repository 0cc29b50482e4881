"""Executors that only take time. What they carry is counts of tokens and versions.

    weights (version) ─▶ CostedGenerator ─▶ Batch ─▶ CostedReward ─▶ Batch ─▶ CostedTrainer ─▶ version + 1

A generator's tick is planned to its end, and planned again where a newer version arrives in it:

    step(tick) ─▶ admit, plan to the end of the tick ─▶ TimedStep
    revise(seconds, version) ─▶ what was decoded until then stays, the rest is planned anew under ``version`` ─▶ TimedStep

Its tick is that of ``executors/generator.py``: admit, decode until the groups to deliver are complete, carry the rest; which
groups start and leave is decided by the same functions (``llamarl/tick_schedule.py``). Under ``schedule.weights = "exact"``
no version arrives inside a tick, and a group's deadline follows from its admission: that is the rule of "latest" with the bound
``max_staleness + max_segments - 1``. Under "latest" each replica finishes the decode step that it is in, takes the version, and
goes on; with ``kv_on_update = "recompute"`` it first fills its cache again.

Replicas are arrays. A response's length is a function of the seed and the tick of its admission, so a resumed simulation
repeats the ticks that were lost.

Legend: R replicas, A active groups of a replica, P groups that it delivers a tick, g responses of a group, s = bound on staleness.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from llamarl.executors.base import ExecutorContext
from llamarl.forecast.scenario import Scenario
from llamarl.forecast.virtual_clock import TimedStep
from llamarl.tick_schedule import (
    NEVER,
    Bools,
    Floats,
    Ints,
    TickPlan,
    constant_batches,
    deadlines,
    num_startable,
    plan_tick,
    urgency_order,
)

__all__ = ["STALENESS_METRIC", "Batch", "CostedGenerator", "CostedReward", "CostedTrainer"]

STALENESS_METRIC = "staleness_tokens/"
"""Metric prefix: trained tokens of each staleness."""

_LENGTHS, _GENERATOR, _REWARD, _TRAINER = 1, 2, 4, 5  # streams of random numbers; 3 draws the slow replicas

_PLAN = 1 << 40
"""Moments: plan number times this plus the decode step, so that later plans sort behind earlier ones."""


@dataclass(frozen=True)
class Batch:
    """The groups of a tick, as counts."""

    sequences: int
    tokens: int
    """Prompt and response tokens."""
    tokens_of_version: Mapping[int, int]
    """Policy version -> response tokens that it sampled."""


@dataclass(frozen=True, eq=False)
class _Groups:
    """What is active. Arrays are replaced, never changed."""

    admitted: Ints
    """[R, A] tick of admission."""
    done: Ints
    """[R, A] moment of completion; NEVER: not complete."""
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

    def where(self, picked: Bools) -> _Groups:
        """The groups of [R, A], as many in every replica."""

        def take(array: Ints) -> Ints:
            return array[picked].reshape(len(array), -1, *array.shape[2:])

        return _Groups(*(take(getattr(self, f.name)) for f in dataclasses.fields(self)))


@dataclass(frozen=True, eq=False)
class _Plan:
    """From some moment of the tick to its end, for some replicas, if no further version comes."""

    schedule: TickPlan
    decode_from_s: Floats
    """[R] seconds of the tick at which the first decode step begins."""
    finish_s: Floats
    """[R]"""


def _jitter(sigma: float, size: int, rng: np.random.Generator) -> Floats:
    """[size] log-normal factors of mean 1."""
    return np.ones(size) if sigma == 0.0 else rng.lognormal(-sigma * sigma / 2.0, sigma, size)


class CostedGenerator:
    """Replicas with slots, carried groups and a speed each; all take a version when it arrives."""

    def __init__(self, scenario: Scenario, context: ExecutorContext) -> None:
        self.scenario = scenario
        self._speed = scenario.variation.slow_replicas(scenario.replicas, scenario.seed)
        exact = scenario.weights == "exact"
        self._bound = scenario.max_staleness + (scenario.max_segments - 1 if exact else 0)
        self._deliver = scenario.prompts_per_step // scenario.replicas
        self._active = max(self._deliver, int(self._deliver * scenario.oversubscription))
        self._carried = self._empty()
        self._plans = 0

    def _empty(self) -> _Groups:
        s = self.scenario
        shape = (s.replicas, 0)
        zero = np.zeros(shape, np.int64)
        group = np.zeros((*shape, s.group_size), np.int64)
        return _Groups(zero, zero, group, group, np.zeros((*shape, self._bound + 1), np.int64))

    def initial_token(self, channel: str, source_tick: int) -> Any:
        raise ValueError(f"channel {channel!r} leaves the generator with a delay; only the weights edge may have one")

    def step(self, tick: int, inputs: Mapping[str, Any]) -> TimedStep:
        """Plan the whole tick under the newest version that is there when it begins."""
        s = self.scenario
        self._tick, self._version = tick, int(inputs["weights"])
        self._groups = self._admit(tick, np.random.default_rng([s.seed, _LENGTHS, tick]))
        self._before = int(self._groups.written.sum())
        speeds = np.random.default_rng([s.seed, _GENERATOR, tick])
        self._factor = self._speed * _jitter(s.variation.generator_jitter, s.replicas, speeds)
        self._running = np.arange(s.replicas)
        self._leaves = np.zeros(self._groups.admitted.shape, np.bool_)
        self._finish_s = np.zeros(s.replicas)
        self._steps = np.zeros(s.replicas, np.int64)
        self._spans = [("weight_sync", 0.0, s.weights_load_s)]
        self._plan = self._make_plan(np.full(s.replicas, s.weights_load_s), fill_carried=s.kv_on_update == "recompute")
        return self._result()

    def revise(self, elapsed_s: float, version: int) -> TimedStep:
        """Plan the rest of the tick anew: ``version`` has arrived ``elapsed_s`` after it began."""
        if version > self._version:
            load_s = self.scenario.weights_load_s
            if self._take(elapsed_s, version, load_s):
                self._spans.append(("weight_sync", elapsed_s, elapsed_s + load_s))
        return self._result()

    def save(self) -> Any:
        """Arrays are replaced, never changed, so the references are the state."""
        return self._carried, self._plans

    def load(self, state: Any) -> None:
        self._carried, self._plans = state

    def _take(self, elapsed_s: float, version: int, load_s: float) -> bool:
        """Go over to a version; returns whether a replica still works, so that it takes it."""
        plan = self._plan
        done = self._steps_by(plan, elapsed_s)
        ended = done >= plan.schedule.stop
        seconds = self._decoded_s(plan.schedule, done)  # at the contexts before it, which progress moves on
        self._keep_progress(plan, done, ended)
        keep = ~ended
        self._running, self._version = self._running[keep], version
        begin = np.maximum(elapsed_s, plan.decode_from_s + seconds)[keep] + load_s
        self._plan = self._make_plan(begin, fill_carried=self.scenario.kv_on_update == "recompute")
        return len(begin) > 0

    # -- planning -----------------------------------------------------------------------------------------------------

    def _admit(self, tick: int, rng: np.random.Generator) -> _Groups:
        s, old = self.scenario, self._carried
        new = max(0, self._active - old.admitted.shape[1])
        lengths = s.lengths.sample(s.replicas * new * s.group_size, rng).reshape(s.replicas, new, s.group_size)

        def extend(array: Ints, values: Ints | int) -> Ints:
            return np.concatenate([array, np.broadcast_to(values, (s.replicas, new, *array.shape[2:]))], axis=1)

        return _Groups(
            extend(old.admitted, tick),
            extend(old.done, NEVER),
            extend(old.length, lengths),
            extend(old.written, 0),
            extend(old.made, 0),
        )

    def _versions(self) -> Ints:
        """[s + 1] the version that each place of ``made`` stands for in this tick."""
        count = self._bound + 1
        lowest = self._tick - count + 1
        return lowest + (np.arange(count) - lowest) % count

    def _make_plan(self, begin_s: Floats, *, fill_carried: bool) -> _Plan:
        """For the running replicas, from ``begin_s`` on under the version in use."""
        s, groups = self.scenario, self._groups.rows(self._running)
        self._plans += 1
        oldest = np.where(groups.made > 0, self._versions(), NEVER).min(axis=2)
        limits = {"max_segments": s.max_segments, "max_staleness": self._bound}
        startable = num_startable(
            self._version,
            tick=self._tick,
            max_staleness=self._bound,
            prompts_per_step=self._deliver,
        )
        may = np.zeros_like(groups.admitted, dtype=bool)
        urgency = urgency_order(deadlines(groups.admitted, oldest, **limits))
        np.put_along_axis(may, urgency[:, :startable], True, axis=1)
        sampled = may & (groups.done == NEVER)  # by this version, before the tick ends
        oldest = np.where(sampled, np.minimum(oldest, self._version), oldest)
        plan = plan_tick(
            np.where(may[:, :, None], groups.length - groups.written, 0),
            groups.done,
            deadlines(groups.admitted, oldest, **limits),
            now=self._plans * _PLAN,
            tick=self._tick,
            prompts_per_step=self._deliver,
            slots=s.slots,
        )
        begun = (plan.left > 0) & (plan.start < plan.stop[:, None, None])
        fresh = groups.written.sum(axis=2) == 0
        fills = begun if fill_carried else begun & fresh[:, :, None]
        filled = np.where(fills, groups.written, 0).sum(axis=(1, 2)) + s.prompt_tokens * fills.any(axis=2).sum(axis=1)
        mean = filled / np.maximum(1, fills.sum(axis=(1, 2)))
        factor = self._factor[self._running]
        prefill_s = s.generator.prefill_s(filled.astype(np.float64), (s.prompt_tokens + mean) / 2.0) * factor
        decode_from_s = begin_s + prefill_s
        return _Plan(plan, decode_from_s, decode_from_s + self._decoded_s(plan, plan.stop))

    def _decoded_s(self, plan: TickPlan, steps: Ints) -> Floats:
        """[R] seconds of the first ``steps`` decode steps of a plan of the running replicas."""
        s, written = self.scenario, self._groups.rows(self._running).written
        runs = constant_batches(plan.left, plan.start, written, steps, s.slots)
        seconds = runs.steps * s.generator.decode_step_s(runs.active, s.prompt_tokens + runs.written)
        return np.bincount(runs.replica, seconds, len(written)) * self._factor[self._running]

    def _steps_by(self, plan: _Plan, elapsed_s: float) -> Ints:
        """[R] decode steps that have begun by ``elapsed_s``, at most those of the plan: by bisection."""
        low, high = np.zeros_like(plan.schedule.stop), plan.schedule.stop
        budget = elapsed_s - plan.decode_from_s
        while (low < high).any():  # smallest number of steps that last at least ``budget``
            middle = (low + high) // 2
            enough = self._decoded_s(plan.schedule, middle) >= budget
            high, low = np.where(enough, middle, high), np.where(enough, low, np.minimum(middle + 1, high))
        return low

    # -- progress -----------------------------------------------------------------------------------------------------

    def _progress(self, plan: TickPlan, steps: Ints) -> _Groups:
        """The running replicas' groups after ``steps`` of a plan."""
        groups = self._groups.rows(self._running)
        made = plan.made(steps)
        by_version = groups.made.copy()
        by_version[:, :, self._version % (self._bound + 1)] += made.sum(axis=2)
        done = np.where(plan.completed_at <= (self._plans * _PLAN + steps)[:, None], plan.completed_at, NEVER)
        return dataclasses.replace(groups, written=groups.written + made, made=by_version, done=done)

    def _keep_progress(self, plan: _Plan, steps: Ints, ended: Bools) -> None:
        """Make the first ``steps`` of the plan real; for replicas that have ended the tick, all of it."""
        progress = self._progress(plan.schedule, steps)
        gone = self._running[ended]
        self._leaves[gone], self._finish_s[gone] = plan.schedule.leaves[ended], plan.finish_s[ended]
        self._steps[self._running] += steps
        self._groups = self._groups.with_rows(self._running, progress)

    def _result(self) -> TimedStep:
        """The tick as it ends if no further version comes: with its slowest replica."""
        s, plan, running = self.scenario, self._plan, self._running
        groups = self._groups.with_rows(running, self._progress(plan.schedule, plan.schedule.stop))
        leaves, finish, steps = self._leaves.copy(), self._finish_s.copy(), self._steps.copy()
        leaves[running], finish[running] = plan.schedule.leaves, plan.finish_s
        steps[running] += plan.schedule.stop
        leaving = groups.where(leaves)
        assert int(leaving.made.sum()) == int(leaving.length.sum()), "a group left before it was complete"
        by_version = leaving.made.sum(axis=(0, 1))
        versions = {int(v): int(n) for v, n in zip(self._versions(), by_version, strict=True) if n}
        self._carried = groups.where(~leaves)
        tokens = int(leaving.length.sum()) + leaving.length.size * s.prompt_tokens
        return TimedStep(
            duration_s=float(finish.max()),
            outputs={"completions": Batch(leaving.length.size, tokens, versions)},
            metrics={
                "tokens/generated": float(int(groups.written.sum()) - self._before),
                "rollout/carried": float((self._carried.written < self._carried.length).sum()),
                "rollout/swaps": float(len(self._spans) - 1),
                "decode_steps": float(steps.max()),
                "busy_replica_s": float(finish.mean()),
            },
            spans=(*self._spans, ("generate", s.weights_load_s, float(finish.max()))),
        )


class CostedReward:
    """Judges a batch."""

    def __init__(self, scenario: Scenario, context: ExecutorContext) -> None:
        self.scenario = scenario

    def initial_token(self, channel: str, source_tick: int) -> Any:
        raise ValueError(f"channel {channel!r} leaves the reward executor with a delay; only weights may have one")

    def step(self, tick: int, inputs: Mapping[str, Any]) -> TimedStep:
        batch: Batch = inputs["completions"]
        rng = np.random.default_rng([self.scenario.seed, _REWARD, tick])
        duration = self.scenario.reward.batch_s(batch.sequences, rng)
        return TimedStep(duration_s=duration, outputs={"scored": batch}, spans=(("score", 0.0, duration),))

    def save(self) -> Any:
        return None

    def load(self, state: Any) -> None:
        pass


class CostedTrainer:
    """Owns the policy's version: v after v ticks."""

    def __init__(self, scenario: Scenario, context: ExecutorContext) -> None:
        self.scenario = scenario
        self._version = 0

    def initial_token(self, channel: str, source_tick: int) -> Any:
        return max(0, source_tick + 1)

    def step(self, tick: int, inputs: Mapping[str, Any]) -> TimedStep:
        s = self.scenario
        batch: Batch = inputs["scored"]
        rng = np.random.default_rng([s.seed, _TRAINER, tick])
        duration = s.trainer.batch_s(batch.tokens) * float(_jitter(s.variation.trainer_jitter, 1, rng)[0])
        staleness = {self._version - version: tokens for version, tokens in batch.tokens_of_version.items()}
        self._version += 1
        metrics = {f"{STALENESS_METRIC}{lag}": float(tokens) for lag, tokens in sorted(staleness.items())}
        metrics["tokens/trained"] = float(sum(staleness.values()))
        return TimedStep(
            duration_s=duration,
            outputs={"weights": self._version},
            metrics=metrics,
            spans=(("train", 0.0, duration),),
        )

    def save(self) -> Any:
        return self._version

    def load(self, state: Any) -> None:
        self._version = state
