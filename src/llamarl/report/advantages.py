"""Advantages of a batch, from its rewards by the run's own estimator, where those alone decide them.

Rollouts are written before the trainer sees them, so they hold rewards. The estimator is a pure function of the batch's
rewards unless a critic, KL inside the reward, a choice among groups or a function of the user's own has a say.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from llamarl.algorithms.advantages import compute_advantages, overlong_penalty
from llamarl.algorithms.config import CRITIC_ADVANTAGES, AlgorithmConfig
from llamarl.errors import LlamaRLError
from llamarl.import_path import is_import_path
from llamarl.observability.rollouts import Rollout
from llamarl.report.rollout_index import TickIndex
from llamarl.types import Score

__all__ = ["advantages_of", "why_no_advantages", "with_advantages"]


def why_no_advantages(config: Mapping[str, Any]) -> str:
    """Why a run's advantages cannot be told from its rewards; empty where they can."""
    algorithm = config.get("algorithm")
    if not isinstance(algorithm, dict):
        return "the run's configuration is missing"
    advantage = str(algorithm.get("advantage", "group_mean"))
    if advantage in CRITIC_ADVANTAGES:
        return "they come from a critic, token by token, and are not recorded"
    if is_import_path(advantage):
        return f"{advantage} is a function of your own, which a report does not call"
    if algorithm.get("kl_coef") and algorithm.get("kl_place", "loss") != "loss":
        return "KL is taken off the reward, and not recorded"
    if config.get("dynamic_sampling", {}).get("enabled") and "batch" in advantage:
        return "they depend on which groups were chosen, which is not recorded"
    return ""


def advantages_of(index: TickIndex, config: Mapping[str, Any]) -> list[float | None]:
    """One an entry of ``index``, None where the response has no reward; empty where rewards alone do not tell."""
    members = [[(index.reward[i], index.length[i]) for i in group] for _, group in index.groups()]
    return _estimate(members, config)


def with_advantages(rollouts: Sequence[Rollout], config: Mapping[str, Any]) -> list[Rollout]:
    """The samples of one tick with the advantages that their rewards give."""
    groups = [list(group) for _, group in groupby(rollouts, key=lambda sample: sample.response.prompt_index)]
    scored = [[(_reward(sample), len(sample.response.tokens)) for sample in group] for group in groups]
    found = _estimate(scored, config)
    if not found:
        return list(rollouts)
    return [dataclasses.replace(sample, advantage=advantage) for sample, advantage in zip(rollouts, found, strict=True)]


def _reward(sample: Rollout) -> float | None:
    outcome = sample.response.outcome
    return outcome.value if isinstance(outcome, Score) else None


def _estimate(groups: Sequence[Sequence[tuple[float | None, int]]], config: Mapping[str, Any]) -> list[float | None]:
    """One a response of (reward, tokens), group by group; empty where rewards alone do not tell."""
    if why_no_advantages(config):
        return []
    try:
        algorithm = AlgorithmConfig(**config["algorithm"])
    except (ValueError, TypeError, LlamaRLError):  # written by another version
        return []
    adjusted = [
        np.array(
            [math.nan if value is None else value - overlong_penalty(length, algorithm) for value, length in group],
            dtype=np.float64,
        )
        for group in groups
    ]
    flat = [float(value) for group in compute_advantages(adjusted, algorithm) for value in group]
    rewards = [value for group in groups for value, _ in group]
    return [None if reward is None else value for reward, value in zip(rewards, flat, strict=True)]
