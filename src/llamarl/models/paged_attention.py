"""The engine's attention: ``llamarl_paged`` in transformers' attention interface.

One engine step is one row of tokens [1, T]: first the decoding sequences, one token each, then chunks of prompts. The
function writes the K and V of all of them into the paged cache and lets each query read its own sequence there::

    row:    d0 d1 d2 | p0 p0 p0 p0 | p1 p1        PagedBatch says: slot of each token, block tables, context lengths
    cache:  per layer  K, V  [num_blocks, block_size, KV, D]

On a GPU ``paged_kernel.py`` reads the blocks of all decodes where they lie. Elsewhere decodes of
similar length form one padded batch, whose K and V are copied together first, so a step costs a few
kernel calls a layer, not one a sequence. Queries that share a K/V head go through the kernel as rows
of that head, so K and V are never repeated. Padding points at blocks of the sequence itself: a NaN
in one sequence cannot reach another.

In a compiled layer (``engine/compiled_layers.py``) all of this is one operator, ``llamarl::attend_pages``.

Shape legend: N sequences, T tokens, L cached tokens (padded), H query heads, KV key/value heads, G
= H / KV, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from llamarl.models.attention import fused_attention, register_attention, repeated_heads, softcapped_attention

__all__ = [
    "DecodeBatch",
    "PagedBatch",
    "PrefillChunk",
    "current_step",
    "paged_attention",
    "paged_step",
    "prefill_attention",
]


@dataclass(slots=True)
class DecodeBatch:
    """Rows ``first .. first + N`` of the step: one query each, contexts of similar length."""

    first: int
    blocks: Tensor
    """[N * B] block ids, B blocks a sequence; shorter tables repeat their last block."""
    lengths: Tensor
    """[N] cached tokens, the new one included."""
    num_slots: int
    """L = B * block_size."""
    _masks: dict[Any, Any] = field(default_factory=dict)

    def bias(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """[N, 1, 1, L]: 0 on slots that hold tokens the query may see, -inf elsewhere. Made once a
        step, not per layer."""
        if window not in self._masks:
            positions = torch.arange(self.num_slots, device=self.lengths.device)[None, :]
            hidden = positions >= self.lengths[:, None]
            if window is not None:
                hidden |= positions < self.lengths[:, None] - window
            bias = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
            self._masks[window] = bias[:, None, None, :]
        return self._masks[window]


class QueryRows(NamedTuple):
    """Queries ``start .. end`` of a chunk, and the keys ``first_key .. last_key`` of its sequence
    that one of them may see."""

    start: int
    end: int
    first_key: int
    last_key: int


@dataclass(slots=True)
class PrefillChunk:
    """Rows ``first .. first + num_tokens``: successive tokens of one sequence, of which ``start``
    lie in the cache already."""

    first: int
    num_tokens: int
    start: int
    blocks: Tensor
    """[B] block ids that cover ``start + num_tokens`` tokens."""
    _masks: dict[int | None, Tensor] = field(default_factory=dict)

    def allowed(self, window: int | None) -> Tensor:
        """[1, 1, num_tokens, start + num_tokens] bool. Made once a step, not per layer."""
        if window not in self._masks:
            whole = QueryRows(0, self.num_tokens, 0, self.start + self.num_tokens)
            self._masks[window] = self.allowed_in(whole, window)
        return self._masks[window]

    def allowed_in(self, rows: QueryRows, window: int | None) -> Tensor:
        """[1, 1, rows.end - rows.start, rows.last_key - rows.first_key] bool."""
        device = self.blocks.device
        queries = torch.arange(self.start + rows.start, self.start + rows.end, device=device)[:, None]
        keys = torch.arange(rows.first_key, rows.last_key, device=device)[None, :]
        allowed = queries >= keys
        if window is not None:
            allowed &= queries - window < keys
        return allowed[None, None]

    def rows(self, window: int | None, scores: int) -> Iterator[QueryRows]:
        """Successive queries that together have at most ``scores`` scores, or are one, and the keys
        that they may see."""
        first = 0
        while first < self.num_tokens:
            first_key = 0 if window is None else max(0, self.start + first - window + 1)
            count = min(self.num_tokens - first, most_rows(self.start + first + 1 - first_key, scores))
            yield QueryRows(first, first + count, first_key, self.start + first + count)
            first += count


def most_rows(keys: int, scores: int) -> int:
    """Of successive queries, the first of which sees ``keys`` keys and each a key more: as many as
    have at most ``scores`` scores in a rectangle, at least one."""
    return max(1, (math.isqrt((keys - 1) ** 2 + 4 * scores) - (keys - 1)) // 2)


@dataclass(slots=True)
class PagedBatch:
    """What ``llamarl_paged`` must know of a step."""

    keys: list[Tensor]
    """Per layer, [num_blocks, block_size, KV, D]."""
    values: list[Tensor]
    slots: Tensor
    """[T] flat slot (block * block_size + offset) of each token."""
    decodes: list[DecodeBatch]
    prefills: list[PrefillChunk]
    in_place: bool = False
    """Whether decodes read their blocks where they lie."""
    layer: int = 0
    """That is computed, where layers are compiled: code for all of them knows no number."""


_MOST_SCORES = 1 << 25
"""Of one call with a mask, which has a byte a score and up to four more where a kernel wants
numbers; 2,048 tokens after 129,024 others have eight times as many."""
_current: ContextVar[PagedBatch | None] = ContextVar("llamarl_paged_batch", default=None)


@contextmanager
def paged_step(batch: PagedBatch) -> Iterator[None]:
    """Model calls inside compute this step. Not every decoder passes on to its layers what it does
    not know, so the batch travels beside the call."""
    token = _current.set(batch)
    try:
        yield
    finally:
        _current.reset(token)


def current_step() -> PagedBatch | None:
    """The batch of the step that is computed."""
    return _current.get()


def paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    packing: Any = None,
) -> Tensor:
    """Write a step's keys and values into the cache and attend over what it holds of each sequence.

    Args:
        query: [1, H, T, D], already rotated.
        key, value: [1, KV, T, D].

    Returns:
        [1, T, H, D].
    """
    if torch.compiler.is_compiling():
        found: Tensor = torch.ops.llamarl.attend_pages(query, key, value, scale, window, softcap)
        return found
    paged_batch = _current.get()
    if paged_batch is None:
        raise ValueError("llamarl_paged runs inside the engine only; load with attention='sdpa' otherwise")
    layer: int = module.layer_idx  # type: ignore[assignment]
    return _attend(paged_batch, layer, query, key, value, scale=scale, window=window, softcap=softcap)


@torch.library.custom_op("llamarl::attend_pages", mutates_args=())
def _operator(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    """What a compiled layer calls. The cache is no argument: torch would copy what an operator writes to."""
    batch = _current.get()
    assert batch is not None, "a compiled layer runs inside the engine only"
    return _attend(batch, batch.layer, query, key, value, scale=scale, window=window, softcap=softcap)


@_operator.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, softcap: float | None) -> Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], query.shape[3])


def _attend(
    paged_batch: PagedBatch,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    keys, values = paged_batch.keys[layer], paged_batch.values[layer]
    _, H, T, D = query.shape
    KV = key.shape[1]
    q_THD, k_TKD, v_TKD = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    keys.view(-1, KV, D).index_copy_(0, paged_batch.slots, k_TKD)
    values.view(-1, KV, D).index_copy_(0, paged_batch.slots, v_TKD)
    out_THD = query.new_empty(T, H, D)

    for batch in paged_batch.decodes:
        N, L = len(batch.lengths), batch.num_slots
        inside = window if window is not None and window < L else None
        if paged_batch.in_place:
            from llamarl.models.paged_kernel import attend_pages  # needs Triton

            queries, tables = q_THD[batch.first : batch.first + N], batch.blocks.view(N, -1)
            out = attend_pages(
                queries, keys, values, tables, batch.lengths, scale=scale, window=inside, softcap=softcap
            )
            if N == T:
                return out[None]
            out_THD[batch.first : batch.first + N] = out
            continue
        k = keys.index_select(0, batch.blocks).view(N, L, KV, D).transpose(1, 2)
        v = values.index_select(0, batch.blocks).view(N, L, KV, D).transpose(1, 2)
        q = q_THD[batch.first : batch.first + N].reshape(N, KV, H // KV, D)
        bias = batch.bias(inside, q.dtype)
        if softcap is not None:
            out = softcapped_attention(q, k, v, bias == 0, scale=scale, softcap=softcap)
        else:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)
        if N == T:
            return out.reshape(1, T, H, D)
        out_THD[batch.first : batch.first + N] = out.reshape(N, H, D)

    for chunk in paged_batch.prefills:
        out_THD[chunk.first : chunk.first + chunk.num_tokens] = prefill_attention(
            chunk, q_THD, key, value, keys, values, scale=scale, window=window, softcap=softcap
        )
    return out_THD[None]


def prefill_attention(
    chunk: PrefillChunk,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Attention of one chunk's queries over what the cache and the chunk itself hold of its sequence.

    A mask takes the queries times the keys: of a long sequence, its queries come a few at a time.

    Args:
        query: [T, H, D] of the whole step.
        key, value: [1, KV, T, D] of the whole step.
        keys, values: This layer's cache; the chunk is in it already.

    Returns:
        [num_tokens, H, D].
    """
    end, L = chunk.first + chunk.num_tokens, chunk.start + chunk.num_tokens
    D, KV = query.shape[2], key.shape[1]
    window = window if window is not None and window < L else None
    q = query[chunk.first : end].transpose(0, 1)[None]
    if chunk.start == 0:
        k, v = key[:, :, chunk.first : end], value[:, :, chunk.first : end]
    else:
        k = keys.index_select(0, chunk.blocks).view(-1, KV, D)[:L].transpose(0, 1)[None]
        v = values.index_select(0, chunk.blocks).view(-1, KV, D)[:L].transpose(0, 1)[None]
    scores = _MOST_SCORES if softcap is None else _MOST_SCORES // q.shape[1]
    if softcap is None and chunk.start == 0 and window is None:
        out = fused_attention(q, k, v, scale=scale, causal=True)
    elif chunk.num_tokens * L <= scores:
        out = _masked(q, k, v, chunk.allowed(window), scale, softcap)
    else:
        k, v = (k, v) if softcap is not None else repeated_heads(q, k, v)
        parts = [
            _masked(
                q[:, :, rows.start : rows.end],
                k[:, :, rows.first_key : rows.last_key],
                v[:, :, rows.first_key : rows.last_key],
                chunk.allowed_in(rows, window),
                scale,
                softcap,
            )
            for rows in chunk.rows(window, scores)
        ]
        out = torch.cat(parts, dim=2)
    return out[0].transpose(0, 1)


def _masked(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, scale: float, softcap: float | None) -> Tensor:
    if softcap is not None:
        return softcapped_attention(query, key, value, allowed, scale=scale, softcap=softcap)
    return fused_attention(query, key, value, scale=scale, mask=allowed)


register_attention("llamarl_paged", paged_attention)
