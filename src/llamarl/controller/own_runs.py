"""Whether this user has begun a run: a mark in its folder that nobody else can make.

    config.toml, working directory ──HMAC with the user's key──▶ RUN/.begun_by ──▶ a resume of the same user's proves it

Written where a run's configuration names code, before that configuration is. It holds for these
settings alone, wherever the folder is moved; where they hold relative paths, in the same working
directory alone.
"""

from __future__ import annotations

import hmac
import os
import sys
from pathlib import Path

from llamarl.config import RunConfig
from llamarl.errors import FileError
from llamarl.observability.writing import replace_file
from llamarl.reading import read_bytes
from llamarl.user_folders import key_file, user_key

__all__ = ["MARK_FILE", "mark", "why_not_own"]

MARK_FILE = ".begun_by"
_MAX_BYTES = 1 << 24


def mark(config: RunConfig, settings: bytes, run_dir: Path) -> None:
    """Note that this user begins a run, or goes on with it.

    Args:
        settings: What its ``config.toml`` is about to hold.

    Raises:
        OSError: The run's folder cannot be written.
    """
    path = run_dir / MARK_FILE
    if not config.named_code:
        path.unlink(missing_ok=True)
        return
    try:
        key = user_key(create=True)
    except OSError as error:
        path.unlink(missing_ok=True)
        told = f"{run_dir} cannot be marked as yours ({key_file()}: {error.strerror}): whoever goes on with it names its code again"
        print(told, file=sys.stderr)
        return
    place = os.fsencode(os.getcwd())
    replace_file(path, _proof(key, settings, place) + b"\n" + place)


def why_not_own(run_dir: Path, settings: Path, *, relative: bool) -> str:
    """Why the run in a folder is not known as this user's; empty if it is.

    Args:
        settings: Its ``config.toml``.
        relative: Whether that names files by paths that mean others in another working directory.
    """
    try:
        proof, _, place = read_bytes(run_dir / MARK_FILE, max_bytes=_MAX_BYTES).partition(b"\n")
        text = read_bytes(settings, max_bytes=_MAX_BYTES)
    except FileError:
        return "it bears no mark of a run that you have begun"
    try:
        key = user_key(create=False)
    except OSError as error:
        return f"your key, which would prove it yours, cannot be read ({key_file()}: {error.strerror})"
    if not hmac.compare_digest(proof, _proof(key, text, place)):
        return "its mark is another user's, or of other settings"
    moved = relative and place != os.fsencode(os.getcwd())
    return f"its paths are those of {os.fsdecode(place)}, where it was begun" if moved else ""


def _proof(key: bytes, settings: bytes, place: bytes) -> bytes:
    signed = len(settings).to_bytes(8, "little") + settings + place
    return hmac.digest(key, signed, "sha256").hex().encode()
