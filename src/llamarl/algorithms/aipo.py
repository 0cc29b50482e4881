"""AIPO, LlamaRL's objective (arXiv:2505.24034, Sec. 6): a policy gradient weighted by min(pi / mu, rho).

The weight compares the weights being trained with whatever sampled the token: older weights, a quantized engine, other
kernels. It is cut from above only. A token whose probability fell keeps its small weight, and a token whose probability
rose beyond ``rho`` still learns, with weight ``rho``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from llamarl.algorithms.base import MOST_LOG_RATIO, TokenBatch, TokenLosses, sequence_sums
from llamarl.settings.algorithms import AlgorithmConfig

__all__ = ["aipo", "most_log_ratio", "reinforce", "sequence_is"]


def aipo(batch: TokenBatch, config: AlgorithmConfig) -> TokenLosses:
    """AIPO: importance-weighted policy gradient with a one-sided clip at ``config.rho``.

    The gradient of its sum over the trained tokens is the update of LlamaRL (arXiv:2505.24034,
    Sec. 6), negated::

        sum_t min(pi_t / mu_t, rho) * A_t * grad log pi_t

    The weight is detached, so a token above ``rho`` still learns, scaled by ``rho``. The loss
    ``-min(ratio, rho) * A`` is another algorithm: it gives such a token no gradient at all.
    """
    return weighted(batch, batch.log_ratio.detach(), config)


def reinforce(batch: TokenBatch, config: AlgorithmConfig) -> TokenLosses:
    """REINFORCE with a baseline (Williams 1992): every token weighs 1, whatever sampled it.

    Unbiased only on policy. On stale tokens it is the "no correction" that AIPO is compared with.
    """
    losses = -batch.advantages * batch.policy_logprobs
    return TokenLosses(losses=losses, clipped=torch.zeros_like(losses, dtype=torch.bool))


def sequence_is(batch: TokenBatch, config: AlgorithmConfig) -> TokenLosses:
    """Truncated importance sampling by whole responses: every token weighs min(pi(y) / mu(y), rho).

    The ratio is the product over the response's trained tokens, detached. It is the weight under
    which the response's reward is unbiased; where AIPO corrects each token for itself, which is
    biased and of far smaller variance. Long responses soon weigh next to nothing or ``rho``.
    """
    return weighted(batch, sequence_sums(batch.log_ratio.detach(), batch)[batch.sequence_ids], config)


def most_log_ratio(config: AlgorithmConfig) -> float:
    """log ``config.rho``, at most ``MOST_LOG_RATIO``, nats."""
    return MOST_LOG_RATIO if config.rho == "none" else min(math.log(config.rho), MOST_LOG_RATIO)


def weighted(batch: TokenBatch, log_weights: Tensor, config: AlgorithmConfig) -> TokenLosses:
    """Weigh the policy gradient of each token by exp(log_weights), [T] and detached, cut at ``config.rho``."""
    most = most_log_ratio(config)
    weights = log_weights.clamp(max=most).exp()  # clamp the log: exp cannot overflow
    return TokenLosses(losses=-weights * batch.advantages * batch.policy_logprobs, clipped=log_weights > most)
