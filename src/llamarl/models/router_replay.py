"""Routers that choose the experts that they are told, and weigh them by what they know now.

    hidden ─▶ router's own scores ─┬─ top k ──────────▶ experts ┐
                                   └─ at the recorded ─▶ experts ┴▶ scores of these ─▶ the router's own weights of them

A router's code stays as it is: only the one step in it that selects, ``topk``, selects what was
recorded. So its weights have the family's own arithmetic and gradients, and where it would have
chosen the same experts in the same order, not a bit differs.

Replaying the generator's choices in the trainer is R3 ("rollout routing replay", arXiv:2510.11370).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from llamarl.errors import ModelError
from llamarl.models.experts import current_routing, expert_layers, num_experts

__all__ = ["let_replay", "routers"]


def routers(model: nn.Module) -> list[nn.Module]:
    """The module beside each layer's experts that chooses among them.

    Raises:
        ModelError: There is none, or it is not known how it chooses.
    """
    found = []
    parents = {child: module for module in model.modules() for child in module.children()}
    for experts in expert_layers(model):
        candidates = [m for m in parents[experts].children() if m is not experts and _chooses(m, num_experts(experts))]
        if len(candidates) != 1:
            raise ModelError(
                f"{type(model).__name__}: how a router chooses in {type(parents[experts]).__name__} is not known"
            )
        found.append(candidates[0])
    if not found:
        raise ModelError(f"{type(model).__name__} has no experts")
    return found


def _chooses(module: nn.Module, experts: int) -> bool:
    """Whether it has a weight row an expert, and knows how many it chooses."""
    weight = module._parameters.get("weight")
    return hasattr(module, "top_k") and weight is not None and weight.ndim == 2 and len(weight) == experts


def let_replay(model: nn.Module) -> None:
    """Let a pass inside ``watching`` choose what its ``Routing.recorded`` says. Once a model.

    Raises:
        ModelError: Of this architecture it is not known how a router chooses.
    """
    for layer, router in enumerate(routers(model)):
        router.forward = _replaying(router.forward, layer, len(router.weight))  # type: ignore[arg-type, method-assign]


def _replaying(original: Callable[[Tensor], Any], layer: int, experts: int) -> Callable[[Tensor], Any]:
    def forward(hidden: Tensor) -> Any:
        routing = current_routing()
        if routing is None or routing.recorded is None:
            return original(hidden)
        selection = _Selection(routing.recorded[:, layer].long(), experts)
        with selection:
            result = original(hidden)
        assert selection.made == 1, "a router selects experts once"
        return result

    return forward


class _Selection(TorchFunctionMode):
    """Inside, ``topk`` over all experts finds what was recorded; one over groups of them
    (DeepSeek's) finds what it finds."""

    def __init__(self, recorded: Tensor, experts: int) -> None:
        super().__init__()
        self._recorded = recorded
        self._shape = (len(recorded), experts)
        self.made = 0

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk) or args[0].shape != self._shape:
            return result
        self.made += 1
        scores, live = args[0], result.indices
        index = torch.where(self._recorded < 0, live, self._recorded)
        return torch.return_types.topk((scores.gather(-1, index), index))
