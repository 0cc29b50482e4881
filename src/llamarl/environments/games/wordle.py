"""Wordle: find a word of five letters from marks under each letter of a guess."""

from __future__ import annotations

import random
import re
from collections import Counter

from llamarl.environments.games.game import Game, Outcome, Style
from llamarl.environments.games.words import FIVE_LETTERS, some_words

__all__ = ["Wordle", "marks"]

_KNOWN = frozenset(FIVE_LETTERS)


def marks(guess: str, secret: str) -> str:
    """One mark a letter: ``=`` in the right place, ``+`` elsewhere in the word, ``#`` not in it.

    A letter of the word is marked once: those in place first, then from the left.
    """
    rest = Counter(s for g, s in zip(guess, secret, strict=True) if g != s)
    shown = []
    for g, s in zip(guess, secret, strict=True):
        if g == s:
            shown.append("=")
        elif rest[g]:
            rest[g] -= 1
            shown.append("+")
        else:
            shown.append("#")
    return "".join(shown)


class Wordle(Game):
    """The game.

    Args:
        num_words: The secret is one of so many of the list's words; 0: of all.
        listed: Whether a guess must be a word of the list; else any five letters are one.
        max_moves, style, speed, partial: See ``Game``; a lost game is worth its most letters in place.
    """

    def __init__(
        self,
        *,
        num_words: int = 0,
        listed: bool = False,
        max_moves: int = 6,
        style: Style = "words",
        speed: float = 0.0,
        partial: float = 0.0,
    ) -> None:
        super().__init__(max_moves=max_moves, style=style, speed=speed, partial=partial)
        if not 0 <= num_words <= len(FIVE_LETTERS):
            raise ValueError(f"num_words must be 0 to {len(FIVE_LETTERS)}, got {num_words}")
        self._words = some_words(num_words)
        self._listed = listed
        self._secret, self._most = "", 0

    def begin(self, seed: int) -> str:
        self._secret, self._most = self.rng.choice(self._words), 0
        if self.compact:
            return "word of 5"
        return (
            "I think of an English word of five letters. Guess it: write one word a turn, and I mark each of its letters: "
            f"= in the right place, + elsewhere in the word, # not in it. You have {self.max_moves} guesses."
        )

    def move(self, said: str) -> Outcome:
        guesses = re.findall(r"(?<![a-z])[a-z]{5}(?![a-z])", said)
        if not guesses:
            return self.unclear("Write one word of five letters.", "word of 5")
        guess = guesses[-1]
        if self._listed and guess not in _KNOWN:
            return self.unclear(f"{guess} is not in my list. Write another word of five letters.", f"no {guess}")
        shown = marks(guess, self._secret)
        self._most = max(self._most, shown.count("="))
        if guess == self._secret:
            return Outcome(text="right" if self.compact else f"Right, it is {guess}.", ending="won")
        if self.compact:
            return Outcome(text=f"{guess}\n{shown}")
        return Outcome(text=f"{guess}\n{shown}\n{self.moves_left} guess{'es' * (self.moves_left != 1)} left.")

    def nearness(self) -> float:
        return self._most / 5

    def random_reply(self, rng: random.Random) -> str:
        return rng.choice(FIVE_LETTERS)
