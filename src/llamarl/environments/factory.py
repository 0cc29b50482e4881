"""From a task's configuration to the task. Each kind is imported only when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator

from llamarl.environments.base import Task
from llamarl.environments.config import TaskConfig
from llamarl.errors import DataError

__all__ = ["make_task", "task_mistakes"]


def make_task(config: TaskConfig, seed: int) -> Task:
    """The task that a configuration names.

    Args:
        seed: The run's seed; procedural tasks draw their questions from it, and all tasks their held-out share.

    Raises:
        DataError: A data file is missing, empty or malformed, a dataset or option is unknown, or the user's function
            cannot exist. That function is not imported here: see ``user_code``.
    """
    task = _make_questions(config, seed)
    if config.reward:
        from llamarl.environments.functions import FunctionTask

        task = FunctionTask(task, config.reward)
    return task


def task_mistakes(config: TaskConfig, seed: int) -> Iterator[str]:
    """Everything for which ``make_task`` would refuse a configuration, each beginning with its key."""
    try:
        _make_questions(config, seed)
    except DataError as error:
        yield from str(error).splitlines()
    if config.reward:
        from llamarl.environments.user_code import check_function

        try:
            check_function(config.reward)
        except DataError as error:
            yield str(error)


def _make_questions(config: TaskConfig, seed: int) -> Task:
    kind, _, dataset = config.name.partition(":")
    if kind == "steps":
        from llamarl.environments.steps import StepsTask

        return StepsTask(config.options, seed=seed, eval_fraction=config.eval_fraction)
    if kind == "reasoning_gym":
        from llamarl.environments.reasoning_gym import ReasoningGymTask

        return ReasoningGymTask(
            dataset, config.options, seed=seed, eval_fraction=config.eval_fraction, answer_from=config.answer_from
        )
    if kind == "math":
        from llamarl.environments.math import MathTask

        return MathTask(config.train_file, config.eval_file, seed=seed, eval_fraction=config.eval_fraction)
    from llamarl.environments.functions import JsonlItems

    return JsonlItems(config.train_file, config.eval_file, seed=seed, eval_fraction=config.eval_fraction)
