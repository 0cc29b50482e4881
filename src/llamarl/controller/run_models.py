"""Which models and data sets a run reads: found once, written down when it begins, and proved when it goes on.

    model.path = "org/name" ─pinned─▶ "org/name@COMMIT"   config.toml and checkpoints: what a resume begins with
                                         └─local─▶ ".../snapshots/COMMIT"    what executors are given

Only the process that starts a run asks the Hub, once; executors get folders.

RUN/models.json   key of the recipe -> {"path": folder, "xxh3_128": of the files that are read}

A folder's name says nothing about what lies in it. The policy's own states are in checkpoints; a
reference, a reward model or a judge has none there, so another one under the same path would go
unnoticed and change every bit after it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from llamarl.checkpoint.snapshot import canonical_json, checksum_bytes, checksum_file
from llamarl.config import RunConfig
from llamarl.environments.config import TaskConfig
from llamarl.environments.factory import with_preset
from llamarl.environments.items import local_data
from llamarl.errors import ConfigError, FileError
from llamarl.models.folders import companion_files, local_model_path, resolve_model_path, split_revision
from llamarl.observability.writing import replace_file
from llamarl.reading import read_object
from llamarl.roles import MODEL_SECTIONS, present_roles

__all__ = ["MODELS_FILE", "frozen_paths", "model_checksum", "record_models", "refuse_other_models"]

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


MODELS_FILE = "models.json"


def frozen_paths(config: RunConfig) -> dict[str, str]:
    """Key of the recipe -> path, of every model beside the policy that never learns."""
    return dict(_frozen(config))


def _frozen(config: RunConfig) -> Iterator[tuple[str, str]]:
    for role in present_roles(config):
        if role.model and not role.model.trained and role.model.named_itself(config):
            yield role.model.key, role.model.path(config)
    for name, own in config.executors.items():
        for section in MODEL_SECTIONS:
            if path := own.settings.get(section, {}).get("path"):
                yield f"executors.{name}.settings.{section}.path", str(path)


def model_checksum(folder: Path) -> str:
    """Of the configuration, the weights and the tokenizer in a model's folder: names and contents."""
    files = {folder / "config.json", *folder.glob("*.safetensors"), *companion_files(folder)}
    found = {file.name: checksum_file(file)[1] for file in sorted(files)}
    return checksum_bytes(canonical_json(found))


def record_models(config: RunConfig, run_dir: Path) -> None:
    """Write down what a run that begins now reads; nothing where it reads no such model.

    Args:
        config: With models by folders.
    """
    if found := _facts(config):
        replace_file(run_dir / MODELS_FILE, canonical_json(found))


def refuse_other_models(config: RunConfig, run_dir: Path) -> None:
    """Refuse a model that is not the one that the run in ``run_dir`` began with.

    Args:
        config: Of the run as it is to go on, with models by folders.

    Raises:
        ConfigError: It names each such model.
    """
    file = run_dir / MODELS_FILE
    if not file.is_file():
        return
    try:
        begun: Mapping[str, Any] = read_object(file)
        had = {key: (str(facts["path"]), str(facts["xxh3_128"])) for key, facts in begun.items()}
    except (FileError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} does not say which models the run read: {error}") from error
    now = _facts(config)
    lines = [
        f"  - {key}: {now[key]['path']} holds another model than {path} did when the run began (xxh3_128 {checksum} then, "
        f"{now[key]['xxh3_128']} now)"
        for key, (path, checksum) in had.items()
        if key in now and now[key]["xxh3_128"] != checksum
    ]
    if lines:
        raise ConfigError(
            f"--resume: {run_dir} would not go on bit for bit:\n"
            + "\n".join(lines)
            + "\nPut the former model back, or begin a "
            f"new run that goes on from this one's last checkpoint: llamarl train --resume {run_dir} --fork NEW"
        )


def _facts(config: RunConfig) -> dict[str, dict[str, str]]:
    folders = {key: resolve_model_path(path, key=key) for key, path in frozen_paths(config).items()}
    sums = {folder: model_checksum(folder) for folder in set(folders.values())}
    return {key: {"path": str(folder), "xxh3_128": sums[folder]} for key, folder in folders.items()}
