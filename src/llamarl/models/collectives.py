"""Collectives that autograd goes through: sums over tensor-parallel ranks, which are the f and g
operators of Megatron-LM (arXiv:1909.08053), and the exchange of context-parallel ones."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["CopyToRanks", "ExchangeParts", "SharedInput", "SumOverRanks"]


class CopyToRanks(torch.autograd.Function):
    """Megatron's f: the same value on every rank; in the backward pass the ranks' gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class SumOverRanks(torch.autograd.Function):
    """Megatron's g: the ranks' parts are summed; the gradient passes unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class SharedInput:
    """One ``CopyToRanks`` for siblings that read one tensor (q, k, v): one sum in the backward pass, not three."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._last: tuple[weakref.ref[Tensor], weakref.ref[Tensor], bool] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if self._last is not None:
            source, copied, with_grad = self._last[0](), self._last[1](), self._last[2]
            if source is x and copied is not None and with_grad == torch.is_grad_enabled():
                return copied
        out = CopyToRanks.apply(x, self.group)
        self._last = (weakref.ref(x), weakref.ref(out), torch.is_grad_enabled())
        return out


class ExchangeParts(torch.autograd.Function):
    """Part i along dimension 0 goes to rank i of the group, and what arrives lies in the order of
    the ranks; gradients take the same way back. All parts of all ranks have one shape."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchanged(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _exchanged(grad, ctx.group), None


def _exchanged(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    x = x.contiguous()
    arrived = torch.empty_like(x)
    dist.all_to_all_single(arrived, x, group=group)
    return arrived
