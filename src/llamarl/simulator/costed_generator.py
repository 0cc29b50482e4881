"""The generator that only takes time: a tick is planned to its end, and planned again where a newer version arrives in it.

    step(tick) ─▶ admit, plan to the end of the tick ─▶ TimedStep
    revise(seconds, version) ─▶ what was decoded until then stays, the rest is planned anew under ``version`` ─▶ TimedStep

Its tick is that of ``executors/generator.py``: admit, decode until the groups to deliver are complete, carry the rest; which
groups start and leave is decided by the same functions (``llamarl/tick_schedule.py``). Under ``schedule.weights = "exact"``
no version arrives inside a tick, and a group's deadline follows from its admission: that is the rule of "latest" with the bound
``max_staleness + max_segments - 1``. Under "latest" each replica finishes the decode step that it is in, takes the version, and
goes on; with ``kv_on_update = "recompute"`` it first fills its cache again.

Replicas that are alike and get as many groups as each other at every tick are arrays (``_Alike``); of unlike ones
(``Scenario.kinds``) there are several such lots, and the tick ends with the slowest. A response's length is a function of the seed
and the tick of its admission, so a resumed simulation repeats the ticks that were lost.

Legend: R replicas, A active groups of a replica, P groups that it delivers a tick, g responses of a group, s = bound on staleness.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from llamarl.executors.base import ExecutorContext
from llamarl.simulator.scenario import ReplicaKind, Scenario
from llamarl.simulator.tick_costs import jitter
from llamarl.simulator.virtual_clock import TimedStep
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
from llamarl.tick_shares import Dealing

__all__ = ["KIND_METRIC", "Batch", "CostedGenerator"]

KIND_METRIC = "busy_kind_s/"
"""Metric prefix: mean seconds of a tick of the replicas of each kind, where they are unlike."""

_LENGTHS, _GENERATOR = 1, 2  # streams of random numbers; 3 draws the slow replicas, costed.py has the others

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
    parts: tuple[int, ...] = ()
    """Prompt and response tokens of each part, in order; none: the tick is not cut."""


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


@dataclass(frozen=True, eq=False)
class _Done:
    """A tick of some replicas, as it ends if no further version comes."""

    finish_s: Floats
    """[R]"""
    steps: Ints
    """[R]"""
    sequences: int
    """That leave."""
    tokens: int
    """Response tokens of these."""
    versions: Mapping[int, int]
    """Of these tokens."""
    sampled: int
    """Tokens that the tick has written."""
    carried: int
    """Sequences that go on at the next tick."""
    parts_s: Floats
    """[parts]"""
    of_parts: Ints
    """[parts] prompt and response tokens."""


class CostedGenerator:
    """Replicas with slots, carried groups and a speed each; all take a version when it arrives."""

    def __init__(self, scenario: Scenario, context: ExecutorContext) -> None:
        self.scenario = scenario
        dealing = Dealing(scenario.shares, scenario.prompts_per_step)
        speed = scenario.variation.slow_replicas(scenario.num_replicas, scenario.seed)
        self._lots: list[_Alike] = []
        first = 0
        for number, kind in enumerate(scenario.of_kinds):
            # Whole quotas are what each of them gets at every tick; of others one gets a group more than its neighbour.
            together = kind.replicas if dealing.quotas[first].is_integer() else 1
            for _ in range(kind.replicas // together):
                own = speed[first : first + together]
                self._lots.append(_Alike(scenario, kind, dealing, number=number, first=first, speed=own))
                first += together

    def initial_token(self, channel: str, source_tick: int) -> Any:
        raise ValueError(f"channel {channel!r} leaves the generator with a delay; only the weights edge may have one")

    def step(self, tick: int, inputs: Mapping[str, Any]) -> TimedStep:
        """The whole tick under the newest version that is there when it begins."""
        s = self.scenario
        self._version = int(inputs["weights"])
        self._load_s = max(kind.weights_load_s for kind in s.of_kinds)
        lengths = np.random.default_rng([s.seed, _LENGTHS, tick])
        speeds = np.random.default_rng([s.seed, _GENERATOR, tick])
        for lot in self._lots:
            lot.begin(tick, self._version, lengths, speeds)
        self._spans = [("weight_sync", 0.0, self._load_s)]
        return self._result()

    def revise(self, elapsed_s: float, version: int) -> TimedStep:
        """``version`` has arrived ``elapsed_s`` after the tick began."""
        if version > self._version:
            self._version = version
            if any([lot.revise(elapsed_s, version) for lot in self._lots]):
                self._spans.append(("weight_sync", elapsed_s, elapsed_s + self._load_s))
        return self._result()

    def _result(self) -> TimedStep:
        """The tick of all replicas: it ends with the slowest."""
        s, done = self.scenario, [lot.result() for lot in self._lots]
        finish = np.concatenate([one.finish_s for one in done])
        duration = float(finish.max())
        sequences, tokens = sum(one.sequences for one in done), sum(one.tokens for one in done)
        versions: dict[int, int] = {}
        for one in done:
            for version, count in one.versions.items():
                versions[version] = versions.get(version, 0) + count
        parts_s, of_parts = (), ()
        if s.parts > 1:
            parts_s = tuple(np.max([one.parts_s for one in done], axis=0).tolist())
            of_parts = tuple(np.sum([one.of_parts for one in done], axis=0).tolist())
        of_kinds = {
            f"{KIND_METRIC}{kind}": float(
                np.concatenate(
                    [one.finish_s for lot, one in zip(self._lots, done, strict=True) if lot.number == kind]
                ).mean()
            )
            for kind in range(len(s.kinds))
        }
        return TimedStep(
            duration_s=duration,
            outputs={"completions": Batch(sequences, tokens + sequences * s.prompt_tokens, versions, of_parts)},
            parts_s=parts_s,
            metrics={
                "tokens/generated": float(sum(one.sampled for one in done)),
                "rollout/carried": float(sum(one.carried for one in done)),
                "rollout/swaps": float(len(self._spans) - 1),
                "decode_steps": float(max(one.steps.max() for one in done)),
                "busy_replica_s": float(finish.mean()),
                **of_kinds,
            },
            spans=(*self._spans, ("generate", self._load_s, duration)),
        )

    def save(self) -> Any:
        """Arrays are replaced, never changed, so the references are the state."""
        return [lot.state for lot in self._lots]

    def load(self, state: Any) -> None:
        for lot, own in zip(self._lots, state, strict=True):
            lot.state = own


class _Alike:
    """Replicas of one kind that get as many groups as each other at every tick.

    Args:
        number: Of the kind.
        first: Number of the first replica.
        speed: [R] factor on the time of each.
    """

    def __init__(
        self, scenario: Scenario, kind: ReplicaKind, dealing: Dealing, *, number: int, first: int, speed: Floats
    ) -> None:
        self.scenario, self.number = scenario, number
        self._kind, self._dealing, self._first, self._speed = kind, dealing, first, speed
        exact = scenario.weights == "exact"
        self._bound = scenario.max_staleness + (scenario.max_segments - 1 if exact else 0)
        self._carried = self._empty()
        self._plans = 0

    def _empty(self) -> _Groups:
        s = self.scenario
        shape = (len(self._speed), 0)
        zero = np.zeros(shape, np.int64)
        group = np.zeros((*shape, s.group_size), np.int64)
        return _Groups(zero, zero, group, group, np.zeros((*shape, self._bound + 1), np.int64))

    @property
    def state(self) -> Any:
        """What it carries to the next tick."""
        return self._carried, self._plans

    @state.setter
    def state(self, state: Any) -> None:
        self._carried, self._plans = state

    def begin(self, tick: int, version: int, lengths: np.random.Generator, speeds: np.random.Generator) -> None:
        """Plan the whole tick under ``version``.

        Args:
            lengths: Whence the lengths of new responses come, lot after lot.
            speeds: The same of the factors that vary from tick to tick.
        """
        s, num_replicas = self.scenario, len(self._speed)
        self._tick, self._version = tick, version
        self._deliver = self._dealing.counts(tick)[self._first]
        self._later = self._dealing.ahead(self._first, tick + 1, max(self._bound, s.max_segments))
        self._groups = self._admit(tick, lengths)
        self._before = int(self._groups.written.sum())
        self._factor = self._speed * jitter(s.variation.generator_jitter, num_replicas, speeds)
        self._running = np.arange(num_replicas)
        self._leaves = np.zeros(self._groups.admitted.shape, np.bool_)
        self._finish_s = np.zeros(num_replicas)
        self._steps = np.zeros(num_replicas, np.int64)
        begin = self._kind.cost.tick_s + self._kind.weights_load_s
        self._plan = self._make_plan(np.full(num_replicas, begin), fill_carried=s.kv_on_update == "recompute")

    def revise(self, elapsed_s: float, version: int) -> bool:
        """``version`` has arrived ``elapsed_s`` after the tick began; returns whether a replica still works, so that it takes it."""
        plan = self._plan
        done = self._steps_by(plan, elapsed_s)
        ended = done >= plan.schedule.stop
        seconds = self._decoded_s(plan.schedule, done)  # at the contexts before it: settling moves them on
        self._settle(plan, done, ended)
        keep = ~ended
        self._running, self._version = self._running[keep], version
        begin = np.maximum(elapsed_s, plan.decode_from_s + seconds)[keep] + self._kind.weights_load_s
        self._plan = self._make_plan(begin, fill_carried=self.scenario.kv_on_update == "recompute")
        return len(begin) > 0

    # -- planning -----------------------------------------------------------------------------------------------------

    def _admit(self, tick: int, rng: np.random.Generator) -> _Groups:
        s, old, num_replicas = self.scenario, self._carried, len(self._speed)
        active = self._dealing.num_active(
            self._first, tick, oversubscription=s.oversubscription, max_segments=s.max_segments
        )
        new = max(0, active - old.admitted.shape[1])
        shape = (num_replicas, new, s.group_size)
        lengths = s.lengths.sample(num_replicas * new * s.group_size, rng).reshape(shape)
        if s.longest_first:
            order = np.argsort(-lengths.max(axis=2), axis=1, kind="stable")
            lengths = np.take_along_axis(lengths, order[:, :, None], axis=1)

        def extend(array: Ints, values: Ints | int) -> Ints:
            return np.concatenate([array, np.broadcast_to(values, (num_replicas, new, *array.shape[2:]))], axis=1)

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
            later=self._later,
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
            slots=self._kind.slots,
            later=self._later,
        )
        begun = (plan.left > 0) & (plan.start < plan.stop[:, None, None])
        fresh = groups.written.sum(axis=2) == 0
        fills = begun if fill_carried else begun & fresh[:, :, None]
        filled = np.where(fills, groups.written, 0).sum(axis=(1, 2)) + s.prompt_tokens * fills.any(axis=2).sum(axis=1)
        mean = filled / np.maximum(1, fills.sum(axis=(1, 2)))
        factor = self._factor[self._running]
        prefill_s = self._kind.cost.prefill_s(filled.astype(np.float64), (s.prompt_tokens + mean) / 2.0) * factor
        decode_from_s = begin_s + prefill_s
        return _Plan(plan, decode_from_s, decode_from_s + self._decoded_s(plan, plan.stop))

    def _decoded_s(self, plan: TickPlan, steps: Ints) -> Floats:
        """[R] seconds of the first ``steps`` decode steps of a plan of the running replicas."""
        s, written = self.scenario, self._groups.rows(self._running).written
        runs = constant_batches(plan.left, plan.start, written, steps, self._kind.slots)
        seconds = runs.steps * self._kind.cost.decode_step_s(runs.active, s.prompt_tokens + runs.written)
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

    def _settle(self, plan: _Plan, steps: Ints, ended: Bools) -> None:
        """Make the first ``steps`` of the plan real; for replicas that have ended the tick, all of it."""
        progress = self._progress(plan.schedule, steps)
        gone = self._running[ended]
        self._leaves[gone], self._finish_s[gone] = plan.schedule.leaves[ended], plan.finish_s[ended]
        self._steps[self._running] += steps
        self._groups = self._groups.with_rows(self._running, progress)

    def result(self) -> _Done:
        """The tick as it ends if no further version comes."""
        s, plan, running = self.scenario, self._plan, self._running
        groups = self._groups.with_rows(running, self._progress(plan.schedule, plan.schedule.stop))
        leaves, finish, steps = self._leaves.copy(), self._finish_s.copy(), self._steps.copy()
        leaves[running], finish[running] = plan.schedule.leaves, plan.finish_s
        steps[running] += plan.schedule.stop
        leaving = groups.where(leaves)
        assert int(leaving.made.sum()) == int(leaving.length.sum()), "a group left before it was complete"
        by_version = leaving.made.sum(axis=(0, 1))
        self._carried = groups.where(~leaves)
        parts_s, of_parts = self._parts() if s.parts > 1 else (np.zeros(0), np.zeros(0, np.int64))
        return _Done(
            finish_s=finish,
            steps=steps,
            sequences=leaving.length.size,
            tokens=int(leaving.length.sum()),
            versions={int(v): int(n) for v, n in zip(self._versions(), by_version, strict=True) if n},
            sampled=int(groups.written.sum()) - self._before,
            carried=int((self._carried.written < self._carried.length).sum()),
            parts_s=parts_s,
            of_parts=of_parts,
        )

    def _parts(self) -> tuple[Floats, Ints]:
        """When each part of the tick is complete in all replicas, and its prompt and response tokens. No version comes in a tick that
        is cut, so its one plan says all."""
        s, plan = self.scenario, self._plan.schedule
        done = np.where(plan.leaves, plan.completed_at, NEVER)
        order = np.argsort(done, axis=1, kind="stable")[:, : self._deliver]
        steps = np.clip(np.take_along_axis(done, order, axis=1) - self._plans * _PLAN, 0, plan.stop[:, None])
        tokens = self._groups.length.sum(axis=2) + s.group_size * s.prompt_tokens
        tokens = np.take_along_axis(tokens, order, axis=1)
        part = np.arange(self._deliver) * s.parts // self._deliver
        ready, counts = [], []
        for number in range(s.parts):
            last = int(np.flatnonzero(part == number)[-1])
            ready.append(float((self._plan.decode_from_s + self._decoded_s(plan, steps[:, last])).max()))
            counts.append(int(tokens[:, part == number].sum()))
        return np.array(ready), np.array(counts, np.int64)
