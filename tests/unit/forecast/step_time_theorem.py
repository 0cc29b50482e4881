"""The step-time theorem as two small optimisation problems (LlamaRL, arXiv:2505.24034, the section on theory).

This is the continuous model, in which the theorem is proved (``docs/forecast.md``): replicas scale without rounding, the
split of the devices is a real number, hand-over and rewards cost nothing. ``search.py`` answers real questions, with
integers and rooflines; here one sees why memory decoupling helps, and that rounding can undo it.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

__all__ = ["RolesProblem", "asynchronous_step_s", "integer_split_step_s", "synchronous_step_s"]

SampleTime = Callable[[float, int], float]
"""(batch of one replica, model-parallel size) -> seconds a sample of one replica: batch time / batch."""


@dataclass(frozen=True, kw_only=True)
class RolesProblem:
    """Symbols as in the paper's notes: capital letters are given, functions are the costs of one replica."""

    devices: int
    batch: int
    """Responses a step, over all replicas."""
    memory: float
    """Bytes of one device."""
    weights: float
    """Bytes of one copy of the weights."""
    train_states: float
    """Training state in copies of the weights, c_t."""
    generate_states: float
    """Generator's weights in copies of the weights, c_g."""
    activation: float
    """Bytes a sample in a training micro-batch, A_t."""
    cache: float
    """Bytes a sample being generated, K_g."""
    train_time: SampleTime
    generate_time: SampleTime
    parallel_sizes: Sequence[int]
    """Model-parallel sizes m to choose from."""
    batch_sizes: Sequence[float]
    """Replica batches b to choose from, ascending."""


def synchronous_step_s(problem: RolesProblem) -> float:
    """Best step of the co-located, synchronous system: one common m, one shared memory; ``inf`` if nothing fits."""
    p = problem
    best = math.inf
    for m in p.parallel_sizes:
        room = m * p.memory - (p.train_states + p.generate_states) * p.weights
        least = list(accumulate((p.generate_time(b, m) for b in p.batch_sizes), min))
        caches = [p.cache * b for b in p.batch_sizes]
        for train_batch in p.batch_sizes:
            fitting = bisect_right(caches, room - p.activation * train_batch)
            if fitting == 0:
                break
            best = min(best, p.batch / p.devices * m * (p.train_time(train_batch, m) + least[fitting - 1]))
    return best


def _device_seconds(problem: RolesProblem, time: SampleTime, fixed: float, each: float) -> float:
    """Least device-seconds a sample of one role that has its memory to itself; ``inf`` if nothing fits."""
    best = math.inf
    for m in problem.parallel_sizes:
        for b in problem.batch_sizes:
            if fixed + each * b <= m * problem.memory:
                best = min(best, m * time(b, m))
    return best


def asynchronous_step_s(problem: RolesProblem) -> float:
    """Best step of the separate, asynchronous system with a real-valued split: both roles end together."""
    p = problem
    train = _device_seconds(p, p.train_time, p.train_states * p.weights, p.activation)
    generate = _device_seconds(p, p.generate_time, p.generate_states * p.weights, p.cache)
    return p.batch / p.devices * (train + generate)


def integer_split_step_s(problem: RolesProblem) -> float:
    """Best step of the separate system when replicas are whole: what rounding makes of the theorem."""
    p = problem
    best = math.inf
    for m_t in p.parallel_sizes:
        for m_g in p.parallel_sizes:
            for trainers in range(1, (p.devices - m_g) // m_t + 1):
                generators = (p.devices - trainers * m_t) // m_g
                train = _role_step(p, p.train_time, p.train_states * p.weights, p.activation, m_t, trainers)
                generate = _role_step(p, p.generate_time, p.generate_states * p.weights, p.cache, m_g, generators)
                best = min(best, max(train, generate))
    return best


def _role_step(p: RolesProblem, time: SampleTime, fixed: float, each: float, m: int, replicas: int) -> float:
    fitting = [b for b in p.batch_sizes if fixed + each * b <= m * p.memory]
    return min((p.batch / replicas * time(b, m) for b in fitting), default=math.inf)
