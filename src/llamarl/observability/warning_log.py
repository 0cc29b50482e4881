"""Writes and reads ``RUN/warnings.jsonl``: what the user was warned of, one JSON object a warning:
``step``, ``kind``, ``text``."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from llamarl.errors import LlamaRLError
from llamarl.observability.writing import LineLog

__all__ = ["WARNINGS_FILE", "WarningLog", "read_warnings"]

WARNINGS_FILE = "warnings.jsonl"


class WarningLog(LineLog):
    """Appends warnings; those of ticks that a resumed run repeats are cut first. One process writes."""

    def __init__(self, run_dir: str | os.PathLike[str], resume_after_tick: int | None = None) -> None:
        """
        Raises:
            LlamaRLError: The folder cannot be read or written.
        """
        super().__init__(Path(run_dir) / WARNINGS_FILE)
        last = -1 if resume_after_tick is None else resume_after_tick
        kept = [warning for warning in read_warnings(run_dir) if warning["step"] <= last]
        self.said = frozenset(str(warning["kind"]) for warning in kept)
        """Kinds that were warned of before the resume."""
        if self.path.exists():
            self.replace(map(_line, kept))

    def write(self, step: int, kind: str, text: str) -> None:
        """
        Raises:
            LlamaRLError: The disk is full or not writable.
        """
        self.append_lines(_line({"step": step, "kind": kind, "text": text}))


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
