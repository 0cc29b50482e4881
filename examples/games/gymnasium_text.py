"""Environments of gymnasium with a few numbered actions, as text: the ``ansi`` picture, and actions by name.

    [task]
    environment = "examples/games/gymnasium_text.py:GymnasiumEnvironment"
    environment_options = { name = "FrozenLake-v1" }      Taxi-v4, Blackjack-v1, CliffWalking-v1, any other with Discrete actions

A picture marks places with colors, which a policy cannot see: the cell with a colored ground, where
the player is, becomes ``*``. Where there is no picture the observation is written down. Rewards are
the environment's own, whatever their size.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import NonNegativeInt

from llamarl.data.items import TaskItem
from llamarl.environments.episode import EpisodeOver, Observation, Step
from llamarl.environments.games.game import checked, said

__all__ = ["GymnasiumEnvironment", "without_colors"]

_ACTIONS: Mapping[str, tuple[str, ...]] = {
    "FrozenLake": ("left", "down", "right", "up"),
    "Taxi": ("south", "north", "east", "west", "pickup", "dropoff"),
    "Blackjack": ("stick", "hit"),
    "CliffWalking": ("up", "right", "down", "left"),
}
_INTRO: Mapping[str, str] = {
    "FrozenLake": "Walk over the frozen lake from S to G. F is ice, H a hole that ends the walk, * is where you are.",
    "Taxi": "Drive the taxi to the passenger, pick them up, drive to the destination and drop them off. * is the taxi, "
    "R G Y B are stops, | and the frame are walls, : can be crossed.",
    "Blackjack": "Play blackjack: come nearer to 21 than the dealer, but not above it.",
    "CliffWalking": "Walk from the lower left to T without stepping on the cliff C. x is where you are.",
}
_GROUND = re.compile(r"(?:\x1b\[[0-9;]*m)*\x1b\[(?:[0-9]+;)*4[0-9]m(?:\x1b\[[0-9;]*m)*(.)")
_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_LAST_ACTION = re.compile(r"^\s*\((\w+)\)\s*$", re.MULTILINE)


def without_colors(picture: str) -> str:
    """The picture as plain text; a character on colored ground becomes ``*``, the name of the last
    action is left out."""
    plain = _COLOR.sub("", _GROUND.sub("*", picture))
    return "\n".join(line for line in plain.splitlines() if line.strip() and not _LAST_ACTION.match(line))


class GymnasiumEnvironment:
    """One environment of gymnasium.

    Args:
        name: Its id, such as FrozenLake-v1.
        intro: Said first; empty: a sentence for the environments named above, nothing for others.
        action_names: What actions 0, 1, ... are called; none: their usual names, or their numbers.
        max_moves: Replies after which the episode is truncated; 0: the environment's own limit.
        make: Keyword arguments for ``gymnasium.make``, such as ``{ is_slippery = false }``.

    Raises:
        ImportError: gymnasium is not installed.
        ValueError: There is no such environment, or its actions are not numbered ones.
    """

    @checked
    def __init__(
        self,
        *,
        name: str,
        intro: str = "",
        action_names: list[str] | None = None,
        max_moves: NonNegativeInt = 0,
        make: dict[str, Any] | None = None,
    ) -> None:
        if ":" in name:
            raise ValueError(f"{name} names a module for gymnasium to import: import it in this file instead")
        import gymnasium as gym

        given = make or {}
        try:
            modes = gym.make(name, **given).metadata.get("render_modes") or ()
            self._env: Any = gym.make(name, render_mode="ansi" if "ansi" in modes else None, **given)
        except gym.error.Error as error:
            raise ValueError(f"gymnasium: {error}") from error
        space = self._env.action_space
        if not isinstance(space, gym.spaces.Discrete):
            raise ValueError(f"gymnasium: {name} has actions {space}, only Discrete ones can be named in text")
        self._family = name.rpartition("/")[2].partition("-v")[0]
        self._draws = "ansi" in modes
        names: Sequence[str] = action_names or _ACTIONS.get(self._family, ())
        self._first = int(space.start)
        self._names = tuple(names) or tuple(str(self._first + place) for place in range(int(space.n)))
        if len(self._names) != space.n or len({name.lower() for name in self._names}) != len(self._names):
            raise ValueError(f"gymnasium: {name} has {space.n} actions, got the names {list(self._names)}")
        self._intro = intro or _INTRO.get(self._family, "")
        limit = self._env.spec.max_episode_steps if self._env.spec else None
        self._max_moves = max_moves or int(limit or 0)
        self._moves = 0
        self._over = True

    def reset(self, item: TaskItem, seed: int) -> Observation:
        """Begin an episode; the item is not looked at."""
        seen, _ = self._env.reset(seed=seed)
        self._over, self._moves = False, 0
        intro = f"{self._intro}\n" if self._intro else ""
        asked = f"Each turn, write one action: {', '.join(self._names)}."
        return Observation(text=f"{intro}{asked}\n\n{self._shown(seen)}")

    def step(self, reply: str) -> Step:
        """Do one action. ``parts``: ``moves``, ``invalid``; an unclear reply is answered with the
        actions and changes nothing."""
        if self._over:
            raise EpisodeOver("the episode is over; reset begins the next one")
        self._moves += 1
        last = 0 < self._max_moves <= self._moves
        action = self._action(said(reply))
        if action is None:
            self._over = last
            text = f"Write one action: {', '.join(self._names)}."
            return Step(text=text, done=last, truncated=last, parts={"moves": 1.0, "invalid": 1.0})
        seen, reward, terminated, truncated, _ = self._env.step(action)
        self._over = bool(terminated or truncated or last)
        return Step(
            text=self._shown(seen),
            reward=float(reward),
            done=self._over,
            truncated=self._over and not terminated,
            parts={"moves": 1.0, "invalid": 0.0},
        )

    def close(self) -> None:
        """Close gymnasium's environment."""
        self._env.close()

    def random_reply(self, rng: random.Random) -> str:
        """An action: for trying the environment out."""
        return rng.choice(self._names)

    def _action(self, said: str) -> int | None:
        """The action named last."""
        found = [
            (match.end(), place)
            for place, name in enumerate(self._names)
            for match in re.finditer(rf"(?<!\w){re.escape(name.lower())}(?!\w)", said)
        ]
        return self._first + max(found)[1] if found else None

    def _shown(self, seen: Any) -> str:
        picture = without_colors(self._env.render()) if self._draws else ""
        if self._family == "Taxi":
            _, _, passenger, destination = self._env.unwrapped.decode(seen)
            where = ("R", "G", "Y", "B", "the taxi")
            return f"{picture}\nPassenger: {where[passenger]}. Destination: {where[destination]}."
        if self._family == "Blackjack":
            own, dealer, ace = (int(value) for value in seen)
            return f"Your cards: {own}{', with an ace that counts 11' if ace else ''}. The dealer shows {dealer}."
        return picture or str(seen)
