"""Sparse layers: which modules of a decoder are experts, and which of them each token chose in a forward pass.

    hidden [N, H] ──router──▶ experts [N, k], weights [N, k] ──experts──▶ sum over k of weight * expert(hidden)
                                   │
                                   └─▶ Routing.chosen[layer], where a pass is watched

Every sparse family of transformers calls a module of fused matrices, [experts, out, in], with the
chosen experts' numbers, so a look at that call knows them for any family. Experts have no capacity
here: whoever is chosen computes, no token is dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Routing", "current_routing", "expert_layers", "expert_metrics", "num_experts", "watch_experts", "watching"]


class Routing:
    """What one forward pass chose, layer by layer.

    Computing a layer again, in a backward pass, writes the same once more.
    """

    def __init__(self, num_layers: int) -> None:
        self.recorded: Tensor | None = None
        """[N, layers, k] experts that the routers are to choose instead of their own, of a model
        that was ``let_replay``; a row of -1 is left to the router."""
        self.chosen: list[Tensor | None] = [None] * num_layers
        """[N, k] int64 of each sparse layer of the whole model, first to last; None until it has been computed."""

    def counts(self, num_experts: int, num_tokens: int | None = None) -> Tensor:
        """Tokens that chose each expert, [layers, num_experts + 1] float64; the last column counts
        choices of no expert. Of layers that other pipeline stages hold, zeros.

        Args:
            num_tokens: That count: the first so many; None: all.
        """
        device = next((chosen.device for chosen in self.chosen if chosen is not None), None)
        rows = []
        for chosen in self.chosen:
            if chosen is None:
                rows.append(torch.zeros(num_experts + 1, dtype=torch.float64, device=device))
                continue
            flat = chosen.detach()[:num_tokens].reshape(-1).clamp(max=num_experts)
            ones = torch.ones(flat.shape, dtype=torch.float64, device=flat.device)
            row = torch.zeros(num_experts + 1, dtype=torch.float64, device=flat.device)
            rows.append(row.scatter_add_(0, flat, ones))  # whole numbers: exact in any order
        return torch.stack(rows)


_current: ContextVar[Routing | None] = ContextVar("llamarl_routing", default=None)


@contextmanager
def watching(routing: Routing | None) -> Iterator[None]:
    """Model calls inside note in ``routing`` which experts they chose. Whoever runs a layer again
    in the backward pass, on CUDA in another thread, enters it again there."""
    token = _current.set(routing)
    try:
        yield
    finally:
        _current.reset(token)


def current_routing() -> Routing | None:
    """What the enclosing ``watching`` was given; None outside."""
    return _current.get()


def expert_layers(model: nn.Module) -> list[nn.Module]:
    """The modules that hold experts, in the order of their layers; none of a dense model."""
    return [module for module in model.modules() if _fused(module)]


def num_experts(experts: nn.Module) -> int:
    """Of one such module, over all ranks that share it."""
    of_all_ranks: int | None = getattr(experts, "num_experts_of_all_ranks", None)
    return int(_fused(experts)[0].shape[0]) if of_all_ranks is None else of_all_ranks


def watch_experts(model: nn.Module) -> list[nn.Module]:
    """Let ``watching`` see this model; returns ``expert_layers``. Once a model, before it is cut into stages."""
    layers = expert_layers(model)
    for number, layer in enumerate(layers):
        layer.register_forward_pre_hook(_Note(number), with_kwargs=True)
    return layers


class _Note:
    """Before the experts of one layer compute: who was chosen."""

    def __init__(self, layer: int) -> None:
        self._layer = layer

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        routing = _current.get()
        if routing is not None:
            routing.chosen[self._layer] = args[1] if len(args) > 1 else kwargs["top_k_index"]


def _fused(module: nn.Module) -> list[nn.Parameter]:
    """Its own parameters of three dimensions, if there is a list of experts in them."""
    own = [p for p in module.parameters(recurse=False) if p.ndim == 3]
    return own if own and isinstance(getattr(module, "num_experts", None), int) else []


def expert_metrics(counts: Tensor) -> dict[str, float]:
    """How evenly tokens lie over experts, from ``Routing.counts`` added up over micro-batches and ranks.

    An expert's load is its share of its layer's choices times the number of experts: 1 where all
    are chosen alike. Nothing is said of a pass without tokens.
    """
    of_experts = counts[:, :-1]
    choices = of_experts.sum(dim=1, keepdim=True)
    if not float(choices.min()):
        return {}
    busiest = (of_experts * of_experts.shape[1] / choices).amax(dim=1)
    return {
        "experts/load_max": float(busiest.max()),
        "experts/load_mean": float(busiest.mean()),
        "experts/unused": float((of_experts == 0).double().mean()),
    }
