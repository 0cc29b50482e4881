"""The checksum of a GPU's memory in one pass over it, in Triton: the number of ``checksum.mix64``, which takes some twenty."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["mix64"]

_TILE = 4096  # words that a program mixes


def mix64(data: torch.Tensor, odd: tuple[int, int, int]) -> torch.Tensor:
    """Mix 8-byte words with their positions and add them up, as ``checksum.mix64`` says; nothing waits.

    Args:
        data: uint8 [n] on a GPU, contiguous, at a multiple of 8 bytes.
        odd: The factors, as signed integers.

    Returns:
        int64 scalar on the same device.
    """
    num_words = data.numel() // 8 + 1  # the last one holds what is left, and zeros
    if data.numel() % 8:
        filled = torch.zeros(8 * num_words, dtype=torch.uint8, device=data.device)
        filled[: data.numel()] = data
        data, num_there = filled, num_words
    else:
        num_there = num_words - 1
    sums = torch.empty(triton.cdiv(num_words, _TILE), dtype=torch.int64, device=data.device)
    with torch.cuda.device(data.device):  # Triton launches on the current one
        _mix[(len(sums),)](data.view(torch.int64), sums, num_there, num_words, *odd, TILE=_TILE, num_warps=8)
    return sums.sum()


@triton.jit(do_not_specialize=["num_there", "num_words"])
def _mix(words, sums, num_there, num_words, a, b, c, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    x = tl.load(words + at, mask=at < num_there, other=0)
    x = x ^ ((at + 1) * a)
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * b  # >> copies the sign
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * c
    x = x ^ ((x >> 31) & 0x1FFFFFFFF)
    tl.store(sums + tl.program_id(0), tl.sum(tl.where(at < num_words, x, 0)))
