"""Attention of decoded tokens on a GPU that reads keys and values where they lie in the cache's blocks, in Triton.

    query [N, H, D] ──▶ _attend_part: one program a sequence, K/V head and part of its context ──▶ sums of each part
                    ──▶ _join_parts: one program a sequence and head ──▶ [N, H, D]

All heads that share a K/V head are rows of one tile, so its keys and values are read once; a context
is cut in parts so that few sequences fill the device as well. In how many parts follows from the
numbers of rows and K/V heads alone, and each part adds in order, so bits repeat: whatever else is in
the batch changes nothing but through its number of rows. Slots that hold no token of the sequence
are not read, so a NaN there reaches nobody.

Read once, keys and values are what a decode step must move beside the weights: ``index_select`` and a padded kernel move
them five times (docs/results/gpu.md).

Shape legend as in :mod:`llamarl.models.paged_attention`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["attend_pages", "num_parts"]

_TILE_BYTES = 128  # of one feature of the keys that a program holds at once
_PROGRAMS = 1056
"""That a step should have, where contexts allow: eight for each of the 132 multiprocessors of an H100."""
_MOST_PARTS = 32


def num_parts(rows: int, kv_heads: int) -> int:
    """Into how many parts each context is cut: a power of two, at least two, so that no long one among short ones is
    left to one program."""
    wanted = min(_MOST_PARTS, max(2, _PROGRAMS // (rows * kv_heads)))
    return 1 << (wanted.bit_length() - 1)


def attend_pages(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Attend of one query a sequence over its blocks of a layer's cache.

    Args:
        query: [N, H, D], heads and features in one piece.
        keys, values: [num_blocks, block_size, KV, D], in one piece.
        tables: [N, B] block ids in the order of the tokens; behind a sequence's last block anything may stand.
        lengths: [N] cached tokens, the new one included, each at least 1.
        window: Tokens that a query sees, itself included; None: all.

    Returns:
        [N, H, D].
    """
    N, H, D = query.shape
    size, KV = keys.shape[1:3]
    query = query if query.stride(2) == 1 else query.contiguous()
    parts, group = num_parts(N, KV), H // KV
    wide = triton.next_power_of_2(D)
    sums = torch.empty(N, H, parts, D, dtype=torch.float32, device=query.device)
    stats = torch.empty(N, H, parts, 2, dtype=torch.float32, device=query.device)
    out = torch.empty(N, H, D, dtype=query.dtype, device=query.device)
    tile = _TILE_BYTES // keys.element_size() // (2 if D > 256 else 1)  # what a multiprocessor of any card holds
    with torch.cuda.device(query.device):  # Triton launches on the current one
        _attend_part[(N, KV, parts)](
            query, keys, values, tables, lengths, sums, stats,
            scale, softcap or 0.0, window or 0, query.stride(0), query.stride(1), tables.stride(0),
            D=D, KV=KV, SIZE=size, GROUP=group, GROUP_PAD=max(16, triton.next_power_of_2(group)), D_PAD=max(16, wide),
            TILE=tile, PARTS=parts, CAPPED=softcap is not None, num_warps=4, num_stages=2,
        )  # fmt: skip
        _join_parts[(N, H)](sums, stats, out, D=D, D_PAD=wide, PARTS=parts, num_warps=2)
    return out


@triton.jit
def _attend_part(  # type: ignore[no-untyped-def]
    query, keys, values, tables, lengths, sums, stats,
    scale, softcap, window, query_row, query_head, table_row,
    D: tl.constexpr, KV: tl.constexpr, SIZE: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr,
    D_PAD: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """The softmax's sums of one part of one sequence's context, for the heads of one K/V head."""
    row, kv, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + row).to(tl.int32)
    first = tl.where(window > 0, tl.maximum(length - window, 0), 0)
    each = tl.cdiv(tl.cdiv(length - first, PARTS), TILE) * TILE
    begin = first + part * each
    end = tl.minimum(begin + each, length)
    group, dims = tl.arange(0, GROUP_PAD), tl.arange(0, D_PAD)
    heads = kv * GROUP + group
    mine = (group < GROUP)[:, None] & (dims < D)[None, :]
    q = tl.load(query + row * query_row + heads[:, None] * query_head + dims[None, :], mask=mine, other=0.0)
    highest = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    found = tl.zeros([GROUP_PAD, D_PAD], tl.float32)
    for start in range(begin, end, TILE):
        position = start + tl.arange(0, TILE)
        held = position < end
        block = tl.load(tables + row * table_row + position // SIZE, mask=held, other=0).to(tl.int64)
        place = ((block * SIZE + position % SIZE) * KV + kv) * D
        there = held[:, None] & (dims < D)[None, :]
        k = tl.load(keys + place[:, None] + dims[None, :], mask=there, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if CAPPED:  # tanh
            scores = softcap * (2.0 / (1.0 + tl.exp(-2.0 * scores / softcap)) - 1.0)
        scores = tl.where(held[None, :], scores, float("-inf"))
        above = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp(scores - above[:, None])
        shrunk = tl.exp(highest - above)
        v = tl.load(values + place[:, None] + dims[None, :], mask=there, other=0.0)
        found = found * shrunk[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        total = total * shrunk + tl.sum(weights, 1)
        highest = above
    at = (row * KV * GROUP + heads) * PARTS + part
    tl.store(sums + at[:, None] * D + dims[None, :], found, mask=mine)
    tl.store(stats + at * 2, highest, mask=group < GROUP)
    tl.store(stats + at * 2 + 1, total, mask=group < GROUP)


@triton.jit
def _join_parts(sums, stats, out, D: tl.constexpr, D_PAD: tl.constexpr, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The whole context's softmax from its parts, of which the first holds a token at least."""
    at = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    parts, dims = tl.arange(0, PARTS), tl.arange(0, D_PAD)
    highest = tl.load(stats + (at * PARTS + parts) * 2)
    weights = tl.exp(highest - tl.max(highest, 0))
    total = tl.sum(weights * tl.load(stats + (at * PARTS + parts) * 2 + 1), 0)
    there = (parts >= 0)[:, None] & (dims < D)[None, :]
    found = tl.load(sums + (at * PARTS + parts)[:, None] * D + dims[None, :], mask=there, other=0.0)
    mean = tl.sum(found * weights[:, None], 0) / total
    tl.store(out + at * D + dims, mean.to(out.dtype.element_ty), mask=dims < D)
