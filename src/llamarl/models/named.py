"""What a user names as a model: a run, a model folder, or an adapter folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from llamarl.errors import ConfigError, ModelError
from llamarl.models.exported import EXPORT_FILE, read_export, why_incomplete
from llamarl.models.folders import resolve_model_path
from llamarl.reading import user_path

__all__ = ["NamedModel", "find_model"]

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

    def narrowed(self) -> str | None:
        """A sentence where the model holds fewer bits than its run served, so that its scores may differ from the run's."""
        folder = Path(self.path).expanduser()
        if not (folder / EXPORT_FILE).is_file():
            return None
        try:
            facts = read_export(folder)
        except ValueError as error:
            raise ModelError(f"{folder}: {error}") from error
        if facts.narrowing is None:
            return None
        return f"{folder} is {facts.dtype}, its run served {facts.served_dtype}: {facts.narrowing.sentence()}"


def find_model(named: str, base: str | None = None) -> NamedModel:
    """Resolve what the user typed: RUN, RUN/model, RUN/adapter, an adapter folder, a model folder or ``bundled:tiny``.

    Args:
        base: ``--base``, the model that an adapter belongs to; None: the one that the adapter names.

    Raises:
        ConfigError: A run without a final policy; ``base`` without an adapter.
        ModelError: An adapter without its base, or a final policy that is not whole. A folder that is not there is not found
            out here.
    """
    folder = user_path(named, "model")
    run = None
    if (folder / _RUN_FILE).is_file():
        run, folder = folder, _final_policy(folder)
    elif folder.name in ("model", "adapter") and (folder.parent / _RUN_FILE).is_file():
        run = folder.parent
    if (folder / EXPORT_FILE).is_file() and (reason := why_incomplete(folder, checksums=False)) is not None:
        again = f"write it again by llamarl export {run} --out DIR" if run is not None else "export it again"
        raise ModelError(f"{folder} is not whole: {reason}; {again}")
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
    if any((run / "checkpoints").glob("tick_*")):
        instead = f"let it finish (llamarl train --resume {run}), or write one from a checkpoint: llamarl export {run} --out DIR"
    else:
        instead = f"let it finish (llamarl train RECIPE --resume {run})"
    raise ConfigError(f"{run} is a run without a final policy in {run / 'model'}: {instead}")


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
