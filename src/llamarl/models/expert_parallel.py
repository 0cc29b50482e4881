"""Experts over ranks: each holds some of them whole, and computes what its tokens chose of these.

    rank 0: experts 0 .. E/tp - 1       hidden, weights ─▶ own experts ─▶ part ─┐
    rank 1: experts E/tp .. 2E/tp - 1   (same on every rank)              part ─┴─ sum ─▶ every rank

This is what transformers' own plans (``base_model_ep_plan``) do: tokens are on every rank already,
as everything between two layers is under tensor parallelism, so none is sent, and there is one sum
a layer, as after any cut matrix. Ranks with tokens of their own may share a tensor-parallel rank's
experts further (``exchange``)::

    rank 0   tokens a b   a: experts 0, 3   ──a──▶ rank 0, experts 0 1   ──▶ a's part ──▶ sum of a's parts
    rank 1   tokens c     b: expert 2       ──a b──▶ rank 1, experts 2 3 ──▶ parts of a, b, c ──▶ ...
                          c: expert 3

There a token goes to a rank once, with all of its choices there, by one all-to-all each way (and one
each way of gradients). Ranks first tell each other how many come, so nothing is padded and no token is
dropped, however unevenly they fall. What a rank computes with is always one row more than what came,
one that chose no expert: a rank that nobody chose takes part in the backward pass as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from llamarl.models.experts import num_experts

__all__ = ["Experts", "cut_experts", "exchange", "senders"]


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
        num_exchanging, exchanging: Ranks over which each of ``ranks`` spreads its experts further,
            and which of them this one is.
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


Experts = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(hidden [N, H], experts [N, k], weights [N, k]) -> [N, H]"""


class _AllToAll(torch.autograd.Function):
    """Rows of a tensor to other ranks, ``sent[r]`` of them to rank r, in order; the gradient goes back the same way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _exchanged(x, sent, received, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchanged(grad, ctx.received, ctx.sent, ctx.group), None, None, None


def _exchanged(x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty((sum(received), *x.shape[1:]))
    dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
    return out


def senders(index: Tensor, *, own: int, num_ranks: int) -> Tensor:
    """Which tokens have at least one choice on each rank, [num_ranks, N] bool.

    Args:
        index: [N, k] experts, those of rank r being ``r * own .. (r + 1) * own - 1``; larger numbers are of nobody.
        own: Experts a rank.
    """
    ranks = index.div(own, rounding_mode="floor")
    return (ranks == torch.arange(num_ranks, device=index.device)[:, None, None]).any(dim=2)


def exchange(compute: Experts, *, own: int, rank: int, num_ranks: int, group: dist.ProcessGroup) -> Experts:
    """``compute``, which knows ``own`` experts, over the experts of all ranks of ``group``; every
    rank calls the result as often.

    Args:
        compute: Leaves out choices of an expert number ``own``, of weight 0.
    """

    def forward(hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        there = senders(index, own=own, num_ranks=num_ranks)
        counts = there.sum(dim=1)
        coming = torch.empty_like(counts)
        dist.all_to_all_single(coming, counts, group=group)
        sent, received = torch.stack([counts, coming]).tolist()  # the only thing that the host waits for
        rows = torch.nonzero_static(there, size=sum(sent))[:, 1]
        width, dtype = hidden.shape[1], torch.promote_types(hidden.dtype, weights.dtype)
        going = torch.cat([hidden.to(dtype), weights.to(dtype)], dim=1).index_select(0, rows)
        came = _AllToAll.apply(going, sent, received, group)
        chosen = _exchanged(index.index_select(0, rows), sent, received, group) - rank * own
        came = torch.cat([came, came.new_zeros(1, came.shape[1])])
        chosen = torch.cat([chosen, chosen.new_full((1, chosen.shape[1]), own)])
        here = (chosen >= 0) & (chosen < own)
        of_rows = torch.where(here, came[:, width:], 0.0).to(weights.dtype)
        made = compute(came[:, :width].to(hidden.dtype), torch.where(here, chosen, own), of_rows)[:-1]
        back = _AllToAll.apply(made, received, sent, group)
        out = torch.zeros_like(hidden)
        # in the order of ranks, each token once a rank: repeatable
        for some, part in zip(rows.split(sent), back.split(sent), strict=True):
            out = out.index_add(0, some, part)
        return out

    return forward
