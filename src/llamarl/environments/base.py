"""What a task is: questions, and a judge of what the policy wrote.

    item ─▶ prompt ─▶ policy writes ─▶ respond ──▶ Score

``respond`` is a function of the prompt and of what the policy has written, with no hidden state.
What answers back in the middle of an episode is an environment: see ``episode``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from llamarl.data.items import ItemSource, Split, TaskItem
from llamarl.types import Prompt, Score

__all__ = ["ItemSource", "Split", "Task", "TaskItem"]


class Task(ItemSource, Protocol):
    """Questions and their judge.

    Items are read where prompts are made; ``respond`` runs in the reward pool's worker processes, in the main thread,
    under a time limit. It may raise, hang or crash: the sample is then failed, and the run goes on.
    """

    def respond(self, prompt: Prompt, turns: Sequence[str]) -> Score:
        """Judge.

        Args:
            prompt: What the episode began with.
            turns: The policy's words, one entry a turn; never empty. Without an environment there is one.
        """
        ...
