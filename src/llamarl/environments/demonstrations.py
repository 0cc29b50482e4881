"""Conversations that somebody else has ended: what supervised fine-tuning trains on.

    {"messages": [.., assistant, ..]}                 each assistant's turn is trained on
    {"prompt": text or messages, "completion": ..}    TRL's form: the completion alone is
    {"question" or "problem": text, "answer": text}   as of GSM8K: the answer is the completion

An item's question is what comes before the first completion; the rest of the conversation is in its metadata, under
``CONTINUATION``, and begins and ends with a turn of the assistant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from llamarl.data.demonstrations import CONTINUATION
from llamarl.data.items import TaskItem, read_messages
from llamarl.environments.items import TableItems, tell, text_field
from llamarl.errors import DataError
from llamarl.settings.environments import TaskConfig
from llamarl.types import Prompt, Score

__all__ = ["DemonstrationsTask", "demonstration_item"]

_COMPLETIONS = ("completion", "answer", "solution", "response")
_BESIDE = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
"""What some data have beside the ``content`` of a turn, for templates of their own."""
_MARKS = ("weight", "train", "loss")
"""By which some data say of a turn that it is not to be learned."""


def demonstration_item(record: Mapping[str, Any], where: str) -> TaskItem:
    """Split a record into what is shown and what is learned.

    Raises:
        DataError: No conversation and no completion, no turn of the assistant, or an empty one, or with tools or thoughts
            beside its words; names ``where``.
    """
    if record.get("tools"):
        raise DataError(
            f"{where}: its conversation was held with tools, which fine-tuning does not show: describe them in a system "
            "message, or leave the field 'tools' out"
        )
    if record.get("chat_template_kwargs"):
        tell("rows have chat_template_kwargs, which are not read: data.chat_template_kwargs is for all rows alike")
    if isinstance(record.get("prompt"), list):
        messages = [*record["prompt"], *_as_messages(record.get("completion"), where)]
        return _of_conversation(read_messages({"messages": messages}, where), where, len(record["prompt"]))
    if "messages" in record:
        return _of_conversation(read_messages(record, where), where)
    question = text_field(record, ("prompt", "question", "problem"), where)
    completion = text_field(record, _COMPLETIONS, where)
    return TaskItem(
        question=question, metadata={CONTINUATION: [{"role": "assistant", "content": completion}]}, where=where
    )


def _as_messages(completion: Any, where: str) -> list[Any]:
    if isinstance(completion, str):
        return [{"role": "assistant", "content": completion}]
    if isinstance(completion, list):
        return completion
    raise DataError(f"{where}: field 'prompt' is a conversation, so 'completion' must be text or messages")


def _of_conversation(messages: Sequence[Mapping[str, str]], where: str, begin: int = 0) -> TaskItem:
    """What the assistant says from message ``begin`` on is learned."""
    turns = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    said = [place for place in turns if place >= begin]
    if not said or said[0] == 0:
        roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
        raise DataError(
            f"{where}: the conversation needs a turn of the assistant after one of somebody else, its roles are {roles}"
        )
    for place in said:
        if beside := next((key for key in _BESIDE if messages[place].get(key)), ""):
            raise DataError(
                f"{where}: message {place} of the assistant has {beside!r} beside its content, which would not be learned: "
                "write it into the content, as the model is to write it, or leave it out"
            )
        if off := next((key for key in _MARKS if messages[place].get(key, 1) == 0), ""):
            raise DataError(
                f"{where}: message {place} of the assistant has {off} = {messages[place][off]!r}, but each of its turns is learned: "
                "leave the field out, or give what is to be learned as 'completion' and what comes before it as 'prompt'"
            )
        if not messages[place]["content"].strip():
            raise DataError(
                f"{where}: message {place} is of the assistant and empty: there is nothing to learn from it"
            )
    if any(later - place == 1 for place, later in zip(turns, turns[1:], strict=False)):
        raise DataError(f"{where}: two turns of the assistant follow each other: join them")
    asked, rest = messages[: said[0]], messages[said[0] : said[-1] + 1]
    return TaskItem(
        question="\n\n".join(message["content"] for message in asked),
        messages=tuple(asked),
        metadata={CONTINUATION: [dict(message) for message in rest]},
        where=where,
    )


def _shown(messages: Sequence[Mapping[str, str]]) -> tuple[Mapping[str, str], ...]:
    return tuple(takewhile(lambda message: message["role"] != "assistant", messages))


class DemonstrationsTask(TableItems):
    """Rows to imitate; nothing that a policy writes is judged."""

    name = "demonstrations"

    def __init__(self, config: TaskConfig, *, seed: int) -> None:
        super().__init__(config, demonstration_item, seed=seed, shown=_shown)

    def respond(self, prompt: Prompt, turns: Sequence[str]) -> Score:
        """Refuse.

        Raises:
            ValueError: Always: demonstrations come without a judge.
        """
        raise ValueError(
            "demonstrations have no judge: evaluate the trained model on a task that has one (llamarl eval)"
        )
