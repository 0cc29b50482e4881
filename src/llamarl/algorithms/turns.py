"""Credit over the turns of an episode: advantages that follow from turn rewards and a critic's
values, in float64 NumPy.

A turn is an action of its own, its first token's prefix the state in which it was chosen. With
``V_j`` the value before the first token of turn j and ``r_j`` that turn's reward::

    delta_j = r_j + gamma V_{j+1} - V_j          V_N = 0
    A_j     = delta_j + gamma lambda A_{j+1}     R_j = A_j + V_j

Every token of a turn has the turn's ``A_j``.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from llamarl.algorithms.gae import gae

__all__ = ["turn_gae", "turn_lengths"]

Array = npt.NDArray[np.float64]


def turn_lengths(
    starts: npt.NDArray[np.integer], ends: npt.NDArray[np.integer], mask: npt.NDArray[np.bool_]
) -> list[int]:
    """Trained tokens of each turn.

    Args:
        starts: First token of each turn, [N].
        ends: One beyond the last token of each turn, [N].
        mask: True on trained tokens of the response, [R]; none lies outside of the turns.

    Raises:
        ValueError: A trained token belongs to no turn, or to two.
    """
    lengths = [int(mask[start:end].sum()) for start, end in zip(starts, ends, strict=True)]
    if sum(lengths) != int(mask.sum()):
        raise ValueError(f"turns of {lengths} trained tokens do not add up to the response's {int(mask.sum())}")
    return lengths


def turn_gae(rewards: Array, values: Array, lengths: list[int], *, gamma: float, lam: float) -> tuple[Array, Array]:
    """Advantages and returns of every token, [T] each: those of its turn.

    A turn without trained tokens is no action: what it earned is the last earlier turn's that has
    some (the first later one's, where there is none).

    Args:
        rewards: r_j, [N].
        values: V_t of each trained token, [T]; only the first of each turn is used.
        lengths: Trained tokens of each turn, [N], adding up to T.
        gamma: Discount a turn, in [0, 1].
        lam: In [0, 1].

    Raises:
        ValueError: The arrays do not fit together.
    """
    rewards, lengths = _actions(rewards, values, lengths)
    firsts = np.cumsum([0, *lengths[:-1]]) if lengths else np.zeros(0, int)
    advantages, returns = gae(rewards, values[firsts], gamma=gamma, lam=lam)
    return np.repeat(advantages, lengths), np.repeat(returns, lengths)


def _actions(rewards: Array, values: Array, lengths: list[int]) -> tuple[Array, list[int]]:
    """Rewards and lengths of the turns that have trained tokens; nothing that was earned is lost."""
    if len(rewards) != len(lengths) or sum(lengths) != len(values):
        raise ValueError(f"{len(rewards)} turn rewards, turns of {lengths} tokens and {len(values)} values do not fit")
    kept: list[float] = []
    early = 0.0
    for reward, n in zip(rewards.tolist(), lengths, strict=True):
        if n:
            kept.append(reward + early)
            early = 0.0
        elif kept:
            kept[-1] += reward
        else:
            early += reward
    return np.array(kept, np.float64), [n for n in lengths if n]
