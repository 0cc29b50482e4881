"""Which sequences share a forward pass: pure decisions on lengths, no tensors.

Sequences are laid end to end, without padding. The longest go first, each into the emptiest micro-batch: micro-batches
come out within one sequence of each other in cost, and the same lengths always give the same packing.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

__all__ = ["SIMILAR", "balance", "for_several_at_once", "pack", "shared_units", "similar_responses"]

SIMILAR = 0.8
"""A padded batch holds responses at least this long relative to its longest."""
_SMALL_GAP = 16
"""Tokens of padding that are always cheaper than another kernel call."""


def balance(costs: Sequence[int], num_bins: int, *, first: int = 0) -> list[list[int]]:
    """Split items over bins of nearly equal cost (longest processing time first, Graham 1969).

    Args:
        costs: Cost of each item, >= 0.
        num_bins: >= 1; bins beyond the number of items stay empty.
        first: The bin that ties go to; then to those that follow it.

    Returns:
        Item indices of each bin, ascending within a bin. The largest bin is at most 4/3 of the best possible.
    """
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    heap = [(0, 0, place) for place in range(num_bins)]  # cost, items, place counted from the first bin
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, count, place = heap[0]
        heapq.heapreplace(heap, (load + costs[index], count + 1, place))
        bins[(place + first) % num_bins].append(index)
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


def similar_responses(responses: Sequence[tuple[int, int, int, int]]) -> list[list[tuple[int, int, int, int]]]:
    """Which responses share a padded batch in attention: those of one prompt length and similar
    lengths, the longest first.

    Args:
        responses: (prompt tokens, own tokens, row of the prompt, row of the response) of each.
    """
    batches: list[list[tuple[int, int, int, int]]] = []
    for response in sorted(responses, key=lambda r: (-r[0], -r[1], r[3])):
        if batches and batches[-1][0][0] == response[0]:
            longest = batches[-1][0][1]
            if response[1] >= SIMILAR * longest or longest - response[1] <= _SMALL_GAP:
                batches[-1].append(response)
                continue
        batches.append([response])
    return batches


def for_several_at_once(
    microbatches: Sequence[Sequence[int]], costs: Sequence[int], lengths: Sequence[int], at_once: int
) -> list[list[int]]:
    """Micro-batches in the order in which ``at_once`` threads that each take the next one end
    closest together: the largest first, and what is left over after whole rounds cut so that there
    is something for each.

    Args:
        costs: Tokens of each micro-batch.
        lengths: Own tokens of each sequence, by which the pieces are made equal.
    """
    ordered = [list(microbatches[i]) for i in sorted(range(len(microbatches)), key=lambda i: (-costs[i], i))]
    rest = len(ordered) % at_once
    pieces = at_once // rest if rest else 1
    whole = len(ordered) - rest
    return ordered[:whole] + [piece for items in ordered[whole:] for piece in _contiguous(items, lengths, pieces)]


def _contiguous(items: Sequence[int], lengths: Sequence[int], num_pieces: int) -> list[list[int]]:
    """``items`` in pieces of nearly equal length, none empty, so fewer where there are too few of
    them. Neighbours stay neighbours: they share a prompt."""
    num_pieces = min(num_pieces, len(items))
    pieces: list[list[int]] = [[]]
    total, before = sum(lengths[i] for i in items), 0
    for number, item in enumerate(items):
        full = before + lengths[item] / 2 > total * len(pieces) / num_pieces
        must = len(items) - number == num_pieces - len(pieces)  # one item for each piece that is still to come
        if pieces[-1] and len(pieces) < num_pieces and (full or must):
            pieces.append([])
        pieces[-1].append(item)
        before += lengths[item]
    return pieces
