"""Supervised fine-tuning: cross-entropy on tokens that somebody else wrote.

    loss(t) = -log pi(token_t | prompt, tokens before it)

No reward, no baseline, no ratio: what wrote the tokens has no distribution here. Averaged as
``algorithm.normalization`` says, so ``token`` gives the usual mean over all completion tokens of
the step.
"""

from __future__ import annotations

import torch

from llamarl.algorithms.base import TokenBatch, TokenLosses
from llamarl.algorithms.config import AlgorithmConfig

__all__ = ["sft"]


def sft(batch: TokenBatch, config: AlgorithmConfig) -> TokenLosses:
    """Charge each token with its own surprise, -log pi(token) in nats, [T]; nothing is clipped."""
    losses = -batch.policy_logprobs
    return TokenLosses(losses=losses, clipped=torch.zeros_like(losses, dtype=torch.bool))
