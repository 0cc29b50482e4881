"""Experts over ranks that hold other tokens: a token travels to the ranks of its experts, and what they make of it travels back.

    rank 0   tokens a b   a: experts 0, 3   ──a──▶ rank 0, experts 0 1   ──▶ a's part ──▶ sum of a's parts
    rank 1   tokens c     b: expert 2       ──a b──▶ rank 1, experts 2 3 ──▶ parts of a, b, c ──▶ ...
                          c: expert 3

A token goes to a rank once, with all of its choices there, by one all-to-all each way (and one each way of gradients). Ranks first tell
each other how many come, so nothing is padded and no token is dropped, however unevenly they fall. What a rank computes with is
always one row more than what came, one that chose no expert: a rank that nobody chose takes part in the backward pass as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Experts", "exchange", "senders"]

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


def senders(index: Tensor, *, own: int, num_ranks: int) -> list[Tensor]:
    """For each rank the tokens, ascending, of which at least one choice lies there.

    Args:
        index: [N, k] experts, those of rank r being ``r * own .. (r + 1) * own - 1``; larger numbers are of nobody.
        own: Experts a rank.
    """
    ranks = index.div(own, rounding_mode="floor")
    return [(ranks == rank).any(dim=1).nonzero()[:, 0] for rank in range(num_ranks)]


def exchange(compute: Experts, *, own: int, rank: int, num_ranks: int, group: dist.ProcessGroup) -> Experts:
    """``compute``, which knows ``own`` experts, over the experts of all ranks of ``group``; every rank calls the result as often.

    Args:
        compute: Leaves out choices of an expert number ``own``, of weight 0.
    """

    def forward(hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        tokens = senders(index, own=own, num_ranks=num_ranks)
        counts = torch.tensor([len(some) for some in tokens], device=hidden.device)
        coming = torch.empty_like(counts)
        dist.all_to_all_single(coming, counts, group=group)
        sent, received = counts.tolist(), coming.tolist()
        rows = torch.cat(tokens)
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
        for some, part in zip(
            tokens, back.split(sent), strict=True
        ):  # in their order, each token once a rank: repeatable
            out = out.index_add(0, some, part)
        return out

    return forward
