"""``llamarl doctor --env NAME``: does an environment answer equal replies equally?

    first process     replies made up, or from a file ──▶ record: what was said, replied and answered
    second process    another episode first, then the record's replies ──▶ record
                      equal bytes? else: the first place where they differ

A run that resumes inside an episode, and workers that take over, rest on that. Both processes are started as the run's workers
are: with a fixed hash seed and few variables. The second plays something else before, so that what one episode leaves behind
shows. As a program, this file is one of the two processes.
"""

from __future__ import annotations

import argparse
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
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llamarl.data.items import TaskItem
    from llamarl.environments.episode import Environment, Observation, Step

__all__ = ["Difference", "Question", "add_flags", "examine", "first_difference", "play", "random_reply", "record_twice"]

_MAX_SHOWN = 1200


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of ``llamarl doctor --env``."""
    group = parser.add_argument_group("with --env")
    group.add_argument("--env", metavar="NAME", help="an environment, as task.environment names it: play it twice")
    group.add_argument(
        "--options", nargs="*", default=[], metavar="KEY=VALUE", help="of the environment, as in TOML: pegs=2 style=compact"
    )  # fmt: skip
    group.add_argument(
        "--item", default="{}", metavar="JSON", help="the episode's question, answer and other fields (default: none)"
    )
    group.add_argument("--replies", metavar="FILE", help="one reply a line, before made-up ones (default: made up)")
    group.add_argument("--episodes", type=int, default=4, help="to play, with seeds from --seed on (default 4)")
    group.add_argument("--max-replies", type=int, default=40, help="in an episode (default 40)")
    group.add_argument("--timeout", type=float, default=120.0, help="seconds for each process (default 120)")


def examine(args: argparse.Namespace) -> int:
    """Play, compare, print. Returns the exit status: 0 where all bytes were the same."""
    from llamarl.cli.flags import refuse_flags
    from llamarl.environments.registry import check_environment

    at_least_one = {"--episodes": args.episodes, "--max-replies": args.max_replies, "--timeout": args.timeout}
    refuse_flags([f"{flag} must be > 0, got {value}" for flag, value in at_least_one.items() if not value > 0])
    options = _options(args.options)
    check_environment(args.env, options)
    question = Question(
        name=args.env,
        options=options,
        item=_item(args.item),
        replies=_replies(args.replies),
        episodes=args.episodes,
        max_replies=args.max_replies,
        seed=args.seed,
    )
    try:
        first, second = record_twice(question, args.timeout)
    except (TimeoutError, RuntimeError) as error:
        first = second = {"episodes": [], "error": str(error)}
    broken = first["error"] or second["error"]
    differs = None if broken else first_difference(first["episodes"], second["episodes"])
    replies = sum(len(episode) - 1 for episode in first["episodes"])
    if args.json:
        found = {
            "environment": args.env,
            "options": options,
            "repeatable": not broken and differs is None,
            "error": broken,
        }
        facts = {"episodes": len(first["episodes"]), "replies": replies, "differs": differs and vars(differs)}
        print(json.dumps({**found, **facts}))
        return 0 if found["repeatable"] else 1
    if first["episodes"]:
        print(_shown(first["episodes"][0], args.seed))
    if broken:
        print(f"{args.env} cannot be played:\n{broken.rstrip()}")
        return 1
    if differs is not None:
        where = f"reply {differs.reply}" if differs.reply else "its beginning"
        print(
            f"not repeatable: episode {differs.episode} (seed {args.seed + differs.episode - 1}) differs at {where}\n"
            f"  first process   {_at_difference(differs.first, differs.second)}\n"
            f"  second process  {_at_difference(differs.second, differs.first)}\n"
            "What is random in an environment must follow from reset's seed, and nothing may be left over from an earlier\n"
            "episode; time, addresses in memory and the order of sets do not repeat."
        )
        return 1
    size = sum(len(json.dumps(entry)) for episode in first["episodes"] for entry in episode)
    unended = sum(not episode[-1].get("done", False) for episode in first["episodes"])
    print(f"repeatable: {len(first['episodes'])} episodes, {replies} replies, {size} bytes, the same in two processes")
    if unended:
        print(f"{unended} of the episodes were not over after {args.max_replies} replies (--max-replies)")
    return 0


def _options(given: list[str]) -> dict[str, Any]:
    import tomllib

    from llamarl.cli.flags import refuse_flags

    refuse_flags([f"--options {pair!r}: expected KEY=VALUE, such as pegs=2" for pair in given if "=" not in pair])
    options: dict[str, Any] = {}
    for key, _, value in (pair.partition("=") for pair in given):
        try:
            options[key.strip()] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:  # a word without quotes
            options[key.strip()] = value
    return options


def _item(given: str) -> dict[str, Any]:
    from llamarl.cli.flags import refuse_flags

    try:
        fields = json.loads(given)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        refuse_flags([f'--item {given!r} must be a JSON object such as \'{{"question": "2 + 2 =", "answer": "4"}}\''])
        return {}
    answer = fields.pop("answer", None)
    question = str(fields.pop("question", ""))
    return {"question": question, "answer": None if answer is None else str(answer), "metadata": fields}


def _replies(file: str | None) -> list[str]:
    from llamarl.reading import read_text, user_path

    return [] if file is None else read_text(user_path(file, "--replies")).splitlines()


def _shown(episode: list[dict[str, Any]], seed: int) -> str:
    """An episode for reading."""
    opened, *turns = episode
    lines = [f"An episode (seed {seed}):", "", *_said("environment", opened)]
    if opened["tools"]:
        lines += _words("tools", ", ".join(tool["function"]["name"] for tool in opened["tools"]))
    for turn in turns:
        lines += _words("policy", turn["reply"])
        lines += _said("environment", turn)
        if turn["reward"]:
            lines.append(f"{'reward':12} {turn['reward']:g}")
    parts: dict[str, float] = {}
    for turn in turns:
        for name, value in turn["parts"].items():
            parts[name] = parts.get(name, 0.0) + value
    total = sum(turn["reward"] for turn in turns)
    end = "not over" if not turns or not turns[-1]["done"] else "cut off" if turns[-1]["truncated"] else "over"
    told = "".join(f", {name} {value:g}" for name, value in parts.items())
    return "\n".join([*lines, f"{'the end':12} {end}: reward {total:g}{told}", ""])


def _said(who: str, entry: dict[str, Any]) -> list[str]:
    if entry["messages"]:
        return [
            line
            for message in entry["messages"]
            for line in _words(str(message.get("name", message["role"])), str(message.get("content", "")))
        ]
    return _words(who, entry["text"]) if entry["text"] else []


def _words(who: str, text: str) -> list[str]:
    text = text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]} ..."
    first, *rest = text.splitlines() or [""]
    return [f"{who:12} {first}", *(f"{'':12} {line}" for line in rest)]


def _at_difference(line: str, other: str) -> str:
    """The part of a line around the first character that differs."""
    place = next((i for i, (a, b) in enumerate(zip(line, other, strict=False)) if a != b), min(len(line), len(other)))
    start = max(0, place - 60)
    return f"{'...' if start else ''}{line[start : place + 60]}{'...' if place + 60 < len(line) else ''}"


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
    first = _recorded({**asdict(question), "redo": None}, timeout_s)
    if first["error"]:
        return first, first
    return first, _recorded({**asdict(question), "redo": first["episodes"]}, timeout_s)


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
    from llamarl.environments.jobs import checked_observation, checked_step

    opened = checked_observation(env.reset(item, seed))
    record: Episode = [asdict(opened)]
    said = _text_of(opened)
    for _ in range(max_replies):
        reply = answer(said, opened.tools)
        if reply is None:
            break
        step = checked_step(env.step(reply))
        record.append({"reply": reply, **asdict(step)})
        if step.done:
            break
        said = _text_of(step)
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


def _text_of(seen: Observation | Step) -> str:
    return seen.text or "\n".join(str(message.get("content", "")) for message in seen.messages)


def _line(entry: Mapping[str, Any]) -> str:
    return json.dumps(entry, sort_keys=True)


def _recorded(request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
    from llamarl.environments.worker_process import worker_environment

    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder, "request.json"), Path(folder, "record.json")
        asked.write_text(json.dumps(request), encoding="utf-8")
        command = [sys.executable, "-m", "llamarl.cli.doctor_environment", str(asked), str(answered)]
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
    from llamarl.data.items import TaskItem
    from llamarl.environments.jobs import close_quietly
    from llamarl.environments.registry import make_environment

    episodes: list[Episode] = []
    error = ""
    env = make_environment(request["name"], request["options"])
    item = TaskItem(**request["item"])
    redo: list[Episode] | None = request["redo"]

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
        if redo is not None:
            episode(request["seed"] + request["episodes"], None)
        for place in range(request["episodes"]):
            episodes.append(episode(request["seed"] + place, None if redo is None else redo[place]))
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
