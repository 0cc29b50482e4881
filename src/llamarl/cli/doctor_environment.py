"""``llamarl doctor --env NAME``: does an environment repeat? Plays it twice in two processes, and shows one episode."""

from __future__ import annotations

import argparse
import json
from typing import Any

__all__ = ["add_flags", "examine"]

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
    from llamarl.environments.play_twice import Question, first_difference, record_twice
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
