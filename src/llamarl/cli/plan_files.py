"""Where ``llamarl plan --recipe`` writes, and what it never writes over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llamarl.errors import PlanError

__all__ = ["OURS", "merged", "refuse_to_replace", "write_settings"]

OURS = "Written by llamarl plan: "
"""Begins every recipe of a plan."""


def refuse_to_replace(path: Path) -> None:
    """Other verbs read --recipe: nobody's own recipe goes because this one writes it.

    Raises:
        PlanError: The file is there, and no plan has written it.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:  # not there; or writing it says why not
        return
    if text.strip() and not text.startswith(f"# {OURS}"):
        raise PlanError(
            f"--recipe {path}: is there already, and no plan has written it; plan reads a recipe without the flag "
            f"(llamarl plan {path}), and --recipe names the file that it writes: give another"
        )


def write_settings(
    path: Path, config: dict[str, Any], settings: dict[str, Any], header: str, prompt_tokens: int = 0
) -> None:
    """The recipe ``config`` with a plan's settings.

    Args:
        prompt_tokens: Of a planned prompt: limits below it are raised.
        header: First lines, without ``#``.

    Raises:
        PlanError: It cannot be written.
    """
    from llamarl.config import known_keys
    from llamarl.planner.recipe import raised_limits, recipe_text

    whole = merged(config, settings)
    text = recipe_text(merged(whole, raised_limits(whole, prompt_tokens)), set(known_keys()), header)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise PlanError(f"--recipe {path}: cannot write it: {error}") from error


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """``base`` with what ``over`` says, section by section."""
    found = dict(base)
    for key, value in over.items():
        old = found.get(key)
        found[key] = merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return found
