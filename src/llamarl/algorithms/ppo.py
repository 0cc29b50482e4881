"""The clipped surrogates: PPO (GRPO, DAPO), its decoupled and truncated forms, and GSPO; CISPO and DPPO.

All but the last two maximise min(u A, clip(u, 1 - clip_low, 1 + clip_high) A). They differ in what u
compares, and in what weighs it:

    ppo             u = pi / mu                          1
    decoupled_ppo   u = pi / pi_prox                     pi_prox / mu, detached
    truncated_is    u = pi / pi_prox                     min(pi_prox / mu, rho), detached
    gspo            u = (pi(y) / mu(y))^(1 / |y|)        1          one u for a whole response

A clipped token has no gradient. That bounds how far one batch can move the policy; AIPO bounds only
the weight. Where A is negative u has no upper bound but the cap at e^20, which counts as clipping.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llamarl.algorithms.aipo import most_log_ratio
from llamarl.algorithms.base import MOST_LOG_RATIO, TokenBatch, TokenLosses, sequence_means
from llamarl.settings.algorithms import AlgorithmConfig

__all__ = ["cispo", "decoupled_ppo", "dppo", "gspo", "ppo", "truncated_is"]


def ppo(batch: TokenBatch, config: AlgorithmConfig) -> TokenLosses:
    """PPO's clipped surrogate (arXiv:1707.06347) against the behaviour policy, as GRPO and DAPO use it.

    The ratio is to what sampled the token, so a stale token starts outside the trust region and may have no gradient
    from the first step on: at high staleness PPO learns from fewer tokens, where AIPO reweighs them.
    """
    log_ratio = batch.log_ratio
    return _clipped_surrogate(log_ratio, batch, config)


def decoupled_ppo(batch: TokenBatch, config: AlgorithmConfig) -> TokenLosses:
    """Decoupled PPO (arXiv:2110.00641; AReaL, arXiv:2505.24298): clip against a recent policy, weigh by pi_prox / mu.

    The proximal policy is the one before the tick's first update. With one update a tick it is pi itself: the clip
    never acts and the gradient is the plain importance-weighted one.
    """
    return _with_proximal_weight(batch, config, MOST_LOG_RATIO)


def truncated_is(batch: TokenBatch, config: AlgorithmConfig) -> TokenLosses:
    """Truncated importance sampling (Ionides 2008): decoupled PPO with its weight pi_prox / mu cut at ``rho``.

    With one update a tick its gradient equals AIPO's.
    """
    return _with_proximal_weight(batch, config, most_log_ratio(config))


def gspo(batch: TokenBatch, config: AlgorithmConfig) -> TokenLosses:
    """GSPO (arXiv:2507.18071): one ratio a response, the geometric mean of its tokens' ratios, clipped whole.

    Each token carries its response's term, so normalisation by ``sequence`` is the paper's mean over responses. The
    gradient of a token's term is its own (Sec. 4.3, GSPO-token): where all have one advantage it sums up to the same.
    """
    means = sequence_means(batch.log_ratio.detach(), batch)[batch.sequence_ids]
    own = batch.policy_logprobs
    return _clipped_surrogate(means + (own - own.detach()), batch, config)


def _with_proximal_weight(batch: TokenBatch, config: AlgorithmConfig, most: float) -> TokenLosses:
    proximal = batch.proximal_logprobs
    if proximal is None:
        proximal = batch.policy_logprobs.detach()
    log_weight = (proximal - batch.behavior_logprobs).detach()
    weight = log_weight.clamp(max=most).exp()
    terms = _clipped_surrogate(batch.policy_logprobs - proximal, batch, config)
    over = log_weight > most
    return TokenLosses(losses=weight * terms.losses, clipped=terms.clipped | over)


def _clipped_surrogate(log_ratio: Tensor, batch: TokenBatch, config: AlgorithmConfig) -> TokenLosses:
    ratio = log_ratio.clamp(max=MOST_LOG_RATIO).exp()
    bounded = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    plain, clipped = ratio * batch.advantages, bounded * batch.advantages
    losses = -torch.minimum(plain, clipped)
    capped = (log_ratio > MOST_LOG_RATIO) & (batch.advantages != 0)  # where A < 0 nothing else bounds the ratio
    return TokenLosses(losses=losses, clipped=((clipped < plain) | capped).detach())


def cispo(batch: TokenBatch, config: AlgorithmConfig) -> TokenLosses:
    """Weigh every token by -clip(pi / mu).detach() * A * log pi (CISPO, MiniMax-M1, arXiv:2506.13585).

    AIPO with a lower bound as well: the importance weight is clipped to [1 - clip_low, 1 +
    clip_high], never the token. The paper leaves the lower side open, which is ``clip_low = 1``.
    """
    log_ratio = batch.log_ratio.detach()
    ratio = log_ratio.clamp(max=MOST_LOG_RATIO).exp()
    weight = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    losses = -weight * batch.advantages * batch.policy_logprobs
    return TokenLosses(losses=losses, clipped=((weight != ratio) | (log_ratio > MOST_LOG_RATIO)))


def dppo(batch: TokenBatch, config: AlgorithmConfig) -> TokenLosses:
    """Leave out tokens whose probability has moved too far, and moves on (DPPO-Binary-TV, arXiv:2602.04879).

    The trust region is one of total variation, estimated by the sampled token alone: |pi - mu|, a
    difference of probabilities. A token is out where pi - mu > clip_high and A > 0, or pi - mu <
    -clip_low and A < 0. So a rare token may change by a large ratio, and a likely one may not by a
    small one. Else it weighs min(pi / mu, rho), detached.
    """
    log_ratio = batch.log_ratio.detach()
    moved = batch.policy_logprobs.detach().exp() - batch.behavior_logprobs.exp()
    out = ((moved > config.clip_high) & (batch.advantages > 0)) | ((moved < -config.clip_low) & (batch.advantages < 0))
    weight = torch.where(out, 0.0, log_ratio.clamp(max=most_log_ratio(config)).exp())
    return TokenLosses(losses=-weight * batch.advantages * batch.policy_logprobs, clipped=out)
