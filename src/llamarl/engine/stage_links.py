"""What the pipeline stages of one engine hand on: hidden states to the next stage, the last stage's draws to all others.

    stage 0 ──hidden states, [T, E]──▶ stage 1 ──▶ ... ──▶ the last stage ──draws, [4, rows]──▶ every other stage

Every stage has made the same plan (``ranks.py``), so each knows T and the number of rows, and nothing is announced. Each tensor-parallel
rank talks to those in its own place on the other stages. Draws travel as CPU tensors, which take another way than hidden states
on a GPU; so neither waits for the other there.

A send returns at once, and is waited for as many waves later as there are stages. By then its receiver has what was sent: the
draws of that wave are back, or the hidden states of a later one have come from who took those draws (``NativeEngine.step``).
"""

from __future__ import annotations

from collections import deque
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from llamarl.engine.sampler import Draws
from llamarl.models.parallel import ParallelLayout

__all__ = ["StageLinks"]

_WAIT_LIMIT = timedelta(minutes=30)
"""Longest wait for one message: as long as other stages may compute before. A dead one is noticed at once."""


class StageLinks:
    """One stage's end of all links.

    Args:
        layout: Its ``pp`` is above 1.
        width: E, features of a hidden state.
        dtype: In which layers hand hidden states on.
    """

    def __init__(self, layout: ParallelLayout, *, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.num_stages, self.stage = layout.pp, layout.pp_rank
        self._group = layout.group("pp")
        self._width, self._dtype, self._device = width, dtype, device
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()
        """What was sent must stay until it has left."""
        self._most = self.num_stages * (self.num_stages - 1 if self.is_last else 1)
        """Messages of so many waves as there are stages."""

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.num_stages - 1

    def send_hidden(self, hidden: Tensor) -> None:
        """[T, E], to the next stage."""
        assert hidden.dtype == self._dtype and hidden.shape[1] == self._width
        self._send(hidden, self.stage + 1)

    def receive_hidden(self, num_tokens: int) -> Tensor:
        """[T, E] of the stage before."""
        return self._receive(
            torch.empty((num_tokens, self._width), dtype=self._dtype, device=self._device), self.stage - 1
        )

    def send_draws(self, draws: Draws) -> None:
        """From the last stage to every other."""
        ok = [float(value) for value in draws.ok]
        values = torch.tensor(
            [list(map(float, draws.tokens)), draws.logprobs, draws.raw_logprobs, ok], dtype=torch.float64
        )
        for stage in range(self.num_stages - 1):
            self._send(values, stage)

    def receive_draws(self, num_rows: int) -> Draws:
        """On every stage but the last; the numbers are those of the last stage, bit for bit."""
        values = self._receive(torch.empty((4, num_rows), dtype=torch.float64), self.num_stages - 1)
        tokens, logprobs, raw_logprobs, ok = values.tolist()
        return Draws([int(token) for token in tokens], logprobs, raw_logprobs, [bool(value) for value in ok])

    def finish(self) -> None:
        """Return when everything has left; all stages have received what they were sent."""
        while self._sent:
            self._sent.popleft()[0].wait(_WAIT_LIMIT)

    def _send(self, tensor: Tensor, stage: int) -> None:
        tensor = tensor.contiguous()
        work = dist.isend(tensor, group=self._group, group_dst=stage)
        assert work is not None
        self._sent.append((work, tensor))
        if len(self._sent) > self._most:
            self._sent.popleft()[0].wait(_WAIT_LIMIT)

    def _receive(self, tensor: Tensor, stage: int) -> Tensor:
        work = dist.irecv(tensor, group=self._group, group_src=stage)
        assert work is not None
        work.wait(_WAIT_LIMIT)
        return tensor
