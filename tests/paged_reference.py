"""Attention of decoded tokens over blocks of a cache, a sequence at a time: what the kernel for GPUs is held against."""

import torch
from torch import Tensor

__all__ = ["attend_pages"]


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
    """As ``llamarl.models.paged_kernel.attend_pages``, in float64; no slot that a sequence does not hold is looked at."""
    out, size, shared = torch.empty_like(query), keys.shape[1], query.shape[1] // keys.shape[2]
    for i, (table, length) in enumerate(zip(tables.tolist(), lengths.tolist(), strict=True)):
        seen = range(max(0, length - window) if window else 0, length)
        k, v = (
            torch.stack([x[table[p // size], p % size] for p in seen]).double().repeat_interleave(shared, dim=1)
            for x in (keys, values)
        )
        scores = torch.einsum("hd,lhd->hl", query[i].double(), k) * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        out[i] = torch.einsum("hl,lhd->hd", scores.softmax(-1), v).to(query.dtype)
    return out
