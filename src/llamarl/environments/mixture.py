"""Several tasks as one, for whoever judges: each prompt says by its ``task`` whose it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llamarl.data.items import Split, TaskItem
from llamarl.environments.base import Task
from llamarl.environments.code import CodeTask
from llamarl.environments.functions import FunctionTask
from llamarl.types import Prompt, Score

__all__ = ["MixtureTask"]


class MixtureTask:
    """Judges each prompt as the task that it comes from does. Its items are read task by task: see ``data.mixture``."""

    name = "mixture"

    def __init__(self, tasks: Mapping[str, Task]) -> None:
        self.tasks = dict(tasks)

    def prepare(self) -> None:
        """Import the user's modules and look for boxes, as those of its tasks do that judge so."""
        for task in self.tasks.values():
            if isinstance(task, FunctionTask | CodeTask):
                task.prepare()

    def num_items(self, split: Split) -> int | None:
        raise NotImplementedError("a mixture's items are those of its tasks")

    def item(self, split: Split, index: int) -> TaskItem:
        raise NotImplementedError("a mixture's items are those of its tasks")

    def respond(self, prompt: Prompt, turns: Sequence[str]) -> Score:
        return self.tasks[prompt.task].respond(prompt, turns)
