"""Advantages from rewards: pure functions over one group's rewards, in float64 NumPy.

A sample without a reward is NaN on the way in. It is no part of any baseline and has advantage 0 on the way out; the
trainer does not train it. Every token of a response has the response's advantage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from llamarl.algorithms.config import AlgorithmConfig

__all__ = ["ESTIMATORS", "compute_advantages", "group_mean", "group_std", "leave_one_out"]

Rewards = npt.NDArray[np.float64]

_STD_EPSILON = 1e-6


def group_mean(rewards: Rewards) -> Rewards:
    """r_i - mean of the group's rewards, the sample itself included (LlamaRL, Sec. 6). [G] -> [G].

    Equal to (n - 1) / n times ``leave_one_out``, n being the members with a reward.
    """
    scored = ~np.isnan(rewards)
    if not scored.any():
        return np.zeros_like(rewards)
    return np.where(scored, rewards - rewards[scored].mean(), 0.0)


def leave_one_out(rewards: Rewards) -> Rewards:
    """r_i - mean of the *other* members' rewards (RLOO, arXiv:2402.14740): an unbiased baseline. [G] -> [G].

    A lone scored member has no others to compare with: its advantage is 0.
    """
    scored = ~np.isnan(rewards)
    n = int(scored.sum())
    if n < 2:
        return np.zeros_like(rewards)
    others = (rewards[scored].sum() - rewards) / (n - 1)
    return np.where(scored, rewards - others, 0.0)


def group_std(rewards: Rewards) -> Rewards:
    """(r_i - mean) / (std + 1e-6), std with n - 1 (GRPO, arXiv:2402.03300). [G] -> [G].

    Groups whose rewards nearly agree are blown up to unit scale; that is the estimator's known bias.
    """
    scored = ~np.isnan(rewards)
    if scored.sum() < 2:
        return np.zeros_like(rewards)
    return group_mean(rewards) / (rewards[scored].std(ddof=1) + _STD_EPSILON)


ESTIMATORS: dict[str, Callable[[Rewards], Rewards]] = {
    "group_mean": group_mean,
    "leave_one_out": leave_one_out,
    "group_std": group_std,
}
"""``algorithm.advantage`` -> function of one group's rewards."""


def compute_advantages(rewards: Sequence[Rewards], config: AlgorithmConfig) -> list[Rewards]:
    """Advantages of every response of the step, group by group.

    Args:
        rewards: One array [G_i] a group; NaN where the sample failed.

    Returns:
        One array [G_i] a group; finite, 0 where the sample failed.
    """
    estimate = ESTIMATORS[config.advantage]
    return [estimate(np.asarray(group, dtype=np.float64)) for group in rewards]
