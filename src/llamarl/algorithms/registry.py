"""Names that a recipe may write, and the functions they stand for."""

from __future__ import annotations

from llamarl.algorithms.aipo import aipo, aipo_surrogate, reinforce
from llamarl.algorithms.base import LossFunction
from llamarl.algorithms.cispo import cispo
from llamarl.algorithms.ppo import decoupled_ppo, gspo, ppo, truncated_is

__all__ = ["LOSSES", "WITH_PROXIMAL_POLICY"]

LOSSES: dict[str, LossFunction] = {
    "aipo": aipo,
    "aipo_surrogate": aipo_surrogate,
    "reinforce": reinforce,
    "ppo": ppo,
    "decoupled_ppo": decoupled_ppo,
    "truncated_is": truncated_is,
    "cispo": cispo,
    "gspo": gspo,
}
"""``algorithm.name`` -> loss. A new algorithm is one file, one test and one line here."""

WITH_PROXIMAL_POLICY = frozenset({"decoupled_ppo", "truncated_is"})
"""Losses that look at ``proximal_logprobs``. With one update a tick these are the policy's own and nobody computes them."""
