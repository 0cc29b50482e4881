"""CISPO (MiniMax-M1, arXiv:2506.13585): clip the importance weight, never the token.

AIPO with a lower bound as well: every token keeps a gradient, weighted by clip(pi / mu, 1 - clip_low, 1 + clip_high).
The paper leaves the lower side open, which is ``clip_low = 1``.
"""

from __future__ import annotations

from llamarl.algorithms.base import MOST_LOG_RATIO, TokenBatch, TokenLosses
from llamarl.algorithms.config import AlgorithmConfig

__all__ = ["cispo"]


def cispo(batch: TokenBatch, config: AlgorithmConfig) -> TokenLosses:
    """-clip(pi / mu).detach() * A * log pi."""
    log_ratio = batch.log_ratio.detach()
    ratio = log_ratio.clamp(max=MOST_LOG_RATIO).exp()
    weight = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    losses = -weight * batch.advantages * batch.policy_logprobs
    return TokenLosses(losses=losses, clipped=((weight != ratio) | (log_ratio > MOST_LOG_RATIO)))
