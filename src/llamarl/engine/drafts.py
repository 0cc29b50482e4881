"""Guesses at a sequence's next tokens that cost nothing: what followed the same few tokens before, in its prompt, in what it has
written itself, or in what the other responses to the prompt have written. No tensors.

    Drafter.drafts ─▶ Scheduler: rows behind the last token ─▶ one step ─▶ each row is sampled with the draw of its position
                                                                         a guess that was drawn counts, the first that was not ends it

A row is computed as it would be in a step of its own, and its token is drawn by the same uniform number. So what is sampled, and how
likely it was, does not depend on what was guessed: only how many steps it takes does. A step of few rows is bound by reading the
weights, and further rows cost little; a step of many is not, so guesses share what is left of ``max_rows``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from llamarl.engine.scheduler import Member, PromptKey

__all__ = ["Drafter"]

_LONGEST, _SHORTEST = 4, 2
"""Tokens that must have been seen together before; as many as possible."""
Place = tuple[list[int], int]
"""A text and a position in it."""


@dataclass(slots=True)
class _Group:
    """What is known of one prompt."""

    seen: dict[tuple[int, ...], Place] = field(default_factory=dict)
    """A few tokens -> where it went on after them last."""


@dataclass(slots=True)
class _Text:
    tokens: list[int]
    """Prompt and response, as far as they are noted."""
    accepted: int = 1
    """Of the last guess: the next is up to twice as long."""


class Drafter:
    """Of one engine; forgets all when the engine is emptied.

    Args:
        max_tokens: Most guesses for one sequence in a step.
        max_rows: Rows of a step up to which there are guesses.
    """

    def __init__(self, *, max_tokens: int, max_rows: int) -> None:
        self._max_tokens, self._max_rows = max_tokens, max_rows
        self._groups: dict[PromptKey, _Group] = {}
        self._texts: dict[int, _Text] = {}

    def forget(self) -> None:
        """As a new one."""
        self._groups.clear()
        self._texts.clear()

    def note(self, member: Member) -> None:
        """Take in what a sequence has got since it was noted last."""
        group = self._groups.setdefault(member.key, _Group())
        text = self._texts.get(member.order)
        if text is None:
            text = self._texts[member.order] = _Text([])
            _extend(group, text.tokens, member.sequence.prompt_tokens)
        prompt = len(member.sequence.prompt_tokens)
        _extend(group, text.tokens, member.sequence.tokens[len(text.tokens) - prompt :])

    def ended(self, member: Member) -> None:
        """A sequence has ended, or left: the others may learn from it still."""
        self._texts.pop(member.order, None)

    def drafts(self, members: Sequence[Member]) -> Mapping[int, list[int]]:
        """Guesses for the sequences that decode in a step.

        Args:
            members: All of them, with one token to compute each.

        Returns:
            Admission number -> its next tokens, as guessed; those without a guess are left out.
        """
        if not members:
            return {}
        share = min(self._max_tokens, self._max_rows // len(members) - 1)
        found = {}
        if share > 0:
            for member in members:
                if guess := self._guess(member, share):
                    found[member.order] = guess
        return found

    def was_drawn(self, member: Member, count: int) -> None:
        """How many of its guesses were drawn."""
        if (text := self._texts.get(member.order)) is not None:
            text.accepted = count

    def _guess(self, member: Member, share: int) -> list[int]:
        self.note(member)
        text, sequence = self._texts[member.order], member.sequence
        left = sequence.params.max_new_tokens - len(sequence.tokens) - 1
        count = min(share, left, 2 * (text.accepted + 1))
        seen = self._groups[member.key].seen
        for length in range(_LONGEST, _SHORTEST - 1, -1):
            place = seen.get(tuple(text.tokens[-length:]))
            if place is not None:
                tokens, position = place
                return tokens[position : position + max(0, count)]
        return []


def _extend(group: _Group, text: list[int], tokens: Sequence[int]) -> None:
    for token in tokens:
        position = len(text)
        text.append(token)
        for length in range(_SHORTEST, min(_LONGEST, position) + 1):
            group.seen[tuple(text[position - length : position])] = (text, position)
