"""Estimates of a KL divergence from samples, per token (J. Schulman, "Approximating KL divergence", 2020).

For y drawn from p and r = q(y) / p(y)::

    k1 = -log r              unbiased, high variance, may be negative
    k2 = (log r)^2 / 2       biased, never negative, low variance
    k3 = (r - 1) - log r     unbiased, never negative
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["ESTIMATORS", "k1", "k2", "k3", "sampled_kl", "unbiased"]


def k1(log_ratio: Tensor) -> Tensor:
    """KL(p || q) per token from ``log_ratio`` = log q - log p, [T], under samples of p."""
    return -log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    """KL(p || q) per token from ``log_ratio`` = log q - log p, [T], under samples of p."""
    return log_ratio.square() / 2


def k3(log_ratio: Tensor) -> Tensor:
    """KL(p || q) per token from ``log_ratio`` = log q - log p, [T], under samples of p."""
    return torch.expm1(log_ratio) - log_ratio


def unbiased(log_ratio: Tensor, importance: Tensor) -> Tensor:
    """KL(p || q) per token by samples of another policy mu (DeepSeek-V3.2, arXiv:2512.02556), [T].

    ``k3`` weighted by p / mu. Its gradient, through the weight too, is that of the KL itself
    wherever the samples came from; that of ``k3`` alone is not, on policy either.

    Args:
        log_ratio: log q - log p.
        importance: p / mu, with grad.
    """
    return importance * k3(log_ratio)


ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
"""``algorithm.kl_estimator`` -> function of log q - log p."""


def sampled_kl(
    behavior_logprobs: npt.NDArray[np.floating], reference_logprobs: npt.NDArray[np.floating], *, estimator: str
) -> npt.NDArray[np.float64]:
    """KL(mu || reference) per token from recorded log-probs, nats, [T]: what a reward can be charged with.

    A constant to the loss, so its gradient is that of REINFORCE with this as a cost. Only that of ``k1`` is then the
    gradient of the KL; that of ``k3`` is less by the gradient of the reverse one, KL(reference || policy).
    """
    log_ratio = reference_logprobs.astype(np.float64) - behavior_logprobs.astype(np.float64)
    return ESTIMATORS[estimator](torch.from_numpy(log_ratio)).numpy()
