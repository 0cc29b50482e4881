"""Leave out what is too far from its sampler: a filter on pi / mu that works with every loss.

A token far outside the band is a numerical accident (another kernel, a quantized weight) or so stale that its weight says
little. ``token`` drops such tokens (IcePop, Ring-1T, arXiv:2510.18855); ``sequence`` drops a response whose geometric mean
ratio left the band. The step still divides by all its trained tokens, so dropping never makes the rest count more.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from llamarl.algorithms.base import TokenBatch, sequence_means
from llamarl.algorithms.config import AlgorithmConfig

__all__ = ["ratio_keep_mask"]


@torch.no_grad()
def ratio_keep_mask(batch: TokenBatch, config: AlgorithmConfig) -> Tensor:
    """[T] bool: trained tokens whose ratio lies in [ratio_mask_low, ratio_mask_high]; all of them for ``none``."""
    if config.ratio_mask == "none":
        return torch.ones_like(batch.behavior_logprobs, dtype=torch.bool)
    log_ratio = batch.log_ratio
    if config.ratio_mask == "sequence":
        log_ratio = sequence_means(log_ratio, batch)[batch.sequence_ids]
    low = math.log(config.ratio_mask_low) if config.ratio_mask_low > 0 else -math.inf
    return (log_ratio >= low) & (log_ratio <= math.log(config.ratio_mask_high))
