"""Who owns which block of the KV cache. No tensors.

The cache is ``num_blocks`` blocks of ``block_size`` tokens. A block may have several holders (sequences with the same
prompt); it becomes free when the last one releases it. The number of blocks never grows: that is the hard memory limit.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

__all__ = ["BlockManager"]


class BlockManager:
    """Reference-counted blocks. The lowest free block is handed out first, so the same calls give the same blocks."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"need at least one block of one token, got {num_blocks} blocks of {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._never_used = 0  # this block and all above it: a large cache is not listed before it is needed
        self._released: list[int] = []  # a heap, of blocks below that one
        self._holders: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        return self.num_blocks - len(self._holders)

    @property
    def num_used(self) -> int:
        return len(self._holders)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` tokens of one sequence take."""
        return -(-num_tokens // self.block_size)

    def holders(self, block: int) -> int:
        return self._holders.get(block, 0)

    def allocate(self) -> int:
        """A free block, held once. The caller has checked ``num_free``."""
        assert self.num_free, "the scheduler must preempt before it allocates"
        if self._released:
            block = heapq.heappop(self._released)
        else:
            block = self._never_used
            self._never_used += 1
        self._holders[block] = 1
        return block

    def share(self, blocks: Iterable[int]) -> None:
        """One more holder for each block."""
        for block in blocks:
            assert block in self._holders, f"block {block} is free and cannot be shared"
            self._holders[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One holder less for each block."""
        for block in blocks:
            assert block in self._holders, f"block {block} is released twice"
            self._holders[block] -= 1
            if self._holders[block] == 0:
                del self._holders[block]
                heapq.heappush(self._released, block)
