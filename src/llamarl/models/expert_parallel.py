"""Experts over ranks: each holds some of them whole, and computes what its tokens chose of these.

    rank 0: experts 0 .. E/tp - 1       hidden, weights ─▶ own experts ─▶ part ─┐
    rank 1: experts E/tp .. 2E/tp - 1   (same on every rank)              part ─┴─ sum ─▶ every rank

This is what transformers' own plans (``base_model_ep_plan``) do: tokens are on every rank already, as everything between two
layers is under tensor parallelism, so none is sent, and there is one sum a layer, as after any cut matrix. Ranks with tokens of their
own may share a tensor-parallel rank's experts further (``expert_exchange.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from llamarl.models.expert_exchange import Experts
from llamarl.models.experts import num_experts

__all__ = ["cut_experts"]


def cut_experts(
    experts: nn.Module,
    *,
    ranks: int,
    rank: int,
    copied: Callable[[Tensor], Tensor],
    summed: Callable[[Tensor], Tensor],
    num_exchanging: int = 1,
    exchanging: int = 0,
    exchanged: Callable[[Experts, int], Experts] = lambda compute, own: compute,
) -> list[str]:
    """Leave this rank's experts in a module that holds all, and have it compute the sum over ranks; in place.

    Args:
        ranks: Divides the number of experts.
        copied: Of what is the same on every rank: its gradient is the sum of theirs.
        summed: Of what the ranks have parts of.
        num_exchanging, exchanging: Ranks over which each of ``ranks`` spreads its experts further, and which of them this one is.
        exchanged: From what computes with this rank's experts, of such a number, what does with those of all of them.

    Returns:
        Names of its parameters, each cut along dimension 0.
    """
    whole = num_experts(experts)
    together, own = whole // ranks, whole // (ranks * num_exchanging)
    assert own * ranks * num_exchanging == whole, "the sizes have been checked"
    start = rank * together
    first = start + exchanging * own
    names = [name for name, parameter in experts.named_parameters(recurse=False) if len(parameter) == whole]
    for name in names:
        parameter = experts._parameters[name]
        assert parameter is not None
        part = parameter.detach()[first : first + own].clone()
        experts._parameters[name] = nn.Parameter(part, requires_grad=parameter.requires_grad)
    module: Any = experts
    module.num_experts, module.num_experts_of_all_ranks = own, whole
    module._is_expert_parallel = True  # transformers leaves out choices of an expert number ``num_experts``
    compute = exchanged(experts.forward, own)

    def forward(hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        local = top_k_index - start
        here = (local >= 0) & (local < together)
        weights = torch.where(here, copied(top_k_weights), 0.0)
        return summed(compute(copied(hidden), torch.where(here, local, together), weights))

    experts.forward = forward  # type: ignore[method-assign]
    return names
