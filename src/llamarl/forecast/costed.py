"""Executors that only take time. What they carry is counts of tokens and versions.

    weights (version) ─▶ CostedGenerator ─▶ Batch ─▶ CostedReward ─▶ Batch ─▶ CostedTrainer ─▶ version + 1

Its tick is that of ``executors/generator.py`` under ``schedule.weights = "exact"``: admit, decode
until the groups to deliver are complete, carry the rest; which groups start and leave is decided by
the same functions (``llamarl/tick_schedule.py``). A version that arrives inside a tick
(``"latest"``) is not simulated: it is taken when the next tick begins.

Replicas are arrays. A response's length is a function of the seed and the tick of its admission, so
a resumed simulation repeats the ticks that were lost.

Legend: R replicas, A active groups of a replica, P groups that it delivers a tick, g responses of a
group, s = bound on staleness.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from llamarl.executors.base import ExecutorContext
from llamarl.forecast.scenario import Scenario
from llamarl.forecast.virtual_clock import TimedStep, VirtualExecutor
from llamarl.tick_schedule import NEVER, Bools, Floats, Ints, constant_batches, plan_tick

__all__ = ["STALENESS_METRIC", "Batch", "CostedGenerator", "CostedReward", "CostedTrainer"]

STALENESS_METRIC = "staleness_tokens/"
"""Metric prefix: trained tokens of each staleness."""

_LENGTHS, _GENERATOR, _TRAINER = 1, 2, 5  # streams of random numbers

_TICK = 1 << 40
"""Moments: tick times this plus the decode step."""


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

    def where(self, picked: Bools) -> _Groups:
        """The groups of [R, A], as many in every replica."""

        def take(array: Ints) -> Ints:
            return array[picked].reshape(len(array), -1, *array.shape[2:])

        return _Groups(*(take(getattr(self, f.name)) for f in dataclasses.fields(self)))


def _jitter(sigma: float, size: int, rng: np.random.Generator) -> Floats:
    """[size] log-normal factors of mean 1."""
    return np.ones(size) if sigma == 0.0 else rng.lognormal(-sigma * sigma / 2.0, sigma, size)


class CostedGenerator(VirtualExecutor):
    """Replicas with slots and carried groups."""

    def __init__(self, scenario: Scenario, context: ExecutorContext) -> None:
        super().__init__(scenario, context)
        s = scenario
        self._count = s.max_staleness + s.max_segments
        """Versions that live groups may hold tokens of."""
        self._deliver = s.prompts_per_step // s.replicas
        self._active = max(self._deliver, int(self._deliver * s.oversubscription))
        zero = np.zeros((s.replicas, 0), np.int64)
        group = np.zeros((s.replicas, 0, s.group_size), np.int64)
        self.state = _Groups(zero, zero, group, group, np.zeros((s.replicas, 0, self._count), np.int64))
        """The carried groups."""

    def step(self, tick: int, inputs: Mapping[str, Any]) -> TimedStep:
        """Decode to the end of the tick under the version that is there when it begins; the slowest replica ends it."""
        s, groups = self.scenario, self._admit(tick)
        plan = plan_tick(
            groups.length - groups.written, groups.done, groups.admitted + s.max_segments - 1, now=tick * _TICK, tick=tick,
            prompts_per_step=self._deliver, slots=s.slots,
        )  # fmt: skip
        begun = (plan.left > 0) & (plan.start < plan.stop[:, None, None])
        refilled = np.where(begun, groups.written, 0).sum(axis=(1, 2))
        filled = refilled + s.prompt_tokens * begun.any(axis=2).sum(axis=1)
        context = (s.prompt_tokens + refilled / np.maximum(1, begun.sum(axis=(1, 2)))) / 2.0
        runs = constant_batches(plan.left, plan.start, groups.written, plan.stop, s.slots)
        decoding = runs.steps * s.generator.decode_step_s(runs.active, s.prompt_tokens + runs.written)
        factor = _jitter(s.variation.generator_jitter, s.replicas, np.random.default_rng([s.seed, _GENERATOR, tick]))
        busy = s.generator.prefill_s(filled.astype(np.float64), context) + np.bincount(
            runs.replica, decoding, s.replicas
        )
        finish = s.weights_load_s + busy * factor

        made = plan.made(plan.stop)
        by_version = groups.made.copy()
        by_version[:, :, int(inputs["weights"]) % self._count] += made.sum(axis=2)
        done = np.where(plan.completed_at <= (tick * _TICK + plan.stop)[:, None], plan.completed_at, NEVER)
        after = dataclasses.replace(groups, written=groups.written + made, made=by_version, done=done)
        leaving, self.state = after.where(plan.leaves), after.where(~plan.leaves)
        assert int(leaving.made.sum()) == int(leaving.length.sum()), "a group left before it was complete"
        lowest = tick - self._count + 1
        versions = lowest + (np.arange(self._count) - lowest) % self._count
        found = {int(v): int(n) for v, n in zip(versions, leaving.made.sum(axis=(0, 1)), strict=True) if n}
        size, duration = leaving.length.size, float(finish.max())
        return TimedStep(
            duration_s=duration,
            outputs={"completions": Batch(size, int(leaving.length.sum()) + size * s.prompt_tokens, found)},
            metrics={
                "tokens/generated": float(made.sum()),
                "decode_steps": float(plan.stop.max()),
                "busy_replica_s": float(finish.mean()),
            },
            spans=(("weight_sync", 0.0, s.weights_load_s), ("generate", s.weights_load_s, duration)),
        )

    def _admit(self, tick: int) -> _Groups:
        """The carried groups and new ones, up to as many as are active."""
        s, old = self.scenario, self.state
        new = max(0, self._active - old.admitted.shape[1])
        rng = np.random.default_rng([s.seed, _LENGTHS, tick])
        lengths = s.lengths.sample(s.replicas * new * s.group_size, rng).reshape(s.replicas, new, s.group_size)

        def extend(array: Ints, values: Ints | int) -> Ints:
            return np.concatenate([array, np.broadcast_to(values, (s.replicas, new, *array.shape[2:]))], axis=1)

        values: tuple[Ints | int, ...] = (tick, NEVER, lengths, 0, 0)
        return _Groups(*(extend(getattr(old, f.name), v) for f, v in zip(dataclasses.fields(old), values, strict=True)))


class CostedReward(VirtualExecutor):
    """Judges a batch."""

    def step(self, tick: int, inputs: Mapping[str, Any]) -> TimedStep:
        batch: Batch = inputs["completions"]
        duration = self.scenario.reward_s
        return TimedStep(duration_s=duration, outputs={"scored": batch}, spans=(("score", 0.0, duration),))


class CostedTrainer(VirtualExecutor):
    """Owns the policy's version: v after v ticks."""

    def __init__(self, scenario: Scenario, context: ExecutorContext) -> None:
        super().__init__(scenario, context)
        self.state = 0

    def initial_token(self, channel: str, source_tick: int) -> Any:
        return max(0, source_tick + 1)

    def step(self, tick: int, inputs: Mapping[str, Any]) -> TimedStep:
        s = self.scenario
        batch: Batch = inputs["scored"]
        rng = np.random.default_rng([s.seed, _TRAINER, tick])
        duration = s.trainer.batch_s(batch.tokens) * float(_jitter(s.variation.trainer_jitter, 1, rng)[0])
        staleness = {self.state - version: tokens for version, tokens in batch.tokens_of_version.items()}
        self.state += 1
        metrics = {f"{STALENESS_METRIC}{lag}": float(tokens) for lag, tokens in sorted(staleness.items())}
        metrics["tokens/trained"] = float(sum(staleness.values()))
        return TimedStep(
            duration_s=duration, outputs={"weights": self.state}, metrics=metrics, spans=(("train", 0.0, duration),)
        )
