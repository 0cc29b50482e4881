"""What workers do: judge samples, or play environments. See ``worker`` for the program around it.

A player keeps the live environment of each episode, or plays it again where there is none:

    ask (episode, item, seed, replies) ──live and at the last reply but one?──yes──▶ step(last reply) ──▶ Step
                                                     └─no─▶ reset, step through the replies before ──▲

What an environment says when it is played again must be what it said the first time: where it is
not, the sample is failed with both, since the tokens that the policy has seen would be of another
episode.
"""

from __future__ import annotations

import dataclasses
import functools
import traceback
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from llamarl.environments.code import CodeTask
from llamarl.environments.episode import Environment, Observation, Step
from llamarl.environments.episodes import Ask, digest_of
from llamarl.environments.factory import make_task
from llamarl.environments.functions import FunctionTask, NotANumber, Tokens, as_score, finite
from llamarl.environments.messages import Answer, plain_text
from llamarl.environments.registry import make_environment
from llamarl.settings.environments import TaskConfig, label_in
from llamarl.types import Failure, Prompt, Score

__all__ = ["DoesNotRepeat", "Judge", "Player", "checked_observation", "checked_step", "close_quietly"]

_MAX_CHARACTERS = 1 << 20
"""Of one answer: more is no text for a policy, but an environment that has lost itself."""


class Judge:
    """Judges samples: prompt, the policy's words, their tokens."""

    def __init__(self, config: TaskConfig, seed: int) -> None:
        self._tasks = {label: make_task(task, seed) for label, task in config.by_label.items()}
        for task in self._tasks.values():
            if isinstance(task, FunctionTask | CodeTask):
                task.prepare()

    def answer(
        self, samples: Sequence[tuple[Prompt, Sequence[str], Tokens]], released: object = ()
    ) -> tuple[Score | Failure, ...]:
        """The verdicts; raises what the user's code raises."""
        task = self._tasks[label_in(self._tasks, samples[0][0].task)]  # a job's samples are of one task
        if isinstance(task, FunctionTask):
            return tuple(map(_verdict, task.respond_to_batch(samples)))
        ((prompt, turns, _),) = samples
        return (_verdict(task.respond(prompt, turns)),)

    def failed(self, samples: Sequence[object], failure: Failure) -> Answer:
        """The answer where the user's code raised."""
        return (failure,) * len(samples)


def _verdict(value: object) -> Score | Failure:
    try:
        score = as_score(value)
    except NotANumber as error:
        return Failure(kind="not_a_number", detail=plain_text(str(error), 1500))
    return Score(value=score.value, parts={plain_text(part, 200): number for part, number in score.parts.items()})


class DoesNotRepeat(RuntimeError):
    """An environment answered the same replies otherwise than before."""


@dataclasses.dataclass(slots=True)
class _Live:
    environment: Environment
    num_replies: int


class Player:
    """Answers asks. Several episodes are live at once, one is asked at a time."""

    def __init__(self, config: TaskConfig) -> None:
        self._makers = {
            label: functools.partial(
                make_environment, task.environment, task.environment_options, judged=bool(task.judges)
            )
            for label, task in config.by_label.items()
            if task.environment
        }
        for make in self._makers.values():  # a wrong name or option is found before the run starts
            close_quietly(make())
        self._live: dict[tuple[Any, ...], _Live] = {}

    def answer(self, ask: Ask, released: Sequence[tuple[Any, ...]]) -> Answer:
        """The reply to an ask.

        Args:
            released: Keys of episodes that are no more asked about.
        """
        for key in released:
            self._close(key)
        if not ask.replies:
            return self._open(ask)
        live = self._live.get(ask.key)
        if live is None or live.num_replies != len(ask.replies) - 1:
            self._close(ask.key)
            live = self._play_again(ask)
        try:
            step = checked_step(live.environment.step(ask.replies[-1]))
        except BaseException:
            self._close(ask.key)
            raise
        live.num_replies += 1
        if step.done:
            self._close(ask.key)
        return step

    def failed(self, ask: Ask, failure: Failure) -> Answer:
        """The answer where the environment raised."""
        return Failure(kind="environment", detail=failure.detail)

    def _open(self, ask: Ask) -> Observation:
        """Begin an episode, only to see how it begins."""
        environment = self._make(ask)
        try:
            return checked_observation(environment.reset(ask.play.item, ask.play.seed))
        finally:
            close_quietly(environment)

    def _play_again(self, ask: Ask) -> _Live:
        """A new environment that has heard all replies but the last."""
        live = self._live[ask.key] = _Live(self._make(ask), 0)
        try:
            first = checked_observation(live.environment.reset(ask.play.item, ask.play.seed))
            if ask.play.digest and digest_of(first) != ask.play.digest:
                raise DoesNotRepeat(f"reset(item, seed={ask.play.seed}) now gives another observation: {first!s:.300}")
            for number, reply in enumerate(ask.replies[:-1]):
                step = checked_step(live.environment.step(reply))
                live.num_replies += 1
                if digest_of(step) != ask.digests[number]:
                    raise DoesNotRepeat(
                        f"turn {number + 1} was answered otherwise when it was played again: {step!s:.300}"
                    )
        except BaseException:
            self._close(ask.key)
            raise
        return live

    def _make(self, ask: Ask) -> Environment:
        return self._makers[label_in(self._makers, ask.play.task)]()

    def close(self) -> None:
        """End the episodes that are live."""
        for key in list(self._live):
            self._close(key)

    def _close(self, key: tuple[Any, ...]) -> None:
        live = self._live.pop(key, None)
        if live is not None:
            close_quietly(live.environment)


def close_quietly(environment: Environment) -> None:
    """Close what can be; what that raises is printed, and fails nothing, since every answer has been had."""
    try:
        if callable(close := getattr(environment, "close", None)):
            close()
    except Exception:  # the user's code may raise anything
        traceback.print_exc()


def checked_observation(value: object) -> Observation:
    """What ``reset`` returned, in plain values. Raises: TypeError, ValueError: it breaks the contract."""
    if not isinstance(value, Observation):
        raise TypeError(
            f"reset returned {type(value).__name__}, expected Observation(text=...) of llamarl.environments.episode"
        )
    return dataclasses.replace(value, **_checked_words(value), tools=_plain(tuple(value.tools)))


def checked_step(value: object) -> Step:
    """What ``step`` returned, in plain values. Raises: TypeError, ValueError, NotANumber: it breaks the contract."""
    if not isinstance(value, Step):
        raise TypeError(
            f"step returned {type(value).__name__}, expected Step(text=...) of llamarl.environments.episode"
        )
    return dataclasses.replace(
        value,
        **_checked_words(value),
        reward=finite("reward of a turn", value.reward),
        done=bool(value.done) or bool(value.truncated),
        truncated=bool(value.truncated),
        parts={_plain(name): finite(f"part {name!r} of a turn", number) for name, number in value.parts.items()},
    )


def _checked_words(said: Observation | Step) -> dict[str, Any]:
    messages = tuple(said.messages)
    for place, message in enumerate(messages, 1):
        example = isinstance(said, Observation) and place < len(messages)  # an opening may show how one answers
        roles = ("user", "tool", "system", "assistant") if example else ("user", "tool", "system")
        if not isinstance(message, Mapping) or message.get("role") not in roles:
            raise TypeError(f"message {message!s:.200}: its role must be {', '.join(roles[:-1])} or {roles[-1]}")
    if messages and said.text:
        raise ValueError("text and messages are both given: give one of them")
    if not isinstance(said.text, str):
        raise TypeError(f"text is {type(said.text).__name__} {said.text!s:.80}, expected str")
    total = len(said.text) + sum(len(str(message)) for message in messages)
    if total > _MAX_CHARACTERS:
        raise ValueError(f"an answer of {total} characters, the limit is {_MAX_CHARACTERS}")
    return {"text": _plain(said.text), "messages": _plain(messages)}


def _plain(value: Any) -> Any:
    """The same in plain JSON values, whose text can be written as UTF-8; sequences are tuples of
    the outermost level."""
    if isinstance(value, str):
        return str.__str__(value).encode("utf-8", "backslashreplace").decode()
    if isinstance(value, Mapping):
        return {_plain(str(key)): _inner(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_inner(item) for item in value)
    if value is None or isinstance(value, bool | int | float):
        return value
    raise TypeError(f"{type(value).__name__} {value!s:.80} is no plain JSON value")


def _inner(value: Any) -> Any:
    if isinstance(value, Iterable) and not isinstance(value, str | Mapping):
        return [_inner(item) for item in value]
    return _plain(value)
