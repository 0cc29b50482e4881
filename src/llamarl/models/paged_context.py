"""The engine's attention where every rank has the whole weights and computes some of a step's
tokens: ``llamarl_paged_over_ranks`` in transformers' attention interface.

    rank r                  tokens r * m .. (r + 1) * m of the step, all heads         [m, H + 2 KV, D]
    q, k, v ──exchange──▶   all T tokens, heads of rank r                              [T, h + 2 kv, D]
    the engine's own attention of the whole step: these heads' cache, every sequence, windows, soft caps
    output ──exchange──▶    own tokens, all heads                                      [m, H, D]

This is DeepSpeed-Ulysses (arXiv:2309.14509) for inference. Attention treats each head alone, and
everything else in a decoder each token alone, so nothing is summed over ranks: a rank's embedding,
norms and products are those of m tokens, its cache is that of its heads, as with tensor parallelism
over as many ranks.

Rules. m = ceil(T / n): a step is filled up at its end with tokens that attention never sees and
nobody reads. Query heads divide by n = the ranks, key-value heads too, or n is a multiple of them:
then neighbours hold the same head.

Shape legend: as in ``paged_attention.py``; h and kv are the heads of one rank, m its tokens, n the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from llamarl.models.attention import register_attention
from llamarl.models.paged_attention import paged_attention

__all__ = ["PAGED_OVER_RANKS", "HeadExchange", "paged_over_ranks", "share_of"]

PAGED_OVER_RANKS = "llamarl_paged_over_ranks"
"""Name in transformers' attention interface. To take it from here is to have it registered."""


def share_of(count: int, rank: int, num_ranks: int) -> range:
    """Which of ``count`` things are a rank's: as many each, the last ones fewer or none."""
    each = -(-count // num_ranks)
    return range(min(count, rank * each), min(count, (rank + 1) * each))


@dataclass(frozen=True, slots=True)
class HeadExchange:
    """Between own tokens of all heads and all tokens of own heads, for one step. Every rank calls
    the same in the same order."""

    group: dist.ProcessGroup
    num_ranks: int
    """n."""
    num_tokens: int
    """T, of the whole step; at least 1."""

    @property
    def num_on_each(self) -> int:
        """m, with what the step is filled up with."""
        return -(-self.num_tokens // self.num_ranks)

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[T, h + 2 kv, D] query, key and value heads of this rank.

        Args:
            query: [m, H, D] of own tokens.
            key, value: [m, KV, D].
        """
        n, m = self.num_ranks, self.num_on_each
        if key.shape[1] < n:
            key, value = (x.repeat_interleave(n // x.shape[1], dim=1) for x in (key, value))
        h, kv, D = query.shape[1] // n, key.shape[1] // n, query.shape[2]
        leaving = query.new_empty(n, m, h + 2 * kv, D)
        for first, x in ((0, query), (h, key), (h + kv, value)):
            own = x.shape[1] // n
            leaving[:, :, first : first + own] = x.reshape(m, n, own, D).transpose(0, 1)
        return self._exchanged(leaving).view(n * m, h + 2 * kv, D)[: self.num_tokens]

    def to_tokens(self, attended: Tensor) -> Tensor:
        """[m, H, D] of own tokens, from [T, h, D] of own heads."""
        n, m = self.num_ranks, self.num_on_each
        _, h, D = attended.shape
        leaving = attended
        if n * m > self.num_tokens:
            leaving = torch.cat([attended, attended.new_zeros(n * m - self.num_tokens, h, D)])
        return self._exchanged(leaving.view(n, m, h, D)).transpose(0, 1).reshape(m, n * h, D)

    def _exchanged(self, parts: Tensor) -> Tensor:
        """Part i goes to rank i, and what arrives lies in the order of the ranks."""
        parts = parts.contiguous()
        arrived = torch.empty_like(parts)
        dist.all_to_all_single(arrived, parts, group=self.group)
        return arrived


_current: ContextVar[HeadExchange | None] = ContextVar("llamarl_head_exchange", default=None)


@contextmanager
def paged_over_ranks(heads: HeadExchange) -> Iterator[None]:
    """Inside, beside ``paged_step`` with the batch of the whole step, model calls compute this rank's tokens of it."""
    token = _current.set(heads)
    try:
        yield
    finally:
        _current.reset(token)


def _attention_over_ranks(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, **settings: Any
) -> Tensor:
    """The function behind ``PAGED_OVER_RANKS``: query [1, H, m, D], key and value [1, KV, m, D] of
    own tokens -> [1, m, H, D]."""
    heads = _current.get()
    if heads is None:
        raise ValueError(f"{PAGED_OVER_RANKS} runs inside the engine only; load with attention='sdpa' otherwise")
    whole = heads.to_heads(*(x[0].transpose(0, 1) for x in (query, key, value)))
    h = query.shape[1] // heads.num_ranks
    kv = (whole.shape[1] - h) // 2
    q, k, v = (x.transpose(0, 1)[None] for x in whole.split((h, kv, kv), dim=1))
    return heads.to_tokens(paged_attention(module, q, k, v, **settings)[0])[None]


register_attention(PAGED_OVER_RANKS, _attention_over_ranks)
