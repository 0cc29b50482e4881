"""The prompt stream of a recipe: its task, its data section, and what its model's context leaves for a prompt."""

from __future__ import annotations

from llamarl.config import RunConfig
from llamarl.data.chat import Tokenizer
from llamarl.data.mixture import MixedStream
from llamarl.data.prompts import PromptStream
from llamarl.environments.config import TaskConfig
from llamarl.environments.episode_pool import Environments, EpisodeOpener
from llamarl.environments.factory import make_task
from llamarl.errors import ConfigError
from llamarl.models.loading import context_length

__all__ = ["make_prompt_stream"]


def make_prompt_stream(
    config: RunConfig, tokenizer: Tokenizer, environments: Environments | None = None
) -> PromptStream | MixedStream:
    """The same stream wherever it is made: every executor that reads prompts makes its own.

    Args:
        environments: Where the recipe's environments live; None only where it has none.

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
    seed, room = config.run.seed, None if context is None else context - longest

    def stream_of(task: TaskConfig, label: str = "") -> PromptStream:
        opener = None
        if task.environment:
            assert environments is not None, "a recipe with an environment needs a pool of them"
            opener = EpisodeOpener(environments, task, label)
        return PromptStream(make_task(task, seed), tokenizer, config.data, seed=seed, room=room, opener=opener)

    if not config.task.mixture:
        return stream_of(config.task)
    streams = {label: stream_of(task, label) for label, task in config.task.tasks.items()}
    return MixedStream(streams, {task.title: task.weight for task in config.task.mixture}, seed)
