"""The prompt stream of a recipe: its task, its data section, and what its model's context leaves for a prompt."""

from __future__ import annotations

from llamarl.config import RunConfig
from llamarl.data.chat import Tokenizer
from llamarl.data.prompts import PromptStream
from llamarl.environments.factory import make_task
from llamarl.errors import ConfigError
from llamarl.models.loading import context_length

__all__ = ["make_prompt_stream"]


def make_prompt_stream(config: RunConfig, tokenizer: Tokenizer) -> PromptStream:
    """The same stream wherever it is made: every executor that reads prompts makes its own.

    Raises:
        ConfigError: The longest response leaves no room for a prompt.
        DataError: The task cannot be made.
    """
    context, longest = context_length(config.model.path), config.generator.sampling.max_new_tokens
    if context is not None and context <= longest:
        raise ConfigError(
            f"generator.sampling.max_new_tokens = {longest} leaves no room for a prompt in the context of "
            f"{config.model.path} ({context} tokens): lower it"
        )
    task = make_task(config.task, seed=config.run.seed)
    room = None if context is None else context - longest
    return PromptStream(task, tokenizer, config.data, seed=config.run.seed, room=room)
