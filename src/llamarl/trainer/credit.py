"""What each response and each of its tokens earns: rewards, penalties, and advantages that differ from token to token.

    reward of the response + length and repetitions − KL of the response ("reward")  ─▶ group baseline ─▶ one advantage
    reward at the last token, KL of each token ("token_reward")  ─▶ GAE with the critic's values ─▶ an advantage a token
    reward at each turn's end                                    ─▶ GAE over turns, and over the tokens in each

Pure, NumPy float64. T is the number of a response's trained tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from llamarl.algorithms.advantages import shaped_reward
from llamarl.algorithms.gae import gae, suffix_sums, turn_gae, turn_lengths
from llamarl.algorithms.kl import sampled_kl
from llamarl.settings.algorithms import AlgorithmConfig
from llamarl.types import Failure, Response, Score

__all__ = ["response_reward", "reward_parts", "standardize", "token_advantages", "value_targets"]

Array = npt.NDArray[np.float64]

_EPSILON = 1e-8


def response_reward(response: Response, config: AlgorithmConfig) -> float:
    """The reward that a baseline sees; NaN for a failed response.

    Raises:
        ValueError: The response was never judged, its reward is not finite, or KL is to be taken off and there are no
            reference log-probs.
    """
    if response.outcome is None:
        raise ValueError(
            f"response {response.prompt_index}/{response.sample_index} reached the trainer without a verdict:"
            " wire a reward executor between generator and trainer"
        )
    if isinstance(response.outcome, Failure):
        return float("nan")
    if not math.isfinite(response.outcome.value):  # it would pass for a failed one that nobody counts
        raise ValueError(
            f"response {response.prompt_index}/{response.sample_index} has the reward {response.outcome.value}: an "
            "executor of your own gives a finite one, or a llamarl.types.Failure"
        )
    reward = shaped_reward(response, config)
    if config.kl_coef and config.kl_place == "reward" and response.loss_mask.any():
        reward -= config.kl_coef * float(_token_kl(response, config).sum())
    return reward


def reward_parts(responses: Sequence[Response]) -> Array:
    """The named parts of a group's rewards, by name, [G, K]; a reward without parts is the only one.
    NaN where a response failed or lacks a part."""
    scores = [r.outcome for r in responses]
    names = sorted({name for s in scores if isinstance(s, Score) for name in s.parts})
    if not names:
        return np.array([[s.value if isinstance(s, Score) else np.nan] for s in scores], np.float64).reshape(-1, 1)
    found = [[s.parts.get(name, np.nan) if isinstance(s, Score) else np.nan for name in names] for s in scores]
    return np.array(found, np.float64)


def token_advantages(response: Response, advantage: float, config: AlgorithmConfig) -> Array | None:
    """An advantage a trained token, [T]; None where all of them have the response's.

    Args:
        advantage: The response's, by ``algorithm.advantage``; not used by ``gae`` and ``distillation``.
    """
    if config.has_critic:
        if response.values is None:
            raise ValueError(
                f"response {response.prompt_index}/{response.sample_index} has no values, which algorithm.advantage ="
                f" {config.advantage!r} needs: wire a critic executor before the trainer"
            )
        return _gae(response, response.values[response.loss_mask], config)[0]
    if config.distills:
        return _teacher_gap(response, config)
    if config.kl_coef and config.kl_place == "token_reward":
        return advantage - config.kl_coef * suffix_sums(_token_kl(response, config))
    return None


def value_targets(response: Response, values: npt.NDArray[np.floating], config: AlgorithmConfig) -> Array:
    """What the critic should have said before each trained token, [T]: its own estimate plus the advantage.

    Args:
        values: The critic's estimates, [T].
    """
    return _gae(response, values, config)[1]


def standardize(arrays: Sequence[Array], sum_over_ranks: Callable[[Array], Array]) -> list[Array]:
    """(x - mean) / (std + 1e-8) over all elements of the step; with a single one, x - mean.

    Args:
        sum_over_ranks: Adds an array up over the ranks that hold the step's other responses.
    """
    joined = np.concatenate([*arrays, np.zeros(0)])
    count, total = sum_over_ranks(np.array([len(joined), joined.sum()], np.float64))
    mean = total / max(1.0, count)
    squares = sum_over_ranks(np.array([np.square(joined - mean).sum()], np.float64))[0]
    deviation = np.sqrt(squares / max(1.0, count - 1.0))
    return [(array - mean) / (deviation + _EPSILON) if count > 1 else array - mean for array in arrays]


def _gae(response: Response, values: npt.NDArray[np.floating], config: AlgorithmConfig) -> tuple[Array, Array]:
    of_tokens = np.zeros(len(values))
    if config.kl_coef and config.kl_place == "token_reward":
        of_tokens -= config.kl_coef * _token_kl(response, config)
    estimates = values.astype(np.float64)
    if config.advantage == "gae":
        of_tokens[-1] += response_reward(response, config)
        return gae(of_tokens, estimates, gamma=config.gae_gamma, lam=config.gae_lambda)
    of_turns, lengths = _turns(response, config)
    ends = np.cumsum(lengths)
    of_turns += [of_tokens[end - n : end].sum() for n, end in zip(lengths, ends, strict=True)]
    return turn_gae(of_turns, estimates, lengths, gamma=config.gae_gamma, lam=config.gae_lambda)


def _turns(response: Response, config: AlgorithmConfig) -> tuple[Array, list[int]]:
    """Reward and trained tokens of each turn; what the response earns beside its turns (a judge's
    verdict on the whole, less penalties) is its last turn's. A response without turns is one
    turn."""
    if not response.turns:
        return np.array([response_reward(response, config)]), [int(response.loss_mask.sum())]
    rewards = np.array([turn.reward for turn in response.turns], np.float64)
    rewards[-1] += response_reward(response, config) - rewards.sum()
    starts = np.array([turn.start for turn in response.turns])
    ends = np.array([turn.end for turn in response.turns])
    return rewards, turn_lengths(starts, ends, response.loss_mask)


def _teacher_gap(response: Response, config: AlgorithmConfig) -> Array:
    """log p_teacher - log mu of each trained token, [T]: what is known before the policy has seen
    it; the loss puts log pi in mu's place."""
    if response.reference_logprobs is None or (config.teacher_top_k and response.top_tokens is None):
        raise ValueError(
            f"response {response.prompt_index}/{response.sample_index} has no teacher's log-probs, which algorithm.advantage"
            " = 'distillation' needs: wire a reference executor before the trainer"
        )
    own = response.loss_mask
    return response.reference_logprobs[own].astype(np.float64) - response.behavior_logprobs[own].astype(np.float64)


def _token_kl(response: Response, config: AlgorithmConfig) -> Array:
    """Estimate of KL(mu || reference) at each trained token, from what was recorded, [T]."""
    if response.reference_logprobs is None:
        raise ValueError(
            f"response {response.prompt_index}/{response.sample_index} has no reference log-probs, which"
            " algorithm.kl_coef > 0 needs: wire a reference executor before the trainer"
        )
    trained = np.flatnonzero(response.loss_mask)
    return sampled_kl(
        response.behavior_logprobs[trained], response.reference_logprobs[trained], estimator=config.kl_estimator
    )
