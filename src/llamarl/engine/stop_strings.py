"""Tells whether the token that a response just got completes one of its stop strings; the same for every built-in engine."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from llamarl.engine.sequence import Sequence

__all__ = ["StopStrings"]


class StopStrings:
    """Looks for stop strings at the end of responses, special tokens and what was written before an interruption included."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._tokenizer = tokenizer
        self._windows: dict[tuple[str, ...], int] = {}

    def check(self, sequence: Sequence, where: str) -> None:
        """Refuse a sequence whose text nobody here can read.

        Raises:
            ValueError: There is no tokenizer.
        """
        if sequence.params.stop_strings and self._tokenizer is None:
            raise ValueError(
                f"{where}: stop_strings {sequence.params.stop_strings} need an engine that was given a tokenizer"
            )

    def ended(self, sequence: Sequence) -> bool:
        """Tell whether the newest token completes one. Text that the policy did not write cannot be part of it."""
        strings = sequence.params.stop_strings
        if not strings:
            return False
        window = self._windows.setdefault(strings, max(len(s.encode()) for s in strings) + 4)
        own = 0
        while own < min(window, len(sequence.tokens)) and sequence.loss_mask[-1 - own]:
            own += 1
        text = self._decoded(sequence.tokens[-own:])
        if own == len(sequence.tokens):
            # decoders drop a space at the start of what they get: let it have a token before
            before = sequence.prompt_tokens[-1:]
            head, whole = self._decoded(before), self._decoded([*before, *sequence.tokens])
            text = whole.removeprefix(head) if whole.startswith(head) else text
        return any(s in text for s in strings)

    def _decoded(self, tokens: list[int]) -> str:
        assert self._tokenizer is not None
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False))
