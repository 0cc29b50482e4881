"""Episodes in which the policy calls tools: its calls are run, their results are shown, a reply
without a call is the answer.

    reset ─▶ question, schemas ─▶ policy ─▶ calls? ──yes──▶ run each, in order ──▶ a message of role "tool" for each ─▶ policy
                                               └──no──▶ finish(reply) ─▶ over

What the policy does wrong (a tool that is not there, JSON that is broken, arguments of a wrong
type) is text for the policy. What a tool raises is the environment's mistake and fails the sample,
unless the environment shows it (``show_errors``), or the tool raises ``ToolError``, which is meant
for the policy.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import json
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, get_type_hints

from pydantic import ConfigDict, Field, PydanticUserError, ValidationError, create_model

from llamarl.data.items import TaskItem
from llamarl.environments.episode import EpisodeOver, Message, Observation, Step
from llamarl.environments.tool_calls import BadCall, Call, read_calls

__all__ = ["BadArguments", "Tool", "ToolEnvironment", "ToolError", "cut", "in_words", "tools_of", "waited_for"]

MAX_CALLS = 16
"""Calls of one reply that are run; to the others the policy is told so."""

_SECTION = re.compile(r"^[ \t]*(Args|Returns|Raises):[ \t]*$", re.MULTILINE)


class ToolError(Exception):
    """Raised by a tool: the policy called it wrongly, and the text of this error tells it how."""


class BadArguments(Exception):
    """A call's arguments do not fit; the text says what was expected."""


class Tool:
    """A function that the policy may call: its JSON schema for chat templates, and the check of a call's arguments.

    Pydantic makes both from the annotations, so ``"3"`` is taken for an ``int``: policies often quote numbers.

    Args:
        function: With a docstring, in Google style where it has parameters, and an annotation for each of them.

    Raises:
        ValueError: The function has no docstring, or a parameter without annotation, JSON schema or description.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.name = function.__name__
        self.function = function
        doc = inspect.getdoc(function)
        if not doc:
            raise ValueError(f"tool {self.name!r} has no docstring: say in it what the tool does")
        parts = _sections(doc)
        hints, described = get_type_hints(function, include_extras=True), _arguments(parts.get("Args", ""))
        fields: dict[str, Any] = {}
        for parameter in inspect.signature(function).parameters.values():
            name = parameter.name
            if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
                raise ValueError(f"tool {self.name!r}: parameter {name!r} must be one that can be given by name")
            if name not in hints:
                raise ValueError(f"tool {self.name!r}: parameter {name!r} has no annotation, such as {name}: str")
            if name not in described:
                raise ValueError(f"tool {self.name!r}: parameter {name!r} has no line under Args: in the docstring")
            default = ... if parameter.default is parameter.empty else parameter.default
            # known by its alias: a parameter may be called like a method of pydantic's
            fields[f"f{len(fields)}"] = (hints[name], Field(default, alias=name, description=described[name]))
        try:
            self._model = create_model(f"arguments of {self.name}", __config__=ConfigDict(extra="forbid"), **fields)
            schema = self._model.model_json_schema()
            properties = _inlined(schema.get("properties", {}), schema.get("$defs", {}))
        except (PydanticUserError, RecursionError) as error:
            raise ValueError(f"tool {self.name!r}: a parameter's type has no JSON schema: {error}") from error
        parameters = {"type": "object", "properties": properties}
        if "required" in schema:
            parameters["required"] = schema["required"]
        body = {"name": self.name, "description": parts[""], "parameters": parameters}
        self.schema: dict[str, Any] = {"type": "function", "function": body}

    @property
    def usage(self) -> str:
        """Name and parameters, for the policy: ``add(x: integer, y: integer, optional)``."""
        body = self.schema["function"]["parameters"]
        required = body.get("required", [])
        shown = [
            f"{name}: {_type_name(schema)}{'' if name in required else ', optional'}"
            for name, schema in body["properties"].items()
        ]
        return f"{self.name}({'; '.join(shown)})"

    def checked(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments as the annotations want them; those left out take the function's own defaults.

        Raises:
            BadArguments: One is missing, unknown or of a wrong type.
        """
        properties = self.schema["function"]["parameters"]["properties"]
        nested = {name for name, schema in properties.items() if _is_told_in_json(schema)}
        try:
            model = self._model.model_validate({k: _parsed(v) if k in nested else v for k, v in arguments.items()})
        except ValidationError as error:
            wrong = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:4]]
            raise BadArguments(f"{'; '.join(wrong)}. Expected {self.usage}") from error
        names = {field: str(of.alias) for field, of in type(model).model_fields.items()}
        return {names[field]: getattr(model, field) for field in model.model_fields_set}


def _is_told_in_json(schema: Mapping[str, Any]) -> bool:
    """Whether a value that is text may be a list, an object, null or one of several numbers that is meant, and cannot be
    meant as text."""
    kinds = {one.get("type", "string") for one in schema.get("anyOf", (schema,))}  # of no type: may be text
    return "string" not in kinds and ("enum" in schema or not kinds.isdisjoint(("array", "object", "null")))


def _parsed(value: Any) -> Any:
    """What stands in a text of JSON, as templates whose values are all text write lists and objects."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def tools_of(instance: object, *, leave_out: frozenset[str]) -> dict[str, Tool]:
    """The public methods of an object, in the order of their definition, as tools.

    Raises:
        ValueError: One of them has no docstring or annotations; or there is none.
    """
    found: dict[str, Tool] = {}
    for cls in reversed(type(instance).__mro__[:-1]):
        for name, member in vars(cls).items():
            if (
                name.startswith("_")
                or name in leave_out
                or isinstance(member, type)
                or not callable(getattr(cls, name))
            ):
                continue
            found[name] = Tool(getattr(instance, name))
    if not found:
        raise ValueError(f"{type(instance).__name__} has no public method that could be a tool")
    return found


def _sections(doc: str) -> dict[str, str]:
    """What stands before the first heading under ``""``, and the text under each heading."""
    pieces = _SECTION.split(doc)
    return {"": pieces[0].strip(), **dict(zip(pieces[1::2], pieces[2::2], strict=True))}


def _arguments(block: str) -> dict[str, str]:
    """Parameter -> its description, the lines of one joined by spaces."""
    lines = [line for line in block.splitlines() if line.strip()]
    indent = min((len(line) - len(line.lstrip()) for line in lines), default=0)
    found: dict[str, str] = {}
    name = ""
    for line in lines:
        head = re.match(r"(\w+)(?:\s*\([^)]*\))?:\s*(.*)", line[indent:])
        if head and not line[indent : indent + 1].isspace():
            name = head[1]
            found[name] = head[2].strip()
        elif name:
            found[name] = f"{found[name]} {line.strip()}".strip()
    return found


def _inlined(schema: Any, definitions: Mapping[str, Any]) -> Any:
    """A schema, or several by name, without pydantic's titles, defaults and references, which few
    templates show well."""
    if isinstance(schema, list):
        return [_inlined(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        schema = {**definitions[schema["$ref"].rpartition("/")[2]], **schema}
    hidden = [key for key in ("title", "default", "$ref") if not isinstance(schema.get(key), dict)]
    return {key: _inlined(value, definitions) for key, value in schema.items() if key not in hidden}


def _type_name(schema: Mapping[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(map(_type_name, schema["anyOf"]))
    return " or ".join(map(str, schema["enum"])) if "enum" in schema else str(schema.get("type", "any"))


class ToolEnvironment(ABC):
    """One episode of calls and results.

    Args:
        max_moves: Replies of an episode, the final answer included.
        max_result_chars: Longer results are cut, with a word that they were.
        show_errors: Whether whatever a tool raises is shown to the policy; else it fails the sample.
        in_text: Tools are described in the question's text, and results come as text: for chat
            templates that know no tools.
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
    """A text of at most ``max_chars`` characters and a word on what is missing; halves of surrogate
    pairs are replaced."""
    text = text.encode("utf-8", "replace").decode("utf-8")
    if len(text) <= max_chars:
        return text
    return f"{text[:max_chars]}\n... (cut after {max_chars} of {len(text)} characters)"


def waited_for(result: Any) -> Any:
    """What a function returned; of an ``async`` one, what it returns in the end.

    Calls of the main thread share one loop: a connection that one of them opened is the next one's too.
    """
    if not inspect.isawaitable(result):
        return result
    import asyncio

    async def ended() -> Any:
        return await result

    if threading.current_thread() is threading.main_thread():
        return _runner().run(ended())
    return asyncio.run(ended())


@cache
def _runner() -> Any:
    import asyncio

    return asyncio.Runner()


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
    return dataclasses.replace(step, parts={**counts, **step.parts})
