"""Whether an environment answers equal replies equally: episodes played in one process, and the replies played again in another.

    first process     replies made up, or from a file ──▶ record: what was said, replied and answered
    second process    another episode first, then the record's replies ──▶ record
                      equal bytes? else: the first place where they differ

Resuming inside an episode, and workers that take over, rest on that. Both processes are started as the run's workers are: with a
fixed hash seed and few variables. The second plays something else before, so that what one episode leaves behind shows.

As a program: ``python -m llamarl.environments.play_twice REQUEST.json RECORD.json`` plays for ``record_twice``.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llamarl.data.items import TaskItem
from llamarl.environments.episode import Environment, Observation, Step
from llamarl.environments.episode_worker import (
    checked_observation,
    checked_step,
    close_quietly,
    plain_observation,
    plain_step,
)
from llamarl.environments.worker_process import worker_environment

__all__ = ["Answer", "Difference", "Question", "first_difference", "play", "random_reply", "record_twice"]

Episode = list[dict[str, Any]]
"""An observation, then a reply and its step by turns; plain JSON."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is to be played."""

    name: str
    options: Mapping[str, Any]
    item: Mapping[str, Any]
    """Fields of a ``TaskItem``."""
    replies: Sequence[str] = ()
    """The first replies of every episode; after them they are made up."""
    episodes: int = 4
    max_replies: int = 40
    seed: int = 0


@dataclass(frozen=True)
class Difference:
    """Where two records part."""

    episode: int
    """From 1."""
    reply: int
    """From 1; 0 is the beginning."""
    first: str
    second: str


def record_twice(question: Question, timeout_s: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """The records of two processes: ``episodes``, and ``error`` where one was cut short.

    Args:
        timeout_s: For each process.

    Raises:
        TimeoutError: A process took longer.
        RuntimeError: A process died without a record.
    """
    first = _recorded({**asdict(question), "again": None}, timeout_s)
    if first["error"]:
        return first, first
    return first, _recorded({**asdict(question), "again": first["episodes"]}, timeout_s)


def first_difference(first: Sequence[Episode], second: Sequence[Episode]) -> Difference | None:
    """The first place where two records have different bytes; None where they are equal."""
    for episode, (one, other) in enumerate(zip(first, second, strict=True), 1):
        for place in range(max(len(one), len(other))):
            shown = [_line(record[place]) if place < len(record) else "(over)" for record in (one, other)]
            if shown[0] != shown[1]:
                return Difference(episode, place, shown[0], shown[1])
    return None


Answer = Callable[[str, Sequence[Mapping[str, Any]]], str | None]
"""The reply to a text, with the tools that the episode began with; None ends the play."""


def play(env: Environment, item: TaskItem, seed: int, answer: Answer, max_replies: int) -> Episode:
    """One episode.

    Raises:
        TypeError, ValueError, NotANumber: The environment breaks its contract, by the checks that a run makes.
    """
    opened = checked_observation(env.reset(item, seed))
    record: Episode = [plain_observation(opened)]
    said = _said(opened)
    for _ in range(max_replies):
        reply = answer(said, opened.tools)
        if reply is None:
            break
        step = checked_step(env.step(reply))
        record.append({"reply": reply, **plain_step(step)})
        if step.done:
            break
        said = _said(step)
    return record


def random_reply(rng: random.Random, said: str, tools: Sequence[Mapping[str, Any]]) -> str:
    """A reply made of what an environment said: a call of its tools, an offered ``[action]``, its words, or a number."""
    words = re.findall(r"[A-Za-z]{2,}|\d+", said) or ["yes"]
    if tools and rng.random() < 0.8:
        function = rng.choice(list(tools))["function"]
        fields = function["parameters"].get("properties", {})
        arguments = {name: _random_value(rng, about, words) for name, about in fields.items()}
        return f"<tool_call>{json.dumps({'name': function['name'], 'arguments': arguments})}</tool_call>"
    offered = re.findall(r"\[[^\[\]\n]{1,30}\]", said)
    kind = rng.random()
    if offered and kind < 0.5:
        return rng.choice(offered)
    if kind < 0.7:
        return rng.choice(words)
    return str(rng.randint(0, 20)) if kind < 0.9 else " ".join(rng.choices(words, k=3))


def _random_value(rng: random.Random, about: Mapping[str, Any], words: Sequence[str]) -> Any:
    if "enum" in about:
        return rng.choice(list(about["enum"]))
    kind = about.get("type", "string")
    made: dict[Any, Any] = {
        "integer": rng.randint(0, 9),
        "number": rng.randint(0, 99) / 10,
        "boolean": rng.random() < 0.5,
        "array": [],
        "object": {},
        "null": None,
    }
    return made.get(kind[0] if isinstance(kind, list) else kind, rng.choice(words))


def _said(seen: Observation | Step) -> str:
    return seen.text or "\n".join(str(message.get("content", "")) for message in seen.messages)


def _line(entry: Mapping[str, Any]) -> str:
    return json.dumps(entry, sort_keys=True)


def _recorded(request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder, "request.json"), Path(folder, "record.json")
        asked.write_text(json.dumps(request), encoding="utf-8")
        command = [sys.executable, "-m", "llamarl.environments.play_twice", str(asked), str(answered)]
        try:
            ended = subprocess.run(
                command,
                env=worker_environment(os.environ, (), sys.path),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"{request['name']} was not played to its end within {timeout_s:g} s") from None
        if not answered.exists():
            raise RuntimeError(f"the process that played {request['name']} died (exit status {ended.returncode})")
        record: dict[str, Any] = json.loads(answered.read_text(encoding="utf-8"))
        return record


def _play_all(request: Mapping[str, Any]) -> dict[str, Any]:
    """The other process's work."""
    from llamarl.environments.registry import make_environment

    episodes: list[Episode] = []
    error = ""
    env = make_environment(request["name"], request["options"])
    item = TaskItem(**request["item"])
    again: list[Episode] | None = request["again"]

    def episode(seed: int, old: Episode | None) -> Episode:
        rng = random.Random(seed)
        script = list(request["replies"]) if old is None else [entry["reply"] for entry in old[1:]]

        def answer(said: str, tools: Sequence[Mapping[str, Any]]) -> str | None:
            if script:
                return str(script.pop(0))
            if old is not None:
                return None
            own = getattr(env, "random_reply", None)
            if callable(own) and rng.random() < 0.9:
                return str(own(rng))
            return random_reply(rng, said, tools)

        return play(env, item, seed, answer, request["max_replies"])

    try:
        if again is not None:
            episode(request["seed"] + request["episodes"], None)
        for place in range(request["episodes"]):
            episodes.append(episode(request["seed"] + place, None if again is None else again[place]))
    except Exception:  # the user's environment may raise anything
        error = traceback.format_exc()
    finally:
        close_quietly(env)
    return {"episodes": episodes, "error": error}


def _main(asked: str, answered: str) -> None:
    from llamarl.errors import DataError

    try:
        record = _play_all(json.loads(Path(asked).read_text(encoding="utf-8")))
    except DataError as error:
        record = {"episodes": [], "error": str(error)}
    Path(answered).write_text(json.dumps(record), encoding="utf-8")


if __name__ == "__main__":
    _main(*sys.argv[1:])
