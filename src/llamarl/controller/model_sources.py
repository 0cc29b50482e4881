"""Models and data sets that a recipe names by their ids on the Hugging Face Hub: what a run writes
down of them, and where they lie.

    model.path = "org/name" ─pinned─▶ "org/name@COMMIT"   config.toml and checkpoints: what a resume begins with
                                         └─local─▶ ".../snapshots/COMMIT"    what executors are given

Only the process that starts a run asks the Hub, once; executors get folders.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from llamarl.config import RunConfig
from llamarl.environments.config import TaskConfig
from llamarl.environments.factory import with_preset
from llamarl.environments.items import local_data
from llamarl.models.folders import local_model_path, split_revision
from llamarl.roles import MODEL_SECTIONS, present_roles

_Task = TypeVar("_Task", bound=TaskConfig)
_Rename = Callable[[str, str], str]
"""(name on the Hub, folder of this machine) -> what the configuration then says."""

__all__ = ["fetch_weights", "local", "pinned"]


def pinned(config: RunConfig) -> RunConfig:
    """``config`` with the commit of each model and data set of the Hub, and with the data that a
    task of this package stands for; without weights yet.

    Raises:
        ModelError, DataError: As ``models.folders.resolve_model_path`` and ``environments.items.local_data``.
    """

    def with_commit(named: str, folder: str) -> str:
        return f"{split_revision(named)[0]}@{Path(folder).name}"

    return _with_models(_with_data(config, with_commit), with_commit, weights=False)


def local(config: RunConfig) -> RunConfig:
    """``config`` with a folder of this machine for each model and data set of the Hub.

    Args:
        config: As ``pinned`` gave it.
    """

    def as_folder(named: str, folder: str) -> str:
        return folder

    return _with_models(_with_data(config, as_folder), as_folder, weights=False)


def fetch_weights(config: RunConfig) -> None:
    """Have the weights of each model of the Hub here.

    Args:
        config: As ``pinned`` gave it.

    Raises:
        ModelError: As ``models.folders.resolve_model_path``.
    """
    _with_models(config, lambda named, folder: named, weights=True)


def _with_data(config: RunConfig, rename: _Rename) -> RunConfig:
    """Rename the tables of the tasks that are of the Hub."""
    mixture = tuple(_task_with_data(task, rename, f"task.mixture.{task.title}") for task in config.task.mixture)
    task = _task_with_data(dataclasses.replace(config.task, mixture=mixture), rename, "task")
    return dataclasses.replace(config, task=task)


def _task_with_data(task: _Task, rename: _Rename, section: str) -> _Task:
    task = with_preset(task)
    for key in ("data", "eval_data"):
        named = getattr(task, key)
        if named and (found := local_data(named, f"{section}.{key}")) != named:
            task = dataclasses.replace(task, **{key: rename(named, found)})  # type: ignore[arg-type]
    return task


def _with_models(config: RunConfig, rename: _Rename, *, weights: bool) -> RunConfig:
    """Rename the models that are of the Hub."""
    code = config.model.trust_remote_code

    def renamed(key: str, path: str) -> str:
        found = local_model_path(path, key=key, weights=weights, code=code)
        return path if found == path else rename(path, found)

    for key in sorted({role.model.key for role in present_roles(config) if role.model}):
        section = key.partition(".")[0]
        model = getattr(config, section)
        if model.path:
            new = dataclasses.replace(model, path=renamed(key, model.path))
            config = dataclasses.replace(config, **{section: new})
    for name, section in [(name, section) for name in config.executors for section in MODEL_SECTIONS]:
        own = config.executors[name]
        given = own.settings.get(section, {})
        if given.get("path"):
            path = renamed(f"executors.{name}.settings.{section}.path", given["path"])
            settings = {**own.settings, section: {**given, "path": path}}
            executors = {**config.executors, name: dataclasses.replace(own, settings=settings)}
            config = dataclasses.replace(config, executors=executors)
    return config
