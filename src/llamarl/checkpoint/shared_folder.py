"""Whether a host and the controller see one run folder: proved by files, in both directions, before
anything depends on it.

    controller                              host
    ask: a random word in .shared-X  ── its name ──▶  answer: copies the word into .shared-X-host
    judge: reads the word in .shared-X-host

The word is new each time and does not travel with the question. So a folder of the same name on a
disk of its own, a copy, or a folder that the host sees and cannot write is told from the same
folder. No torch here: a host answers before any rank of it is started.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from llamarl.errors import CheckpointError

__all__ = ["FolderQuestion", "answer", "ask", "judge", "withdraw"]

_NAME = re.compile(r"\.shared-[0-9a-f]{16}")
_PATIENCE_S = 2.0
"""How long a file that was just written elsewhere may take to be seen: network file systems keep
listings for a while."""
_MAX_BYTES = 256


@dataclass(frozen=True, kw_only=True)
class FolderQuestion:
    """What the controller sends; the word in the file is not in it."""

    folder: str
    """The run's folder, absolute, as the controller names it."""
    name: str
    """Of the file that was written into it."""


def ask(run_dir: Path) -> FolderQuestion:
    """Write the controller's word into ``run_dir``; several hosts may answer one question, one after another or not.

    Raises:
        CheckpointError: The folder cannot be written.
    """
    question = FolderQuestion(folder=str(run_dir), name=f".shared-{secrets.token_hex(8)}")
    try:
        _write(run_dir / question.name, secrets.token_hex(16))
    except OSError as error:
        raise CheckpointError(f"run.dir: cannot write into {run_dir}: {error.strerror}") from error
    return question


def answer(question: FolderQuestion, host: str, *, patience_s: float = _PATIENCE_S) -> str:
    """On the host: copy the controller's word into a file beside it. Never makes a folder; never fails.

    Args:
        host: Its name, for the name of its file: letters, digits, dots, dashes.
        patience_s: How long to look for the file where its folder is.

    Returns:
        What stood in the way, in words that follow the host's name; empty: nothing.
    """
    folder = Path(question.folder)
    if not _NAME.fullmatch(question.name) or not folder.is_absolute():
        return "it was asked for a file that no run's folder has"
    if not folder.is_dir():
        return f"it has no folder {folder}"
    if not (word := _read_patiently(folder / question.name, patience_s)):
        return f"its {folder} is another folder"
    try:
        _write(_host_file(question, host), word)
    except OSError as error:
        return f"it cannot write into {folder} ({error.strerror})"
    return ""


def judge(question: FolderQuestion, host: str, trouble: str, *, patience_s: float = _PATIENCE_S) -> str:
    """On the controller: empty if the folder is shared with ``host``, else why not, in words that
    follow the host's name.

    Args:
        trouble: The host's answer, which alone proves nothing.
    """
    if trouble:
        return trouble
    theirs = _read_patiently(_host_file(question, host), patience_s)
    if not theirs:
        return f"what it writes into {question.folder} is not seen here"
    ours = _read_patiently(Path(question.folder) / question.name, 0.0)
    return "" if theirs == ours else f"its {question.folder} is another folder"


def withdraw(question: FolderQuestion) -> None:
    """Remove the controller's file and those of all hosts; what cannot be removed stays, and hurts nobody."""
    folder = Path(question.folder)
    with contextlib.suppress(OSError):
        for path in folder.glob(f"{question.name}*"):
            path.unlink(missing_ok=True)


def _host_file(question: FolderQuestion, host: str) -> Path:
    return Path(question.folder) / f"{question.name}-{re.sub(r'[^A-Za-z0-9.-]', '_', host)[:64]}"


def _write(path: Path, word: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.write(descriptor, word.encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_patiently(path: Path, patience_s: float) -> str:
    """The word in a file; empty if it is not there in time."""
    until = time.monotonic() + patience_s
    while True:
        with contextlib.suppress(OSError), open(path, "rb") as file:
            if word := file.read(_MAX_BYTES).decode("ascii", "replace"):
                return word
        if time.monotonic() >= until:
            return ""
        with contextlib.suppress(OSError):
            os.listdir(path.parent)  # opening a folder makes a network file system look again
        time.sleep(0.05)
