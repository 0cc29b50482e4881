"""An episode in the making, as plain values: whatever is live can be lost and is made again from them. Pure.

    state of an environment  =  (factory, item, seed, replies so far)
    state of an episode      =  that, the tokens, and for a reply that is on its way: engine steps until it joins

So an episode may lie in a checkpoint with a turn half written or half answered, and goes on to the same bits elsewhere.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import xxhash
from pydantic import TypeAdapter

from llamarl.data.items import TaskItem
from llamarl.environments.episode import Message, Observation, Step
from llamarl.types import Opening, Prompt, Score, Turn

__all__ = [
    "Ask",
    "Episode",
    "Play",
    "answer_turn",
    "begin_episode",
    "digest_of",
    "episode_item",
    "episode_score",
    "load_episode",
    "messages_of",
    "save_episode",
    "words_of",
]


@dataclass(slots=True, kw_only=True)
class Episode:
    """What a sequence knows of its episode. ``turns`` ends with the one that is being answered,
    while ``due_in`` is set."""

    task: str
    """The prompt's: which environment, where there are several."""
    item: TaskItem
    opening: Opening
    max_tokens: int
    """After the prompt, the environment's among them."""
    turns: list[Turn] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    """Of the environment's answers, one a turn that is answered."""
    turn_start: int = 0
    """First token, after the prompt, of the turn that is being written."""
    due_in: int | None = None
    """Engine steps until the reply to the last turn joins; None while the policy writes."""
    failure: str = ""
    """Why it has no outcome."""

    @property
    def turn_end(self) -> int:
        """Tokens after the prompt at which the present turn is cut."""
        limit = self.opening.max_turn_tokens
        return min(self.max_tokens, self.turn_start + limit) if limit else self.max_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Play:
    """Which episode an environment plays: all that it is a function of, but the replies."""

    task: str
    item: TaskItem
    seed: int
    digest: str = ""
    """Of its first observation, where that is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A question to an environment: begin (``replies`` empty), or answer the last of ``replies``."""

    key: tuple[Any, ...]
    """Of the episode: who holds the live one knows it by this."""
    play: Play
    replies: tuple[str, ...] = ()
    digests: tuple[str, ...] = ()
    """Of the answers to all replies but the last: an environment that is played again must give them again."""


def episode_item(prompt: Prompt) -> TaskItem:
    """The item that a prompt was made of, as its environment is given it."""
    assert prompt.opening is not None, f"prompt {prompt.index} has no environment"
    metadata = dict(prompt.metadata)
    messages = metadata.pop("messages", None)
    return TaskItem(
        question=prompt.question if prompt.opening.question is None else prompt.opening.question,
        answer=prompt.answer,
        metadata=metadata,
        messages=None if messages is None else tuple(messages),
    )


def begin_episode(prompt: Prompt, max_tokens: int) -> Episode | None:
    """A sample's episode, before its first token; None where the policy answers once."""
    if prompt.opening is None:
        return None
    return Episode(
        task=prompt.task,
        item=episode_item(prompt),
        opening=prompt.opening,
        max_tokens=max_tokens,
        failure=prompt.opening.failure,
    )


def answer_turn(episode: Episode, step: Step) -> None:
    """Write the environment's answer into the last turn."""
    episode.turns[-1] = dataclasses.replace(
        episode.turns[-1], reward=step.reward, parts=dict(step.parts), observation=words_of(step)
    )
    episode.digests.append(digest_of(step))


def episode_score(turns: Sequence[Turn]) -> Score:
    """The reward of a whole episode: the sum of its turns', part by part."""
    parts: dict[str, float] = {}
    for turn in turns:
        for name, value in turn.parts.items():
            parts[name] = parts.get(name, 0.0) + value
    return Score(value=float(sum(turn.reward for turn in turns)), parts=parts)


def messages_of(said: Observation | Step) -> tuple[Message, ...]:
    """What was said, as a conversation."""
    return said.messages or ({"role": "user", "content": said.text},)


def words_of(said: Observation | Step) -> str:
    """What was said, for people."""
    return "\n".join(str(message.get("content") or "") for message in said.messages) if said.messages else said.text


def digest_of(said: Observation | Step) -> str:
    """64 bits over everything that was said."""
    plain = json.dumps(dataclasses.asdict(said), sort_keys=True, default=list)
    return xxhash.xxh3_64_hexdigest(plain.encode("utf-8", "surrogatepass"))


def save_episode(episode: Episode) -> dict[str, Any]:
    """What ``begin_episode`` does not know, as JSON values."""
    known = {field.name: getattr(episode, field.name) for field in dataclasses.fields(_Saved)}
    return dataclasses.asdict(_Saved(**known)) | {"opening": episode.opening.digest}


@dataclass(frozen=True, kw_only=True)
class _Saved:
    turns: list[Turn]
    digests: list[str]
    turn_start: int
    due_in: int | None
    failure: str


_SAVED = TypeAdapter(_Saved)


def load_episode(episode: Episode, saved: Mapping[str, Any], num_tokens: int) -> None:
    """Put back what ``save_episode`` gave, into a new episode of the same prompt; failed where that begins otherwise now.

    Args:
        num_tokens: That its sequence has.

    Raises:
        ValueError: It gives no such thing: what was read may be anybody's.
    """
    given = _SAVED.validate_python(saved)
    waits = given.due_in is not None
    ends = [end for turn in given.turns for end in (turn.start, turn.end)] + [num_tokens]
    if ends != sorted(ends) or not 0 <= given.turn_start <= num_tokens or waits and (given.due_in or 0) < 0:
        raise ValueError(f"an episode has turns at {ends[:-1]}, and {num_tokens} tokens")
    if not len(given.turns) - 1 <= len(given.digests) <= len(given.turns) - waits:
        raise ValueError(f"an episode has {len(given.turns)} turns and {len(given.digests)} answers")
    for field_ in dataclasses.fields(given):
        setattr(episode, field_.name, getattr(given, field_.name))
    opening = episode.opening
    if (
        saved.get("opening", opening.digest) != opening.digest and not episode.failure
    ):  # its tokens follow another prompt
        episode.failure = (
            opening.failure or f"reset(item, seed={opening.seed}) now gives another observation than before"
        )
