"""Names that a recipe may write, and the functions they stand for."""

from __future__ import annotations

from llamarl.algorithms.aipo import aipo, reinforce
from llamarl.algorithms.base import LossFunction

__all__ = ["LOSSES"]

LOSSES: dict[str, LossFunction] = {
    "aipo": aipo,
    "reinforce": reinforce,
}
"""``algorithm.name`` -> loss. A new algorithm is one file, one test and one line here."""
