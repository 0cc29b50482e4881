"""What a run was begun with, and what the user sets on top. Imports no torch: from what this says
``llamarl train`` starts the imports of a run's processes."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from llamarl.config import RunConfig, begun_in, read_settings, to_plain, validate
from llamarl.controller.begun_settings import settings_on_top
from llamarl.controller.preflight import find_missing
from llamarl.controller.run_folder import CONFIG_FILE, why_not_own
from llamarl.errors import ConfigError
from llamarl.import_path import source_file
from llamarl.reading import refuse_pipes, with_paths_from
from llamarl.settings.algorithms import spelled_out

__all__ = ["begun_config", "refuse_code_of_a_run"]


def begun_config(run_dir: Path, given: Mapping[str, Any]) -> RunConfig:
    """The configuration of the run in ``run_dir`` with what the user sets on top; ``run.dir`` is where it lies now.

    Args:
        given: Nested plain values, as ``read_settings`` returns them.

    Raises:
        ConfigError: There is no run, or the values are wrong; every mistake is named.
    """
    run_dir = run_dir.resolve()
    if not (run_dir / CONFIG_FILE).is_file():
        raise ConfigError(f"--resume: {run_dir} holds no run (no {CONFIG_FILE}); start one without --resume")
    if isinstance(given.get("algorithm"), Mapping):
        given = {**given, "algorithm": spelled_out(given["algorithm"])}
    if begun_in(run_dir / CONFIG_FILE) != Path.cwd():  # from where paths that it says count
        given = with_paths_from(Path.cwd(), given)
    merged = settings_on_top(read_settings(run_dir / CONFIG_FILE), given)
    hosts = given.get("hosts")
    if isinstance(hosts, Mapping) and "cluster" in hosts:  # other hosts: what was put on the former ones is forgotten
        merged["hosts"] = {**merged.get("hosts", {}), "on": hosts.get("on", {})}
    refuse_code_of_a_run(validate(merged), run_dir, given)  # before anything that it names is looked at, and imported
    config = validate(merged, [find_missing])
    return dataclasses.replace(config, run=dataclasses.replace(config.run, dir=str(run_dir)))


def _is_set(given: Mapping[str, Any], key: str) -> bool:
    """Whether the user has set a key; all keys in a list are set with it."""
    node: Any = given
    for part in key.split("."):
        if not isinstance(node, Mapping):
            return True
        if part not in node:
            return False
        node = node[part]
    return True


def refuse_code_of_a_run(
    config: RunConfig, run_dir: Path, given: Mapping[str, Any], sections: Collection[str] = ()
) -> None:
    """Refuse what a run's folder, which may come from somebody else, names to be run, and where it
    has secrets sent: whatever ``RunConfig.named_code`` lists. Of a run that this user has begun
    only what lies in its folder is refused.

    Args:
        given: What the user has set now; a key in it is the user's own.
        sections: Those that are read; what others name is not run. Empty: all.

    Raises:
        ConfigError: It names such things.
        FileError: A pipe or a device in the folder.
    """
    refuse_pipes(run_dir)
    saved, inside = run_dir / CONFIG_FILE, run_dir.resolve()
    named = [one for one in config.named_code if not sections or one[0].partition(".")[0] in sections]
    named = [one for one in named if not _is_set(given, one[0])]
    for key, value, kind in named:
        source = source_file(value, key) if kind == "import path" else None
        if source is not None and source.resolve().is_relative_to(inside):
            raise ConfigError(
                f"{key} {value!r}, as {saved} says, is code inside the run's folder, which llamarl never puts there: "
                f"if you trust {source}, name it yourself: --{key} {shlex.quote(_written(config, key, value))}"
            )
    relative = any(_is_relative(config, key, value) for key, value, _ in named)
    why = why_not_own(inside, saved, relative=relative) if named else ""
    if not why:  # the model's own code may have been put into the folder since
        named = [
            one
            for one in named
            if one[0].endswith("trust_remote_code") and _model(config, one[0]).resolve().is_relative_to(inside)
        ]
        why = "the model's code lies in the run's folder" if named else ""
    if why:
        listed = ", ".join(f"{key} {value!r}" for key, value, _ in named)
        flags = " ".join(
            dict.fromkeys(f"--{key} {shlex.quote(_written(config, key, value))}" for key, value, _ in named)
        )
        raise ConfigError(
            f"{saved} names what would run as you, or be sent what is yours ({listed}), and {why}: if you trust it, name it "
            f"yourself, by a recipe of yours or by {flags}"
        )


def _written(config: RunConfig, key: str, value: str) -> str:
    """The value of a key as the user would set it: an environment with its kind, ``trl:my_shop.py:Class``, a list whole."""
    node: Any = to_plain(config)
    for part in key.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return json.dumps(node) if isinstance(node, list) else node if isinstance(node, str) else value


def _is_relative(config: RunConfig, key: str, value: str) -> bool:
    """Whether a key of ``RunConfig.named_code`` names a file that is another one in another working directory."""
    module = value.rpartition(":")[0]
    path = Path(module).expanduser() if module.endswith(".py") else _model(config, key)
    return not path.is_absolute() and (module.endswith(".py") or key.endswith("trust_remote_code") and path.exists())


def _model(config: RunConfig, key: str) -> Path:
    """The model folder beside a key: the job's, or that of an executor's own settings."""
    own = config.for_executor(key.split(".")[1]) if key.startswith("executors.") else config
    return Path(own.model.path)
