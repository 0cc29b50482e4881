"""From an item to prompt text and tokens: chat template, system prompt, the words put into the policy's mouth."""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from llamarl.data.config import DataConfig
from llamarl.data.items import TaskItem
from llamarl.data.template_trial import MAX_RENDERED_CHARS, why_template_is_refused
from llamarl.errors import DataError

__all__ = ["Tokenizer", "apply_template", "check_templates", "render_prompt", "uses_chat_template"]


TraceFunction = Callable[[FrameType, str, object], Any]
_LINES_BETWEEN_LOOKS = 200
_TEMPLATE = "<template>"  # what jinja calls the file of a template that came as text


class Tokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    chat_template: Any

    # The library's signatures change with its versions: only the names are relied on here.
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
    def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any: ...


_MAX_TEMPLATE_S = 5.0
"""Processor seconds that a chat template may take for one prompt; real ones take milliseconds."""


_NO_TOOLS = (
    "shows the policy no tools ({names}): have the environment describe them in its first observation's text and leave "
    "Observation.tools empty, or choose a model whose template shows them"
)


def _names(tools: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(str(tool.get("function", tool).get("name", "?")) for tool in tools)


@contextlib.contextmanager
def _limited_time(seconds: float) -> Iterator[None]:
    """Ends a jinja template that runs for too long, in whichever thread this is.

    The interpreter asks before each of its lines, so that no alarm, no other thread and no process
    is needed. Time is this thread's own on a processor: a busy or suspended machine changes
    nothing. A single built-in call is not interrupted.

    Raises:
        TimeoutError: In the template, at the line that it has reached.
    """
    left = [_LINES_BETWEEN_LOOKS]
    end = time.thread_time() + seconds

    def look(frame: FrameType, event: str, argument: object) -> TraceFunction | None:
        if frame.f_code.co_filename != _TEMPLATE:
            return None  # no look at the lines of the libraries around it
        left[0] -= 1
        if left[0] < 0:
            left[0] = _LINES_BETWEEN_LOOKS
            if time.thread_time() > end:
                raise TimeoutError(f"it was still running after {seconds:g} s: does it loop?")
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        yield
    finally:
        sys.settrace(before)


def uses_chat_template(tokenizer: Tokenizer, config: DataConfig) -> bool:
    """True where prompts go through the tokenizer's chat template."""
    return config.chat_template == "auto" and bool(getattr(tokenizer, "chat_template", None))


def apply_template(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    reply_follows: bool = True,
) -> str:
    """A conversation as the tokenizer's chat template writes it.

    Args:
        reply_follows: It ends with what the template puts before a reply of the policy.

    Raises:
        DataError: The template refuses it, or breaks the limits of time, memory or size.
    """
    check_templates(tokenizer)
    try:
        with _limited_time(_MAX_TEMPLATE_S):
            text = tokenizer.apply_chat_template(
                list(messages),
                tokenize=False,
                add_generation_prompt=reply_follows,
                **({"tools": list(tools)} if tools else {}),
            )
    except Exception as error:  # templates are programs of the model's author: any jinja error can come out
        raise DataError(
            f"the chat template refused {list(messages)!r:.1000}: {error}; try data.chat_template = 'none'"
        ) from error
    if len(text) > MAX_RENDERED_CHARS:
        raise DataError(
            f"the chat template wrote {len(text):,} characters for {list(messages)!r:.1000}, expected at most "
            f"{MAX_RENDERED_CHARS:,}; try data.chat_template = 'none'"
        )
    return str(text)


def check_templates(tokenizer: Tokenizer) -> None:
    """Try a tokenizer's chat templates (one, or several by name) in a child process, before they
    are compiled in this one.

    Raises:
        DataError: One breaks the limits of time, memory or size.
    """
    given = tokenizer.chat_template
    for template in given.values() if isinstance(given, Mapping) else [given]:
        if isinstance(template, str) and (why := _refusal(template)):
            folder = getattr(tokenizer, "name_or_path", "") or "the tokenizer"
            raise DataError(
                f"the chat template of {folder} (chat_template.jinja, or chat_template in tokenizer_config.json) is refused: "
                f"{why}; mend it, or try data.chat_template = 'none'"
            )


@functools.cache
def _refusal(template: str) -> str:
    """Why a template is refused; tried once a process."""
    return why_template_is_refused(template)


def render_prompt(
    item: TaskItem, tokenizer: Tokenizer, config: DataConfig, *, tools: Sequence[Mapping[str, Any]] = ()
) -> tuple[str, npt.NDArray[np.int32]]:
    """Text and tokens of one prompt, of any length.

    A chat template writes its own special tokens, so the tokenizer adds none to its text; plain text gets those the
    tokenizer usually adds (a beginning-of-sequence token, where it has that habit).

    Returns:
        The text, and its token ids, [P].

    Raises:
        DataError: The chat template refuses the conversation or does not show the tools, or the prompt has no tokens.
    """
    question = config.question_template.replace("{question}", item.question)
    if uses_chat_template(tokenizer, config):
        messages = list(item.messages) if item.messages else [{"role": "user", "content": question}]
        if config.system_prompt and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": config.system_prompt})
        text = apply_template(tokenizer, messages, tools=tools)
        if tools and text == apply_template(tokenizer, messages):
            raise DataError("the chat template " + _NO_TOOLS.format(names=_names(tools)))
        special = False
    else:
        if item.messages:
            question = "\n\n".join(message["content"] for message in item.messages)
        if tools:
            raise DataError(
                "plain text (data.chat_template = 'none', or no template) " + _NO_TOOLS.format(names=_names(tools))
            )
        text = f"{config.system_prompt}\n\n{question}" if config.system_prompt else question
        special = True
    text += config.response_prefix
    tokens = np.asarray(tokenizer(text, add_special_tokens=special)["input_ids"], dtype=np.int32)
    if tokens.size == 0:
        raise DataError(
            f"question {item.question!r} gives a prompt without a token; an empty prompt cannot be continued"
        )
    return text, tokens
