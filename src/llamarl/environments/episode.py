"""What an environment is: it opens an episode, answers what the policy wrote, and says what that was worth.

    reset(item, seed) ──Observation──▶ policy writes ──reply──▶ step ──Step──▶ done, or the policy writes again
                                            ▲                            │
                                            └──────── text, messages ◀───┘   never trained on

Text in, text out. An environment may keep state; whoever plays it (``episodes.py``) makes that
state a function of (item, seed, replies so far), by playing the replies again wherever the live one
is lost. So it must answer equal replies equally: whatever is random in it follows from ``seed``.
``llamarl doctor --env NAME`` plays one twice and says whether it does.

A single-turn task is the episode of length one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from llamarl.data.items import TaskItem

__all__ = ["Environment", "EpisodeOver", "Message", "Observation", "Step"]

Message = Mapping[str, Any]
"""As chat templates take it: ``role`` (``user``, ``tool`` or ``system``), ``content``, ``name`` of a tool.

``assistant`` may stand in an observation alone, before its last message: examples of how one answers."""


class EpisodeOver(Exception):
    """``step`` was called after an episode's end: a mistake of the caller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What an episode begins with."""

    text: str = ""
    """The user's words; or else ``messages``."""
    messages: tuple[Message, ...] = ()
    """A conversation in place of ``text``."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """JSON schemas of what may be called, as chat templates take them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The answer to one reply of the policy."""

    text: str = ""
    """The user's next words; or else ``messages``. Unused where the episode is over."""
    messages: tuple[Message, ...] = ()
    """Results of tools and the like, in place of ``text``."""
    reward: float = 0.0
    """Of this turn alone; finite. An episode's reward is their sum."""
    done: bool = False
    """The episode is over: won, lost, or ended by its own rules."""
    truncated: bool = False
    """The episode was ended by a limit: over, but what would have come later is unknown. Implies ``done``."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Named parts of the reward or counts, for metrics; added up over the turns."""


class Environment(Protocol):
    """One episode at a time: ``reset`` begins the next one. Made by a factory called as ``factory(**options)``.

    What an environment raises fails its sample, with the cause. A reply that makes no sense is no reason to raise: the
    policy is told so in the next ``text``.
    """

    def reset(self, item: TaskItem, seed: int) -> Observation:
        """Begin an episode.

        Args:
            item: The task's question, answer and metadata; an environment without data gets an item without words.
            seed: 64 bits; the same for all samples of a group, so that they begin alike.
        """
        ...

    def step(self, reply: str) -> Step:
        """Answer what the policy wrote in its turn, special tokens left out."""
        ...

    def close(self) -> None:
        """Give back what the environment holds; called once, also after a failure. One of your own may do without."""
        ...
