"""From an item to prompt text and tokens: chat template, system prompt, the words put into the policy's mouth."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from llamarl.data.config import DataConfig
from llamarl.data.items import TaskItem
from llamarl.data.template_process import TemplateLimitError, render_template
from llamarl.errors import DataError

__all__ = ["Tokenizer", "apply_template", "render_prompt", "uses_chat_template"]


class Tokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    chat_template: Any

    @property
    def special_tokens_map(self) -> Any: ...

    # The library's signatures change with its versions: only the names are relied on here.
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
    def get_chat_template(self, *args: Any, **kwargs: Any) -> Any: ...
    def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any: ...


_WHAT_TEMPLATES_SEE = (
    "{{ {'messages': messages, 'tools': tools, 'documents': documents, 'add_generation_prompt': add_generation_prompt}"
    " | tojson }}"
)
"""A template in place of the model's, so that transformers prepares conversations and nothing of the model's is run."""

_NO_TOOLS = (
    "shows the policy no tools ({names}): set task.environment_options = {{ in_text = true }}, which a ToolEnvironment and TRL's "
    "classes know; have another environment describe them in its first observation's text and leave Observation.tools empty; or "
    "choose a model whose template shows them"
)


def _names(tools: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(str(tool.get("function", tool).get("name", "?")) for tool in tools)


def uses_chat_template(tokenizer: Tokenizer, config: DataConfig) -> bool:
    """True where prompts go through the tokenizer's chat template."""
    return config.chat_template == "auto" and bool(getattr(tokenizer, "chat_template", None))


def apply_template(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    reply_follows: bool = True,
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> str:
    """A conversation as the tokenizer's chat template writes it.

    Args:
        reply_follows: It ends with what the template puts before a reply of the policy.
        settings: Variables of the template's own, such as ``enable_thinking``.

    Raises:
        DataError: The template refuses it, or breaks the limits of time, memory or size.
    """
    shown = list(tools) or None
    try:
        template = tokenizer.get_chat_template(None, shown)
        prepared = tokenizer.apply_chat_template(
            list(messages),
            tools=shown,
            chat_template=_WHAT_TEMPLATES_SEE,
            tokenize=False,
            add_generation_prompt=reply_follows,
        )
        variables = {**settings, **tokenizer.special_tokens_map, **json.loads(prepared)}
        return render_template(template, variables)
    except TemplateLimitError as error:
        folder = getattr(tokenizer, "name_or_path", "") or "the tokenizer"
        raise DataError(
            f"the chat template of {folder} (chat_template.jinja, or chat_template in tokenizer_config.json) is refused: "
            f"{error}; mend it, or try data.chat_template = 'none'"
        ) from error
    except (ValueError, TypeError) as error:
        raise DataError(
            f"the chat template refused {list(messages)!r:.1000}: {error}; try data.chat_template = 'none'"
        ) from error


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
        settings = config.chat_template_kwargs
        text = apply_template(tokenizer, messages, tools=tools, settings=settings)
        if tools and text == apply_template(tokenizer, messages, settings=settings):
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
