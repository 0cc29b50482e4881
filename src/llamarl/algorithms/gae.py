"""Generalized advantage estimation (arXiv:1506.02438) over one response's trained tokens, or its turns, in float64 NumPy.

Token t is an action; ``values[t]`` estimates the return from there on, before it is chosen. The response ends after its
last trained token, whatever ended it, so nothing is bootstrapped beyond::

    delta_t = r_t + gamma V_{t+1} - V_t          V_T = 0
    A_t     = delta_t + gamma lambda A_{t+1}     A_T = 0
    return  = A_t + V_t                          what the critic learns

A turn is an action too: its first token's prefix is the state in which it is chosen, and each of its tokens has its
advantage.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["gae", "suffix_sums", "turn_gae", "turn_lengths"]

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


def turn_lengths(
    starts: npt.NDArray[np.integer], ends: npt.NDArray[np.integer], mask: npt.NDArray[np.bool_]
) -> list[int]:
    """Trained tokens of each turn.

    Args:
        starts: First token of each turn, [N].
        ends: One beyond the last token of each turn, [N].
        mask: True on trained tokens of the response, [R]; none lies outside of the turns.

    Raises:
        ValueError: A trained token belongs to no turn, or to two.
    """
    lengths = [int(mask[start:end].sum()) for start, end in zip(starts, ends, strict=True)]
    if sum(lengths) != int(mask.sum()):
        raise ValueError(f"turns of {lengths} trained tokens do not add up to the response's {int(mask.sum())}")
    return lengths


def turn_gae(rewards: Array, values: Array, lengths: list[int], *, gamma: float, lam: float) -> tuple[Array, Array]:
    """Advantages and returns of every token, [T] each: those of its turn.

    A turn without trained tokens is no action: what it earned is the last earlier turn's that has
    some (the first later one's, where there is none).

    Args:
        rewards: r_j, [N].
        values: V_t of each trained token, [T]; only the first of each turn is used.
        lengths: Trained tokens of each turn, [N], adding up to T.
        gamma: Discount a turn, in [0, 1].
        lam: In [0, 1].

    Raises:
        ValueError: The arrays do not fit together.
    """
    rewards, lengths = _actions(rewards, values, lengths)
    firsts = np.cumsum([0, *lengths[:-1]]) if lengths else np.zeros(0, int)
    advantages, returns = gae(rewards, values[firsts], gamma=gamma, lam=lam)
    return np.repeat(advantages, lengths), np.repeat(returns, lengths)


def _actions(rewards: Array, values: Array, lengths: list[int]) -> tuple[Array, list[int]]:
    """Rewards and lengths of the turns that have trained tokens; nothing that was earned is lost."""
    if len(rewards) != len(lengths) or sum(lengths) != len(values):
        raise ValueError(f"{len(rewards)} turn rewards, turns of {lengths} tokens and {len(values)} values do not fit")
    kept: list[float] = []
    early = 0.0
    for reward, n in zip(rewards.tolist(), lengths, strict=True):
        if n:
            kept.append(reward + early)
            early = 0.0
        elif kept:
            kept[-1] += reward
        else:
            early += reward
    return np.array(kept, np.float64), [n for n in lengths if n]
