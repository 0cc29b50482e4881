"""After an engine step: which rows of it belong to which prompt or sequence, and are to be written down there."""

from __future__ import annotations

from collections.abc import Sequence

from llamarl.engine.expert_record import ExpertRecord, Experts, joined
from llamarl.engine.scheduler import Member, Prompt, StepPlan

__all__ = ["forget_unread", "note_prompts", "note_tokens"]


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
    """Sequences get the rows of their own tokens. Call it when the step's draws are known: a guess that was not drawn is no token
    of its sequence."""
    for chunk, rows in zip(plan.chunks, chosen, strict=True):
        if isinstance(chunk.owner, Member):
            sequence = chunk.owner.sequence
            assert sequence.experts is not None
            start = chunk.start - len(sequence.prompt_tokens)
            real = sequence.tokens[start : start + len(chunk.tokens)] == chunk.tokens
            if real and start <= sequence.experts.num_tokens:
                sequence.experts.note(start, rows)


def forget_unread(plan: StepPlan) -> None:
    """The step's draws are dropped: who has no token yet samples its first one behind a later pass over the prompt, and has the choices
    of that one."""
    for member, _ in plan.samples:
        if not member.sequence.tokens:
            member.sequence.experts = None


def _of_whole(prompt: Prompt) -> Experts | None:
    if len(prompt.experts) > 1:
        prompt.experts = [joined(prompt.experts)]  # one array for all members
    return prompt.experts[0] if prompt.experts else None
