"""What the bundled games share: moves are counted, an unclear reply gets a hint, and a win is
worth 1.

    reply ──move──▶ Outcome(text, won | lost | goes on, clear?) ──▶ Step
                                                        last move used up ──▶ over, lost

A game draws everything from ``random.Random(seed)`` of its own, so equal replies get equal answers.
An unclear reply takes a move: otherwise a policy that never makes sense would never come to an end.
"""

from __future__ import annotations

import random
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import ConfigDict, Field, PositiveInt, validate_call

from llamarl.data.items import TaskItem
from llamarl.environments.episode import EpisodeOver, Observation, Step

__all__ = ["Game", "Outcome", "OwnRandomness", "Share", "Style", "checked", "said"]

Style = Literal["words", "compact"]
"""``words``: sentences. ``compact``: only a to z, digits, space, newline and ``# + =``, which
``bundled:tiny`` can read."""

Share = Annotated[float, Field(ge=0, le=1)]
"""An option between 0 and 1."""

checked = validate_call(config=ConfigDict(strict=True))
"""Decorates an ``__init__`` whose options come from a recipe: values of another type or range than
annotated are refused."""


class OwnRandomness:
    """The state of the global generators of one episode; entered around each call.

    Args:
        seed: What they are seeded with, any non-negative integer.
    """

    def __init__(self, seed: int = 0) -> None:
        self._states: tuple[Any, Any] = (
            random.Random(seed).getstate(),
            np.random.RandomState(seed % 2**32).get_state(),
        )

    def __enter__(self) -> None:
        self._exchange()

    def __exit__(self, *_: object) -> None:
        self._exchange()

    def _exchange(self) -> None:
        """Give the global generators these states, and take theirs."""
        others = (random.getstate(), np.random.get_state())
        random.setstate(self._states[0])
        np.random.set_state(self._states[1])
        self._states = others


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one move came to."""

    text: str
    ending: Literal["", "won", "lost"] = ""
    clear: bool = True
    """Whether the reply was a move at all."""


class Game(ABC):
    """A game of at most ``max_moves`` moves.

    Args:
        max_moves: Replies of an episode; after the last one the game is lost. The policy is told so.
        style: How the game speaks; see ``Style``.
    """

    @checked
    def __init__(self, *, max_moves: PositiveInt, style: Style = "words") -> None:
        self.max_moves = max_moves
        self.compact = style == "compact"
        self.rng = random.Random(0)
        self._left = 0

    def reset(self, item: TaskItem, seed: int) -> Observation:
        """Begin an episode; the item is not looked at."""
        self.rng = random.Random(seed)
        self._left = self.max_moves
        return Observation(text=self.begin(seed))

    def step(self, reply: str) -> Step:
        """Answer a move. ``parts``: ``moves``, ``invalid`` (unclear replies) and ``correct`` (1
        where the game is won)."""
        if self._left == 0:
            raise EpisodeOver(f"{type(self).__name__}: the episode is over; reset begins the next one")
        self._left -= 1
        outcome = self.move(said(reply))
        ending = outcome.ending or ("" if self._left else "lost")
        step = Step(
            text=outcome.text,
            reward=float(ending == "won"),
            done=bool(ending),
            parts={"moves": 1.0, "invalid": float(not outcome.clear), "correct": float(ending == "won")},
        )
        if ending:
            self._left = 0
        return step

    def close(self) -> None:
        """End the episode."""
        self._left = 0

    @property
    def moves_left(self) -> int:
        return self._left

    @abstractmethod
    def begin(self, seed: int) -> str:
        """Set the game up with ``self.rng`` and say what it is."""

    @abstractmethod
    def move(self, said: str) -> Outcome:
        """Answer the part of a reply that holds the move."""

    @abstractmethod
    def random_reply(self, rng: random.Random) -> str:
        """A reply of the right form, good or bad: for trying the game out."""

    def unclear(self, words: str, compact: str) -> Outcome:
        """The answer to a reply that is no move: what a move looks like."""
        return Outcome(text=compact if self.compact else words, clear=False)


_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")


def said(reply: str) -> str:
    """The part of a reply in which the move is looked for, in lower case.

    What follows ``</think>``; of that the last ``<answer>...</answer>``, else the last ``[...]``,
    else the last line that is not blank.
    """
    reply = reply.rpartition("</think>")[2]
    closed = reply[: reply.rfind("</answer>") + len("</answer>")]  # what opens behind it would be looked through each
    marked = _ANSWER.findall(closed) or _BRACKETS.findall(reply)
    lines = [line for line in reply.splitlines() if line.strip()]
    return str((marked or lines or [""])[-1]).strip().lower()
