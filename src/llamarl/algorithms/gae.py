"""Generalized advantage estimation (arXiv:1506.02438) over one response's trained tokens, in float64 NumPy.

Token t is an action; ``values[t]`` estimates the return from there on, before it is chosen. The response ends after its
last trained token, whatever ended it, so nothing is bootstrapped beyond::

    delta_t = r_t + gamma V_{t+1} - V_t          V_T = 0
    A_t     = delta_t + gamma lambda A_{t+1}     A_T = 0
    return  = A_t + V_t                          what the critic learns
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["gae", "suffix_sums"]

Array = npt.NDArray[np.float64]


def gae(rewards: Array, values: Array, *, gamma: float, lam: float) -> tuple[Array, Array]:
    """Advantages and returns of one response, [T] each.

    ``lam = 1`` is the discounted return less the value (Monte Carlo, unbiased whatever the critic says); ``lam = 0`` is
    the one-step temporal difference.

    Args:
        rewards: r_t, [T]; most often 0 but for the last.
        values: V_t, [T], finite.
        gamma: Discount a token, in [0, 1].
        lam: In [0, 1].

    Raises:
        ValueError: The arrays differ in shape.
    """
    if rewards.shape != values.shape:
        raise ValueError(f"rewards {rewards.shape} and values {values.shape} must have one shape")
    rewards, values = rewards.astype(np.float64), values.astype(np.float64)
    deltas = rewards + gamma * np.append(values[1:], 0.0) - values
    advantages = np.zeros_like(deltas)
    following = 0.0
    for t in range(len(deltas) - 1, -1, -1):
        following = deltas[t] + gamma * lam * following
        advantages[t] = following
    return advantages, advantages + values


def suffix_sums(values: Array) -> Array:
    """Sum of ``values[t:]`` for every t, [T] -> [T]."""
    return np.cumsum(values[::-1])[::-1]
