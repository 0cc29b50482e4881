"""Waves: the plans on their way through an engine's pipeline stages, and what the stages hand on.

    stage 0 ──hidden states, [T, E]──▶ stage 1 ──▶ ... ──▶ the last stage ──draws, [4, rows]──▶ every other stage

Two stages, waves a b c ..., each some of the sequences; D: the stage takes the draws of the oldest
wave, and its sequences can be in a plan again::

    stage 0   a  b  Da c  Db d  Dc e
    stage 1      a  Da b  Db c  Dc d

On every stage a step begins a wave and, once there are as many as stages, ends the oldest; all are
dropped together at the end. That is a rule by count, so the stages make the same plans however fast
each of them is (``ranks.py``): each knows T and the number of rows, and nothing is announced. With
one stage a wave ends in the step that began it.

Each tensor-parallel rank talks to those in its own place on the other stages. Draws travel as CPU
tensors, which take another way than hidden states on a GPU; so neither waits for the other there. A
send returns at once, and is waited for as many waves later as there are stages. By then its
receiver has what was sent: the draws of that wave are back, or the hidden states of a later one
have come from who took those draws (``NativeEngine.step``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from llamarl.engine.expert_record import ExpertRecord, Experts, joined
from llamarl.engine.sampler import Draws
from llamarl.engine.scheduler import Member, Prompt, StepPlan
from llamarl.models.collectives import wait_for
from llamarl.models.parallel import ParallelLayout

__all__ = ["StageLinks", "Wave", "Waves", "forget_unread", "note_prompts", "note_tokens"]


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
        values = torch.tensor([list(map(float, draws.tokens)), draws.logprobs, ok], dtype=torch.float64)
        for stage in range(self.num_stages - 1):
            self._send(values, stage)

    def receive_draws(self, num_rows: int) -> Draws:
        """On every stage but the last; the numbers are those of the last stage, bit for bit."""
        values = self._receive(torch.empty((3, num_rows), dtype=torch.float64), self.num_stages - 1)
        tokens, logprobs, ok = values.tolist()
        return Draws([int(token) for token in tokens], logprobs, [bool(value) for value in ok])

    def finish(self) -> None:
        """Return when everything has left; all stages have received what they were sent."""
        while self._sent:
            wait_for(*self._sent.popleft())

    def _send(self, tensor: Tensor, stage: int) -> None:
        tensor = tensor.contiguous()
        work = dist.isend(tensor, group=self._group, group_dst=stage)
        assert work is not None
        self._sent.append((work, tensor))
        if len(self._sent) > self._most:
            wait_for(*self._sent.popleft())

    def _receive(self, tensor: Tensor, stage: int) -> Tensor:
        work = dist.irecv(tensor, group=self._group, group_src=stage)
        assert work is not None
        wait_for(work, tensor)
        return tensor


@dataclass(frozen=True, slots=True)
class Wave:
    """A plan that this stage has computed."""

    plan: StepPlan
    rows: Sequence[Member]
    """The sequences that are sampled, by row of the logits."""
    experts: Sequence[Experts] | None
    """Of each chunk, where they are noted."""


class Waves:
    """Those that have begun and not ended, oldest first.

    Args:
        most: So many at once; as many as stages.
        links: To the other stages; None: there are none.
    """

    def __init__(self, most: int, links: StageLinks | None) -> None:
        self._most, self._links = most, links
        self._under_way: deque[tuple[Wave, Draws | None]] = deque()

    def __bool__(self) -> bool:
        return bool(self._under_way)

    @property
    def full(self) -> bool:
        """Whether one must end before another begins."""
        return len(self._under_way) >= self._most

    @property
    def drawing(self) -> Collection[int]:
        """Admission numbers of the sequences for which tokens are being drawn."""
        return {member.order for wave, _ in self._under_way for member in wave.rows}

    def begin(self, wave: Wave, draws: Draws | None) -> None:
        """
        Args:
            draws: Of its rows; None on a stage that does not sample, and where there are no rows.
        """
        if draws is not None and self._links is not None:
            self._links.send_draws(draws)
        self._under_way.append((wave, draws))

    def end_oldest(self) -> tuple[Wave, Draws | None]:
        """It with its draws, waited for if another stage makes them; None: it has no rows."""
        wave, draws = self._under_way.popleft()
        if wave.rows and self._links is not None and not self._links.is_last:
            draws = self._links.receive_draws(len(wave.rows))
        if self._links is not None and not self._under_way:
            self._links.finish()  # nothing may be left to send when the last sequence has ended: its process may end too
        return wave, draws

    def drop(self) -> list[Wave]:
        """End all and return them; nobody wants their draws. They will be drawn again, by the same numbers."""
        dropped = []
        while self._under_way:
            dropped.append(self.end_oldest()[0])
        return dropped


def note_prompts(plan: StepPlan, chosen: Sequence[Experts]) -> None:
    """Prompts get their rows, and who goes on from a whole prompt gets the prompt's.

    Args:
        chosen: Of each chunk of the plan, [its tokens, layers, k].
    """
    for chunk, rows in zip(plan.chunks, chosen, strict=True):
        if isinstance(chunk.owner, Prompt) and sum(map(len, chunk.owner.experts)) <= chunk.start:
            chunk.owner.experts.append(rows)
    members = [chunk.owner for chunk in plan.chunks if isinstance(chunk.owner, Member)]
    for member in [*members, *(member for member, _ in plan.samples)]:
        sequence, prompt = member.sequence, member.prompt
        assert prompt is not None, "it is part of this step"
        if sequence.experts is None:
            sequence.experts = ExpertRecord()
        if sequence.experts.prompt is None:
            sequence.experts.prompt = _of_whole(prompt)


def note_tokens(plan: StepPlan, chosen: Sequence[Experts]) -> None:
    """Sequences get the rows of their own tokens."""
    for chunk, rows in zip(plan.chunks, chosen, strict=True):
        if isinstance(chunk.owner, Member):
            sequence = chunk.owner.sequence
            assert sequence.experts is not None
            start = chunk.start - len(sequence.prompt_tokens)
            if start <= sequence.experts.num_tokens:
                sequence.experts.note(start, rows)


def forget_unread(plan: StepPlan) -> None:
    """The step's draws are dropped: who has no token yet samples its first one behind a later pass
    over the prompt, and has the choices of that one."""
    for member, _ in plan.samples:
        if not member.sequence.tokens:
            member.sequence.experts = None


def _of_whole(prompt: Prompt) -> Experts | None:
    if len(prompt.experts) > 1:
        prompt.experts = [joined(prompt.experts)]  # one array for all members
    return prompt.experts[0] if prompt.experts else None
