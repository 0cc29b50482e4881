"""What a response costs the trainer where its group's prompt is computed once for all responses in a micro-batch (``trainer.share_prompts``). Pure.

    lengths, prompt, group, budget ─▶ units (the trainer's own rule) ─▶ padded batches of each unit (its own rule) ─▶ means a response

Every product but attention's works on single tokens, so a prompt that is left out saves its whole cost there. Attention pays for
it. A row of separate sequences goes through a causal kernel, which leaves out what no token may see: ``L² / 2`` pairs of a sequence
of L tokens. A response after a shared prompt goes through one that takes a mask and computes the rectangle, ``R (P + R)``, of
responses filled up to the longest of their batch; keys and values of the prompt are copied for every response, and the mask is
kept. So sharing pays where the prompt is long beside the response, and a plan may be faster without.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from llamarl.planner.lengths import Lengths
from llamarl.trainer.packing import shared_units, similar_responses

__all__ = ["SharedRows", "microbatch_tokens", "sequences_within", "shared_rows"]

_RESPONSES = 1024
"""Of the sample from which means are taken, at least eight groups."""


@dataclass(frozen=True, kw_only=True)
class SharedRows:
    """Of a response, on average over a tick."""

    prompts: float
    """Prompts computed, 1 / group size to 1: a group that the budget cuts has one in each of its parts."""
    prompt_tokens: float
    """Of these."""
    queries: float
    """Rows of its padded batch: its own and what fills them up."""
    keys: float
    """The same with the prompt before them."""
    pairs: float
    """Query-key pairs computed under a mask."""
    masks: float
    """Numbers of a mask, one mask a batch."""


def microbatch_tokens(sequences: float, prompt_tokens: float, response_tokens: float, sharing: int) -> float:
    """Tokens of a micro-batch of so many responses of a length, whose prompts are computed once for ``sharing`` of a group each; the
    budget that holds them.

    Args:
        sharing: 1 where each response has its own.
    """
    return math.ceil(sequences / sharing) * prompt_tokens + sequences * response_tokens


def sequences_within(budget: float, prompt_tokens: float, response_tokens: float, sharing: int) -> int:
    """How many responses such a budget holds, at least one: a part of a group, or whole groups."""
    whole = prompt_tokens + sharing * response_tokens
    if sharing == 1:
        return max(1, round(budget / whole))
    if budget > whole - 1.0:  # a budget is a whole number of tokens
        return sharing * max(1, int((budget + 1.0) / whole))
    return max(1, round((budget - prompt_tokens) / response_tokens))


@lru_cache(maxsize=4096)
def shared_rows(lengths: Lengths, prompt_tokens: int, group: int, budget: int) -> SharedRows:
    """The means, over groups of representative lengths in a fixed shuffled order.

    Args:
        budget: ``trainer.max_tokens_per_microbatch``.
    """
    groups = max(8, _RESPONSES // group)
    count = groups * group
    sample = np.random.default_rng(0).permutation(lengths.representative(count)).tolist()
    units = shared_units([i // group for i in range(count)], [prompt_tokens] * count, sample, budget)
    queries = keys = pairs = masks = 0.0
    for unit in units:
        for batch in similar_responses([(prompt_tokens, sample[i], 0, i) for i in unit]):
            longest = max(response[1] for response in batch)
            queries += len(batch) * longest
            keys += len(batch) * (prompt_tokens + longest)
            pairs += len(batch) * longest * (prompt_tokens + longest)
            masks += longest * (prompt_tokens + longest)
    prompts = len(units) / count
    return SharedRows(
        prompts=prompts,
        prompt_tokens=prompts * prompt_tokens,
        queries=queries / count,
        keys=keys / count,
        pairs=pairs / count,
        masks=masks / count,
    )
