"""What one micro-batch adds to the step's loss: up to three terms of each trained token, weighted.

    log-probs, entropy ─▶ rl · (loss(tokens) ─▶ masks)  ─┐
                          ce · -log pi                   ─┼─ - entropy bonus ─▶ · weights ─▶ sum
                          kl · KL to the reference       ─┘     (of a teacher's top k: KL of the teacher)

Which terms a token has was said where its sequence was made (``TermWeights``); nothing here asks
what it is trained for.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from llamarl.algorithms.base import MOST_LOG_RATIO, LossFunction, TokenBatch, sequence_means
from llamarl.algorithms.diagnostics import token_statistics, weight_sums
from llamarl.algorithms.distillation import distillation_advantages, top_k_kl
from llamarl.algorithms.kl import ESTIMATORS as KL_ESTIMATORS
from llamarl.algorithms.kl import unbiased
from llamarl.settings.algorithms import AlgorithmConfig
from llamarl.trainer.batch import Microbatch
from llamarl.trainer.policy import TokenScores
from llamarl.trainer.statistics import WEIGHT_SUMS

__all__ = ["microbatch_loss", "ratio_keep_mask", "top_entropy_mask"]


def microbatch_loss(
    loss_of: LossFunction,
    scores: TokenScores,
    microbatch: Microbatch,
    algorithm: AlgorithmConfig,
    *,
    has_reference: bool,
) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Its share of the step's loss, a scalar with grad, and of the statistics, and which tokens the
    loss's bound acted on, [T] bool; nothing touches the host.

    Args:
        loss_of: The ``rl`` term of tokens that have one.
        scores: What the policy says of the trained tokens, with grad.
        has_reference: The samples carry reference log-probs.

    Raises:
        ValueError: They are needed and are not there.
    """
    policy_logprobs, entropy = scores.logprobs, scores.entropy
    batch = _tokens(scores, microbatch, algorithm)
    losses = torch.zeros_like(policy_logprobs)
    keep = clipped = torch.zeros_like(policy_logprobs, dtype=torch.bool)
    masked = algorithm.ratio_mask != "none" or algorithm.top_entropy < 1.0
    if microbatch.rl_weights is not None:
        terms = loss_of(batch, algorithm)
        losses, clipped = terms.losses, terms.clipped
        if masked:
            keep = ratio_keep_mask(batch, algorithm) & top_entropy_mask(batch, algorithm.top_entropy)
            losses = torch.where(keep, losses, 0.0)
        losses = microbatch.rl_weights * losses
    if microbatch.ce_weights is not None:
        losses = losses - microbatch.ce_weights * policy_logprobs
    sums = {"loss/policy": (losses.detach() * microbatch.weights).sum()}
    sampled = None if algorithm.imitates else _sampled(microbatch)
    if algorithm.entropy_coef:
        losses = losses - algorithm.entropy_coef * entropy
    if has_reference:
        kl = _reference_kl(scores, microbatch, algorithm)
        if microbatch.kl_weights is not None:
            losses = losses + microbatch.kl_weights * kl
            if algorithm.teacher_top_k:
                sums["loss/policy"] += (microbatch.kl_weights * kl.detach() * microbatch.weights).sum()
        sums["kl/reference"] = (kl.detach() if sampled is None else torch.where(sampled, kl.detach(), 0.0)).sum()
    if algorithm.imitates:  # what wrote the tokens has no distribution to compare with
        sums["entropy"] = entropy.detach().sum()
    else:  # by the recipe, not by what this micro-batch holds: ranks add up the same keys
        sums |= token_statistics(policy_logprobs, microbatch.behavior_logprobs, entropy, clipped, sampled)
        sums |= dict(zip(WEIGHT_SUMS, weight_sums(batch, sampled), strict=True))
        if masked:
            sums["ratio/masked_fraction"] = (~keep if sampled is None else ~keep & sampled).sum().to(losses.dtype)
    return (losses * microbatch.weights).sum(), sums, clipped


def _sampled(microbatch: Microbatch) -> Tensor | None:
    """Which tokens something sampled, [T] bool, where others stand beside them that are to be imitated; None: all."""
    if microbatch.ce_weights is None or not microbatch.num_sequences:
        return None
    return microbatch.ce_weights == 0


def _tokens(scores: TokenScores, microbatch: Microbatch, algorithm: AlgorithmConfig) -> TokenBatch:
    """The T tokens as a loss sees them."""
    advantages = microbatch.advantages
    if algorithm.distills:
        assert microbatch.reference_logprobs is not None, "sequences are made with a teacher's log-probs or not at all"
        advantages = distillation_advantages(scores.logprobs, microbatch.reference_logprobs)
    return TokenBatch(
        policy_logprobs=scores.logprobs,
        behavior_logprobs=microbatch.behavior_logprobs,
        advantages=advantages,
        sequence_ids=microbatch.sequence_ids,
        num_sequences=microbatch.num_sequences,
        proximal_logprobs=microbatch.proximal_logprobs,
        entropy=scores.entropy,
        tokens=microbatch.targets if microbatch.own is None else None,
        logits=scores.logits,
        reference_logprobs=microbatch.reference_logprobs,
        rewards=microbatch.rewards,
        group_ids=microbatch.group_ids,
    )


def _reference_kl(scores: TokenScores, microbatch: Microbatch, algorithm: AlgorithmConfig) -> Tensor:
    """KL(policy || reference) a trained token, [T]; of a teacher that has named its likeliest, KL(teacher || policy)."""
    if scores.top_logprobs is not None and microbatch.top_logprobs is not None:
        return top_k_kl(scores.top_logprobs, microbatch.top_logprobs)
    if microbatch.reference_logprobs is None:
        raise ValueError(
            "the samples carry no reference log-probs, which algorithm.kl_coef > 0 needs:"
            " wire a reference executor before the trainer"
        )
    log_ratio = microbatch.reference_logprobs - scores.logprobs
    if microbatch.kl_weights is not None:  # of rows to imitate the reference knows nothing: infinity times 0 is NaN
        log_ratio = torch.where(microbatch.kl_weights != 0, log_ratio, 0.0)
    if algorithm.kl_estimator == "unbiased":
        return unbiased(log_ratio, (scores.logprobs - microbatch.behavior_logprobs).clamp(max=MOST_LOG_RATIO).exp())
    return KL_ESTIMATORS[algorithm.kl_estimator](log_ratio)


@torch.no_grad()
def ratio_keep_mask(batch: TokenBatch, config: AlgorithmConfig) -> Tensor:
    """Leave out what is too far from its sampler: [T] bool, True where pi / mu lies in
    [ratio_mask_low, ratio_mask_high].

    A token far outside the band is a numerical accident (another kernel, a quantized weight) or so
    stale that its weight says little. ``token`` drops such tokens (IcePop, Ring-1T,
    arXiv:2510.18855); ``sequence`` drops a response whose geometric mean ratio left the band;
    ``off_policy`` one that fell below it and has a negative advantage (DeepSeek-V3.2,
    arXiv:2512.02556); ``none`` keeps all. The step still divides by all its trained tokens, so dropping never makes
    the rest count more.
    """
    if config.ratio_mask == "none":
        return torch.ones_like(batch.behavior_logprobs, dtype=torch.bool)
    log_ratio = batch.log_ratio
    if config.ratio_mask != "token":
        log_ratio = sequence_means(log_ratio, batch)[batch.sequence_ids]
    low = math.log(config.ratio_mask_low) if config.ratio_mask_low > 0 else -math.inf
    if config.ratio_mask == "off_policy":
        return (log_ratio >= low) | (batch.advantages >= 0)
    return (log_ratio >= low) & (log_ratio <= math.log(config.ratio_mask_high))


@torch.no_grad()
def top_entropy_mask(batch: TokenBatch, share: float) -> Tensor:
    """Keep of each response the tokens at which the policy is least sure (arXiv:2506.01939): [T]
    bool, True for ``share`` of its trained tokens, rounded up; of equal ones the earlier.

    The source takes the quantile over the batch. By response it is the same however a step is cut
    into micro-batches.
    """
    if share >= 1.0 or not len(batch.sequence_ids):
        return torch.ones_like(batch.sequence_ids, dtype=torch.bool)
    assert batch.entropy is not None
    falling = torch.argsort(batch.entropy, descending=True, stable=True)
    order = falling[torch.argsort(batch.sequence_ids[falling], stable=True)]
    ids = batch.sequence_ids[order]
    lengths = torch.bincount(ids, minlength=batch.num_sequences)
    first = lengths.cumsum(0) - lengths
    place = torch.arange(len(ids), device=ids.device) - first[ids]
    kept = torch.ceil(lengths.double() * share - 1e-9).long()
    return torch.zeros_like(ids, dtype=torch.bool).index_put((order,), place < kept[ids])
