"""Where a user's files go that can be made again. Nothing is imported here but Python's own."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

__all__ = ["cache_folder", "temporary_folder"]


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/llamarl``, else ``~/.cache/llamarl``; of a user without a home the folder
    beside the system's temporary files."""
    if cache := os.environ.get("XDG_CACHE_HOME"):
        return Path(cache) / "llamarl"
    home = os.path.expanduser("~")
    return temporary_folder() if home == "~" else Path(home) / ".cache" / "llamarl"


def temporary_folder() -> Path:
    """The user's own among the system's temporary files. Who runs what lies there asks first whose it is."""
    return Path(tempfile.gettempdir()) / f"llamarl-{os.getuid()}"
