"""One stage of a pipeline at work: its schedule carried out, hidden states sent on, gradients sent back.

    stage s - 1 ──hidden states of micro-batch i, [1, N_i, H]──▶ stage s ──▶ stage s + 1
                ◀─────────their gradient, [1, N_i, H]──────────         ◀──

Micro-batches are packed, so each has another number of tokens: more than
``torch.distributed.pipelining`` allows, whose buffers have one shape. Every stage packs the same
groups in the same way, so each knows N_i and nothing is announced.

No deadlock: a send returns at once, what a stage receives was made from earlier passes alone, and a
send that has long gone is waited for (its memory is wanted) only towards one end: for hidden states
by those who come after, for gradients by those who come before. The two directions have groups of
their own: NCCL carries out one group's transfers in the order in which they were asked for, and
there a send that waits for its receiver would hold up what the receiver waits for. And each pair has
spoken in both directions before the first step: NCCL makes a pair's communicator at its first
transfer, where both hosts stand still until it is there. In a step stage s would wait so for the first
gradient while its device sends hidden states that stage s + 1 takes only after that. A wait has the limit of its
group, and is given none of its own: NCCL would hold up the host for it, where else the device's stream waits.

One forward, one backward (Narayanan et al., arXiv:2104.04473): a stage begins with as many forward
passes as there are stages after it, then takes one more forward pass and the oldest backward pass
in turn. Three stages, four micro-batches, ``f`` a forward pass, ``B`` a backward pass of twice its
time::

    stage 0   f0 f1 f2 .. .. .. .. B0 B0 f3 B1 B1 .. B2 B2 .. B3 B3
    stage 1   .. f0 f1 .. .. B0 B0 f2 B1 B1 f3 B2 B2 .. B3 B3 .. ..
    stage 2   .. .. f0 B0 B0 f1 B1 B1 f2 B2 B2 f3 B3 B3 .. .. .. ..

Stage s of p keeps the activations of at most ``p - s`` micro-batches, however many there are, and
with m of equal cost the pipeline stands still for ``(p - 1) / (m + p - 1)`` of its time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from llamarl.models.parallel import ParallelLayout
from llamarl.trainer.batch import Microbatch

__all__ = ["Action", "Links", "run_stage", "schedule"]

Action = tuple[Literal["F", "B"], int]
"""Forward or backward pass, and of which micro-batch."""

_MOST_UNDER_WAY = 2
"""Sends in one direction that may be under way before the oldest is waited for. In steady state
that one has arrived: a stage takes gradient i - 2 before it gives the hidden states that come just
before gradient i."""

Forward = Callable[[int, Tensor | None], Tensor]
"""(Micro-batch, hidden states of the stage before, or None on the first) -> hidden states for the
next stage; the last's own."""

_Sent = dict[int, tuple[dist.Work, Tensor]]
"""Micro-batch -> what was sent, which must stay until it has left."""


def schedule(stage: int, num_stages: int, num_microbatches: int) -> list[Action]:
    """What a stage does, in order: each micro-batch forward once and backward once, both in their order."""
    ahead = min(num_stages - 1 - stage, num_microbatches)
    actions: list[Action] = [("F", i) for i in range(ahead)]
    for i in range(num_microbatches):
        if i + ahead < num_microbatches:
            actions.append(("F", i + ahead))
        actions.append(("B", i))
    return actions


class Links:
    """What a stage says to the stages beside it, over ``torch.distributed``; one object lives as long as its mesh.

    Args:
        width: H, features of a hidden state.
        dtype: In which layers hand hidden states on.
    """

    def __init__(self, layout: ParallelLayout, *, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self._stage, self._num_stages = layout.pp_rank, layout.pp
        self.is_first, self.is_last = layout.pp_rank == 0, layout.pp_rank == layout.pp - 1
        self._width, self._dtype, self._device = width, dtype, device
        stride = layout.ranks_of_stage
        self._before, self._after = layout.rank - stride, layout.rank + stride
        self._forward = layout.group("pp")
        columns = [list(range(start, layout.num_ranks, stride)) for start in range(stride)]
        self._backward: Any = dist.new_subgroups_by_enumeration(columns)[0]  # torch 2.15 types it as a number, too
        self._hidden: _Sent = {}
        self._gradients: _Sent = {}
        self._num_tokens: Sequence[int] = ()
        self._trains = False
        self._meet()

    def begin(self, num_tokens: Sequence[int], *, trains: bool) -> None:
        """Say how many tokens each of the step's micro-batches has, the same on every stage, and
        whether gradients come back."""
        self._num_tokens, self._trains = num_tokens, trains

    def run(self, microbatches: Sequence[Microbatch], forward: Forward, *, trains: bool) -> None:
        """Carry out this stage's passes over the same micro-batches on every stage."""
        self.begin([microbatch.input_ids.shape[1] for microbatch in microbatches], trains=trains)
        forward_only: list[Action] = [("F", i) for i in range(len(microbatches))]
        of_stage = schedule(self._stage, self._num_stages, len(microbatches)) if trains else forward_only
        run_stage(of_stage, self, forward)

    def send_hidden(self, microbatch: int, hidden: Tensor) -> None:
        self._hidden[microbatch] = self._send(microbatch, hidden, self._after, self._forward)
        if not self._trains:
            _wait(self._hidden, microbatch - _MOST_UNDER_WAY)

    def receive_hidden(self, microbatch: int) -> Tensor:
        return self._receive(microbatch, self._before, self._forward)

    def send_gradient(self, microbatch: int, gradient: Tensor) -> None:
        self._gradients[microbatch] = self._send(microbatch, gradient, self._before, self._backward)
        _wait(self._gradients, microbatch - _MOST_UNDER_WAY)

    def receive_gradient(self, microbatch: int) -> Tensor:
        gradient = self._receive(microbatch, self._after, self._backward)
        _wait(self._hidden, microbatch)  # who answers has received it
        return gradient

    def _meet(self) -> None:
        """Exchange a number with both neighbours in both directions: first stage to last, and back."""
        number = torch.zeros(1, device=self._device)
        before, after = None if self.is_first else self._before, None if self.is_last else self._after
        for group, source, to in ((self._forward, before, after), (self._backward, after, before)):
            for transfer, peer in ((dist.irecv, source), (dist.isend, to)):
                if peer is not None:
                    work = transfer(number, peer, group=group)
                    assert work is not None
                    work.wait()

    def finish(self) -> None:
        for sent in (self._hidden, self._gradients):
            for microbatch in list(sent):
                _wait(sent, microbatch)

    def _send(self, microbatch: int, tensor: Tensor, to: int, group: Any) -> tuple[dist.Work, Tensor]:
        expected = (1, self._num_tokens[microbatch], self._width)
        assert tuple(tensor.shape) == expected and tensor.dtype == self._dtype, (
            f"micro-batch {microbatch}: {tuple(tensor.shape)} in {tensor.dtype}, its receiver waits for {expected} in {self._dtype}"
        )
        tensor = tensor.contiguous()
        work = dist.isend(tensor, dst=to, group=group)
        assert work is not None
        return work, tensor

    def _receive(self, microbatch: int, source: int, group: Any) -> Tensor:
        tensor = torch.empty((1, self._num_tokens[microbatch], self._width), dtype=self._dtype, device=self._device)
        work = dist.irecv(tensor, src=source, group=group)
        assert work is not None
        work.wait()
        return tensor


def run_stage(actions: Sequence[Action], neighbours: Links, forward: Forward) -> None:
    """Carry out a stage's passes. Gradients are added to its parameters' own.

    Args:
        actions: Of this stage; without backward passes nothing is kept for them.
        forward: On the last stage gives the loss, a scalar, where there are backward passes.
    """
    trains = any(kind == "B" for kind, _ in actions)
    alive: dict[int, tuple[Tensor | None, Tensor]] = {}
    for kind, i in actions:
        if kind == "F":
            received = None if neighbours.is_first else neighbours.receive_hidden(i).requires_grad_(trains)
            output = forward(i, received)
            if not neighbours.is_last:
                neighbours.send_hidden(i, output.detach())
            if trains:
                alive[i] = received, output
            del received, output
        else:
            received, output = alive.pop(i)
            output.backward(None if neighbours.is_last else neighbours.receive_gradient(i))  # type: ignore[no-untyped-call]
            if received is not None:
                # a micro-batch that only keeps step with other ranks may have a loss that depends on nothing
                neighbours.send_gradient(i, torch.zeros_like(received) if received.grad is None else received.grad)
            del received, output
    neighbours.finish()


def _wait(sent: _Sent, microbatch: int) -> None:
    if microbatch in sent:
        sent.pop(microbatch)[0].wait()
