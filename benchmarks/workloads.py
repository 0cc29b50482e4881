"""The requests that ``generation.py`` and its child decode. Needs nothing but the engine's records, so that another environment can read it."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from llamarl.engine.sequence import SamplingParams
from llamarl.engine.sequence import Sequence as TokenSequence

__all__ = ["Request", "long_tail_requests", "sequences_of", "short_requests", "task_tail_sequences"]

Request = tuple[list[int], int]
"""Prompt tokens, number of tokens to generate."""


def short_requests(vocabulary: int, n: int = 32, length: int = 64) -> list[Request]:
    draw = random.Random(1)
    return [([draw.randrange(3, vocabulary) for _ in range(draw.randint(24, 40))], length) for _ in range(n)]


def long_tail_requests(vocabulary: int, n: int = 64) -> list[Request]:
    draw = random.Random(2)
    lengths = [min(512, max(8, round(math.exp(draw.gauss(math.log(64), 1.0))))) for _ in range(n)]
    return [(prompt, length) for (prompt, _), length in zip(short_requests(vocabulary, n), lengths, strict=True)]


def sequences_of(requests: Sequence[Request], group: int = 1) -> list[TokenSequence]:
    return [
        TokenSequence(
            prompt_index=i,
            sample_index=j,
            prompt_tokens=list(prompt),
            params=SamplingParams(max_new_tokens=length),
            seed=1000 * i + j,
        )
        for i, (prompt, length) in enumerate(requests)
        for j in range(group)
    ]


def task_tail_sequences(prompts: Sequence[Sequence[int]], group: int = 8) -> list[TokenSequence]:
    """``group`` responses to each prompt, with the lengths of ``long_tail``."""
    lengths = [length for _, length in long_tail_requests(4, len(prompts) * group)]
    return [
        TokenSequence(
            prompt_index=i // group,
            sample_index=i % group,
            prompt_tokens=list(prompts[i // group]),
            params=SamplingParams(max_new_tokens=length),
            seed=i,
        )
        for i, length in enumerate(lengths)
    ]
