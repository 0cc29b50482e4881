"""One attention kernel for whatever rows the trainer packs, ``llamarl_flex``: torch's ``flex_attention``.

    [1, T] row of segments; a response sees its prompt's tokens and its own up to itself

On a GPU the call compiles to one fused kernel that visits the blocks of keys named here and no
others: no copies of K and V, no padded batches, windows and soft caps included. Elsewhere all
scores are computed, by torch or, where it has no backward pass, here: right and slow, for tests.

A *block* is of ``BLOCK`` rows of queries or keys. Shape legend as in :mod:`llamarl.models.paged_attention`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from llamarl.models.attention import Segment, register_attention
from llamarl.models.transfer import to_device

__all__ = ["BLOCK", "FLEX_ATTENTION", "flex_attention", "visible_blocks"]

FLEX_ATTENTION = "llamarl_flex"
"""Name in transformers' attention interface."""
BLOCK = 128
"""Rows of queries, and of keys, that the kernel takes or leaves out together."""
_MOST_KINDS = 64
"""Of calls that torch makes code for: with and without gradients, of one block and of more, for each window and soft cap
of each model in the process."""


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


@functools.cache
def _soft_cap(softcap: float | None) -> Callable[..., Tensor] | None:
    if softcap is None:
        return None
    return lambda score, b, h, q, kv: torch.tanh(score / softcap) * softcap


@functools.cache
def _kernel(device: str) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention as call  # seconds, where nobody asks for it

    if device != "cuda":
        return lambda query, *args, **how: (
            _by_all_scores(query, *args, **how) if _needs_gradient(device, query) else call(query, *args, **how)
        )
    # "deterministic": no timing decides in which order a kernel adds, and with it the bits
    kernel: Any = torch.compile(call, dynamic=True, fullgraph=True, options={"deterministic": True})

    def compiled(*args: Tensor, **how: Any) -> Any:
        # torch cannot compile a soft cap that varies, and past its limit it would compute all scores without a word
        with torch._dynamo.config.patch(specialize_float=True, recompile_limit=_MOST_KINDS):
            return kernel(*args, **how)

    return compiled


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
