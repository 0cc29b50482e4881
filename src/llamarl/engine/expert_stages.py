"""The experts of all layers, from stages that each wrote down those of their own layers.

    stage 0   [T, layers 0 .. a-1, k] ─┐
    stage 1   [T, layers a .. b-1, k] ─┼─▶ first rank of the engine: [T, layers, k]
    stage 2   [T, layers b .. n-1, k] ─┘

A stage keeps its own part beside each sequence as long as that is in the making, in its checkpoints too, and nothing of it
travels with a step. It is asked for once, when a group is complete: all ranks deliver the same groups in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from llamarl.engine.expert_record import Experts
from llamarl.engine.ranks import EngineRanks

__all__ = ["layers_joined", "of_all_stages"]


def of_all_stages(own: Sequence[Experts | None], ranks: EngineRanks) -> list[Experts | None]:
    """What all stages noted, on the first rank of the engine; on other ranks ``own``, of which nobody there makes use.

    Args:
        own: This stage's, of some rows of tokens; every rank calls it with the same rows.
    """
    if ranks.num_stages == 1 or not ranks.leads:
        return list(own)  # of tensor-parallel ranks, which chose the same, one sends
    parts = ranks.gather_from_stages(list(own))
    return list(own) if parts is None else [layers_joined(of_stages) for of_stages in zip(*parts, strict=True)]


def layers_joined(of_stages: Sequence[Experts | None]) -> Experts | None:
    """Of one row of tokens, what each stage noted [T, its layers, k], side by side; None where nothing was noted.

    Raises:
        AssertionError: Stages noted different numbers of tokens.
    """
    noted = [part for part in of_stages if part is not None]
    assert len({len(part) for part in noted}) <= 1, f"stages noted {[len(part) for part in noted]} tokens"
    assert len(noted) in (0, len(of_stages)), "a stage noted nothing where others did"
    with_experts = [part for part in noted if part.shape[1]]
    if not with_experts:
        return None
    return np.concatenate(with_experts, axis=1)
