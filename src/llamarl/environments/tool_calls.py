"""Calls of tools in a policy's reply, in the formats that the common chat templates teach.

    Hermes, Qwen       <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>
    Qwen3-Coder        <tool_call><function=add><parameter=a>1</parameter></function></tool_call>      values are text
    Llama 3            {"name": "add", "parameters": {"a": 1}}      also behind <|python_tag|>, several joined by ;
    Mistral            [TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]      newer: [TOOL_CALLS]add[ARGS]{"a": 1}
    fenced             a block of three backquotes and json that holds such objects

Some tokenizers hold their marker as a special token, and replies come without those: so ``[TOOL_CALLS]``, ``[ARGS]`` and
``<|python_tag|>`` are optional. Without any marker a reply's *end* is a call where it is an object (or a list of them) with a
name and arguments, or the name of a known tool before an object. Thoughts up to ``</think>`` are not looked at.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

__all__ = ["BadCall", "Call", "read_calls"]


@dataclass(frozen=True, slots=True)
class Call:
    """One call as the policy wrote it; whether there is such a tool is not checked."""

    name: str
    arguments: dict[str, Any]
    id: str = ""
    in_text: bool = field(default=False, compare=False)
    """Whether its form has text alone for values: a number, a list or null is written as such."""


@dataclass(frozen=True, slots=True)
class BadCall:
    """Something marked as a call that is none."""

    why: str


_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
_TAGGED = re.compile(r"<function=([\w.-]+)>(.*?)(?:</function>|(?=<function=)|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([\w.-]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_PYTHON_TAG = "<|python_tag|>"
_MISTRAL = "[TOOL_CALLS]"
_FENCED = re.compile(r"```(?:json|tool_call)[ \t]*\n(.*?)```", re.DOTALL)
_NAMED = re.compile(r"\s*([A-Za-z_][\w.-]*)\s*(?:\[CALL_ID\]\s*(\w+)\s*)?(?:\[ARGS\])?\s*(?=\{)")
_SHAPE = '{"name": ..., "arguments": {...}}'
_MAX_TAIL_STARTS = 64


def read_calls(reply: str, known: Collection[str]) -> list[Call | BadCall]:
    """All calls of a reply in their order; empty where it is a final answer.

    Args:
        known: Names of the tools; a call without any marker must name one of them, or be the whole reply.
    """
    text = reply.rpartition("</think>")[2]
    if "<tool_call>" in text:
        return [call for body in _HERMES.findall(text) for call in _marked(body)]
    if _MISTRAL in text:
        return [call for body in text.split(_MISTRAL)[1:] for call in _mistral(body)]
    if _PYTHON_TAG in text:
        return _marked(text.partition(_PYTHON_TAG)[2])
    if fenced := [body for body in _FENCED.findall(text) if _looks_like_call(body)]:
        return [call for body in fenced for call in _marked(body)]
    return _unmarked(text.strip(), known)


def _marked(body: str) -> list[Call | BadCall]:
    """What stands behind a marker, where only calls may stand."""
    found: list[Call | BadCall] = []
    if body.lstrip().startswith("<function="):
        tagged = [(name, dict(_PARAMETER.findall(_closed(inside)))) for name, inside in _TAGGED.findall(body)]
        found += [Call(name, arguments, in_text=True) for name, arguments in tagged]
        return found or [BadCall(f"this call has no name: {_short(body)}. Expected <function=NAME>...</function>")]
    try:
        for value in _values(body):
            found += _calls_in(value)
    except ValueError as error:
        found.append(BadCall(f"this is no JSON ({error}): {_short(body)}. Expected {_SHAPE}"))
    return found or [BadCall(f"there is no call behind the marker. Expected {_SHAPE}")]


def _closed(inside: str) -> str:
    """Up to the last ``</parameter>``: for each that opens behind it the rest would be looked through."""
    return inside[: inside.rfind("</parameter>") + len("</parameter>")]


def _mistral(body: str) -> list[Call | BadCall]:
    named = _NAMED.match(body)
    if named is None:
        return _marked(body)
    try:
        arguments, _ = _decode(body, named.end())
    except ValueError as error:
        return [BadCall(f"the arguments of {named[1]} are no JSON ({error}): {_short(body[named.end() :])}")]
    return [Call(named[1], arguments, named[2] or "")]


def _unmarked(text: str, known: Collection[str]) -> list[Call | BadCall]:
    if text[:1] in ("{", "["):
        try:
            values = list(_values(text))
        except ValueError:
            values = []
        if values and all(_is_call(one) for value in values for one in _listed(value)) and any(map(_listed, values)):
            return [call for value in values for call in _calls_in(value)]
        if text[0] == "{" and re.match(r'\{\s*"name"\s*:', text) and not values:
            return _marked(text)
    starts = [match.start() for match in re.finditer(r"[\[{]", text)][-_MAX_TAIL_STARTS:]
    for start in starts:
        try:
            values = list(_values(text[start:]))
        except ValueError:
            continue
        ones = [one for value in values for one in _listed(value)]
        if ones and all(_is_call(one) and one["name"] in known for one in ones):
            return [call for one in ones for call in _calls_in(one)]
        before = re.search(r"(?<![\w.-])([A-Za-z_][\w.-]*)\s*$", text[:start])
        if len(values) == 1 and isinstance(values[0], dict) and before and before[1] in known:
            return [Call(before[1], values[0])]
    return []


def _calls_in(value: Any) -> list[Call | BadCall]:
    return [_call(one) for one in _listed(value)]


def _call(value: Any) -> Call | BadCall:
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = {"id": value.get("id"), **value["function"]}
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return BadCall(f"this call has no name: {_short(json.dumps(value))}. Expected {_SHAPE}")
    arguments = value.get("arguments", value.get("parameters")) or {}  # of a tool without any: null or "", too
    if isinstance(arguments, str):  # JSON within JSON, as OpenAI's API writes it
        try:
            arguments, _ = _decode(arguments, 0)
        except ValueError:
            arguments = value["arguments"] if "arguments" in value else value["parameters"]
    if not isinstance(arguments, dict):
        return BadCall(f"the arguments of {value['name']} are no object: {_short(json.dumps(arguments))}")
    given = value.get("id")
    return Call(value["name"], arguments, given if isinstance(given, str) else "")


def _is_call(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("name"), str)
        and ("arguments" in value or "parameters" in value)
    )


def _looks_like_call(body: str) -> bool:
    return '"name"' in body and ('"arguments"' in body or '"parameters"' in body)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _values(text: str) -> Iterator[Any]:
    """JSON values one behind another, between them space, ``;`` or ``,``.

    Raises:
        ValueError: Something else stands between or behind them, or one is broken.
    """
    place = 0
    while True:
        rest = re.compile(r"[\s;,]*").match(text, place)
        place = rest.end() if rest else place
        if place >= len(text):
            return
        value, place = _decode(text, place)
        yield value


def _decode(text: str, place: int) -> tuple[Any, int]:
    try:
        value, end = _DECODER.raw_decode(text, place)
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    return value, end


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 120 else f"{text[:120]}..."
