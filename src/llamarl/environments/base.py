"""What an environment is: it shows a prompt, reads what the policy wrote, and judges it or answers.

    prompt ─▶ policy writes ─▶ respond ──Score──▶ the episode is over
                  ▲               │
                  └──── Turn ◀────┘   further tokens the policy did not write (tools, games, several turns)

``respond`` is a function of the prompt and of everything the policy has written so far, with no hidden state: an
episode can lie in a checkpoint half done and go on in another process. A single-turn task always returns a ``Score``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from llamarl.data.items import ItemSource, Split, TaskItem
from llamarl.types import Prompt, Score

__all__ = ["ItemSource", "Split", "Task", "TaskItem", "Turn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The environment's answer in the middle of an episode: text shown to the policy, never trained on."""

    text: str


class Task(ItemSource, Protocol):
    """Questions and their judge.

    Items are read where prompts are made; ``respond`` runs in the reward pool's worker processes, in the main thread,
    under a time limit. It may raise, hang or crash: the sample is then failed, and the run goes on.
    """

    def respond(self, prompt: Prompt, turns: Sequence[str]) -> Score | Turn:
        """Judge or answer.

        Args:
            prompt: What the episode began with.
            turns: The policy's words, one entry a turn; never empty.
        """
        ...
