"""Gyms over strings: a class of GEM's shape, and TextArena's games.

    [task]
    environment = "examples/games/string_gyms.py:textarena"
    environment_options = { name = "GuessTheNumber-v0" }

    class MyGame(GemShape):                                 # of your own, in a file of your own
        def __init__(self) -> None:
            super().__init__(make_my_gym)

    shape        begins                            goes on
    GEM          reset(seed) -> (text, info)       step(text) -> (text, reward, terminated, truncated, info)
    TextArena    reset(num_players, seed)          get_observation() -> (player, ...), step(text) -> (done, info),
                                                   close() -> rewards

Such libraries often draw from the global generators: each episode finds its own state of them (``randomness``).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from llamarl.data.items import TaskItem
from llamarl.environments.episode import EpisodeOver, Observation, Step
from llamarl.environments.games.game import OwnRandomness, checked

__all__ = ["GemShape", "TextArenaShape", "textarena"]


class _Shape:
    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._own = OwnRandomness()
        self._game: Any = None
        self._over = True

    def _begin(self, seed: int) -> None:
        """A game of its own for each episode: what an earlier one left behind cannot reach into it."""
        self.close()
        self._own = OwnRandomness(seed)
        with self._own:
            self._game = self._make()
        self._over = False

    def _check_open(self) -> None:
        if self._over:
            raise EpisodeOver("the episode is over; reset begins the next one")

    def close(self) -> None:
        """The game's own ``close``, if it has one."""
        game, self._game, self._over = self._game, None, True
        if game is not None and callable(getattr(game, "close", None)):
            with self._own:
                game.close()


class GemShape(_Shape):
    """``reset(seed=...)`` and a step with five values (or four, as in the older gym)."""

    def reset(self, item: TaskItem, seed: int) -> Observation:
        """Begin an episode; an item's words come before the game's."""
        self._begin(seed)
        with self._own:
            takes_seed = "seed" in inspect.signature(self._game.reset).parameters
            began = self._game.reset(seed=seed % 2**31) if takes_seed else self._game.reset()
        text = began[0] if isinstance(began, tuple) else began
        return Observation(text=f"{item.question}\n\n{text}" if item.question else str(text))

    def step(self, reply: str) -> Step:
        """Pass a reply on."""
        self._check_open()
        with self._own:
            result = tuple(self._game.step(reply))
        if len(result) not in (4, 5):
            raise TypeError(
                f"{type(self._game).__name__}.step returned {len(result)} values, expected (text, reward, terminated, "
                "truncated, info)"
            )
        text, reward, terminated = result[:3]
        truncated = bool(result[3]) if len(result) == 5 else False
        self._over = bool(terminated) or truncated
        return Step(
            text=str(text), reward=float(reward), done=self._over, truncated=truncated and not terminated, parts=_MOVE
        )


class TextArenaShape(_Shape):
    """A game for one player; what the game says since the last turn is shown, the player's own
    words are not repeated."""

    def reset(self, item: TaskItem, seed: int) -> Observation:
        """Begin an episode; the item is not looked at."""
        self._begin(seed)
        with self._own:
            self._game.reset(num_players=1, seed=seed % 2**31)
            said = self._said()
        return Observation(text=said)

    def step(self, reply: str) -> Step:
        """Pass a reply on; the game's reward, mostly -1 to 1, comes at its end."""
        self._check_open()
        with self._own:
            done, _ = self._game.step(action=reply)
            said = "" if done else self._said()
            reward = self._reward() if done else 0.0
        if done:
            self._game, self._over = None, True
        return Step(text=said, reward=reward, done=bool(done), parts=_MOVE)

    def _said(self) -> str:
        _, seen = self._game.get_observation()
        if isinstance(seen, str):
            return seen
        told = [message for message in seen if getattr(message[2], "name", "") != "PLAYER_ACTION"]
        return "\n".join(str(message[1]).strip() for message in told)

    def _reward(self) -> float:
        closed = self._game.close()
        rewards = closed[0] if isinstance(closed, tuple) else closed
        if not rewards or 0 not in rewards:
            raise ValueError(f"{type(self._game).__name__} ended without a reward for its player: {rewards!r:.80}")
        return float(rewards[0])


@checked
def textarena(*, name: str, make: dict[str, Any] | None = None) -> TextArenaShape:
    """A game of TextArena for one player by its id, without the wrappers that repeat the whole history.

    Args:
        name: Its id, such as GuessTheNumber-v0.
        make: Keyword arguments for ``textarena.make``.

    Raises:
        ImportError: textarena is not installed.
        ValueError: There is no such game.
    """
    try:
        import textarena as library
        from textarena.envs.registration import ENV_REGISTRY
    except ImportError:
        raise ImportError("it needs textarena: pip install textarena") from None
    raw = name if name.endswith("-raw") else f"{name}-raw"
    if raw not in ENV_REGISTRY:
        import difflib

        near = difflib.get_close_matches(raw, ENV_REGISTRY, n=3)
        shown = ", ".join(one.removesuffix("-raw") for one in near) or "see textarena.pprint_registry_detailed()"
        raise ValueError(f"textarena has no game {name!r}; nearest: {shown}")
    return TextArenaShape(lambda: library.make(raw, **(make or {})))


_MOVE = {"moves": 1.0}
