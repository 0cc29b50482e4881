"""Which sequences share a forward pass: pure decisions on lengths, no tensors.

Sequences are laid end to end, without padding. The longest go first, each into the emptiest micro-batch: micro-batches
come out within one sequence of each other in cost, and the same lengths always give the same packing.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["balance", "pack", "shared_units"]


def balance(costs: Sequence[int], num_bins: int) -> list[list[int]]:
    """Split items over bins of nearly equal cost (longest processing time first, Graham 1969).

    Args:
        costs: Cost of each item, >= 0.
        num_bins: >= 1; bins beyond the number of items stay empty.

    Returns:
        Item indices of each bin, ascending within a bin. The largest bin is at most 4/3 of the best possible.
    """
    if num_bins < 1:
        raise ValueError(f"num_bins must be >= 1, got {num_bins}")
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    loads = [0] * num_bins
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        emptiest = min(range(num_bins), key=lambda b: (loads[b], len(bins[b]), b))
        bins[emptiest].append(index)
        loads[emptiest] += costs[index]
    return [sorted(items) for items in bins]


def pack(lengths: Sequence[int], max_tokens: int, *, min_microbatches: int = 1) -> list[list[int]]:
    """Sequences -> micro-batches of at most ``max_tokens`` tokens, balanced, in as few as balancing allows.

    Args:
        lengths: Tokens of each sequence, >= 1.
        max_tokens: Budget of a micro-batch. A sequence longer than it gets a micro-batch of its own.
        min_microbatches: At least so many; ranks that must step together use the largest number among them, and
            the surplus is empty.

    Returns:
        Sequence indices of each micro-batch, ascending within one.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be >= 1, got {max_tokens}")
    long = [[i] for i, length in enumerate(lengths) if length > max_tokens]
    short = [i for i, length in enumerate(lengths) if length <= max_tokens]
    costs = [lengths[i] for i in short]
    if not short:
        return long + [[] for _ in range(min_microbatches - len(long))]
    num_bins = max(-(-sum(costs) // max_tokens), min_microbatches - len(long), 1)
    while True:
        bins = balance(costs, num_bins)
        if max(sum(costs[i] for i in items) for items in bins) <= max_tokens:
            return [[short[i] for i in items] for items in bins] + long
        num_bins += 1  # ends: with one bin a sequence every bin fits


def shared_units(
    groups: Sequence[int], prompt_lengths: Sequence[int], response_lengths: Sequence[int], max_tokens: int
) -> list[list[int]]:
    """Sequences that will share their prompt's computation: those of one group, as many as the budget holds.

    Args:
        groups: Group of each sequence; equal ones are neighbours.
        prompt_lengths: Of each sequence; equal within a group.
        response_lengths: Of each sequence, prompt not counted.
        max_tokens: Budget of a unit, its prompt counted once. A sequence that does not fit is a unit of its own.

    Returns:
        Sequence indices of each unit, in order.
    """
    units: list[list[int]] = []
    used = 0
    for i, length in enumerate(response_lengths):
        if units and groups[units[-1][-1]] == groups[i] and used + length <= max_tokens:
            units[-1].append(i)
            used += length
        else:
            units.append([i])
            used = prompt_lengths[i] + length
    return units
