"""The ranks of one engine: what they tell each other in a step.

Every rank runs the same scheduler on the same sequences, holds its heads' part of the KV cache, and
computes its part of each layer's matrix products (tensor parallelism). What crosses between them, in
this order, the same on every rank::

    sums behind embedding, o_proj, down_proj                        one, and two a layer
    the draws                    see ``cut_sampler.py``             the only values that decide what comes next
    replies of environments      rank 0 asks ─▶ all                 between steps; see ``episode_ranks.py``
    the newest weights           the oldest of what ranks have      between steps, under the latest weights

So ranks cannot drift apart, even if their sums differed in the last bit: every draw is made by one of them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from llamarl.models.parallel import ParallelLayout

__all__ = ["EngineRanks"]


class EngineRanks:
    """This rank's view of its peers. A single rank talks to nobody."""

    def __init__(self, layout: ParallelLayout | None = None) -> None:
        self.size = 1 if layout is None else layout.tp
        self.rank = 0 if layout is None or layout.tp == 1 else layout.tp_rank
        self._group = layout.group("tp") if layout is not None and layout.tp > 1 else None

    @property
    def is_leader(self) -> bool:
        """Whether this is rank 0, which decides where one must."""
        return self.rank == 0

    def sum(self, part: Tensor) -> Tensor:
        """Sum of all ranks' parts, in place, on all of them."""
        if self._group is not None:
            dist.all_reduce(part, group=self._group)
        return part

    def first_token(self, vocabulary: int) -> int:
        """Where this rank's part of the vocabulary begins."""
        return min(vocabulary, self.rank * -(-vocabulary // self.size))

    def max(self, values: Tensor) -> Tensor:
        """Maximum of all ranks' values, in place, on all of them."""
        if self._group is not None:
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self._group)
        return values

    def gather(self, values: Tensor) -> Tensor:
        """All ranks' ``values`` (of one shape), [ranks, ...], the same on all of them."""
        if self._group is None:
            return values[None]
        parts = [torch.empty_like(values) for _ in range(self.size)]
        dist.all_gather(parts, values.contiguous(), group=self._group)
        return torch.stack(parts)

    def share_bytes(self, make: Callable[[], bytes]) -> bytes:
        """What ``make`` gives on rank 0, on every rank; the others wait for it as long as a collective may take."""
        if self._group is None:
            return make()
        made = make() if self.is_leader else b""
        length = torch.tensor([len(made)], dtype=torch.int64)
        dist.broadcast(length, group=self._group, group_src=0)
        values = torch.empty(int(length), dtype=torch.uint8)
        if made:
            values = torch.frombuffer(bytearray(made), dtype=torch.uint8)
        dist.broadcast(values, group=self._group, group_src=0)
        return values.numpy().tobytes()

    def least(self, value: int) -> int:
        """The smallest of all ranks' values, on all of them."""
        if self._group is None:
            return value
        values = torch.tensor([value], dtype=torch.int64)
        dist.all_reduce(values, op=dist.ReduceOp.MIN, group=self._group)
        return int(values)
