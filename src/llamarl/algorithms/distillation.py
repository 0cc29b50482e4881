"""On-policy distillation: what a teacher thinks of the tokens that the policy itself has written.

    A_t = log p_teacher(y_t) - log pi(y_t)

With it the policy gradient of a token is that of the reverse KL, KL(pi || p_teacher), at that token:
a reward at each token in place of one at the end (arXiv:2306.13649; thinkingmachines.ai, "On-Policy
Distillation", 2025). log pi is that of the weights being trained, not of those that sampled the
token: the loss's ratio pi / mu corrects for the latter, and to first order nothing else is needed.
What later tokens make of this one is left out (discount 0), as in the sources.
"""

from __future__ import annotations

from torch import Tensor

__all__ = ["distillation_advantages"]


def distillation_advantages(policy_logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
    """Of each token, nats, [T], detached.

    Args:
        policy_logprobs: log pi of the weights being trained, [T].
        teacher_logprobs: At the sampling temperature, as log pi, [T].
    """
    return teacher_logprobs - policy_logprobs.detach()
