"""AIPO, LlamaRL's objective (arXiv:2505.24034, Sec. 6): a policy gradient weighted by min(pi / mu, rho).

The weight compares the weights being trained with whatever sampled the token: older weights, a quantized engine, other
kernels. It is cut from above only. A token whose probability fell keeps its small weight, and a token whose probability
rose beyond ``rho`` still learns, with weight ``rho``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from llamarl.algorithms.base import MOST_LOG_RATIO, TokenBatch, TokenLosses, check_same_shape, sequence_sums
from llamarl.algorithms.config import AlgorithmConfig

__all__ = ["aipo", "aipo_loss", "aipo_surrogate", "reinforce", "sequence_is"]


def aipo_loss(
    policy_logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    rho: float,
    num_loss_tokens: int,
) -> Tensor:
    """AIPO: importance-weighted policy gradient with a one-sided clip.

    Its gradient is the update of LlamaRL (arXiv:2505.24034, Sec. 6), negated and averaged::

        sum_t min(pi_t / mu_t, rho) * A_t * grad log pi_t

    The weight is detached, so a token above ``rho`` still learns, scaled by ``rho``. The loss
    ``-min(ratio, rho) * A`` is another algorithm: it gives such a token no gradient at all.

    Args:
        policy_logprobs: log pi(y_t), nats, [T], with grad.
        behavior_logprobs: log mu(y_t) as recorded by the generator, nats, [T].
        advantages: A_t, [T]; finite everywhere, also where masked.
        loss_mask: [T] bool, True on trained tokens; other entries of ``behavior_logprobs`` may be NaN.
        rho: Clip on pi / mu, > 0; the paper suggests 2 to 10. ``math.inf`` leaves only the cap at e^20 that keeps it
            finite (``MOST_LOG_RATIO``).
        num_loss_tokens: True mask entries in the whole optimizer step, over all microbatches and
            data-parallel ranks. Parts then add up to the full-batch loss.

    Raises:
        ValueError: The four tensors differ in shape, or ``rho`` or ``num_loss_tokens`` is not positive.
    """
    if not rho > 0:
        raise ValueError(f"rho must be > 0, got {rho}")
    if num_loss_tokens < 1:
        raise ValueError(f"num_loss_tokens must be >= 1, got {num_loss_tokens}: there is nothing to average over")
    check_same_shape(policy=policy_logprobs, behavior=behavior_logprobs, advantages=advantages, mask=loss_mask)
    losses, _ = _aipo_terms(policy_logprobs[loss_mask], behavior_logprobs[loss_mask], advantages[loss_mask], rho)
    return losses.sum() / num_loss_tokens


def aipo(batch: TokenBatch, config: AlgorithmConfig) -> TokenLosses:
    """``aipo_loss`` before averaging, under ``config.rho``."""
    rho = math.inf if config.rho == "none" else float(config.rho)
    losses, clipped = _aipo_terms(batch.policy_logprobs, batch.behavior_logprobs, batch.advantages, rho)
    return TokenLosses(losses=losses, clipped=clipped)


def aipo_surrogate(batch: TokenBatch, config: AlgorithmConfig) -> TokenLosses:
    """-min(pi / mu, rho) * A with a differentiable ratio: equal to ``aipo`` below ``rho``, no gradient above.

    Some implementations call this AIPO. It is here to compare with, not what the paper's update says.
    """
    rho = math.inf if config.rho == "none" else float(config.rho)
    log_ratio = batch.log_ratio
    most = min(math.log(rho), MOST_LOG_RATIO)
    clipped = (log_ratio > most).detach()
    ratio = torch.where(log_ratio > most, most, log_ratio).exp()  # where, not clamp: no gradient through the bound
    return TokenLosses(losses=-ratio * batch.advantages, clipped=clipped)


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
    rho = math.inf if config.rho == "none" else float(config.rho)
    log_ratio = sequence_sums(batch.log_ratio.detach(), batch)[batch.sequence_ids]
    most = min(math.log(rho), MOST_LOG_RATIO)
    weight = log_ratio.clamp(max=most).exp()
    return TokenLosses(losses=-weight * batch.advantages * batch.policy_logprobs, clipped=log_ratio > most)


def _aipo_terms(
    policy_logprobs: Tensor, behavior_logprobs: Tensor, advantages: Tensor, rho: float
) -> tuple[Tensor, Tensor]:
    log_ratio = (policy_logprobs - behavior_logprobs).detach()
    most = min(math.log(rho), MOST_LOG_RATIO)
    weight = log_ratio.clamp(max=most).exp()  # clamp the log: exp cannot overflow
    return -weight * advantages * policy_logprobs, log_ratio > most
