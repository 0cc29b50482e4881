"""Classes in the shape of TRL's ``environment_factory``: ``reset(**row)``, and every other public method is a tool.

    class MyEnvironment:
        def reset(self, **row) -> str | None: ...        row: question, answer and the item's other fields; text is put behind the question
        def look(self, place: str) -> str: ...           a tool: typed, with a docstring
        def get_reward(self) -> float: ...               optional; else the attribute ``reward``; else the answer is judged as mathematics

As in TRL, what a tool raises is shown to the policy. Unlike there, each episode gets an instance of
its own, so that nothing of an earlier episode can reach into it, and finds its own state of
Python's and numpy's global generators.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import Field, PositiveInt

from llamarl.data.items import TaskItem
from llamarl.environments.episode import Observation, Step
from llamarl.environments.functions import finite
from llamarl.environments.games.game import OwnRandomness, checked
from llamarl.environments.math import judge_answer
from llamarl.environments.tools import Tool, ToolEnvironment, tools_of, waited_for
from llamarl.import_path import import_user, signature_of

__all__ = ["TrlEnvironment", "trl"]

_NO_TOOLS = frozenset({"reset", "get_reward", "close"})


def trl(path: str, **options: Any) -> TrlEnvironment:
    """Make the environment of ``trl:my_shop.py:Class``.

    Args:
        path: Import path of the class.
        options: Those of ``TrlEnvironment``, and the class's own.

    Raises:
        DataError: There is no such class.
    """
    return TrlEnvironment(import_user(path, "task.environment"), **options)


class TrlEnvironment(ToolEnvironment):
    """Plays such a class.

    Args:
        make: Makes an instance.
        max_moves: Replies of an episode, the final answer included.
        max_result_chars: Longer results of tools are cut.
        show_errors: Whether the policy sees what a tool raises; False fails the sample instead.
        in_text: Tools are described in the question, for chat templates that know none.
        own: Arguments of ``make``.

    Raises:
        TypeError: It has no ``reset``.
        ValueError: A public method cannot be a tool, or there is none.
    """

    @checked
    def __init__(
        self,
        make: Callable[[], Any],
        *,
        max_moves: PositiveInt = 8,
        max_result_chars: Annotated[int, Field(ge=16)] = 2000,
        show_errors: bool = True,
        in_text: bool = False,
        **own: Any,
    ) -> None:
        super().__init__(
            max_moves=max_moves, max_result_chars=max_result_chars, show_errors=show_errors, in_text=in_text
        )
        self._make = functools.partial(make, **own)
        self._instance: Any = self._made()
        if not callable(getattr(self._instance, "reset", None)):
            raise TypeError(f"{type(self._instance).__name__} has no reset(**row)")
        self._used = False
        self._own = OwnRandomness()
        self._tools = tools_of(self._instance, leave_out=_NO_TOOLS)
        self._item = TaskItem(question="")

    @property
    def tools(self) -> Mapping[str, Tool]:
        return self._tools

    def begin(self, item: TaskItem, seed: int) -> Observation:
        self._own = OwnRandomness(seed)
        with self._own:
            if self._used:
                self._end_instance()
                self._instance = self._made()
                self._tools = tools_of(self._instance, leave_out=_NO_TOOLS)
            self._used, self._item = True, item
            said = waited_for(self._instance.reset(**_fitting(self._instance.reset, _row(item, seed))))
        if said is not None and not isinstance(said, str):
            raise TypeError(f"{type(self._instance).__name__}.reset returned {said!r:.80}, expected a text or None")
        said = said or ""
        if not item.messages:
            return Observation(text=f"{item.question}{said}")
        *before, last = item.messages
        return Observation(messages=(*before, {**last, "content": f"{last['content']}{said}"}))

    def step(self, reply: str) -> Step:
        """Run a reply's calls, or judge it."""
        with self._own:
            return super().step(reply)

    def finish(self, reply: str) -> Step:
        return self._judged(reply)

    def abandon(self) -> Step:
        return self._judged("")

    def close(self) -> None:
        """The instance's own ``close``, if it has one."""
        self._end_instance()

    def _judged(self, reply: str) -> Step:
        if hasattr(self._instance, "get_reward"):
            reward = waited_for(self._instance.get_reward())
            try:
                return Step(reward=float(reward), done=True)
            except (TypeError, ValueError) as error:
                shown = f"{type(self._instance).__name__}.get_reward()"
                raise TypeError(
                    f"{shown} returned {type(reward).__name__} {reward!s:.80}, expected a number"
                ) from error
        reward = getattr(self._instance, "reward", None)
        if reward is not None and not callable(reward):
            return Step(reward=finite(f"reward of {type(self._instance).__name__}", reward), done=True)
        if self._item.answer is None:
            raise ValueError(
                f"{type(self._instance).__name__} has no get_reward() and no number `reward`, and the item no answer: nothing "
                "says what the episode was worth"
            )
        score = judge_answer(reply, self._item.answer)
        return Step(reward=score.value, done=True, parts=score.parts)

    def _made(self) -> Any:
        with OwnRandomness():  # alike for each episode: what differs follows from ``reset``
            return self._make()

    def _end_instance(self) -> None:
        if callable(close := getattr(self._instance, "close", None)):
            waited_for(close())


def _row(item: TaskItem, seed: int) -> dict[str, Any]:
    """The columns that TRL would pass, and the seed."""
    prompt: Any = [dict(message) for message in item.messages] if item.messages else item.question
    return {"prompt": prompt, "question": item.question, "answer": item.answer, "seed": seed, **item.metadata}


def _fitting(function: Callable[..., Any], row: Mapping[str, Any]) -> dict[str, Any]:
    parameters = signature_of(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return dict(row)
    return {parameter.name: row[parameter.name] for parameter in parameters if parameter.name in row}
