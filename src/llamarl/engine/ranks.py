"""The ranks of one engine: what they tell each other in a step.

Every rank runs the same scheduler on the same sequences, holds its heads' part of the KV cache of
its stage's layers, and computes its part of their matrix products (tensor parallelism). What
crosses between them, in this order, the same on every rank::

    sums behind embedding, o_proj, down_proj                        one, and two a layer
    the draws                    see ``cut_sampler.py``             the only values that decide what comes next
    replies of environments      rank 0 asks ─▶ all                 between steps; see ``episode_ranks.py``
    experts of stages' layers    each stage ─▶ rank 0               of complete groups; see ``expert_record.py``
    the newest weights           the oldest of what ranks have      between steps, under the latest weights

The sums, and what the draws need, cross between the tensor-parallel ranks of a stage; the rest
between all ranks of the engine, rank 0 being the first of the first stage. What pipeline stages
hand on besides: ``waves.py``.

So ranks cannot drift apart, even if their sums differed in the last bit: every draw is made by one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from llamarl.models.parallel import ParallelLayout

__all__ = ["EngineRanks"]


class EngineRanks:
    """This rank's view of its peers. A single rank talks to nobody."""

    def __init__(self, layout: ParallelLayout | None = None) -> None:
        self.size = 1 if layout is None else layout.tp
        """Tensor-parallel ranks of a stage."""
        self.rank = 0 if layout is None or layout.tp == 1 else layout.tp_rank
        self.num_stages = 1 if layout is None else layout.pp
        self.stage = 0 if layout is None else layout.pp_rank
        self._group = layout.group("tp") if layout is not None and layout.tp > 1 else None
        self._stages = layout.group("pp") if layout is not None and layout.pp > 1 else None

    @property
    def is_stage_leader(self) -> bool:
        """Whether this rank decides where one of its stage's must."""
        return self.rank == 0

    @property
    def is_leader(self) -> bool:
        """Whether this is rank 0 of the engine, which decides where one of all must."""
        return self.is_stage_leader and self.stage == 0

    @property
    def alone(self) -> bool:
        """Whether there is no other rank."""
        return self.size * self.num_stages == 1

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

    def gather_from_stages(self, value: Any) -> list[Any] | None:
        """The values (any that pickle) of the ranks that have this one's place in their stages,
        first stage to last, on that of the first stage; None on the others."""
        if self._stages is None:
            return [value]
        values = [None] * self.num_stages if self.stage == 0 else None
        dist.gather_object(value, values, group=self._stages, group_dst=0)
        return values

    def share_bytes(self, make: Callable[[], bytes]) -> bytes:
        """What ``make`` gives on rank 0, on every rank; the others wait for it as long as a collective may take."""
        if self.alone:
            return make()
        made = make() if self.is_leader else b""
        length = self._from_rank_0(torch.tensor([len(made)], dtype=torch.int64))
        values = torch.empty(int(length), dtype=torch.uint8)
        if self.is_leader:
            values = torch.frombuffer(bytearray(made), dtype=torch.uint8) if made else values
        return self._from_rank_0(values).numpy().tobytes()

    def least(self, value: int) -> int:
        """The smallest of all ranks' values, on all of them."""
        values = torch.tensor([value], dtype=torch.int64)
        for group in (self._group, self._stages):
            if group is not None:
                dist.all_reduce(values, op=dist.ReduceOp.MIN, group=group)
        return int(values)

    def _from_rank_0(self, values: Tensor) -> Tensor:
        """Rank 0's values, in place, on all of them: over the first stage, or part of the tokens,
        then from there to the others."""
        if self._group is not None and self.stage == 0:
            dist.broadcast(values, group=self._group, group_src=0)
        if self._stages is not None:
            dist.broadcast(values, group=self._stages, group_src=0)
        return values
