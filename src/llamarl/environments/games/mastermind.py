"""Mastermind: find a row of digits from counts of right and of misplaced ones."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field, PositiveInt

from llamarl.environments.games.game import Game, Outcome, Style, checked

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
        max_moves, style: See ``Game``.
    """

    @checked
    def __init__(
        self,
        *,
        pegs: Annotated[int, Field(ge=1, le=8)] = 4,
        colors: Annotated[int, Field(ge=2, le=9)] = 6,
        max_moves: PositiveInt = 10,
        style: Style = "words",
    ) -> None:
        super().__init__(max_moves=max_moves, style=style)
        self._pegs, self._colors = pegs, colors
        self._secret: list[int] = []

    def begin(self, seed: int) -> str:
        self._secret = self.rng.choices(range(1, self._colors + 1), k=self._pegs)
        if self.compact:
            return f"{self._pegs} of 1 to {self._colors}"
        return (
            f"I have a code of {self._pegs} digits from 1 to {self._colors}; a digit may stand in it twice. Find it: write one code a turn, "
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
        if placed == self._pegs:
            return Outcome(text="right" if self.compact else "Right, that is the code.", ending="won")
        if self.compact:
            return Outcome(text=f"={placed} +{misplaced}")
        left = f"{self.moves_left} guess{'es' * (self.moves_left != 1)} left."
        return Outcome(text=f"{placed} in the right place, {misplaced} misplaced. {left}")

    def random_reply(self, rng: random.Random) -> str:
        return "".join(str(rng.randint(1, self._colors)) for _ in range(self._pegs))

    def _form(self) -> str:
        return "".join(str(place % self._colors + 1) for place in range(self._pegs))
