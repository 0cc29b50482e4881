"""Recipes that come with the package, by name: ``tiny`` is ``llamarl/recipes/tiny.toml``, wherever
llamarl is installed."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llamarl.errors import ConfigError

__all__ = ["find_recipe", "shipped_or_path", "shipped_recipes", "with_paths_from"]

_FOLDER = Path(__file__).resolve().parent / "recipes"
_MAY_BE_FOLDERS = ("path", "data", "eval_data")


def shipped_recipes() -> dict[str, str]:
    """Name -> what it is for: the comment in its first line."""
    return {path.stem: _first_comment(path) for path in sorted(_FOLDER.glob("*.toml"))}


def find_recipe(named: str | os.PathLike[str]) -> Path:
    """The file that a user means: a path, or the bare name of a recipe that ships with llamarl. A file comes first.

    Raises:
        ConfigError: A bare name of neither. Whether a path's file is there is found out when it is read.
    """
    text = os.fspath(named)
    if os.path.exists(text) or os.path.basename(text) != text or text.endswith(".toml"):
        return Path(text)
    shipped = shipped_recipes()
    if text not in shipped:
        near = difflib.get_close_matches(text, shipped, n=1, cutoff=0.6)
        meant = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(
            f"recipe {text!r}: no such file, and llamarl ships none of that name; {meant}"
            f"It has {', '.join(shipped)} (llamarl recipes); a file of your own ends in .toml"
        )
    return _FOLDER / f"{text}.toml"


def shipped_or_path(text: str) -> str:
    """What a command takes that reads other things than recipes too: the name of one that ships is
    its file, the rest stays."""
    return os.fspath(find_recipe(text)) if text in shipped_recipes() else text


def with_paths_from(folder: Path, settings: Any, key: str = "") -> Any:
    """Settings of a recipe in ``folder``, with the files that they name beside it (``FILE`` or ``FILE.py:NAME``; of
    models and data also folders) as seen from the working directory. What is not there stays: the name of
    something else, or a path that counts from the working directory."""
    if isinstance(settings, Mapping):
        return {name: with_paths_from(folder, value, name) for name, value in settings.items()}
    if isinstance(settings, list):
        return [with_paths_from(folder, value, key) for value in settings]
    if not isinstance(settings, str) or not settings:
        return settings
    kind, file, name = "", settings, ""
    if found := re.fullmatch(r"(\w+:)?(.+\.py)(:[\w.]+)", settings):
        kind, file, name = found[1] or "", found[2], found[3]
    beside = os.path.join(folder, file)
    is_meant = "." in file and os.path.isfile(beside) or key in _MAY_BE_FOLDERS and os.path.isdir(beside)
    return f"{kind}{beside}{name}" if is_meant else settings


def _first_comment(path: Path) -> str:
    with path.open(encoding="utf-8") as lines:
        first = lines.readline()
    return first.removeprefix("#").strip() if first.startswith("#") else ""
