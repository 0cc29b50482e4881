"""How long the parts of a simulated tick take: from rooflines, or as straight lines whose slopes were measured.

A generator's cost answers two questions for many replicas at once, a trainer's and a reward's one each. All are plain
frozen values: a scenario that holds them can be compared, pickled and replaced field by field.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt

from llamarl.errors import PlanError
from llamarl.planner.hardware import Hardware
from llamarl.planner.model_spec import ModelSpec
from llamarl.planner.rooflines import GeneratorLayout, decode_step_s, prefill_s

__all__ = [
    "GeneratorCost",
    "LinearGeneratorCost",
    "RewardCost",
    "RooflineGeneratorCost",
    "TrainerCost",
    "Variation",
    "jitter",
]

Floats = npt.NDArray[np.float64]


class GeneratorCost(Protocol):
    """Time of one generator replica. Arrays go in, an array of the same shape comes out."""

    def decode_step_s(self, active: Floats, context: Floats) -> Floats:
        """Seconds in which each of ``active`` sequences, at mean ``context`` tokens, gains one token."""
        ...

    def prefill_s(self, tokens: Floats, context: Floats) -> Floats:
        """Seconds in which the cache of ``tokens`` tokens is filled; each attends to ``context`` on average."""
        ...

    @property
    def tick_s(self) -> float:
        """Seconds of a tick that do not depend on its work."""
        ...


@dataclass(frozen=True, kw_only=True)
class LinearGeneratorCost:
    """Straight lines: what a measurement of whole ticks can tell apart."""

    tick_s: float = 0.0
    step_s: float = 0.0
    """A decode step, whatever its size."""
    sequence_s: float = 0.0
    """More for each active sequence of a step."""
    cache_token_s: float = 0.0
    """More for each cached token that a step attends to."""
    prefill_token_s: float = 0.0

    def decode_step_s(self, active: Floats, context: Floats) -> Floats:
        return self.step_s + self.sequence_s * active + self.cache_token_s * active * context

    def prefill_s(self, tokens: Floats, context: Floats) -> Floats:
        return self.prefill_token_s * tokens


@dataclass(frozen=True, kw_only=True, eq=False)
class RooflineGeneratorCost:
    """The planner's rooflines of one replica."""

    hardware: Hardware
    model: ModelSpec
    layout: GeneratorLayout
    speed: float = 1.0
    """Devices that work as one without loss: the threads of a replica where a device is one CPU core."""
    tick_s: float = 0.0

    def decode_step_s(self, active: Floats, context: Floats) -> Floats:
        step = decode_step_s(self.hardware, self.model, self.layout, active, context)
        return np.asarray(step, dtype=np.float64) / self.speed

    def prefill_s(self, tokens: Floats, context: Floats) -> Floats:
        """Between sizes that are powers of two the planner's value is interpolated."""
        sizes, values, attention = self._prefill_table
        if tokens.size and tokens.max() > sizes[-1]:
            raise PlanError(f"a replica would fill {tokens.max():.3g} tokens of cache in one tick: use more replicas")
        return (np.interp(tokens, sizes, values) + attention * tokens * context) / self.speed

    @cached_property
    def _prefill_table(self) -> tuple[Floats, Floats, float]:
        sizes = np.array([0.0, *(2.0**i for i in range(41))])
        values = np.array([prefill_s(self.hardware, self.model, self.layout, float(t), 0.0) for t in sizes])
        attention = self.model.attention_flops(1.0) * self.model.layers / self.layout.devices
        return sizes, values, attention / self.hardware.attention_rate


@dataclass(frozen=True, kw_only=True)
class TrainerCost:
    """An optimizer step over a batch, on all trainer ranks together."""

    tick_s: float = 0.0
    """Seconds of a tick that do not depend on its batch."""
    token_s: float = 0.0
    """More for each token of the batch, prompts included."""

    def batch_s(self, tokens: float) -> float:
        return self.tick_s + self.token_s * tokens


@dataclass(frozen=True, kw_only=True)
class RewardCost:
    """Judging a batch."""

    tick_s: float = 0.0
    sample_s: float = 0.0
    """Mean time of one sample's reward, log-normal."""
    sample_sigma: float = 0.0
    """Standard deviation of its logarithm; 0: all alike."""
    workers: int = 1
    """Samples judged at once."""

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise PlanError(f"reward workers must be at least 1, got {self.workers}")

    def batch_s(self, samples: int, rng: np.random.Generator) -> float:
        """The pool's share of the sum, but never less than the slowest sample (greedy scheduling is at most their sum)."""
        if self.sample_s == 0.0:
            return self.tick_s
        if self.sample_sigma == 0.0:
            return self.tick_s + self.sample_s * math.ceil(samples / self.workers)
        mu = math.log(self.sample_s) - self.sample_sigma**2 / 2.0
        each = rng.lognormal(mu, self.sample_sigma, samples)
        return self.tick_s + max(float(each.sum()) / self.workers, float(each.max()))


@dataclass(frozen=True, kw_only=True)
class Variation:
    """What differs between replicas and from tick to tick, besides lengths."""

    slow_fraction: float = 0.0
    """Share of generator replicas that are slow for the whole run."""
    slow_factor: float = 1.0
    """How many times as long they take."""
    generator_jitter: float = 0.0
    """Standard deviation of the logarithm of a factor of mean 1, drawn for each replica and tick."""
    trainer_jitter: float = 0.0
    """The same for the trainer, drawn each tick."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.slow_fraction <= 1.0:
            raise PlanError(f"the share of slow replicas must be 0 to 1, got {self.slow_fraction}")
        if not 1.0 <= self.slow_factor < math.inf:
            raise PlanError(f"a slow replica takes at least as long as another: factor >= 1, got {self.slow_factor}")
        for name in ("generator_jitter", "trainer_jitter"):
            if not 0.0 <= getattr(self, name) <= 3.0:
                raise PlanError(f"{name} must be 0 to 3, got {getattr(self, name)}")

    def slow_replicas(self, replicas: int, seed: int) -> Floats:
        """[replicas] factor of each: the slow ones are drawn once a run, and any share is at least one of them."""
        factors = np.ones(replicas)
        count = max(round(self.slow_fraction * replicas), 1 if self.slow_fraction > 0.0 else 0)
        factors[np.random.default_rng([seed, 3]).permutation(replicas)[:count]] = self.slow_factor
        return factors


def jitter(sigma: float, size: int, rng: np.random.Generator) -> Floats:
    """[size] log-normal factors of mean 1."""
    return np.ones(size) if sigma == 0.0 else rng.lognormal(-sigma * sigma / 2.0, sigma, size)
