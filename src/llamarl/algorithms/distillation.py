"""On-policy distillation: what a teacher thinks of the tokens that the policy itself has written.

    A_t = log p_teacher(y_t) - log pi(y_t)

With it the policy gradient of a token is that of the reverse KL, KL(pi || p_teacher), at that token:
a reward at each token in place of one at the end (arXiv:2306.13649; thinkingmachines.ai, "On-Policy
Distillation", 2025). log pi is that of the weights being trained, not of those that sampled the
token: the loss's ratio pi / mu corrects for the latter, and to first order nothing else is needed.
What later tokens make of this one is left out (discount 0), as in the sources.

With its k likeliest tokens at hand (``top_k_kl``) the whole distribution is compared, not one token of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["distillation_advantages", "top_k_kl"]

_LEAST_REST = 1e-5
"""Probability outside of k tokens below which float32 log-probs no longer tell it from 0."""


def distillation_advantages(policy_logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
    """Of each token, nats, [T], detached.

    Args:
        policy_logprobs: log pi of the weights being trained, [T].
        teacher_logprobs: At the sampling temperature, as log pi, [T].
    """
    return teacher_logprobs - policy_logprobs.detach()


def top_k_kl(policy_logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
    """KL(p_teacher || pi) at each position over k tokens and one more that stands for all others, nats, [T]::

        sum_i p_i (log p_i - log pi_i)  +  p_rest (log p_rest - log pi_rest),    p_rest = 1 - sum_i p_i

    Its gradient by the policy's logits is that of the whole KL at the k tokens, pi_i - p_i, and at
    another one v it is pi_v - p_rest pi_v / pi_rest: how much mass lies outside is learned, how it
    is spread there is left to the policy. So a policy equal to its teacher stays what it is, which
    it would not if the k were renormalised. The rest as one token is of arXiv:2601.20802; forward
    KL at states of the policy, of arXiv:2306.13649. Below ``1e-5`` the rest has no gradient.

    Args:
        policy_logprobs: log pi of the teacher's k likeliest tokens, [T, k], with grad.
        teacher_logprobs: log p_teacher of them, [T, k].
    """
    policy, teacher = (
        torch.cat([logprobs, _log_rest(logprobs)], dim=-1) for logprobs in (policy_logprobs, teacher_logprobs)
    )
    return (teacher.exp() * (teacher - policy)).sum(dim=-1)


def _log_rest(logprobs: Tensor) -> Tensor:
    inside = logprobs.logsumexp(dim=-1, keepdim=True).clamp(max=-_LEAST_REST)
    return (-inside.expm1()).log()
