"""Names that a recipe may write, and the functions they stand for; a user's own are named by import path."""

from __future__ import annotations

from dataclasses import replace

import torch

from llamarl.algorithms.base import LossFunction, TokenBatch, TokenLosses
from llamarl.errors import ConfigError
from llamarl.import_path import call, resolve
from llamarl.settings import algorithms as settings
from llamarl.settings.algorithms import AlgorithmConfig

__all__ = ["LOSSES", "WITH_PROXIMAL_POLICY", "find_loss"]

LOSSES: dict[str, LossFunction] = {name: resolve(path) for name, path in settings.LOSSES.items()}
"""``algorithm.name`` -> loss, of those built in."""

WITH_PROXIMAL_POLICY = frozenset({"decoupled_ppo", "truncated_is"})
"""Losses that look at ``proximal_logprobs``. With one update a tick these are the policy's own and
nobody computes them."""


def find_loss(name: str) -> LossFunction:
    """The loss that ``algorithm.name`` names, built in or a user's own.

    A user's own raises ConfigError when it is called: no such module, file or function, or an
    answer of another shape than its batch.
    """
    if name in LOSSES:
        return LOSSES[name]

    def checked(batch: TokenBatch, config: AlgorithmConfig) -> TokenLosses:
        # imported when it is first needed: an export of a run runs no code of it
        terms = call(name, "algorithm.name", batch, config)
        if not isinstance(terms, TokenLosses):
            raise ConfigError(
                f"algorithm.name {name!r} returned a {type(terms).__name__}: a loss returns "
                f"llamarl.algorithms.base.TokenLosses, one term a token, not averaged"
            )
        if terms.clipped is None:
            terms = replace(terms, clipped=torch.zeros_like(batch.policy_logprobs, dtype=torch.bool))
        parts = {"losses": terms.losses, "clipped": terms.clipped}
        shapes = {
            name: tuple(part.shape) if isinstance(part, torch.Tensor) else type(part) for name, part in parts.items()
        }
        if set(shapes.values()) != {(expected := tuple(batch.policy_logprobs.shape))}:
            raise ConfigError(
                f"algorithm.name {name!r} returned {shapes} for a batch of {expected} tokens: one term a token"
            )
        if batch.policy_logprobs.requires_grad and not terms.losses.requires_grad:
            raise ConfigError(
                f"algorithm.name {name!r} returned losses without a gradient: they depend on batch.policy_logprobs or "
                f"batch.logits() (batch.entropy has one with algorithm.entropy_coef alone), and nothing detaches them"
            )
        return terms

    return checked
