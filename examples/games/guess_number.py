"""Guess a number: each guess is told to be too low or too high."""

from __future__ import annotations

import random
import re

from pydantic import PositiveInt

from llamarl.environments.games.game import Game, Outcome, Style, checked

__all__ = ["GuessNumber"]


class GuessNumber(Game):
    """The game.

    Args:
        low: Least number that it may be.
        high: Greatest.
        max_moves, style: See ``Game``.
    """

    @checked
    def __init__(
        self,
        *,
        low: int = 1,
        high: int = 100,
        max_moves: PositiveInt = 7,
        style: Style = "words",
    ) -> None:
        super().__init__(max_moves=max_moves, style=style)
        if not -(10**12) <= low < high <= 10**12:
            raise ValueError(f"low must be below high, both within 10**12, got {low} and {high}")
        if self.compact and low < 0:
            raise ValueError(f"low must be >= 0 with style 'compact', which has no minus sign, got {low}")
        self._low, self._high, self._secret = low, high, low

    def begin(self, seed: int) -> str:
        self._secret = self.rng.randint(self._low, self._high)
        if self.compact:
            return f"{self._low} to {self._high}"
        return (
            f"I think of a whole number from {self._low} to {self._high}. Guess it: write one number a turn, and I say "
            f"whether mine is higher or lower. You have {self.max_moves} guesses."
        )

    def move(self, said: str) -> Outcome:
        numbers = re.findall(r"(?<![\d.])-?\d{1,15}(?![\d.]*\d)", said)
        guess = int(numbers[-1]) if numbers else None
        if guess is None or not self._low <= guess <= self._high:
            asked = f"{self._low} to {self._high}"
            return self.unclear(f"Write one whole number from {asked}.", asked)
        if guess == self._secret:
            return Outcome(text="right" if self.compact else f"Right, it is {guess}.", ending="won")
        higher = guess < self._secret
        if self.compact:
            return Outcome(text="more" if higher else "less")
        left = f"{self.moves_left} guess{'es' * (self.moves_left != 1)} left."
        return Outcome(text=f"My number is {'higher' if higher else 'lower'} than {guess}. {left}")

    def random_reply(self, rng: random.Random) -> str:
        return str(rng.randint(self._low, self._high))
