"""How far the policy is from what sampled its data: sums over trained tokens that micro-batches and ranks add up.

Nothing here touches the host: the trainer reads all metrics once, at the end of the step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llamarl.algorithms.base import MOST_LOG_RATIO, TokenBatch, sequence_sums
from llamarl.algorithms.kl import k3

__all__ = ["MAXIMA", "effective_share", "token_statistics", "weight_sums"]

MAXIMA = ("ratio/max",)
"""Keys of ``token_statistics`` of which the largest counts."""


@torch.no_grad()
def token_statistics(
    policy_logprobs: Tensor, behavior_logprobs: Tensor, entropy: Tensor, clipped: Tensor, sampled: Tensor | None = None
) -> dict[str, Tensor]:
    """Sums (and maxima) over the trained tokens of one micro-batch; scalars on the device.

    Args:
        policy_logprobs: log pi, nats, [T].
        behavior_logprobs: log mu, nats, [T].
        entropy: Entropy of pi at each position, nats, [T].
        clipped: [T] bool, from the loss.
        sampled: [T] bool; others count in no sum, since nothing is known of what wrote them. None: all are.

    Returns:
        ``ratio/mean``: sum of pi / mu. ``ratio/clipped_fraction``: number of clipped tokens. ``mismatch/kl``: sum of
        the k3 estimate of KL(mu || pi), nats. ``entropy``: sum, nats. ``ratio/max``: largest pi / mu, 0 if T is 0.
    """
    log_ratio = policy_logprobs - behavior_logprobs
    ratio = log_ratio.exp()
    if sampled is not None:
        log_ratio, ratio, entropy = (torch.where(sampled, of, 0.0) for of in (log_ratio, ratio, entropy))
        clipped = clipped & sampled
    return {
        "ratio/mean": ratio.sum(),
        "ratio/clipped_fraction": clipped.sum().to(ratio.dtype),
        "mismatch/kl": k3(log_ratio).sum(),
        "entropy": entropy.sum(),
        "ratio/max": ratio.max() if ratio.numel() else ratio.new_zeros(()),
    }


@torch.no_grad()
def weight_sums(batch: TokenBatch, sampled: Tensor | None = None) -> Tensor:
    """Number of responses with a trained token, and the sums of their weights w = pi(y) / mu(y) and of w^2, [3] float64.

    A weight is the product over the response's trained tokens; its logarithm is cut at ``MOST_LOG_RATIO``.
    ``sampled`` as in ``token_statistics``.
    """
    log_weights = sequence_sums(batch.log_ratio.double(), batch)
    here = (
        sequence_sums(torch.ones_like(batch.log_ratio) if sampled is None else sampled.to(batch.log_ratio.dtype), batch)
        > 0
    )
    weights = torch.where(here, log_weights.clamp(max=MOST_LOG_RATIO).exp(), 0.0)
    return torch.stack([here.sum().double(), weights.sum(), weights.square().sum()])


def effective_share(count: float, weights: float, squares: float) -> float:
    """Effective sample size over the number of samples, (sum w)^2 / (n sum w^2): 1 where all weigh
    the same, 1 / n where one carries everything (Kong 1992; of collapse: arXiv:2602.17616)."""
    return weights * weights / (count * squares) if squares > 0 else 0.0
