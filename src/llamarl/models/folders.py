"""Where a model's folder lies. No torch, so that a wrong path is refused before anything heavy is imported."""

from __future__ import annotations

from pathlib import Path

from llamarl.errors import ModelError

__all__ = ["resolve_model_path"]

_ASSETS = Path(__file__).resolve().parent.parent / "assets"


def resolve_model_path(path: str | Path) -> Path:
    """Folder of a model; ``bundled:NAME`` names one that ships with llamarl.

    Raises:
        ModelError: No such folder, or no ``config.json`` in it.
    """
    text = str(path)
    folder = _ASSETS / text.removeprefix("bundled:") if text.startswith("bundled:") else Path(text).expanduser()
    if not folder.is_dir():
        bundled = sorted(f"bundled:{p.parent.name}" for p in _ASSETS.glob("*/config.json"))
        raise ModelError(f"model.path: no folder {folder}; give a Hugging Face folder, or one of {', '.join(bundled)}")
    if not (folder / "config.json").is_file():
        raise ModelError(f"model.path: {folder} has no config.json, so it is not a Hugging Face model folder")
    return folder
