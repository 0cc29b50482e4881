"""What one micro-batch adds to the step's loss: the algorithm's term of each trained token, entropy
and KL beside it, weighted.

log-probs, entropy ─▶ loss(tokens) ─▶ ratio mask ─▶ - entropy bonus ─▶ + KL to the reference ─▶ · weights ─▶ sum
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from llamarl.algorithms.base import LossFunction, TokenBatch, sequence_means
from llamarl.algorithms.config import AlgorithmConfig
from llamarl.algorithms.diagnostics import token_statistics
from llamarl.algorithms.kl import ESTIMATORS as KL_ESTIMATORS
from llamarl.trainer.batch import Microbatch

__all__ = ["microbatch_loss", "ratio_keep_mask"]


def microbatch_loss(
    loss_of: LossFunction,
    policy_logprobs: Tensor,
    entropy: Tensor,
    microbatch: Microbatch,
    algorithm: AlgorithmConfig,
    *,
    has_reference: bool,
) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Its share of the step's loss, a scalar with grad, and of the statistics, and which tokens the
    loss's bound acted on, [T] bool; nothing touches the host.

    Args:
        policy_logprobs: log pi of the trained tokens, nats, [T], with grad.
        entropy: Of pi at each position, nats, [T].
        has_reference: The samples carry reference log-probs.

    Raises:
        ValueError: They are needed and are not there.
    """
    batch = TokenBatch(
        policy_logprobs=policy_logprobs,
        behavior_logprobs=microbatch.behavior_logprobs,
        advantages=microbatch.advantages,
        sequence_ids=microbatch.sequence_ids,
        num_sequences=microbatch.num_sequences,
        proximal_logprobs=microbatch.proximal_logprobs,
        entropy=entropy,
        reference_logprobs=microbatch.reference_logprobs,
        rewards=microbatch.rewards,
        group_ids=microbatch.group_ids,
    )
    terms = loss_of(batch, algorithm)
    losses, sums = terms.losses, {}
    if algorithm.ratio_mask != "none":
        keep = ratio_keep_mask(batch, algorithm)
        losses = torch.where(keep, losses, 0.0)
        sums["ratio/masked_fraction"] = (~keep).sum().to(losses.dtype)
    sums["loss/policy"] = (losses.detach() * microbatch.weights).sum()
    if algorithm.entropy_coef:
        losses = losses - algorithm.entropy_coef * entropy
    if has_reference:
        kl = _reference_kl(policy_logprobs, microbatch, algorithm)
        if algorithm.kl_in_loss:
            losses = losses + algorithm.kl_coef * kl
        sums["kl/reference"] = kl.detach().sum()
    if algorithm.imitates:  # what wrote the tokens has no distribution to compare with
        sums["entropy"] = entropy.detach().sum()
    else:
        sums |= token_statistics(policy_logprobs, microbatch.behavior_logprobs, entropy, terms.clipped)
    return (losses * microbatch.weights).sum(), sums, terms.clipped


def _reference_kl(policy_logprobs: Tensor, microbatch: Microbatch, algorithm: AlgorithmConfig) -> Tensor:
    """KL(policy || reference) a trained token, [T]."""
    if microbatch.reference_logprobs is None:
        raise ValueError(
            "the samples carry no reference log-probs, which algorithm.kl_coef > 0 needs:"
            " wire a reference executor before the trainer"
        )
    return KL_ESTIMATORS[algorithm.kl_estimator](microbatch.reference_logprobs - policy_logprobs)


@torch.no_grad()
def ratio_keep_mask(batch: TokenBatch, config: AlgorithmConfig) -> Tensor:
    """Leave out what is too far from its sampler: [T] bool, True where pi / mu lies in
    [ratio_mask_low, ratio_mask_high].

    A token far outside the band is a numerical accident (another kernel, a quantized weight) or so
    stale that its weight says little. ``token`` drops such tokens (IcePop, Ring-1T,
    arXiv:2510.18855); ``sequence`` drops a response whose geometric mean ratio left the band;
    ``none`` keeps all. The step still divides by all its trained tokens, so dropping never makes
    the rest count more.
    """
    if config.ratio_mask == "none":
        return torch.ones_like(batch.behavior_logprobs, dtype=torch.bool)
    log_ratio = batch.log_ratio
    if config.ratio_mask == "sequence":
        log_ratio = sequence_means(log_ratio, batch)[batch.sequence_ids]
    low = math.log(config.ratio_mask_low) if config.ratio_mask_low > 0 else -math.inf
    return (log_ratio >= low) & (log_ratio <= math.log(config.ratio_mask_high))
