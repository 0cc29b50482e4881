"""Episodes in which the policy calls tools: its calls are run, their results are shown, a reply without a call is the answer.

    reset ─▶ question, schemas ─▶ policy ─▶ calls? ──yes──▶ run each, in order ──▶ a message of role "tool" for each ─▶ policy
                                               └──no──▶ finish(reply) ─▶ over

What the policy does wrong (a tool that is not there, JSON that is broken, arguments of a wrong type) is text for the policy. What
a tool raises is the environment's mistake and fails the sample, unless the environment shows it (``show_errors``), or the tool
raises ``ToolError``, which is meant for the policy.
"""

from __future__ import annotations

import difflib
import inspect
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from llamarl.data.items import TaskItem
from llamarl.environments.episode import EpisodeOver, Message, Observation, Step
from llamarl.environments.tool_calls import BadCall, Call, read_calls
from llamarl.environments.tool_schemas import BadArguments, Tool

__all__ = ["ToolEnvironment", "ToolError", "cut", "in_words", "waited_for"]

MAX_CALLS = 16
"""Calls of one reply that are run; to the others the policy is told so."""


class ToolError(Exception):
    """Raised by a tool: the policy called it wrongly, and the text of this error tells it how."""


class ToolEnvironment(ABC):
    """One episode of calls and results.

    Args:
        max_moves: Replies of an episode, the final answer included.
        max_result_chars: Longer results are cut, with a word that they were.
        show_errors: Whether whatever a tool raises is shown to the policy; else it fails the sample.
        in_text: Tools are described in the question's text, and results come as text: for chat templates that know no tools.
    """

    def __init__(
        self, *, max_moves: int = 8, max_result_chars: int = 2000, show_errors: bool = False, in_text: bool = False
    ) -> None:
        self.max_moves, self._max_chars = max_moves, max_result_chars
        self._show_errors, self._in_text = show_errors, in_text
        self._left = 0

    @property
    @abstractmethod
    def tools(self) -> Mapping[str, Tool]:
        """What may be called, by name."""

    @abstractmethod
    def begin(self, item: TaskItem, seed: int) -> Observation:
        """Begin an episode; ``tools`` of the observation are filled in."""

    @abstractmethod
    def finish(self, reply: str) -> Step:
        """Judge a reply without a call."""

    @abstractmethod
    def abandon(self) -> Step:
        """Judge an episode whose last reply still held calls; they were run."""

    def reset(self, item: TaskItem, seed: int) -> Observation:
        """Begin an episode."""
        self._left = self.max_moves
        opened = self.begin(item, seed)
        if not self._in_text:
            return Observation(
                text=opened.text, messages=opened.messages, tools=tuple(tool.schema for tool in self.tools.values())
            )
        said = in_words(self.tools)
        if opened.messages:
            return Observation(messages=({"role": "system", "content": said}, *opened.messages))
        return Observation(text=f"{opened.text}\n\n{said}")

    def step(self, reply: str) -> Step:
        """Run a reply's calls, or judge it. ``parts``: ``moves``, ``calls``, ``bad_calls``, and those of the judge."""
        if self._left == 0:
            raise EpisodeOver(f"{type(self).__name__}: the episode is over; reset begins the next one")
        self._left -= 1
        calls = read_calls(reply, self.tools.keys())
        if not calls:
            self._left = 0
            ended = self.finish(reply)
            return _with_parts(ended, calls=0, bad=0)
        answers = [self._answer(call) for call in calls[:MAX_CALLS]]
        if len(calls) > MAX_CALLS:
            answers.append((_message("", f"Only {MAX_CALLS} calls of a reply are run; the others were not."), True))
        bad = sum(wrong for _, wrong in answers)
        if self._left == 0:
            return _with_parts(self.abandon(), calls=len(calls), bad=bad)
        messages = tuple(message for message, _ in answers)
        step = (
            Step(text="\n".join(_line(message) for message in messages)) if self._in_text else Step(messages=messages)
        )
        return _with_parts(step, calls=len(calls), bad=bad)

    def close(self) -> None:
        """End the episode."""
        self._left = 0

    @property
    def moves_left(self) -> int:
        return self._left

    def _answer(self, call: Call | BadCall) -> tuple[Message, bool]:
        """The message for one call, and whether the policy was at fault."""
        if isinstance(call, BadCall):
            return _message("", f"Error: {call.why}"), True
        tool = self.tools.get(call.name)
        if tool is None:
            near = difflib.get_close_matches(call.name, self.tools, n=1)
            meant = f"Did you mean {near[0]}? " if near else ""
            shown = "; ".join(known.usage for known in self.tools.values())
            return _message(
                call.name, f"Error: there is no tool {call.name[:80]!r}. {meant}Tools: {shown}", call.id
            ), True
        try:
            arguments = tool.checked(call.arguments)
        except BadArguments as error:
            return _message(tool.name, f"Error: {cut(str(error), self._max_chars)}", call.id), True
        try:
            result = waited_for(tool.function(**arguments))
        except ToolError as error:
            return _message(tool.name, cut(f"Error: {error}", self._max_chars), call.id), True
        except Exception as error:
            if not self._show_errors:
                raise
            return _message(tool.name, cut(f"Error: {type(error).__name__}: {error}", self._max_chars), call.id), True
        return _message(tool.name, cut(_written(result), self._max_chars), call.id), False


def in_words(tools: Mapping[str, Tool]) -> str:
    """Tools and the form of a call, for a policy whose chat template has no place for them."""
    listed = "\n".join(f"- {tool.usage}: {tool.schema['function']['description']}" for tool in tools.values())
    return (
        f"You may call tools:\n{listed}\n"
        'To call one, write <tool_call>{"name": "...", "arguments": {...}}</tool_call> and nothing behind it. '
        "A reply without a call is your final answer."
    )


def cut(text: str, max_chars: int) -> str:
    """A text of at most ``max_chars`` characters and a word on what is missing; halves of surrogate pairs are replaced."""
    text = text.encode("utf-8", "replace").decode("utf-8")
    if len(text) <= max_chars:
        return text
    return f"{text[:max_chars]}\n... (cut after {max_chars} of {len(text)} characters)"


def waited_for(result: Any) -> Any:
    """What a function returned; of an ``async`` one, what it returns in the end."""
    if inspect.isawaitable(result):
        import asyncio

        async def ended() -> Any:
            return await result

        return asyncio.run(ended())
    return result


def _written(result: Any) -> str:
    if isinstance(result, str):
        return result
    if isinstance(result, (dict, list, tuple)):
        try:
            return json.dumps(result, ensure_ascii=False)
        except (TypeError, ValueError):
            return str(result)
    return str(result)


def _message(name: str, content: str, call_id: str = "") -> Message:
    message = {"role": "tool", "content": content}
    if name:
        message["name"] = name
    if call_id:
        message["tool_call_id"] = call_id
    return message


def _line(message: Message) -> str:
    return f"{message['name']}: {message['content']}" if "name" in message else str(message["content"])


def _with_parts(step: Step, *, calls: int, bad: int) -> Step:
    counts = {"moves": 1.0, "calls": float(calls), "bad_calls": float(bad)}
    return Step(
        text=step.text,
        messages=step.messages,
        reward=step.reward,
        done=step.done,
        truncated=step.truncated,
        parts={**counts, **step.parts},
    )
