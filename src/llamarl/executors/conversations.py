"""Renders what a model that judges reads, and finds the number in what it says. Pure.

rubric    with {question}, {response}, {answer} ─▶ text ─▶ the judge's words ─▶ the last number found, between 0 and 1
"chat"    [question or the item's messages, response] ─▶ its chat template ─▶ tokens
"plain"   the prompt as the policy was given it + response ─▶ tokens
"pair"    (question, response) ─▶ its tokenizer's form of two texts ─▶ tokens and which of the two each is of
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from llamarl.data.prompts import apply_template
from llamarl.errors import ModelError
from llamarl.types import Prompt, Response

__all__ = ["Rendered", "TextFor", "conversation", "fill", "score_in", "special_tokens", "transcript", "without"]

_PLACES = re.compile(r"\{(question|response|answer)\}")


@dataclass(frozen=True, slots=True)
class Rendered:
    """A text as a model reads it."""

    tokens: list[int]
    types: list[int]
    """Of each token, which of two joined texts it is of; empty where the model makes no difference."""


def conversation(prompt: Prompt, response: Response) -> list[dict[str, Any]]:
    """The item's own messages, or its question as the user's, followed by the response as the assistant's.

    Where the messages end in words of the assistant, the response goes on from there. Of an episode
    with an environment, each turn follows, with what the environment answered as the user's words;
    what it said after the last one was shown to nobody.
    """
    given = prompt.metadata.get("messages")
    messages: list[dict[str, Any]] = [dict(message) for message in given] if given else []
    if not messages:
        messages = [{"role": "user", "content": prompt.question or prompt.text}]
    said = _said(response)
    if messages[-1].get("role") == "assistant":
        last = messages.pop()
        said[0] = {**last, "content": f"{last.get('content') or ''}{said[0]['content']}"}
    return [*messages, *said]


def _said(response: Response) -> list[dict[str, Any]]:
    """What followed the prompt, as messages; at least one."""
    if not response.turns:
        return [{"role": "assistant", "content": response.text}]
    messages = []
    for turn in response.turns:
        messages += [{"role": "assistant", "content": turn.reply}, {"role": "user", "content": turn.observation}]
    return messages[:-1]


def transcript(response: Response) -> str:
    """The response as one text; of an episode with several turns, each after who said it."""
    said = _said(response)
    if len(said) == 1:
        return str(said[0]["content"])
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in said)


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    """Finds a tokenizer's special tokens where a text spells them out."""
    added = (getattr(tokenizer, "added_tokens_decoder", None) or {}).values()
    names = sorted((str(one) for one in added if one.special and len(str(one)) > 1), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, names)) or "(?!)")


def without(special: re.Pattern[str], response: Response) -> Response:
    """The response with a space in each special token that its words spell out.

    The model that judges would read ``<|im_end|>`` as the end of the policy's turn, and what follows as another's:
    its user's praise, or the verdict begun (github.com/huggingface/transformers/issues/29279).
    """

    def plain(text: str) -> str:
        return special.sub(lambda found: f"{found[0][0]} {found[0][1:]}", text)

    turns = (replace(t, reply=plain(t.reply), observation=plain(t.observation)) for t in response.turns)
    return replace(response, text=plain(response.text), turns=tuple(turns))


class TextFor:
    """Renders for one model."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str) -> None:
        """
        Args:
            template: ``auto``, ``chat``, ``plain`` or ``pair``.

        Raises:
            ModelError: ``chat``, and the tokenizer has no chat template.
        """
        self._tokenizer, self._special = tokenizer, special_tokens(tokenizer)
        has_template = bool(getattr(tokenizer, "chat_template", None))
        if template == "chat" and not has_template:
            why = ": is 'chat', but the model's tokenizer has no chat template: set it to 'plain' or 'pair'"
            raise ModelError.at("reward_model.template", why)
        self.template = ("chat" if has_template else "plain") if template == "auto" else template

    def __call__(self, prompt: Prompt, response: Response) -> Rendered:
        """The tokens of one prompt with its response; whatever a chat template raises passes through."""
        response = without(self._special, response)
        if self.template == "chat":
            text = apply_template(self._tokenizer, conversation(prompt, response), reply_follows=False)
            found: Any = self._tokenizer(text, add_special_tokens=False)
        elif self.template == "plain":
            words, begin = prompt.text + response.text, self._tokenizer.bos_token
            # a chat template of the policy may have written the beginning
            found = self._tokenizer(words, add_special_tokens=not (begin and words.startswith(str(begin))))
        else:
            found = self._tokenizer(prompt.question or prompt.text, transcript(response))
        return Rendered(list(found["input_ids"]), list(found.get("token_type_ids") or ()))


def fill(rubric: str, prompt: Prompt, response: Response) -> str:
    """The rubric with an item's question, the response and the reference answer in their places.

    All places are filled at once: braces in a response are words, and put nothing else in.
    """
    parts = {"question": _question(prompt), "response": transcript(response), "answer": prompt.answer or ""}
    return _PLACES.sub(lambda place: parts[place[1]], rubric)


def _question(prompt: Prompt) -> str:
    """The question; of a conversation, its turns, each after who said it."""
    messages = prompt.metadata.get("messages")
    if not messages:
        return prompt.question or prompt.text
    if len(messages) == 1:
        return str(messages[0].get("content") or "")
    return "\n\n".join(f"{message.get('role')}: {message.get('content') or ''}" for message in messages)


def score_in(text: str, pattern: str, score_range: Sequence[float]) -> float | None:
    """What ``text`` says as a share of the range; None where it names no number, or one outside."""
    found = re.findall(pattern, text)
    if not found:
        return None
    low, high = score_range
    try:
        number = float(found[-1])
    except ValueError:
        return None
    return (number - low) / (high - low) if low <= number <= high else None
