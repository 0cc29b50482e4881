"""Which bytes the frozen models of a run are of: written down when it begins, and proved when it goes on.

RUN/models.json   key of the recipe -> {"path": folder, "xxh3_128": of the files that are read}

A folder's name says nothing about what lies in it. The policy's own states are in checkpoints; a
reference, a reward model or a judge has none there, so another one under the same path would go
unnoticed and change every bit after it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from llamarl.checkpoint.snapshot import canonical_json, checksum_bytes, checksum_file
from llamarl.config import RunConfig
from llamarl.errors import ConfigError, FileError
from llamarl.models.folders import companion_files, resolve_model_path
from llamarl.observability.writing import replace_file
from llamarl.reading import read_object
from llamarl.roles import MODEL_SECTIONS, present_roles

__all__ = ["MODELS_FILE", "frozen_paths", "model_checksum", "record_models", "refuse_other_models"]

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
