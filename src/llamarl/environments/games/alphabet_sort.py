"""Sort words by the alphabet, over turns: each turn brings more words, and the whole list is to be sorted again.

Every turn is scored, so an episode has rewards at several places: what the policy has to remember are its own earlier lists.
"""

from __future__ import annotations

import random
import re
from difflib import SequenceMatcher

from llamarl.data.items import TaskItem
from llamarl.environments.episode import EpisodeOver, Observation, Step
from llamarl.environments.games.game import Style, at_least, one_of
from llamarl.environments.games.words import FIVE_LETTERS

__all__ = ["AlphabetSort"]

_LETTERS = "abcdefghijklmnopqrstuvwxyz"


class AlphabetSort:
    """The task.

    Args:
        turns: Lists to sort in one episode, each longer than the one before.
        first: Words of the first list.
        more: Words that each further turn brings.
        partial: Whether a list that is nearly right is worth something: its similarity to the right one (twice the matched
            words over the words of both) to the power 4; else only the whole list counts.
        style: ``words``, or ``compact``: single letters without sentences, for ``bundled:tiny``; at most 26 in all.
    """

    def __init__(
        self, *, turns: int = 3, first: int = 4, more: int = 2, partial: bool = True, style: Style = "words"
    ) -> None:
        self._turns = at_least("turns", turns, 1)
        self._first, self._more = at_least("first", first, 1), at_least("more", more, 1)
        self._partial = partial
        self._compact = one_of("style", style, ("words", "compact")) == "compact"
        known = len(_LETTERS) if self._compact else len(FIVE_LETTERS)
        if first + more * (turns - 1) > known:
            raise ValueError(f"first + more * (turns - 1) must be <= {known}, got {first + more * (turns - 1)}")
        self._words: list[str] = []
        self._turn = turns
        self._all_right = True

    def reset(self, item: TaskItem, seed: int) -> Observation:
        """Begin an episode; the item is not looked at."""
        number = self._first + self._more * (self._turns - 1)
        self._words = random.Random(seed).sample(_LETTERS if self._compact else FIVE_LETTERS, number)
        self._turn, self._all_right = 0, True
        shown = " ".join(self._words[: self._first])
        if self._compact:
            return Observation(text=f"sort {shown}")
        return Observation(
            text=f"Sort these words by the alphabet, and write them in one line, separated by spaces: {shown}"
        )

    def step(self, reply: str) -> Step:
        """Score one list. ``parts``: ``moves``, ``invalid`` (no word of the list in the reply), ``correct`` (all lists right)."""
        if self._turn >= self._turns:
            raise EpisodeOver("AlphabetSort: the episode is over; reset begins the next one")
        held = self._first + self._more * self._turn
        right = sorted(self._words[:held])
        given = self._given(reply)
        clear = any(word in right for word in given)
        score = 1.0 if given == right else 0.0
        if self._partial and given != right:
            score = SequenceMatcher(None, given, right, autojunk=False).ratio() ** 4
        self._all_right &= given == right
        self._turn += 1
        done = self._turn == self._turns
        new = " ".join(self._words[held : held + self._more])
        if done:
            text = ""
        elif self._compact:
            text = f"add {new}"
        else:
            hint = "" if clear else "Write words separated by spaces. "
            text = f"{hint}Now sort the list again with these words added: {new}"
        return Step(
            text=text,
            reward=score / self._turns,
            done=done,
            parts={"moves": 1.0, "invalid": float(not clear), "correct": float(done and self._all_right)},
        )

    def close(self) -> None:
        """Nothing is held."""

    def random_reply(self, rng: random.Random) -> str:
        """Some words: for trying the environment out."""
        return " ".join(rng.sample(self._words, min(len(self._words), 4)))

    def _given(self, reply: str) -> list[str]:
        """The words of the reply's last line that has any of the list's; ``<answer>`` and the like around it do not matter."""
        told = set(self._words)
        lines = [re.findall(r"[a-z]+", line) for line in reply.rpartition("</think>")[2].lower().splitlines()]
        held = [line for line in lines if told & set(line)]
        words = held[-1] if held else []
        places = [place for place, word in enumerate(words) if word in told]
        return words[places[0] : places[-1] + 1] if places else []
