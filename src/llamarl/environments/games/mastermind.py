"""Mastermind: find a row of digits from counts of right and of misplaced ones."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field, PositiveInt

from llamarl.environments.games.game import Game, Outcome, Share, Style, checked

__all__ = ["Mastermind", "compare"]


def compare(guess: Sequence[int], secret: Sequence[int]) -> tuple[int, int]:
    """Digits in the right place, and further digits that are right but misplaced (each counted once)."""
    placed = sum(one == other for one, other in zip(guess, secret, strict=True))
    shared = sum((Counter(guess) & Counter(secret)).values())
    return placed, shared - placed


class Mastermind(Game):
    """The game.

    Args:
        pegs: Length of the code, 1 to 8.
        colors: Digits that it is made of, 1 to ``colors``; 2 to 9.
        repeats: Whether a digit may stand in it twice.
        max_moves, style, speed, partial: See ``Game``; a lost game is worth its most digits in place.
    """

    @checked
    def __init__(
        self,
        *,
        pegs: Annotated[int, Field(ge=1, le=8)] = 4,
        colors: Annotated[int, Field(ge=2, le=9)] = 6,
        repeats: bool = True,
        max_moves: PositiveInt = 10,
        style: Style = "words",
        speed: Share = 0.0,
        partial: Share = 0.0,
    ) -> None:
        super().__init__(max_moves=max_moves, style=style, speed=speed, partial=partial)
        if not repeats and pegs > colors:
            raise ValueError(f"without repeats pegs must be <= colors, got {pegs} and {colors}")
        self._pegs, self._colors, self._repeats = pegs, colors, repeats
        self._secret: list[int] = []
        self._most = 0

    def begin(self, seed: int) -> str:
        digits = range(1, self._colors + 1)
        self._secret = self.rng.choices(digits, k=self._pegs) if self._repeats else self.rng.sample(digits, self._pegs)
        self._most = 0
        if self.compact:
            return f"{self._pegs} of 1 to {self._colors}"
        twice = "may stand in it twice" if self._repeats else "stands in it at most once"
        return (
            f"I have a code of {self._pegs} digits from 1 to {self._colors}; a digit {twice}. Find it: write one code a turn, "
            f"such as {self._form()}, and I say how many digits are in the right place and how many are misplaced. "
            f"You have {self.max_moves} guesses."
        )

    def move(self, said: str) -> Outcome:
        rows = [re.findall(r"\d", row) for row in re.findall(r"\d(?:[ ,]*\d)*", said)]
        guess = next(([int(digit) for digit in row] for row in reversed(rows) if len(row) == self._pegs), [])
        if not guess or not all(1 <= digit <= self._colors for digit in guess):
            return self.unclear(
                f"Write {self._pegs} digits from 1 to {self._colors}, such as {self._form()}.",
                f"{self._pegs} of 1 to {self._colors}",
            )
        placed, misplaced = compare(guess, self._secret)
        self._most = max(self._most, placed)
        if placed == self._pegs:
            return Outcome(text="right" if self.compact else "Right, that is the code.", ending="won")
        if self.compact:
            return Outcome(text=f"={placed} +{misplaced}")
        left = f"{self.moves_left} guess{'es' * (self.moves_left != 1)} left."
        return Outcome(text=f"{placed} in the right place, {misplaced} misplaced. {left}")

    def nearness(self) -> float:
        return self._most / self._pegs

    def random_reply(self, rng: random.Random) -> str:
        return "".join(str(rng.randint(1, self._colors)) for _ in range(self._pegs))

    def _form(self) -> str:
        return "".join(str(place % self._colors + 1) for place in range(self._pegs))
