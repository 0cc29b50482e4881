"""Checksums at memory speed: XXH3 over blocks that fit a core's cache.

A hand-over needs to find accidents (a torn write, a stale buffer, a flipped bit), not attackers, so XXH3 (64 bits, one
in 1.8e19 misses) takes the place of a cryptographic hash. It is taken block by block right after the block's bytes were
copied, while they are still in the cache: measured at 3 to 15% of the copy, against 55% in a second pass over memory.
Checksums are kept by position, so two blocks that change places are found as well.

XXH3 does not run on a GPU. There ``mix64`` takes its place: each 8-byte word is combined with its
position, mixed by a bijection of 64-bit integers (splitmix64's: xor with a logical shift of itself,
multiply by an odd number, thrice and twice), and the results are added. One changed word always
changes the sum, because the mixing is a bijection; several changed words cancel by chance only. It
gives the same number on every device: a GPU takes one pass by a kernel in Triton where there is a
compiler for it, and some twenty elementwise operations elsewhere.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Literal

import xxhash

from llamarl.compiler import check_compiler
from llamarl.errors import ConfigError

if TYPE_CHECKING:  # bytes are checksummed in processes that compute nothing
    import torch

__all__ = ["BLOCK_BYTES", "ChecksumKind", "block_digest", "digest", "mix64"]

BLOCK_BYTES = 3 << 18
"""Bytes copied and checksummed at a time, 768 KiB: what was just written, and part of where it came
from, then lie in a core's second-level cache of 1 MiB. Whole mebibytes fill it and cost a model of
1B parameters 0.2 of a copy more; smaller blocks make more calls."""

ChecksumKind = Literal["xxh3", "mix64"]

# 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9 and 0x94D049BB133111EB as signed integers
_ODD = (-7046029254386353131, -4658895280553007687, -7723592293110705685)


def digest(data: bytes | bytearray | memoryview) -> int:
    """XXH3 of contiguous bytes, as an unsigned 64-bit number."""
    return xxhash.xxh3_64_intdigest(data)


def block_digest(data: torch.Tensor, kind: ChecksumKind) -> int:
    """Checksum of contiguous uint8 bytes, as an unsigned 64-bit number. On a GPU it waits for the result."""
    if kind == "xxh3":
        return digest(data.numpy().data)
    return int(mix64(data).item()) & ((1 << 64) - 1)


def mix64(data: torch.Tensor) -> torch.Tensor:
    """The checksum for GPUs as an int64 scalar on ``data``'s device; nothing waits.

    Args:
        data: uint8 [n], contiguous. Copied first if it does not start at a multiple of 8 bytes.
    """
    import torch

    if data.storage_offset() % 8:
        data = data.clone()
    if data.is_cuda and _compiles():
        from llamarl.transports import mix_kernel

        return mix_kernel.mix64(data, _ODD) + data.numel()
    whole = data.numel() // 8 * 8
    words = data[:whole].view(torch.int64)
    rest = data[whole:].to(torch.int64)
    words = torch.cat([words, (rest << (8 * torch.arange(rest.numel(), device=data.device))).sum().view(1)])
    positions = torch.arange(1, words.numel() + 1, device=data.device) * _ODD[0]
    x = words ^ positions
    x = (x ^ _shifted(x, 30)) * _ODD[1]
    x = (x ^ _shifted(x, 27)) * _ODD[2]
    return (x ^ _shifted(x, 31)).sum() + data.numel()


@cache
def _compiles() -> bool:
    try:
        check_compiler("checksums", "nothing")
    except ConfigError:  # the number is the same without
        return False
    return True


def _shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    """Logical shift to the right. ``>>`` copies the sign bit: x and ~x would give the same ``x ^ (x >> by)``."""
    return (x >> by) & ((1 << (64 - by)) - 1)
