"""The tensor-parallel ranks of one engine: what they tell each other in a step.

Every rank runs the same scheduler on the same sequences, holds its heads' part of the KV cache, and computes its part of
each layer. Three things cross between them, in this order, the same on every rank::

    deadlines that have passed   rank 0's clock decides             only while a sequence has one
    sums behind o_proj, down_proj                                   two a layer
    logits                       each rank's slice of the vocabulary ─▶ rank 0
    the draws                    rank 0 samples ─▶ all              the only values that decide what comes next
    replies of environments      rank 0 asks ─▶ all                 between steps; see ``episode_ranks.py``

So ranks cannot drift apart, even if their sums differed in the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from llamarl.engine.sampler import Draws
from llamarl.models.parallel import ParallelLayout

__all__ = ["EngineRanks"]


class EngineRanks:
    """This rank's view of its peers. A single rank talks to nobody."""

    def __init__(self, layout: ParallelLayout | None = None) -> None:
        self.size = 1 if layout is None else layout.tp
        self.rank = 0 if layout is None or layout.tp == 1 else layout.tp_rank
        self._group = layout.group("tp") if layout is not None and layout.tp > 1 else None

    @property
    def leads(self) -> bool:
        """Whether this rank samples and decides."""
        return self.rank == 0

    def sum(self, part: Tensor) -> Tensor:
        """Sum of all ranks' parts, in place, on all of them."""
        if self._group is not None:
            dist.all_reduce(part, group=self._group)
        return part

    def vocabulary_slice(self, vocabulary: int) -> slice:
        """Rows of the output layer that this rank computes."""
        step = -(-vocabulary // self.size)
        return slice(min(vocabulary, self.rank * step), min(vocabulary, (self.rank + 1) * step))

    def gather_logits(self, part: Tensor, vocabulary: int) -> Tensor:
        """All ranks' slices side by side, [N, vocabulary], on rank 0; the others get back their own part.

        Args:
            part: [N, this rank's slice].
        """
        if self._group is None:
            return part
        step = -(-vocabulary // self.size)
        if part.shape[-1] < step:
            part = torch.nn.functional.pad(part, (0, step - part.shape[-1]))
        parts = [torch.empty_like(part) for _ in range(self.size)] if self.leads else None
        dist.gather(part.contiguous(), parts, group=self._group, group_dst=0)
        return part if parts is None else torch.cat(parts, dim=-1)[..., :vocabulary]

    def share_draws(self, draw: Callable[[], Draws], count: int) -> Draws:
        """Rank 0 draws ``count`` tokens; every rank gets them."""
        if self._group is None:
            return draw()
        values = torch.empty(4, count, dtype=torch.float64)  # exact for tokens and for fp32 log-probs
        if self.leads:
            draws = draw()
            values = torch.tensor([draws.tokens, draws.logprobs, draws.raw_logprobs, draws.ok], dtype=torch.float64)
        dist.broadcast(values, group=self._group, group_src=0)
        tokens, logprobs, raw, ok = values.tolist()
        return Draws([int(token) for token in tokens], logprobs, raw, [bool(value) for value in ok])

    def share_bytes(self, make: Callable[[], bytes]) -> bytes:
        """What ``make`` gives on rank 0, on every rank; the others wait for it as long as a collective may take."""
        if self._group is None:
            return make()
        made = make() if self.leads else b""
        length = torch.tensor([len(made)], dtype=torch.int64)
        dist.broadcast(length, group=self._group, group_src=0)
        values = torch.empty(int(length), dtype=torch.uint8)
        if self.leads:
            values = torch.frombuffer(bytearray(made), dtype=torch.uint8)
        dist.broadcast(values, group=self._group, group_src=0)
        return values.numpy().tobytes()

    def share_flags(self, flags: Sequence[bool]) -> list[bool]:
        """Rank 0's answers to questions that every rank asks in the same order."""
        if self._group is None:
            return list(flags)
        values = torch.tensor(flags, dtype=torch.uint8)
        dist.broadcast(values, group=self._group, group_src=0)
        return [bool(value) for value in values.tolist()]
