"""The executors of a job that only take time: what they carry is counts of tokens and versions.

    weights (version) ─▶ CostedGenerator ─▶ Batch ─▶ CostedReward ─▶ Batch ─▶ CostedTrainer ─▶ version + 1

The generator's tick is that of ``executors/generator.py``: admit, decode until the groups to deliver are complete, carry
the rest. Which groups leave is decided by the same ``select_deliveries``. All replicas are arrays; a response's length is
a function of the seed and the tick of its admission, so a resumed simulation repeats the ticks that were lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from llamarl.executors.base import ExecutorContext
from llamarl.executors.partial_rollouts import select_deliveries
from llamarl.simulator.batching import decode_s, schedule
from llamarl.simulator.costs import jitter
from llamarl.simulator.scenario import Scenario
from llamarl.simulator.virtual_clock import TimedStep

__all__ = ["Batch", "CostedGenerator", "CostedReward", "CostedTrainer", "STALENESS_METRIC"]

STALENESS_METRIC = "staleness_tokens/"
"""Metric prefix: trained tokens of each staleness."""

Ints = npt.NDArray[np.int64]

_LENGTHS, _GENERATOR, _REWARD, _TRAINER = 1, 2, 4, 5  # streams of random numbers; 3 draws the slow replicas


@dataclass(frozen=True)
class Batch:
    """The groups of a tick, as counts."""

    sequences: int
    tokens: int
    """Prompt and response tokens."""
    tokens_of_version: Mapping[int, int]
    """Policy version -> response tokens that it sampled."""


class CostedGenerator:
    """Replicas with slots, carried groups and a speed each.

    Legend: R replicas, A active groups of a replica, P groups that it delivers a tick, g responses of a group,
    m = max_segments.
    """

    def __init__(self, scenario: Scenario, context: ExecutorContext) -> None:
        self.scenario = scenario
        self._deliver = scenario.prompts_per_step // scenario.replicas
        self._num_active = int(self._deliver * scenario.oversubscription)
        self._speed = scenario.variation.slow_replicas(scenario.replicas, scenario.seed)
        self._versions: dict[int, int] = {}
        empty = (scenario.replicas, 0)
        self._admitted: Ints = np.zeros(empty, np.int64)  # [R, A] tick of admission
        self._rank: Ints = np.zeros(empty, np.int64)  # [R, A] order of completion; -1: not complete
        self._length: Ints = np.zeros((*empty, scenario.group_size), np.int64)  # [R, A, g]
        self._written: Ints = np.zeros((*empty, scenario.group_size), np.int64)  # [R, A, g]
        self._by_age: Ints = np.zeros((*empty, scenario.max_segments), np.int64)  # [R, A, m] tokens by ticks since

    def initial_token(self, channel: str, source_tick: int) -> Any:
        raise ValueError(f"channel {channel!r} leaves the generator with a delay; only the weights edge may have one")

    def step(self, tick: int, inputs: Mapping[str, Any]) -> TimedStep:
        s = self.scenario
        self._versions[tick] = inputs["weights"]
        self._versions = {t: v for t, v in self._versions.items() if t > tick - s.max_segments}
        self._admit(tick)
        flat = (s.replicas, -1)
        left = self._length - self._written
        plan = schedule(left.reshape(flat), s.slots)
        end = np.where(left > 0, plan.end.reshape(left.shape), 0)
        complete = np.where(self._rank >= 0, self._rank - self._num_active, end.max(axis=2))
        order = np.argsort(complete, axis=1, kind="stable")
        chosen, stop = self._select(tick, complete, order)

        seconds = decode_s(plan, self._written.reshape(flat), stop, s.prompt_tokens, s.generator)
        begun = (left > 0) & (plan.start.reshape(left.shape) < stop[:, None, None])
        filled = np.where(begun, self._written, 0).sum(axis=(1, 2)) + s.prompt_tokens * begun.any(axis=2).sum(axis=1)
        mean = filled / np.maximum(1, begun.sum(axis=(1, 2)))
        seconds += s.generator.prefill_s(filled.astype(np.float64), (s.prompt_tokens + mean) / 2.0)
        rng = np.random.default_rng([s.seed, _GENERATOR, tick])
        seconds *= self._speed * jitter(s.variation.generator_jitter, s.replicas, rng)

        made = np.clip(stop[:, None, None] - plan.start.reshape(left.shape), 0, left)
        self._written = self._written + made
        age = np.expand_dims(tick - self._admitted, 2)
        self._by_age = self._by_age + made.sum(axis=2, keepdims=True) * (np.arange(s.max_segments) == age)
        batch = self._batch(tick, chosen)
        busy = float(seconds.mean()) + s.generator.tick_s + s.weights_load_s
        duration = float(seconds.max()) + s.generator.tick_s + s.weights_load_s
        carried = self._remove(chosen, order)
        return TimedStep(
            duration_s=duration,
            outputs={"completions": batch},
            metrics={
                "tokens/generated": float(made.sum()),
                "rollout/carried": float(carried),
                "decode_steps": float(stop.max()),
                "busy_replica_s": busy,
            },
            spans=(("weight_sync", 0.0, s.weights_load_s), ("generate", s.weights_load_s, duration)),
        )

    def _admit(self, tick: int) -> None:
        s = self.scenario
        new = self._num_active - self._admitted.shape[1]
        shape = (s.replicas, new, s.group_size)
        rng = np.random.default_rng([s.seed, _LENGTHS, tick])
        lengths = s.lengths.sample(s.replicas * new * s.group_size, rng).reshape(shape)

        def extend(old: Ints, values: Ints | int) -> Ints:
            return np.concatenate([old, np.broadcast_to(values, (s.replicas, new, *old.shape[2:]))], axis=1)

        self._admitted = extend(self._admitted, tick)
        self._rank = extend(self._rank, -1)
        self._length = extend(self._length, lengths)
        self._written = extend(self._written, 0)
        self._by_age = extend(self._by_age, 0)

    def _select(self, tick: int, complete: Ints, order: Ints) -> tuple[Ints, Ints]:
        """([R, P] groups that leave, [R] decode step after which they can): asked as the real generator asks, whenever
        another group is complete."""
        s = self.scenario
        if self._num_active == self._deliver:  # all leave, in order of admission
            return np.broadcast_to(np.arange(self._deliver), (s.replicas, self._deliver)), complete.max(axis=1).clip(0)
        chosen = np.empty((s.replicas, self._deliver), np.int64)
        stop = np.empty(s.replicas, np.int64)
        times = np.take_along_axis(complete, order, axis=1).clip(0)
        for replica in range(s.replicas):
            admitted, ranked, at = self._admitted[replica].tolist(), order[replica].tolist(), times[replica]
            count = self._deliver
            while True:
                now = at[count - 1]
                count = int(np.searchsorted(at, now, side="right"))  # groups that end in one step come together
                found = select_deliveries(
                    admitted,
                    ranked[:count],
                    tick=tick,
                    max_segments=s.max_segments,
                    prompts_per_step=self._deliver,
                )
                if found is not None:
                    break
                count += 1
            chosen[replica], stop[replica] = found, now
        return chosen, stop

    def _batch(self, tick: int, chosen: Ints) -> Batch:
        s = self.scenario
        lengths = np.take_along_axis(self._length, chosen[:, :, None], axis=1)
        by_age = np.take_along_axis(self._by_age, chosen[:, :, None], axis=1)
        born = np.take_along_axis(self._admitted, chosen, axis=1)
        assert int(by_age.sum()) == int(lengths.sum()), "a group left before it was complete"
        made_at = born[:, :, None] + np.arange(s.max_segments)
        versions: dict[int, int] = {}
        for source_tick, version in self._versions.items():
            tokens = int(by_age[made_at == source_tick].sum())
            if tokens:
                versions[version] = versions.get(version, 0) + tokens
        sequences = lengths.size
        return Batch(sequences, int(lengths.sum()) + sequences * s.prompt_tokens, versions)

    def _remove(self, chosen: Ints, order: Ints) -> int:
        """Drop the groups that leave, keep the order of completion of the others; returns unfinished responses."""
        s = self.scenario
        done = (self._written == self._length).all(axis=2)
        rank = np.empty_like(order)
        np.put_along_axis(rank, order, np.broadcast_to(np.arange(self._num_active), order.shape), axis=1)
        stays = np.ones_like(done)
        np.put_along_axis(stays, chosen, False, axis=1)
        kept = np.nonzero(stays)[1].reshape(s.replicas, self._num_active - self._deliver)
        self._rank = np.take_along_axis(np.where(done, rank, -1), kept, axis=1)
        self._admitted = np.take_along_axis(self._admitted, kept, axis=1)
        self._length = np.take_along_axis(self._length, kept[:, :, None], axis=1)
        self._written = np.take_along_axis(self._written, kept[:, :, None], axis=1)
        self._by_age = np.take_along_axis(self._by_age, kept[:, :, None], axis=1)
        return int((self._written < self._length).sum())

    def save(self) -> Any:
        """Every array is replaced, never changed, so the references are the state."""
        return self._versions, self._admitted, self._rank, self._length, self._written, self._by_age

    def load(self, state: Any) -> None:
        self._versions, self._admitted, self._rank, self._length, self._written, self._by_age = state


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
        duration = s.trainer.batch_s(batch.tokens) * float(jitter(s.variation.trainer_jitter, 1, rng)[0])
        staleness = {self._version - version: tokens for version, tokens in batch.tokens_of_version.items()}
        self._version += 1
        metrics = {f"{STALENESS_METRIC}{lag}": float(tokens) for lag, tokens in sorted(staleness.items())}
        metrics["tokens/trained"] = float(sum(staleness.values()))
        outputs = {"weights": self._version}
        if s.evaluation is not None:
            outputs["eval_weights"] = self._version
        return TimedStep(
            duration_s=duration,
            outputs=outputs,
            metrics=metrics,
            spans=(("train", 0.0, duration),),
        )

    def save(self) -> Any:
        return self._version

    def load(self, state: Any) -> None:
        self._version = state
