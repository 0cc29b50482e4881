"""Frozen lake: walk over a grid to the goal and stay out of the holes.

The map is drawn around a random way from the upper left to the lower right corner, so every one can be solved. Seen whole
(``view = "map"``) it takes planning; seen by its neighbouring cells alone (``near``), or with ice that slips, nobody can plan
all moves in advance: the policy has to look again after each.
"""

from __future__ import annotations

import random
import re
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from llamarl.environments.games.game import Game, Outcome, Share, Style, checked

__all__ = ["FrozenLake"]

Cell = tuple[int, int]

_MOVES: dict[str, Cell] = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}
_NAMES = {**{name: name for name in _MOVES}, **{name[0]: name for name in _MOVES}}
_ACROSS = {"left": ("up", "down"), "right": ("up", "down"), "up": ("left", "right"), "down": ("left", "right")}


class FrozenLake(Game):
    """The lake.

    Args:
        size: Rows and columns, 2 to 16.
        holes: Cells to fall into; at most those beside the one way that is kept free.
        slip: Chance that a move goes to one of the two sides instead, 0 to 1.
        view: ``map``: the whole lake is shown; ``near``: the nine cells around the walker.
        maps: Number of different maps that seeds are spread over; 0: each seed has its own.
        max_moves, style: See ``Game``.
    """

    @checked
    def __init__(
        self,
        *,
        size: Annotated[int, Field(ge=2, le=16)] = 4,
        holes: NonNegativeInt = 3,
        slip: Share = 0.0,
        view: Literal["map", "near"] = "map",
        maps: NonNegativeInt = 0,
        max_moves: PositiveInt = 20,
        style: Style = "words",
    ) -> None:
        super().__init__(max_moves=max_moves, style=style)
        if holes > (most := size * size - (2 * size - 1)):
            raise ValueError(f"holes must be 0 to {most} with size {size}, got {holes}")
        self._size, self._num_holes, self._maps, self._slip = size, holes, maps, slip
        self._near = view == "near"
        self._at: Cell = (0, 0)
        self._goal: Cell = (size - 1, size - 1)
        self._holes: frozenset[Cell] = frozenset()

    def begin(self, seed: int) -> str:
        self._holes = self._draw_holes(random.Random(seed % self._maps) if self._maps else self.rng)
        self._at = (0, 0)
        if self.compact:
            return self._show()
        goal = "The goal G is in the lower right corner. " if self._near else ""
        slips = " The ice is slippery: a move may go to the side." if self._slip else ""
        seen = "the cells around you" if self._near else "the lake"
        return (
            f"Walk over the frozen lake: you are P, . is ice, O a hole, G the goal{', # no lake' * self._near}. {goal}"
            f"Each turn, write one move: left, right, up or down. You have {self.max_moves} moves.{slips}\n"
            f"This is {seen}:\n{self._show()}"
        )

    def move(self, said: str) -> Outcome:
        named = [_NAMES[word] for word in re.findall(r"[a-z]+", said) if word in _NAMES]
        if not named:
            return self.unclear(f"Write one move: left, right, up or down.\n{self._show()}", f"l r u d\n{self._show()}")
        way = named[-1]
        if self._slip and self.rng.random() < self._slip:
            way = self.rng.choice(_ACROSS[way])
        row, column = self._at[0] + _MOVES[way][0], self._at[1] + _MOVES[way][1]
        if 0 <= row < self._size and 0 <= column < self._size:
            self._at = (row, column)
        if self._at in self._holes:
            return Outcome(text="hole" if self.compact else "You fell into a hole.", ending="lost")
        if self._at == self._goal:
            return Outcome(text="goal" if self.compact else "You reached the goal.", ending="won")
        return Outcome(text=self._show())

    def random_reply(self, rng: random.Random) -> str:
        move = rng.choice(list(_MOVES))
        return move[0] if self.compact else move

    def _draw_holes(self, rng: random.Random) -> frozenset[Cell]:
        steps = [(1, 0)] * (self._size - 1) + [(0, 1)] * (self._size - 1)
        rng.shuffle(steps)
        free = {(0, 0)}
        row = column = 0
        for down, right in steps:
            row, column = row + down, column + right
            free.add((row, column))
        others = [(r, c) for r in range(self._size) for c in range(self._size) if (r, c) not in free]
        return frozenset(rng.sample(others, self._num_holes))

    def _show(self) -> str:
        rows = columns = range(self._size)
        if self._near:
            rows, columns = (range(place - 1, place + 2) for place in self._at)
        return "\n".join("".join(self._symbol((r, c)) for c in columns) for r in rows)

    def _symbol(self, cell: Cell) -> str:
        if not (0 <= cell[0] < self._size and 0 <= cell[1] < self._size):
            return "#"
        shown = {self._goal: "G", self._at: "P"}.get(cell) or ("O" if cell in self._holes else ".")
        return shown.lower().replace(".", "=") if self.compact else shown
