"""From an item to prompt text and tokens: chat template, system prompt, the words put into the policy's mouth."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from llamarl.data.config import DataConfig
from llamarl.data.items import TaskItem
from llamarl.errors import DataError

__all__ = ["Tokenizer", "render_prompt", "uses_chat_template"]


class Tokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    chat_template: Any

    # The library's signatures change with its versions: only the names are relied on here.
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
    def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any: ...


def uses_chat_template(tokenizer: Tokenizer, config: DataConfig) -> bool:
    """True where prompts go through the tokenizer's chat template."""
    return config.chat_template == "auto" and bool(getattr(tokenizer, "chat_template", None))


def render_prompt(item: TaskItem, tokenizer: Tokenizer, config: DataConfig) -> tuple[str, npt.NDArray[np.int32]]:
    """Text and tokens of one prompt, of any length.

    A chat template writes its own special tokens, so the tokenizer adds none to its text; plain text gets those the
    tokenizer usually adds (a beginning-of-sequence token, where it has that habit).

    Returns:
        The text, and its token ids, [P].

    Raises:
        DataError: The chat template refuses the conversation, or the prompt has no tokens.
    """
    question = config.question_template.replace("{question}", item.question)
    if uses_chat_template(tokenizer, config):
        messages = list(item.messages) if item.messages else [{"role": "user", "content": question}]
        if config.system_prompt and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": config.system_prompt})
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # templates are programs of the model's author: any jinja error can come out
            raise DataError(f"the chat template refused {messages!r}: {error}; try chat_template = 'none'") from error
        special = False
    else:
        if item.messages:
            question = "\n\n".join(message["content"] for message in item.messages)
        text = f"{config.system_prompt}\n\n{question}" if config.system_prompt else question
        special = True
    text += config.response_prefix
    tokens = np.asarray(tokenizer(text, add_special_tokens=special)["input_ids"], dtype=np.int32)
    if tokens.size == 0:
        raise DataError(
            f"question {item.question!r} gives a prompt without a token; an empty prompt cannot be continued"
        )
    return text, tokens
