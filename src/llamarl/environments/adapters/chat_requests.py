"""Requests to an OpenAI-compatible chat endpoint, and answers to them, as plain values. Pure.

    body ──read_request──▶ ChatRequest ──new_messages(history)──▶ what the program adds ──shown──▶ messages for a template
    reply of the policy ──assistant_message──▶ a message of the assistant ──completion, chunks──▶ bodies

An episode is one conversation that grows at its end: a request repeats what was said, with the
policy's words as they were answered, and adds to it. What tokens the policy wrote is never told by
a program, so a request that edits or leaves out something cannot be played on, and is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llamarl.environments.episode import Message
from llamarl.environments.tool_calls import Call, read_calls

__all__ = [
    "BadRequest",
    "ChatRequest",
    "assistant_message",
    "chunks",
    "completion",
    "new_messages",
    "read_request",
    "shown",
]

_ROLES = {"system": "system", "developer": "system", "user": "user", "tool": "tool", "assistant": "assistant"}
_CALL_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_MARKERS = re.compile(r"<tool_call>|\[TOOL_CALLS\]|<\|python_tag\|>|```(?:json|tool_call)[ \t]*\n")
_USAGE = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}


class BadRequest(ValueError):
    """A request that cannot be answered by the policy; says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """What counts of a request; sampling is the recipe's."""

    messages: tuple[Message, ...]
    """``role`` (system, user, tool, assistant), ``content`` (text), and ``tool_calls``, ``tool_call_id``, ``name``."""
    tools: tuple[Mapping[str, Any], ...] = ()
    takes_calls: bool = False
    """Whether calls in the reply are read as such."""
    model: str = ""
    stream: bool = False
    stream_usage: bool = False


def read_request(body: object) -> ChatRequest:
    """A request from its JSON.

    Raises:
        BadRequest: It asks for something that the endpoint does not do, or is none.
    """
    if not isinstance(body, dict):
        raise BadRequest(f"the body is {_short(body)}, expected a JSON object")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest(f"messages is {_short(messages)}, expected a list of messages")
    _refuse(body)
    tools = body.get("tools") or []
    if not isinstance(tools, list) or not all(
        isinstance(tool, dict) and isinstance(tool.get("function"), dict) for tool in tools
    ):
        raise BadRequest(f"tools are {_short(tools)}, expected a list of objects with type and function")
    options = body.get("stream_options")
    read = tuple(_message(place, message) for place, message in enumerate(messages))
    if read[-1]["role"] == "assistant":
        raise BadRequest("the last message is the assistant's: a reply that is begun cannot be gone on with")
    return ChatRequest(
        messages=read,
        tools=tuple(tools),
        takes_calls=bool(tools) and body.get("tool_choice") != "none",
        model=str(body.get("model") or ""),
        stream=bool(body.get("stream")),
        stream_usage=isinstance(options, dict) and bool(options.get("include_usage")),
    )


def new_messages(history: Sequence[Message], request: ChatRequest) -> tuple[Message, ...]:
    """What a request adds to the conversation so far.

    Raises:
        BadRequest: It does not begin with the conversation, or adds nothing, or words of the assistant.
    """
    for place, (before, now) in enumerate(zip(history, request.messages, strict=False), 1):
        if not _same(before, now):
            raise BadRequest(
                f"message {place} was {_short(before)} and now is {_short(now)}: an episode is one conversation that only "
                "grows at its end, with the assistant's messages as they were answered. Train a branch, a shortened or an "
                "edited history as an episode of its own"
            )
    if len(request.messages) <= len(history):
        raise BadRequest(
            f"{len(request.messages)} messages, of a conversation that has {len(history)}, the last answer among them: a "
            "request goes on where the last answer ended, and a question cannot be asked again"
        )
    added = request.messages[len(history) :]
    if any(message["role"] == "assistant" for message in added):
        raise BadRequest("messages of the assistant that the policy did not write stand behind its last answer")
    return added


def shown(messages: Sequence[Message], history: Sequence[Message]) -> tuple[Message, ...]:
    """Messages as chat templates take them: calls with arguments as objects, results with the names of their tools.

    Args:
        history: What was said before them, where the calls are that they answer.
    """
    names = {call["id"]: call["function"]["name"] for m in (*history, *messages) for call in m.get("tool_calls", ())}
    out: list[Message] = []
    for message in messages:
        if message["role"] == "tool" and "name" not in message and message.get("tool_call_id") in names:
            message = {**message, "name": names[message["tool_call_id"]]}
        if calls := message.get("tool_calls"):
            told = [{**c, "function": {**c["function"], "arguments": _parsed(c["function"])}} for c in calls]
            message = {**message, "tool_calls": told}
        out.append(message)
    return tuple(out)


def assistant_message(reply: str, request: ChatRequest, turn: int) -> dict[str, Any]:
    """The policy's reply as a message: its calls as ``tool_calls``, if all of them are calls; else all of it as text.

    Args:
        turn: Of the episode, from 0: ids of calls that the policy gave none follow from it.
    """
    message: dict[str, Any] = {"role": "assistant", "content": reply}
    if not request.takes_calls:
        return message
    known = [tool["function"].get("name", "") for tool in request.tools]
    found = read_calls(reply, known)
    calls = [call for call in found if isinstance(call, Call)]
    if not calls or len(calls) < len(found):
        return message
    thoughts = reply.rfind("</think>") + len("</think>") if "</think>" in reply else 0
    marker = _MARKERS.search(reply, thoughts)
    before = reply[: marker.start()] if marker else reply[:thoughts]
    message["content"] = before.strip() or None
    ids = [call.id if _CALL_ID.fullmatch(call.id) else "" for call in calls]
    message["tool_calls"] = [
        {
            "id": own
            if own and ids.count(own) == 1
            else f"call{turn:03d}{place:02d}",  # 9 characters, as Mistral's have
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(_arguments(call, request), ensure_ascii=False)},
        }
        for place, (call, own) in enumerate(zip(calls, ids, strict=True))
    ]
    return message


def _arguments(call: Call, request: ChatRequest) -> dict[str, Any]:
    """Those of a call; in a form whose values are all text, what the tool's schema has as another type is made that."""
    functions = [tool["function"] for tool in request.tools if call.in_text]
    schema = next((one.get("parameters") for one in functions if one.get("name") == call.name), None)
    known = schema.get("properties") if isinstance(schema, Mapping) else None
    if not isinstance(known, Mapping):
        return call.arguments
    return {name: _of_type(value, known.get(name)) for name, value in call.arguments.items()}


def _of_type(text: str, schema: Any) -> Any:
    """What a text is by a parameter's schema; as it stands where that may be text, says nothing, or is another."""
    parts = (schema.get("anyOf") or [schema]) if isinstance(schema, Mapping) else []
    told = [one.get("type", "object" if "$ref" in one else "string") for one in parts if isinstance(one, Mapping)]
    kinds = [kind for one in told for kind in (one if isinstance(one, list) else [one])]
    if not kinds or "string" in kinds:
        return text
    if "boolean" in kinds and text in ("True", "False"):  # as templates write them
        return text == "True"
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def completion(message: Mapping[str, Any], request: ChatRequest, turn: int) -> dict[str, Any]:
    """The body of an answer."""
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _finish_reason(message)}
    return {**_head(request, turn), "object": "chat.completion", "choices": [choice], "usage": _USAGE}


def chunks(message: Mapping[str, Any], request: ChatRequest, turn: int) -> list[dict[str, Any]]:
    """The bodies of a streamed answer: everything in one delta, and the end."""
    head = {**_head(request, turn), "object": "chat.completion.chunk"}
    delta = dict(message)
    if calls := delta.get("tool_calls"):
        delta["tool_calls"] = [{"index": place, **call} for place, call in enumerate(calls)]
    last = {"index": 0, "delta": {}, "finish_reason": _finish_reason(message)}
    bodies = [{**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}, {**head, "choices": [last]}]
    return [*bodies, {**head, "choices": [], "usage": _USAGE}] if request.stream_usage else bodies


def _head(request: ChatRequest, turn: int) -> dict[str, Any]:
    return {"id": f"chatcmpl-{turn}", "created": 0, "model": request.model}


def _finish_reason(message: Mapping[str, Any]) -> str:
    return "tool_calls" if message.get("tool_calls") else "stop"


def _refuse(body: Mapping[str, Any]) -> None:
    """What would change the answer and is not done."""
    if body.get("n") not in (None, 1):
        raise BadRequest(f"n is {_short(body['n'])}: an episode has one answer to each request")
    choice = body.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise BadRequest(f"tool_choice is {_short(choice)}: the policy cannot be made to call; it may be auto or none")
    form = body.get("response_format")
    if form is not None and (not isinstance(form, dict) or form.get("type") != "text"):
        raise BadRequest(f"response_format is {_short(form)}: the policy's words cannot be constrained; it may be text")
    if body.get("functions"):
        raise BadRequest("functions are of an older API: give tools")


def _message(place: int, message: object) -> Message:
    where = f"messages[{place}]"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str) or message["role"] not in _ROLES:
        raise BadRequest(f"{where} is {_short(message)}, expected an object whose role is one of {', '.join(_ROLES)}")
    role = _ROLES[message["role"]]
    read: dict[str, Any] = {"role": role, "content": _text(where, message.get("content"))}
    if role == "assistant" and (calls := message.get("tool_calls")):
        read["tool_calls"] = [_call(where, call) for call in (calls if isinstance(calls, list) else [calls])]
    if role == "tool":
        read |= {key: message[key] for key in ("tool_call_id", "name") if isinstance(message.get(key), str)}
    return read


def _text(where: str, content: object) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        return "".join(str(part.get("text", "")) for part in content)
    raise BadRequest(
        f"{where}.content is {_short(content)}, expected a text: pictures, sound and files cannot be shown"
    )


def _call(where: str, call: object) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRequest(f"{where}.tool_calls holds {_short(call)}, expected a call of a function")
    arguments = function.get("arguments", "{}")
    arguments = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {
        "id": str(call.get("id") or ""),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _same(before: Message, now: Message) -> bool:
    """Equal but for what clients do to a message: space at the ends of an assistant's words, how
    arguments are written."""
    if before["role"] != "assistant" or now["role"] != "assistant":
        return before == now
    return (before["content"] or "").strip() == (now["content"] or "").strip() and _calls(before) == _calls(now)


def _calls(message: Message) -> list[Any]:
    return [(call["id"], call["function"]["name"], _parsed(call["function"])) for call in message.get("tool_calls", ())]


def _parsed(function: Mapping[str, Any]) -> Any:
    """The arguments of a call as an object, where their text is one."""
    try:
        return json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return function["arguments"]


def _short(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 200 else f"{text[:200]}..."
