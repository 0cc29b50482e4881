"""The critic's loss."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["value_loss"]


def value_loss(estimates: Tensor, returns: Tensor, earlier: Tensor, *, clip: float) -> tuple[Tensor, Tensor]:
    """Half the squared error a token, with PPO's optional clipping of the estimate's move. Not averaged.

    With ``clip`` c the loss is the larger of the plain error and that of ``earlier + clip(V - earlier, -c, c)``: an
    estimate that has already moved further than c towards its return gets no more gradient (as in the code of
    arXiv:1707.06347's authors; arXiv:2005.12729 finds little use in it).

    Args:
        estimates: V, [T], with grad.
        returns: What V should be, [T].
        earlier: V as first estimated in this tick, [T].
        clip: In units of reward; 0 is off.

    Returns:
        Losses [T], and [T] bool: V has moved further than ``clip``, and the clipped error was the larger.
    """
    plain = (estimates - returns).square()
    if not clip:
        return plain / 2, torch.zeros_like(plain, dtype=torch.bool)
    move = estimates - earlier
    bounded = (earlier + move.clamp(-clip, clip) - returns).square()
    return torch.maximum(plain, bounded) / 2, ((move.abs() > clip) & (bounded > plain)).detach()
