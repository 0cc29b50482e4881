"""How episodes begin: the first observation, asked for ahead of the prompt that it becomes part of."""

from __future__ import annotations

from llamarl.data.items import Split, TaskItem
from llamarl.data.prompts import Opened
from llamarl.environments.config import TaskConfig
from llamarl.environments.episode import Observation
from llamarl.environments.episode_pool import Environments
from llamarl.environments.episodes import Ask, Play, digest_of
from llamarl.types import Failure, Opening, Prompt, Score

__all__ = ["EpisodeItems", "EpisodeOpener"]


class EpisodeOpener:
    """Opens the episodes of one task in a pool.

    Args:
        label: Of the task, where there are several.
    """

    def __init__(self, pool: Environments, config: TaskConfig, label: str = "") -> None:
        self._pool = pool
        self._config = config
        self._label = label

    def ask(self, item: TaskItem, seed: int) -> None:
        self._pool.ask(self._ask(item, seed))

    def open(self, item: TaskItem, seed: int) -> Opened:
        """Waits for the first observation. Where there is none, the opening says why, and the question is the item's."""
        said = self._pool.wait(self._ask(item, seed))
        opening = Opening(
            seed=seed,
            max_turns=self._config.max_turns,
            max_turn_tokens=self._config.max_turn_tokens,
            digest=digest_of(said) if isinstance(said, Observation) else "",
            question=item.question,
            failure=said.detail if isinstance(said, Failure) else "",
        )
        if isinstance(said, Observation):
            return Opened(question=said.text, messages=said.messages, tools=said.tools, opening=opening)
        return Opened(question=item.question or "(no episode)", messages=(), tools=(), opening=opening)

    def _ask(self, item: TaskItem, seed: int) -> Ask:
        item = TaskItem(question=item.question, answer=item.answer, metadata=item.metadata, messages=item.messages)
        return Ask(
            key=("open", self._label, seed, item.question, str(item.metadata)),
            play=Play(task=self._label, item=item, seed=seed),
        )


class EpisodeItems:
    """Items without words, one an episode, without end: all that an episode is follows from its seed."""

    name = "episodes"

    def num_items(self, split: Split) -> int | None:
        return None

    def item(self, split: Split, index: int) -> TaskItem:
        return TaskItem(question="", metadata={"index": index})

    def respond(self, prompt: Prompt, turns: object) -> Score:
        raise NotImplementedError("episodes are judged by their environment, or by task.reward")
