"""How prompts are made from a task's items. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt
from pydantic.dataclasses import dataclass

from llamarl.strict import IN_STATE, STRICT, holding

__all__ = ["DataConfig"]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DataConfig:
    """From a task's item to the tokens that the policy continues."""

    chat_template: Literal["auto", "none"] = "auto"
    """auto: the tokenizer's chat template where it has one, else plain text; none: always plain text."""

    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables of the chat template's own, such as { enable_thinking = false } for models that would think first."""

    system_prompt: str = ""
    """Words before the question: a system message in a chat template, a paragraph of its own in plain text. Empty:
    none, and the template's own default system message, if it has one, stands."""

    question_template: Annotated[str, holding(lambda text: "{question}" in text, "must contain {question}")] = (
        "{question}"
    )
    """Wraps each question that is text, not a conversation; must contain {question}. Other braces need no doubling."""

    response_prefix: str = ""
    """Words put into the policy's mouth: they end the prompt, and the response goes on from them.
    So does each further turn."""

    turn_template: Annotated[str, holding(lambda text: text.count("{text}") == 1, "must contain {text} once")] = (
        "\n{text}\n"
    )
    """Without a chat template: what stands between two turns of the policy, around the environment's words."""

    max_prompt_tokens: PositiveInt = 1024
    """Longest prompt, in tokens, chat template included; less where the model's context leaves less beside
    generator.sampling.max_new_tokens."""

    too_long: Literal["error", "skip"] = "error"
    """A longer prompt ends the run with an error that names it, or is replaced by another item chosen by the seed. Those
    of a finite task that the run may ask for are all looked at before it starts; one that an environment opens with
    fails its samples instead."""

    candidates: Annotated[PositiveInt, IN_STATE] = 1
    """Items of a finite task among which each training prompt is chosen, as the first that is answered right at
    times and not always, as far as that is known (a curriculum). 1: every item in its turn."""

    shuffle: bool = True
    """A finite task's items are shuffled anew each epoch, by the run's seed; false keeps their order."""
