"""``RUN/warnings.jsonl``: what the user was warned of, one JSON object a warning: ``step``, ``kind``, ``text``."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from llamarl.errors import LlamaRLError
from llamarl.observability.writing import append_all, cannot_write, replace_file

__all__ = ["WARNINGS_FILE", "WarningLog", "read_warnings"]

WARNINGS_FILE = "warnings.jsonl"


class WarningLog:
    """Appends warnings; those of ticks that a resumed run repeats are cut first. One process writes."""

    def __init__(self, run_dir: str | os.PathLike[str], resume_after_tick: int | None = None) -> None:
        """
        Raises:
            LlamaRLError: The folder cannot be read or written.
        """
        self.path = Path(run_dir) / WARNINGS_FILE
        kept = [] if resume_after_tick is None else read_warnings(run_dir)
        kept = [warning for warning in kept if warning["step"] <= (resume_after_tick or 0)]
        self.said = frozenset(str(warning["kind"]) for warning in kept)
        """Kinds that were warned of before the resume."""
        try:
            if self.path.exists():
                replace_file(self.path, b"".join(_line(warning) for warning in kept))
        except OSError as error:
            raise cannot_write(self.path, error) from error

    def write(self, step: int, kind: str, text: str) -> None:
        """
        Raises:
            LlamaRLError: The disk is full or not writable.
        """
        try:
            file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                append_all(file, _line({"step": step, "kind": kind, "text": text}))
            finally:
                os.close(file)
        except OSError as error:
            raise cannot_write(self.path, error) from error


def read_warnings(run_dir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The warnings of a run, oldest first; none where it has no such file. A line torn by a kill is left out.

    Raises:
        LlamaRLError: The file cannot be read.
    """
    path = Path(run_dir) / WARNINGS_FILE
    if not path.exists():
        return []
    found = []
    try:
        for line in path.read_bytes().splitlines():
            warning = json.loads(line)
            if isinstance(warning, dict) and {"step", "kind", "text"} <= warning.keys():
                found.append(warning)
    except ValueError:
        pass  # the last line, half written when the run was killed
    except OSError as error:
        raise LlamaRLError(f"cannot read {path}: {error.strerror}") from error
    return found


def _line(warning: dict[str, Any]) -> bytes:
    return (json.dumps(warning, ensure_ascii=False) + "\n").encode("utf-8", "replace")
