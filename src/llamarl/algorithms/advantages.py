"""Advantages from rewards: pure functions over one group's rewards, in float64 NumPy.

A sample without a reward is NaN on the way in. It is no part of any baseline and has advantage 0 on the way out; the
trainer does not train it. Every token of a response has the response's advantage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from llamarl.errors import ConfigError
from llamarl.import_path import call
from llamarl.settings.algorithms import AlgorithmConfig
from llamarl.strict import is_import_path
from llamarl.types import RIGHT, Response, Score

__all__ = [
    "ESTIMATORS",
    "compute_advantages",
    "group_mean",
    "group_std",
    "leave_one_out",
    "max_rl",
    "shaped_reward",
    "shaping",
]

Rewards = npt.NDArray[np.float64]

_STD_EPSILON = 1e-6


def _agree(scored: Rewards) -> bool:
    """No signal. Rewards are compared: less their mean, equal ones are not exactly 0 (seven times 0.1, say)."""
    return len(scored) == 0 or bool((scored == scored[0]).all())


def group_mean(rewards: Rewards) -> Rewards:
    """r_i - mean of the group's rewards, the sample itself included (LlamaRL, Sec. 6). [G] -> [G].

    Equal to (n - 1) / n times ``leave_one_out``, n being the members with a reward.
    """
    scored = ~np.isnan(rewards)
    if _agree(rewards[scored]):
        return np.zeros_like(rewards)
    return np.where(scored, rewards - rewards[scored].mean(), 0.0)


def leave_one_out(rewards: Rewards) -> Rewards:
    """r_i - mean of the *other* members' rewards (RLOO, arXiv:2402.14740): an unbiased baseline. [G] -> [G].

    A lone scored member has no others to compare with: its advantage is 0.
    """
    scored = ~np.isnan(rewards)
    n = int(scored.sum())
    if _agree(rewards[scored]):
        return np.zeros_like(rewards)
    others = (rewards[scored].sum() - rewards) / (n - 1)
    return np.where(scored, rewards - others, 0.0)


def group_std(rewards: Rewards) -> Rewards:
    """(r_i - mean) / (std + 1e-6), std with n - 1 (GRPO, arXiv:2402.03300). [G] -> [G].

    Groups whose rewards nearly agree are blown up to unit scale; that is the estimator's known bias.
    """
    scored = ~np.isnan(rewards)
    if _agree(rewards[scored]):
        return np.zeros_like(rewards)
    return group_mean(rewards) / (rewards[scored].std(ddof=1) + _STD_EPSILON)


def max_rl(rewards: Rewards) -> Rewards:
    """(r_i - mean) / mean of the group's rewards, which are not negative (MaxRL, arXiv:2602.02710). [G] -> [G].

    With rewards of 0 and 1 its mean over the group is on average the gradient of the sum of pass@k / k
    for k from 1 to G - 1: a prompt that is seldom solved counts as much as its rate is small. (The
    source's form without a baseline has the term of k = G too; the mean, taken off only where
    something was earned, costs it.) 0 where nothing was earned.
    """
    scored = ~np.isnan(rewards)
    if _agree(rewards[scored]):
        return np.zeros_like(rewards)
    mean = rewards[scored].mean()
    return group_mean(rewards) / mean if mean > 0 else np.zeros_like(rewards)


def overlong_penalty(length: int, config: AlgorithmConfig) -> float:
    """What a response of ``length`` tokens loses (DAPO, arXiv:2503.14476): 0 up to ``overlong_limit
    - overlong_buffer``, then linearly up to ``overlong_penalty`` at the limit and beyond. Not
    negative."""
    if config.overlong_buffer == 0:
        return 0.0
    over = (length - (config.overlong_limit - config.overlong_buffer)) / config.overlong_buffer
    return config.overlong_penalty * min(1.0, max(0.0, over))


def shaping(
    value: float,
    tokens: Sequence[int] | npt.NDArray[np.integer[Any]],
    config: AlgorithmConfig,
    written: npt.NDArray[np.bool_] | None = None,
) -> float:
    """What length and repetitions add to a response's reward, before any baseline.

    Args:
        value: The reward; at least 1 is right.
        tokens: Of the response.
        written: True on those that the policy wrote; None: all. The others count in its length alone.
    """
    added = cosine_length(len(tokens), config.cosine_length, right=value >= RIGHT)
    if config.repetition_penalty:
        added -= config.repetition_penalty * repeated_share(tokens, config.repetition_ngram, written)
    return added - overlong_penalty(len(tokens), config)


def shaped_reward(response: Response, config: AlgorithmConfig) -> float:
    """The reward of a scored response with what its length and repetitions add."""
    assert isinstance(response.outcome, Score)
    value = response.outcome.value
    return value + shaping(value, response.tokens, config, response.policy_versions >= 0)


def cosine_length(length: int, limit: int, *, right: bool) -> float:
    """What a length adds to a reward of 0 or 1 (arXiv:2502.03373): a right answer falls from 1 to
    0.5 and a wrong one rises from -1 to -0.5 along half a cosine, up to ``limit`` tokens; 0 with a
    ``limit`` of 0."""
    if limit == 0:
        return 0.0
    way = 0.25 * (1.0 - math.cos(math.pi * min(1.0, length / limit)))
    return -way if right else way - 1.0


def repeated_share(
    tokens: Sequence[int] | npt.NDArray[np.integer[Any]], size: int, written: npt.NDArray[np.bool_] | None = None
) -> float:
    """Share of a response's runs of ``size`` tokens that were there before (arXiv:2502.03373); 0 of
    a shorter one. A run with a token that is not ``written`` is none: an environment repeats itself."""
    data = np.asarray(tokens, np.int64).tobytes()  # slices of bytes: of 100,000 tokens each run is made and compared
    starts: Sequence[int] = range(len(tokens) - size + 1)
    if written is not None and starts:
        starts = np.flatnonzero(np.lib.stride_tricks.sliding_window_view(written, size).all(axis=1)).tolist()
    runs = {data[8 * start : 8 * (start + size)] for start in starts}
    return 1.0 - len(runs) / len(starts) if starts else 0.0


ESTIMATORS: dict[str, Callable[[Rewards], Rewards]] = {
    "group_mean": group_mean,
    "leave_one_out": leave_one_out,
    "group_std": group_std,
    "max_rl": max_rl,
}
"""``algorithm.advantage`` -> function of one group's rewards, for those that look at one group alone."""


def compute_advantages(
    rewards: Sequence[Rewards],
    config: AlgorithmConfig,
    sum_over_ranks: Callable[[Rewards], Rewards] = lambda values: values,
    parts: Sequence[Rewards] | None = None,
) -> list[Rewards]:
    """Advantages of every response of the step, group by group.

    Args:
        rewards: One array [G_i] a group; NaN where the sample failed.
        parts: Of each group the named parts of its rewards, [G_i, K], for ``gdpo``; NaN where a sample lacks one.
        sum_over_ranks: Adds an array up over the ranks that hold the step's other groups; called the same number of
            times on each.

    Returns:
        One array [G_i] a group; finite, 0 where the sample failed.
    """
    groups = [np.asarray(group, dtype=np.float64) for group in rewards]
    if config.advantage in ESTIMATORS:
        return [ESTIMATORS[config.advantage](group) for group in groups]
    if is_import_path(config.advantage):
        return [_by_users_function(config.advantage, group) for group in groups]
    # the trainer replaces a critic's and a teacher's by an advantage a token
    if config.advantage == "reward" or config.has_critic or config.distills:
        return [np.nan_to_num(group, nan=0.0) for group in groups]
    if config.advantage == "gdpo":  # each reward normalised apart, then all by the step (arXiv:2601.05242)
        apart = parts if parts is not None else [group[:, None] for group in groups]
        groups = [
            np.where(np.isnan(group), np.nan, sum((group_std(part) for part in each.T), np.zeros(len(group))))
            for group, each in zip(groups, apart, strict=True)
        ]
    if config.advantage == "group_mean_batch_std":  # REINFORCE++-baseline (arXiv:2501.03262)
        groups = [np.where(np.isnan(group), np.nan, group_mean(group)) for group in groups]
    count, total = sum_over_ranks(_count_and_sum(groups))
    # groups less their means have none; the rounding of their sum would give silent ones a signal
    mean = 0.0 if config.advantage in ("group_mean_batch_std", "gdpo") else total / max(1.0, count)
    squares = [(group - mean) ** 2 for group in groups]
    deviation = np.sqrt(sum_over_ranks(_count_and_sum(squares))[1] / max(1.0, count - 1.0))
    return [np.nan_to_num((group - mean) / (deviation + _STD_EPSILON), nan=0.0) for group in groups]


def _by_users_function(name: str, rewards: Rewards) -> Rewards:
    """Advantages of one group by a function of the user's own; 0 for samples without a reward,
    whatever it says of them."""
    scored = ~np.isnan(rewards)
    if not scored.any():
        return np.zeros_like(rewards)
    answer = call(name, "algorithm.advantage", rewards.copy())
    try:
        found = np.asarray(answer, dtype=np.float64)
    except (TypeError, ValueError, RuntimeError):  # the last: a tensor with a gradient
        raise ConfigError(
            f"algorithm.advantage {name!r} returned {answer!r:.100}, expected an array of numbers"
        ) from None
    if found.shape != rewards.shape or not np.isfinite(found[scored]).all():
        raise ConfigError(
            f"algorithm.advantage {name!r} made {answer!r:.200} of the rewards {rewards.tolist()}: expected one finite "
            f"advantage for each (nan is a sample without a reward)"
        )
    return np.where(scored, found, 0.0)


def _count_and_sum(groups: Sequence[Rewards]) -> Rewards:
    values = np.concatenate([*groups, np.zeros(0)])
    scored = values[~np.isnan(values)]
    return np.array([len(scored), scored.sum()], dtype=np.float64)
