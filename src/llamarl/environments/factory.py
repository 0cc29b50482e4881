"""From a task's configuration to the task. Each kind is imported only when it is asked for."""

from __future__ import annotations

from llamarl.environments.base import Task
from llamarl.environments.config import TaskConfig

__all__ = ["make_task"]


def make_task(config: TaskConfig, seed: int) -> Task:
    """The task that a configuration names.

    Args:
        seed: The run's seed; procedural tasks draw their questions from it, and all tasks their held-out share.

    Raises:
        DataError: A data file is missing, empty or malformed, a dataset or option is unknown, or the user's function
            cannot be imported.
    """
    kind, _, dataset = config.name.partition(":")
    task: Task
    if kind == "steps":
        from llamarl.environments.steps import StepsTask

        task = StepsTask(config.options, seed=seed, eval_fraction=config.eval_fraction)
    elif kind == "reasoning_gym":
        from llamarl.environments.reasoning_gym import ReasoningGymTask

        task = ReasoningGymTask(
            dataset, config.options, seed=seed, eval_fraction=config.eval_fraction, answer_from=config.answer_from
        )
    elif kind == "math":
        from llamarl.environments.math import MathTask

        task = MathTask(config.train_file, config.eval_file, seed=seed, eval_fraction=config.eval_fraction)
    else:
        from llamarl.environments.functions import JsonlItems

        task = JsonlItems(config.train_file, config.eval_file, seed=seed, eval_fraction=config.eval_fraction)
    if config.reward:
        from llamarl.environments.functions import FunctionTask

        task = FunctionTask(task, config.reward)
    return task
