"""From a task's configuration to the task, and to its prompts. Each kind is imported only when it is asked for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

from llamarl.config import RunConfig
from llamarl.data.mixture import MixedStream
from llamarl.data.prompts import PromptStream, Tokenizer
from llamarl.environments.base import Task
from llamarl.errors import ConfigError, DataError, Mistake
from llamarl.import_path import check
from llamarl.settings.environments import TaskConfig, TaskSection

if TYPE_CHECKING:
    from llamarl.environments.episode_pool import Environments

__all__ = ["PRESETS", "make_prompt_stream", "make_task", "task_mistakes", "with_preset"]

T = TypeVar("T", bound=TaskConfig)

_BOXED = "{question}\n\nReason step by step, and put your final answer within \\boxed{}."

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "gsm8k": {"data": "openai/gsm8k", "subset": "main", "split": "train", "eval_split": "test", "template": _BOXED},
    "math": {"data": "DigitalLearningGmbH/MATH-lighteval", "split": "train", "eval_split": "test", "template": _BOXED},
}
"""Tasks that bring their data: name -> keys of ``TaskConfig``."""
_UNSAID = TaskConfig()


def make_task(config: TaskConfig, seed: int) -> Task:
    """The task that a configuration names; of a mixture, one of its tasks.

    Args:
        seed: The run's seed; procedural tasks draw their questions from it, and all tasks their held-out share.

    Raises:
        DataError: A data file is missing, empty or malformed, a dataset or option is unknown, or the user's function
            cannot exist. That function is not imported here: see ``llamarl.import_path``.
    """
    assert config.name != "mixture", "each of its tasks is made by itself"
    task = _make_questions(config, seed)
    if config.judges:
        from llamarl.environments.functions import FunctionTask

        task = FunctionTask(task, config.judges, config.reward_batch_size)
    return task


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
    from llamarl.models.loading import context_length

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
            from llamarl.environments.episode_pool import EpisodeOpener

            opener = EpisodeOpener(environments, task, label)
        return PromptStream(make_task(task, seed), tokenizer, config.data, seed=seed, room=room, opener=opener)

    if not config.task.mixture:
        return stream_of(config.task)
    streams = {label: stream_of(task, label) for label, task in config.task.tasks.items()}
    return MixedStream(streams, {task.title: task.weight for task in config.task.mixture}, seed)


def task_mistakes(config: TaskConfig, seed: int) -> Iterator[Mistake]:
    """Everything for which a run would refuse its task."""
    if isinstance(config, TaskSection) and config.mixture:
        for label, task in config.tasks.items():
            for mistake in task_mistakes(task, seed):
                yield Mistake(re.sub(r"^task\.", f"task.mixture.{label}.", mistake.key), mistake.text)
        return
    try:
        questions = _make_questions(config, seed)
        if with_preset(config).data:
            questions.num_items("train")  # a table is opened when it is first asked
        if config.by_import_path:
            _check_first_item(config.name, questions)
    except DataError as error:
        yield from error.mistakes
    if config.environment:
        from llamarl.environments.registry import check_environment

        try:
            check_environment(config.environment, config.environment_options)
        except DataError as error:
            yield from error.mistakes
    for part in config.judges:
        try:
            check(part.function, "task.reward" if config.reward else f"task.rewards.{part.part}")
        except DataError as error:
            yield from error.mistakes


def _make_questions(config: TaskConfig, seed: int) -> Task:
    if config.by_import_path:
        return _users_task(config, seed)
    kind, _, dataset = config.name.partition(":")
    if kind == "steps":
        from llamarl.environments.sum_task import StepsTask

        return StepsTask(config.options, seed=seed, eval_fraction=config.eval_fraction)
    if kind in ("reasoning_gym", "countdown"):
        from llamarl.environments.reasoning_gym import ReasoningGymTask

        return ReasoningGymTask(dataset or kind, config.options, seed=seed, eval_fraction=config.eval_fraction)
    if kind == "code":
        from llamarl.environments.code import CodeTask

        return CodeTask(config, seed=seed)
    if kind == "episodes":
        from llamarl.environments.episode_pool import EpisodeItems

        return EpisodeItems()
    if kind == "demonstrations":
        from llamarl.environments.demonstrations import DemonstrationsTask

        return DemonstrationsTask(config, seed=seed)
    config = with_preset(config)
    if config.name == "function":
        from llamarl.environments.functions import QuestionsTask

        return QuestionsTask(config, seed=seed)
    from llamarl.environments.math import MathTask

    return MathTask(config, seed=seed)


def _check_first_item(name: str, task: Task) -> None:
    """Refuse a task of the user's own whose items cannot be made, sent to a judge, or written into the run's folder."""
    from llamarl.import_path import own_line

    try:
        if task.num_items("train") == 0:
            return
        item = task.item("train", 0)
        texts = {"question": item.question, "answer": "" if item.answer is None else item.answer}
        wrong = [f"{key} is {value!r:.80}, expected text" for key, value in texts.items() if not isinstance(value, str)]
        json.dumps(dict(item.metadata))
    except Exception as error:  # the user's code may raise anything
        wrong = [f"{type(error).__name__}: {error}{own_line(error)}"]
    if wrong:
        text = (
            f"{name!r}: item('train', 0) is no TaskItem (llamarl.data.items) of plain JSON values: {'; '.join(wrong)}"
        )
        raise DataError.at("task.name", text)


def with_preset(config: T) -> T:
    """``config`` with the data that its name stands for, where it names none of its own; what it says beside stands."""
    if config.data or config.name not in PRESETS:
        return config
    unsaid = {k: value for k, value in PRESETS[config.name].items() if getattr(config, k) == getattr(_UNSAID, k)}
    if config.eval_data:
        unsaid.pop("eval_split", None)  # which is of the preset's table
    return replace(config, **unsaid)


def _users_task(config: TaskConfig, seed: int) -> Task:
    from llamarl.import_path import import_user, own_line

    check(config.name, "task.name")
    make = import_user(config.name, "task.name")
    try:
        task = make(config.options, seed=seed, eval_fraction=config.eval_fraction)
    except Exception as error:  # the user's code may raise anything
        raise DataError.at(
            "task.name",
            f"{config.name!r}, called as Task(options, seed=..., eval_fraction=...): "
            f"{type(error).__name__}: {error}{own_line(error)}",
        ) from error
    missing = [name for name in ("name", "num_items", "item", "respond") if not hasattr(task, name)]
    if missing:
        raise DataError.at(
            "task.name",
            f"{config.name!r}: a task has name, num_items, item and respond (llamarl.environments.base.Task); "
            f"{type(task).__name__} lacks {', '.join(missing)}",
        )
    return cast(Task, task)
