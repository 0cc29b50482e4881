"""Models and data sets that a recipe names by their ids on the Hugging Face Hub: what a run writes down of them, and where
they lie.

    model.path = "org/name" ─pinned─▶ + model.revision = COMMIT   config.toml and checkpoints: what a resume begins with
                                         └─local─▶ model.path = .../snapshots/COMMIT    what executors are given

Only the process that starts a run asks the Hub, once; executors get folders.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from llamarl.config import RunConfig
from llamarl.environments.config import TaskConfig
from llamarl.environments.factory import with_preset
from llamarl.environments.items import local_data
from llamarl.models.folders import local_model_path
from llamarl.roles import MODEL_SECTIONS, present_roles

_Task = TypeVar("_Task", bound=TaskConfig)

__all__ = ["fetch_weights", "local", "pinned"]


def pinned(config: RunConfig) -> RunConfig:
    """``config`` with the commit of each model and data set of the Hub for its revision, and with the data that a task of this
    package stands for; without weights yet.

    Raises:
        ModelError, DataError: As ``models.folders.resolve_model_path`` and ``environments.items.local_data``.
    """
    config = _with_data(config, lambda found, data: {**data, "revision": found.name})
    return _with_models(config, lambda found, model: {**model, "revision": found.name}, weights=False)


def local(config: RunConfig) -> RunConfig:
    """``config`` with a folder of this machine for each model and data set of the Hub, and no revision.

    Args:
        config: As ``pinned`` gave it.
    """
    config = _with_data(config, lambda found, data: {"data": str(found), "revision": ""})
    return _with_models(config, lambda found, model: {**model, "path": str(found), "revision": ""}, weights=False)


def fetch_weights(config: RunConfig) -> None:
    """Have the weights of each model of the Hub here.

    Args:
        config: As ``pinned`` gave it.

    Raises:
        ModelError: As ``models.folders.resolve_model_path``.
    """
    _with_models(config, lambda found, model: model, weights=True)


_Change = Callable[[Path, dict[str, str]], Mapping[str, str]]


def _with_data(config: RunConfig, change: _Change) -> RunConfig:
    """The same for the tables of the tasks, with ``change(folder, {data, revision})``."""
    mixture = tuple(_task_with_data(task, change, f"task.mixture.{task.title}") for task in config.task.mixture)
    task = _task_with_data(dataclasses.replace(config.task, mixture=mixture), change, "task")
    return dataclasses.replace(config, task=task)


def _task_with_data(task: _Task, change: _Change, section: str) -> _Task:
    task = with_preset(task)
    for prefix in ("", "eval_"):
        data = {name: getattr(task, prefix + name) for name in ("data", "revision")}
        if (
            data["data"]
            and (found := local_data(data["data"], data["revision"], f"{section}.{prefix}data")) != data["data"]
        ):
            new = {prefix + name: value for name, value in change(Path(found), data).items()}
            task = dataclasses.replace(task, **new)  # type: ignore[arg-type]
    return task


def _with_models(config: RunConfig, change: _Change, *, weights: bool) -> RunConfig:
    """``config`` with ``change(folder, {path, revision})`` in place of each path and revision of a model of the Hub."""
    code = config.model.trust_remote_code

    def changed(key: str, path: str, revision: str) -> Mapping[str, str]:
        model = {"path": path, "revision": revision}
        found = local_model_path(path, key=key, revision=revision, weights=weights, code=code)
        return model if found == path else change(Path(found), model)

    for key in sorted({role.model.key for role in present_roles(config) if role.model}):
        section = key.partition(".")[0]
        model = getattr(config, section)
        if model.path:
            new = dataclasses.replace(model, **changed(key, model.path, model.revision))
            config = dataclasses.replace(config, **{section: new})
    for name, section in [(name, section) for name in config.executors for section in MODEL_SECTIONS]:
        own = config.executors[name]
        given = own.settings.get(section, {})
        if given.get("path"):
            key = f"executors.{name}.settings.{section}.path"
            model = {**given, **changed(key, given["path"], given.get("revision", ""))}
            settings = {**own.settings, section: {k: v for k, v in model.items() if v or k in given}}
            executors = {**config.executors, name: dataclasses.replace(own, settings=settings)}
            config = dataclasses.replace(config, executors=executors)
    return config
