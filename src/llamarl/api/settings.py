"""From the words of a Python call to a configuration: the same keys and checks as ``llamarl train``."""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llamarl.api.functions import import_path_of
from llamarl.api.tables import file_of_rows
from llamarl.config import RunConfig, known_keys, load_config, meant_key
from llamarl.errors import ConfigError
from llamarl.settings.job import host_settings

__all__ = ["dotted", "run_config"]

_SHORT: Mapping[str, str] = {
    "model": "model.path",
    "task": "task.name",
    "reward": "task.reward",
    "data": "task.data",
    "dir": "run.dir",
    "seed": "run.seed",
    "num_ticks": "run.num_ticks",
    "epochs": "run.epochs",
}
"""Words for the keys that every job is told."""

_TABLES = ("data", "task.data", "task.eval_data")
"""May be rows of the program instead of a name."""


def run_config(recipe: str | os.PathLike[str] | None, settings: Mapping[str, Any]) -> RunConfig:
    """What ``train`` runs: the recipe with ``settings`` on top.

    Raises:
        ConfigError: As ``train``.
    """
    from llamarl.controller.preflight import find_missing

    given = dotted(settings)
    judged = "task.data" in given and "task.environment" in given or given.keys() & {"task.reward", "task.rewards"}
    if judged and "task.name" not in given and (recipe is None or "task.data" in given):
        given["task.name"] = "function"
    try:
        config = load_config(None if recipe is None else os.fspath(recipe), given, [find_missing])
    except ConfigError as error:
        raise _as_one_sentence(error) from error.__cause__
    if "run.dir" not in given:
        name = _free_folder(Path(config.run.dir))
        config = dataclasses.replace(config, run=dataclasses.replace(config.run, dir=str(name)))
    return config


def _as_one_sentence(error: ConfigError) -> ConfigError:
    """Say a lone mistake without the heading of a list, and with the word of the call for its key."""
    if len(error.mistakes) != 1 or not error.mistakes[0].key:
        return error
    (found,) = error.mistakes
    word = next((word for word, key in _SHORT.items() if key == found.key), found.key)
    return ConfigError(str(dataclasses.replace(found, key=word)), mistakes=error.mistakes)


def dotted(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted key -> plain value, from words, sections and dotted keys.

    Raises:
        ConfigError: A word that names nothing, or a function where text is expected.
    """
    sections = {key.partition(".")[0] for key in known_keys()} | {"executors"}
    given: dict[str, Any] = {}
    unknown = []
    if isinstance(cluster := settings.get("cluster"), str):  # first: it forgets the nodes of another one
        given = {f"hosts.{key}": one for key, one in host_settings(cluster).items()}
    for name, value in settings.items():
        if name == "cluster" and isinstance(value, str):
            continue
        if name in sections and isinstance(value, Mapping) and not hasattr(value, "column_names"):
            given |= _below(name, value)
        elif name in _SHORT:
            given[_SHORT[name]] = _plain(value, name)
        elif "." in name:
            given[name] = _plain(value, name)
        else:
            if name in sections:
                unknown.append(f"{name} is a section, so give a mapping such as {name}={{...}}, got {value!r:.60}")
                continue
            near = difflib.get_close_matches(name, [*_SHORT, *sections], n=1, cutoff=0.8)
            meant = f"did you mean {near[0]!r}?" if near else meant_key(name)
            unknown.append(f"llamarl.train has no setting {name!r}; {meant}".rstrip("; "))
    if unknown:
        unknown[-1] += "" if unknown[-1].endswith("?") else "."
        unknown[-1] += (
            f" There are {', '.join(_SHORT)}, the sections of a recipe as mappings, and every key by its dotted name: "
            "**{'optimizer.lr': 1e-4}"
        )
        raise ConfigError("\n".join(unknown))
    if isinstance(tasks := given.get("task.name"), list):
        given["task.name"], given["task.mixture"] = "mixture", tasks
    if isinstance(rewards := given.get("task.reward"), list):
        del given["task.reward"]
        given["task.rewards"] = [{"function": one} if isinstance(one, str) else one for one in rewards]
    return given


def _below(section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted key -> plain value of a section, those of the sections inside it too."""
    given: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{section}.{name}"
        if isinstance(value, Mapping) and any(known.startswith(f"{key}.") for known in known_keys()):
            given |= _below(key, value)
        else:
            given[key] = _plain(value, key)
    return given


def _plain(value: Any, key: str) -> Any:
    """As TOML would give it."""
    if key in _TABLES and not isinstance(value, str | os.PathLike):
        return file_of_rows(value, key)
    if isinstance(value, Mapping):
        return {str(name): _plain(inner, f"{key}.{name}") for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner, key) for inner in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "tolist"):  # numpy's numbers and arrays
        return value.tolist()
    return import_path_of(value, key) if callable(value) else value


def _free_folder(wanted: Path) -> Path:
    """``wanted``, or with the first number behind it for which there is nothing yet."""
    found, number = wanted, 1
    while found.expanduser().exists():
        number += 1
        found = wanted.with_name(f"{wanted.name}-{number}")
    return found
