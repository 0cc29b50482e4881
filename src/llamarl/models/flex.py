"""One attention kernel for whatever rows the trainer packs and pages the engine decodes from: torch's ``flex_attention``.

    training   [1, T] row of segments; a response sees its prompt's tokens and its own up to itself  ─▶ ``llamarl_flex``
    decoding   one query a sequence, K and V read where they lie in the cache's blocks               ─▶ ``flex_decode``

On a GPU the call compiles to one fused kernel that visits the blocks of keys named here and no
others: no copies of K and V, no padded batches, windows and soft caps included. Elsewhere all
scores are computed, by torch or, where it has no backward pass, here: right and slow, for tests.

**Not yet run on a GPU.** Both are held against float64 on the CPU (``tests/unit/models/test_flex.py``).

Shape legend as in :mod:`llamarl.models.paged_attention`; a *block* is of ``BLOCK`` rows here, in decoding of the cache's size.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from llamarl.models.attention import Segment, register_attention
from llamarl.models.transfer import to_device

__all__ = ["BLOCK", "FLEX_ATTENTION", "flex_attention", "flex_decode", "page_mask", "visible_blocks"]

FLEX_ATTENTION = "llamarl_flex"
"""Name in transformers' attention interface."""
BLOCK = 128
"""Rows of queries, and of keys, that the kernel takes or leaves out together."""


class _Packing(Protocol):
    @property
    def num_tokens(self) -> int: ...

    @property
    def kept(self) -> dict[Any, Any]: ...

    def segments(self) -> Sequence[Segment]: ...


def visible_blocks(segments: Sequence[Segment], window: int) -> list[list[int]]:
    """For each block of queries the blocks of keys that hold a row which one of its queries sees, in order.

    Args:
        segments: In row order, without gaps.
        window: Tokens that a query sees, itself included.
    """
    num_tokens = segments[-1].first + segments[-1].num_tokens
    found: list[set[int]] = [set() for _ in range(-(-num_tokens // BLOCK))]
    for segment in segments:
        end = segment.first + segment.num_tokens
        for block in range(segment.first // BLOCK, -(-end // BLOCK)):
            first, last = max(segment.first, block * BLOCK), min(end, (block + 1) * BLOCK) - 1
            lowest = (
                segment.prompt_tokens + first - segment.first - window + 1
            )  # first position that the first query sees
            own = segment.first + max(0, lowest - segment.prompt_tokens)
            found[block].update(range(own // BLOCK, last // BLOCK + 1))
            if (seen := segment.prompt + max(0, lowest)) < (behind := segment.prompt + segment.prompt_tokens):
                found[block].update(range(seen // BLOCK, (behind - 1) // BLOCK + 1))
    return [sorted(blocks) for blocks in found]


def flex_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    packing: _Packing,
) -> Tensor:
    """Attend within a packed row: query [1, H, T, D], key and value [1, KV, T, D] -> [1, T, H, D].

    Raises:
        ValueError: No boundaries were given, or they do not fit T.
    """
    T = query.shape[2]
    if not hasattr(packing, "segments") or packing.num_tokens != T:
        raise ValueError(f"llamarl_flex needs the segments of a row of {T} tokens, got {type(packing).__name__}")
    kept = ("flex", window, query.device)
    if kept not in packing.kept:
        packing.kept[kept] = _row_mask(packing.segments(), T if window is None else window, query.device)
    out = _kernel(query.device.type)(
        query,
        key,
        value,
        score_mod=_soft_cap(softcap),
        block_mask=packing.kept[kept],
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.transpose(1, 2)


def flex_decode(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Any,
    *,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """Attention of one query a sequence over its blocks of a layer's cache.

    Args:
        query: [N, H, D].
        keys, values: [num_blocks, block_size, KV, D].
        mask: ``page_mask`` of the step.

    Returns:
        [N, H, D].
    """
    num_blocks, size, KV, D = keys.shape
    k, v = (x.view(1, num_blocks * size, KV, D).transpose(1, 2) for x in (keys, values))
    inside = torch.compiler.is_compiling()  # a layer that is compiled as a whole, this call with it
    heads = query.shape[1] // KV
    out = (_call() if inside else _kernel(query.device.type))(
        query[:, :, None],
        k,
        v,
        score_mod=_capping(softcap) if inside else _soft_cap(softcap),
        block_mask=mask,
        scale=scale,
        enable_gqa=heads != 1,
        # a tile of what one block of keys and the heads of one query have, or torch refuses the blocks as too small
        kernel_options={"BLOCK_M": max(16, 1 << (heads - 1).bit_length()), "BLOCK_N": math.gcd(size, 64)},
    )
    return out[:, :, 0]


def _row_mask(segments: Sequence[Segment], window: int, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import BlockMask

    blocks = visible_blocks(segments, window)
    counts = np.array([len(row) for row in blocks], np.int32)
    indices = np.zeros((len(blocks), len(blocks)), np.int32)
    for row, visible in zip(indices, blocks, strict=True):
        row[: len(visible)] = visible
    T = segments[-1].first + segments[-1].num_tokens
    per_row = np.repeat(np.array(segments, np.int32), [segment.num_tokens for segment in segments], axis=0)
    first, _, prompt, prompt_tokens = (to_device(torch.from_numpy(x.copy()), device) for x in per_row.T)
    position = torch.arange(T, dtype=torch.int32, device=device) - first + prompt_tokens

    def may_see(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        own = (kv >= first[q]) & (kv <= q)
        before = (kv >= prompt[q]) & (kv < prompt[q] + prompt_tokens[q])
        return (own | before) & (position[q] - position[kv] < window)

    return BlockMask.from_kv_blocks(
        to_device(torch.from_numpy(counts), device)[None, None],
        to_device(torch.from_numpy(indices), device)[None, None],
        BLOCK_SIZE=BLOCK,
        mask_mod=may_see,
        seq_lengths=(T, T),
    )


def page_mask(tables: Tensor, lengths: Tensor, num_blocks: int, size: int, window: int | None) -> Any:
    """Which slots of the cache each sequence of a step sees, worked out where its tables are: a CUDA graph does so at each replay.

    Args:
        tables: [N, B] block ids, in the order of the tokens; what lies behind a sequence's last block is not looked at.
        lengths: [N] cached tokens, the new one included.
        num_blocks, size: Of the cache, and tokens of a block.
        window: Tokens that a query sees, itself included; None: all.
    """
    from torch.nn.attention.flex_attention import BlockMask

    N, width = tables.shape
    first = (lengths - window).clamp(min=0) if window is not None else torch.zeros_like(lengths)  # position seen first
    skipped = first // size
    used = (lengths - 1) // size + 1 - skipped
    at = (skipped[:, None] + torch.arange(width, device=tables.device)).clamp(max=width - 1)
    pages = tables.gather(1, at)
    begin, end = pages[:, 0].contiguous(), pages.gather(1, (used - 1)[:, None])[:, 0]
    begin_offset, end_offset = first % size, (lengths - 1) % size

    def may_see(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        page, offset = kv // size, kv % size
        late_enough = (page != begin[b]) | (offset >= begin_offset[b])
        return late_enough & ((page != end[b]) | (offset <= end_offset[b]))

    def among_its_own(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return may_see(b, h, q, kv) & held[b, kv // size]

    if tables.device.type == "cuda":  # the kernel visits the pages named and no others
        allowed = may_see
    else:
        held = torch.zeros(N, num_blocks, dtype=torch.bool, device=tables.device)
        named = torch.arange(width, device=tables.device) < used[:, None]
        held[torch.arange(N, device=tables.device)[:, None].expand_as(pages)[named], pages[named]] = True
        allowed = among_its_own
    return BlockMask.from_kv_blocks(
        used.to(torch.int32)[:, None, None],
        pages.to(torch.int32)[:, None, None],
        BLOCK_SIZE=(BLOCK, size),
        mask_mod=allowed,
        seq_lengths=(1, num_blocks * size),
        compute_q_blocks=False,
    )


def _capping(softcap: float | None) -> Callable[..., Tensor] | None:
    if softcap is None:
        return None
    return lambda score, b, h, q, kv: torch.tanh(score / softcap) * softcap


_soft_cap = functools.cache(_capping)


def _call() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention as call  # seconds, where nobody asks for it

    return call


@functools.cache
def _kernel(device: str) -> Callable[..., Any]:
    call = _call()
    # "deterministic": no timing decides in which order a kernel adds, and with it the bits
    kernel: Any = torch.compile(call, dynamic=True, options={"deterministic": True}) if device == "cuda" else call
    return lambda query, key, value, **how: (
        _by_all_scores(query, key, value, **how) if _needs_gradient(device, query) else kernel(query, key, value, **how)
    )


def _needs_gradient(device: str, query: Tensor) -> bool:
    """Where torch's kernel has no backward pass."""
    return device == "cpu" and torch.is_grad_enabled() and query.requires_grad


def _by_all_scores(
    query: Tensor, key: Tensor, value: Tensor, *, score_mod: Any, block_mask: Any, scale: float, enable_gqa: bool
) -> Tensor:
    """The same by the same mask and soft cap, [B, H, Q, D], from scores of all with all."""
    B, H, Q, D = query.shape
    KV, L = key.shape[1:3]
    rows, columns = torch.arange(Q)[:, None], torch.arange(L)[None]
    scores = (query.reshape(B, KV, H // KV * Q, D) @ key.transpose(2, 3)).view(B, H, Q, L).float() * scale
    scores = score_mod(scores, None, None, rows, columns) if score_mod is not None else scores
    scores = scores.masked_fill(~block_mask.mask_mod(None, None, rows, columns), float("-inf"))
    weights = scores.softmax(-1).to(value.dtype).view(B, KV, H // KV * Q, L)
    return (weights @ value).view(B, H, Q, D)


register_attention(FLEX_ATTENTION, flex_attention)
