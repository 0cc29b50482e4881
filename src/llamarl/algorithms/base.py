"""What a loss sees and what it returns.

    TokenBatch (per-token tensors of one micro-batch) ──loss(batch, config)──▶ TokenLosses ──weights──▶ scalar

A loss is a pure function. It never averages: every token's term is multiplied by a weight that the trainer computed
once for the whole optimizer step, so any split over micro-batches and ranks adds up to the same gradient. A loss that
looks at whole responses finds them through ``sequence_ids``; micro-batches never split a response.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from llamarl.settings.algorithms import AlgorithmConfig

__all__ = ["MOST_LOG_RATIO", "LossFunction", "TokenBatch", "TokenLosses", "sequence_means", "sequence_sums"]

MOST_LOG_RATIO = 20.0
"""Where log ratios without another bound are cut: a ratio of e^20, some 5e8, far above any bound
that is set, so that the exp is finite. An infinite ratio times an advantage of 0 would be NaN. A
token that is cut here counts as clipped."""


@dataclass(frozen=True, kw_only=True)
class TokenBatch:
    """Per-token tensors of one micro-batch; the T trained tokens of S responses, in response order.

    Tokens that nobody trains on (prompts, what an environment wrote) are left out before: a loss never sees them.
    """

    policy_logprobs: Tensor
    """log pi, nats, [T], with grad: the weights being trained."""
    behavior_logprobs: Tensor
    """log mu as recorded while sampling, nats, [T]."""
    advantages: Tensor
    """[T], finite."""
    sequence_ids: Tensor
    """[T] int64, 0 .. num_sequences - 1: which response of the micro-batch a token belongs to."""
    num_sequences: int
    proximal_logprobs: Tensor | None = None
    """log-probs under the weights before the tick's first update, nats, [T]; None where the tick has one update, which
    makes them the policy's own, and for losses that do not look at them (``registry.WITH_PROXIMAL_POLICY``)."""

    entropy: Tensor | None = None
    """Of the policy at each token, nats, [T]; has a gradient where ``algorithm.entropy_coef`` is not 0."""
    reference_logprobs: Tensor | None = None
    """log-probs under the reference model, nats, [T]; None where the job has none."""
    rewards: Tensor | None = None
    """Of each response, as its group's baseline sees it, [S]."""
    group_ids: Tensor | None = None
    """Of each response, [S] int64: those with one number answer one prompt. A group may lie in several micro-batches,
    of which a loss sees one at a time: what needs the whole group is an advantage (``algorithm.advantage``)."""
    tokens: Tensor | None = None
    """Of the vocabulary, [T] int64: what was sampled. None with ``trainer.cp`` above 1."""
    logits: Callable[[], Tensor] | None = None
    """Computes the logits that the policy samples from, [T, V] with grad, after softcap and temperature. Nothing else
    of a step holds [T, V] at once: fewer ``trainer.max_tokens_per_microbatch`` bound its memory. One that has only
    its part of them (``trainer.tp`` or ``cp`` above 1) raises ConfigError when it is called."""

    @property
    def log_ratio(self) -> Tensor:
        """log pi - log mu, [T], with grad."""
        return self.policy_logprobs - self.behavior_logprobs


@dataclass(frozen=True, kw_only=True)
class TokenLosses:
    """A loss's answer."""

    losses: Tensor
    """[T], to be minimised, with grad. Not averaged."""
    clipped: Tensor = None  # type: ignore[assignment]  # of one's own; the registry puts zeros there
    """[T] bool: the algorithm's bound, or the cap ``MOST_LOG_RATIO`` where it has none, was active on this token (for
    ``ratio/clipped_fraction``). A loss of the user's own that bounds nothing leaves it out."""


LossFunction = Callable[[TokenBatch, AlgorithmConfig], TokenLosses]


def sequence_means(values: Tensor, batch: TokenBatch) -> Tensor:
    """Mean of ``values`` [T] over each response's tokens, [S], with grad; 0 for a response without any.

    A product with the membership matrix, not a scatter: its sums have a fixed order on every device.
    """
    members = _members(values, batch)
    return members @ values / members.sum(dim=1).clamp(min=1.0)


def sequence_sums(values: Tensor, batch: TokenBatch) -> Tensor:
    """Sum of ``values`` [T] over each response's tokens, [S], with grad."""
    return _members(values, batch) @ values


def _members(values: Tensor, batch: TokenBatch) -> Tensor:
    """[S, T]: 1 where a token is the response's, else 0; in the dtype of ``values``."""
    members = batch.sequence_ids[None, :] == torch.arange(batch.num_sequences, device=values.device)[:, None]
    return members.to(values.dtype)
