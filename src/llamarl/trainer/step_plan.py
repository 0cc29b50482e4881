"""Which groups each optimizer step of a tick trains on: pure decisions on prompt indices, no tensors.

    prompts of all ranks ─▶ a seeded order a pass ─▶ cut into parts whose numbers of groups differ by one at most

A group stays together. Random numbers come from (seed, tick, pass, prompt), so a plan depends neither on which rank
holds what nor on what was drawn before: any layout trains the same steps, and a resume needs no random state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from llamarl.determinism import derive_seed

__all__ = ["plan_of_rank", "plan_steps"]

_ORDER = 7


def plan_steps(prompts: Sequence[int], *, minibatches: int, epochs: int, seed: int, tick: int) -> list[list[int]]:
    """Cut a tick's groups into ``epochs`` passes of ``minibatches`` optimizer steps each.

    Args:
        prompts: Index in the prompt stream of every group of all ranks.
        seed: The run's.

    Returns:
        Prompts of each step; a step may be empty.
    """
    steps = []
    for epoch in range(epochs):
        order = sorted(set(prompts), key=lambda prompt: (derive_seed(seed, _ORDER, tick, epoch, prompt, 0), prompt))
        sizes = [len(order) // minibatches + (part < len(order) % minibatches) for part in range(minibatches)]
        ends = np.cumsum([0, *sizes]).tolist()
        steps += [order[start:end] for start, end in zip(ends, ends[1:], strict=False)]
    return steps


def plan_of_rank(
    prompts: Sequence[int],
    *,
    minibatches: int,
    epochs: int,
    seed: int,
    tick: int,
    rank: int,
    num_ranks: int,
    sum_over_ranks: Callable[[npt.NDArray[np.int64]], npt.NDArray[np.int64]],
) -> list[list[int]]:
    """What one data-parallel rank does in each optimizer step of a tick that all ranks plan together.

    Args:
        prompts: Of each of the rank's sequences.
        sum_over_ranks: Element-wise; every rank calls it twice.

    Returns:
        Indices of its sequences for each step, ascending, so that the responses of a group stay neighbours.
    """
    own = sorted(set(prompts))
    counts = np.zeros(num_ranks, np.int64)
    counts[rank] = len(own)
    counts = sum_over_ranks(counts)
    start = int(counts[:rank].sum())
    everyone = np.zeros(int(counts.sum()), np.int64)
    everyone[start : start + len(own)] = own  # others add zeros
    everyone = sum_over_ranks(everyone)
    steps = plan_steps(everyone.tolist(), minibatches=minibatches, epochs=epochs, seed=seed, tick=tick)
    return [[i for i, prompt in enumerate(prompts) if prompt in step] for step in map(set, steps)]
