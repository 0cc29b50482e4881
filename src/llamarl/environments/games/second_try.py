"""A second try after feedback: any dataset of ``reasoning_gym``, or any data whose answers are mathematics.

question ─▶ answer ──right──▶ over, 1
              └──not──▶ "That is not right ..." ─▶ answer ──right──▶ over, retry_reward
                                                      └── ... at most ``attempts`` times; the last score is scaled too
"""

from __future__ import annotations

import functools
import json
import random
from typing import TYPE_CHECKING, Any

from pydantic import PositiveInt

from llamarl.data.items import TaskItem
from llamarl.environments.episode import EpisodeOver, Observation, Step
from llamarl.environments.games.game import Share, checked
from llamarl.environments.math import judge_answer
from llamarl.errors import DataError
from llamarl.types import Score

if TYPE_CHECKING:
    from llamarl.environments.reasoning_gym import ReasoningGymTask

__all__ = ["SecondTry"]


class SecondTry:
    """The environment.

    Items that a ``reasoning_gym`` task made bring their question; without an item's words one is
    made from the seed. Without ``dataset`` the item's answer is compared as the ``math`` task does.

    Args:
        dataset: Of ``reasoning_gym``.
        attempts: Replies of an episode.
        retry_reward: Worth of a right answer that is not the first, 0 to 1; partial scores of later
            tries are scaled by it.
        feedback: What is said after a wrong answer; ``{score}`` is what it scored, ``{left}`` the tries left.
        dataset_options: The dataset's own.
    """

    @checked
    def __init__(
        self,
        *,
        dataset: str = "",
        attempts: PositiveInt = 2,
        retry_reward: Share = 0.5,
        feedback: str = "That is not right. Try again.",
        **dataset_options: Any,
    ) -> None:
        self._attempts, self._retry_reward = attempts, retry_reward
        self._feedback = feedback
        if dataset_options and not dataset:
            raise ValueError(
                f"unknown options {sorted(dataset_options)}: they would be a dataset's, but dataset is empty"
            )
        self._task: ReasoningGymTask | None = None
        if dataset:
            try:
                self._task = _questions_of(dataset, json.dumps(dataset_options, sort_keys=True))
            except DataError as error:
                raise ValueError(error.mistakes[0].text.lstrip(": ")) from error
        self._item = TaskItem(question="")
        self._tries = self._attempts

    def reset(self, item: TaskItem, seed: int) -> Observation:
        """Begin an episode.

        Raises:
            ValueError: The item has no answer to judge by, or is another than the dataset makes of its number.
        """
        if self._task is not None and "entry" not in item.metadata:
            item = self._task.item("train", seed >> 1)
        elif self._task is None and item.answer is None:
            raise ValueError(f"{item.where or 'the item'} has no answer, and no dataset is named: give one")
        self._item, self._tries = item, 0
        return Observation(messages=item.messages) if item.messages else Observation(text=item.question)

    def step(self, reply: str) -> Step:
        """Judge a try. ``parts``: ``moves``, and once the episode is over ``correct`` and
        ``first_try`` (right at once)."""
        if self._tries >= self._attempts:
            raise EpisodeOver("SecondTry: the episode is over; reset begins the next one")
        self._tries += 1
        score = self._score(reply)
        value = min(1.0, max(0.0, score.value))
        right = value >= 1.0
        if not right and self._tries < self._attempts:
            text = self._feedback.replace("{score}", f"{value:g}").replace("{left}", str(self._attempts - self._tries))
            return Step(text=text, parts={"moves": 1.0, "correct": 0.0, "first_try": 0.0})
        scale = 1.0 if self._tries == 1 else self._retry_reward
        parts = {"moves": 1.0, "correct": float(right), "first_try": float(right and self._tries == 1)}
        return Step(reward=value * scale, done=True, parts=parts)

    def close(self) -> None:
        """Nothing is held."""

    def random_reply(self, rng: random.Random) -> str:
        """The right answer, or a number: for trying the environment out."""
        return (self._item.answer or "") if rng.random() < 0.5 else str(rng.randint(0, 99))

    def _score(self, reply: str) -> Score:
        if self._task is None:
            assert self._item.answer is not None
            return judge_answer(reply, self._item.answer)
        return self._task.judge(reply, self._item.metadata)


@functools.lru_cache(maxsize=8)
def _questions_of(dataset: str, options: str) -> ReasoningGymTask:
    """One for all live episodes of a worker, as some hold megabytes of words: it is asked by number
    and keeps no other state.

    Args:
        options: Of the dataset, as JSON.
    """
    from llamarl.environments.reasoning_gym import ReasoningGymTask

    return ReasoningGymTask(dataset, json.loads(options), seed=0, eval_fraction=0.0)
