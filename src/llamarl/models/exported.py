"""Exported folders and what a user names as a model: a run, a model folder, or an adapter folder.

An exported folder says of itself what it is in ``llamarl.json``, written last beside the weights. It
names version and precision of the weights and proves every file by size and checksum, so that a folder
that was torn by a full disk or a kill is told from a whole one. Nothing in it depends on the time or
the place: equal runs write equal folders.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llamarl.checkpoint.snapshot import FileRecord, canonical_json, checksum_bytes
from llamarl.checkpoint.written import look_at, record_files, write_synced
from llamarl.errors import ConfigError, ModelError
from llamarl.models.folders import resolve_model_path
from llamarl.reading import read_toml, user_path

__all__ = ["EXPORT_FILE", "ExportFacts", "NamedModel", "find_model", "why_incomplete", "write_export"]

EXPORT_FILE = "llamarl.json"
_FORMAT = 1
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ExportFacts:
    """Of an exported model, critic or adapter."""

    policy_version: int
    """Trainer ticks behind the weights."""
    dtype: str
    """Precision of the written weights, a torch dtype's name."""
    served_dtype: str
    """Precision in which the generator computed with them."""


def write_export(folder: Path, facts: ExportFacts) -> None:
    """Flush the files of ``folder`` to the disk and write ``llamarl.json`` over them."""
    (folder / EXPORT_FILE).unlink(missing_ok=True)
    records = record_files(folder, folder.iterdir())
    files = {record.path: {"bytes": record.num_bytes, "xxh3_128": record.xxh3_128} for record in records}
    body = {"format": _FORMAT, **asdict(facts), "files": files}
    write_synced(folder / EXPORT_FILE, canonical_json(body | {"xxh3_128": checksum_bytes(canonical_json(body))}))


def why_incomplete(folder: Path, *, checksums: bool = True, version: int | None = None) -> str | None:
    """Why ``folder`` is not, file for file, what an export wrote; None if it is.

    Args:
        checksums: Read every byte; False compares names and sizes alone.
        version: Of the policy that it is to hold; None: any.
    """
    try:
        body = _body(folder)
        if version not in (None, body.get("policy_version")):
            return f"policy version {body.get('policy_version')}, not {version}"
        records = [
            FileRecord(path=name, num_bytes=one["bytes"], xxh3_128=one["xxh3_128"])
            for name, one in body["files"].items()
        ]
        return next(filter(None, (look_at(folder, record, checksums=checksums) for record in records)), None)
    except (ValueError, OSError) as error:
        return str(error)


def _body(folder: Path) -> dict[str, Any]:
    file = folder / EXPORT_FILE
    if not file.is_file():
        raise ValueError(f"{EXPORT_FILE} is missing")
    data = file.read_bytes()
    try:
        body = json.loads(data)
        checksum = body.pop("xxh3_128")
        whole = (
            canonical_json(body | {"xxh3_128": checksum}) == data and checksum_bytes(canonical_json(body)) == checksum
        )
        whole = whole and all(_is_record(name, record) for name, record in body["files"].items())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{EXPORT_FILE} is not whole ({error!r})") from error
    if not whole:
        raise ValueError(f"{EXPORT_FILE} was altered (it does not match its own checksum)")
    if body.get("format") != _FORMAT:
        raise ValueError(f"{EXPORT_FILE} has format {body.get('format')!r}, this llamarl reads format {_FORMAT}")
    return dict(body)


def _is_record(name: str, record: Mapping[str, Any]) -> bool:
    return "/" not in name and isinstance(record["bytes"], int) and isinstance(record["xxh3_128"], str)


_RUN_FILE = "config.toml"
_ADAPTER_FILE = "adapter_config.json"


@dataclass(frozen=True)
class NamedModel:
    """Where weights and settings come from."""

    path: str
    """Model folder that the engine loads."""
    adapter: Path | None = None
    """Adapter folder to merge into it."""
    run: Path | None = None
    """The run that made it; its ``config.toml`` says how it was served."""

    @property
    def recipe(self) -> str | None:
        return None if self.run is None else str(self.run / _RUN_FILE)

    @property
    def words(self) -> str:
        """For reports."""
        return self.path if self.adapter is None else f"{self.path} + {self.adapter}"


def find_model(named: str, base: str | None = None) -> NamedModel:
    """Resolve what the user typed: RUN, RUN/model, RUN/adapter, an adapter folder, a model folder or ``bundled:tiny``.

    Args:
        base: ``--base``, the model that an adapter belongs to; None: the one that the adapter names.

    Raises:
        ConfigError: A run without a final policy; ``base`` without an adapter.
        ModelError: An adapter without its base, or a final policy that is not whole. A folder that
            is not there is not found out here.
    """
    folder = user_path(named, "model")
    run = None
    if (folder / _RUN_FILE).is_file():
        run, folder = folder, _final_policy(folder)
    elif folder.name in ("model", "adapter") and (folder.parent / _RUN_FILE).is_file():
        run = folder.parent
    if (folder / EXPORT_FILE).is_file() and (reason := why_incomplete(folder, checksums=False)) is not None:
        advice = f"write it again by llamarl export {run} --out DIR" if run is not None else "export it again"
        raise ModelError(f"{folder} is not whole: {reason}; {advice}")
    if run is not None:
        _tell_of_newer_checkpoint(run, folder)
    if not (folder / _ADAPTER_FILE).is_file() or (folder / "config.json").is_file():
        if base is not None:
            raise ConfigError(f"--base is the model that an adapter belongs to, but {named} is no adapter folder")
        return NamedModel(named if run is None else str(folder), run=run)
    return NamedModel(base if base is not None else _base_of(folder), adapter=folder, run=run)


def _final_policy(run: Path) -> Path:
    if (run / "model" / "config.json").is_file():
        return run / "model"
    if (run / "adapter" / _ADAPTER_FILE).is_file():
        return run / "adapter"
    instead = f"let it finish (llamarl train --resume {run})"
    if any((run / "checkpoints").glob("tick_*")):
        instead += f", or write one from a checkpoint: llamarl export {run} --out DIR"
    raise ConfigError(f"{run} is a run without a final policy in {run / 'model'}: {instead}")


def _tell_of_newer_checkpoint(run: Path, folder: Path) -> None:
    """Warn where the run went on after it wrote ``folder``, and was stopped before it wrote another. Not of one
    whose model is of the lowest held-out loss, which an earlier checkpoint may have."""
    evaluation = read_toml(run / _RUN_FILE).get("evaluation")
    if isinstance(evaluation, dict) and evaluation.get("patience"):
        return
    ticks = [int(path.name[5:]) for path in (run / "checkpoints").glob("tick_*") if path.name[5:].isdigit()]
    version = _body(folder)["policy_version"] if (folder / EXPORT_FILE).is_file() else None
    if version is not None and max(ticks, default=-1) + 1 > version:
        _log.warning(
            "%s is policy version %d, the newest checkpoint of the run holds %d: llamarl export %s --out DIR writes that one",
            folder, version, max(ticks) + 1, run,
        )  # fmt: skip


def _base_of(adapter: Path) -> str:
    from llamarl.models.adapters import read_adapter_folder

    base = read_adapter_folder(adapter).base
    try:
        resolve_model_path(base or "(none)")
    except ModelError as error:
        raise ModelError(
            f"{adapter} names {base or 'nothing'} as its base model, which is no model folder here: give the folder by --base"
        ) from error
    return base
