"""Whether a host and the controller see one run folder: proved by files, in both directions, before
anything depends on it.

    controller                              host
    ask: writes .shared-X  ── its name ──▶  answer: reads it, writes .shared-X-host
    judge  ◀── what it read, what it wrote ──
      reads .shared-X-host

The words in the files are random and new each time, so a folder of the same name on a disk of its
own, a copy, or a folder that the host sees and cannot write is told from the same folder. No torch
here: a host answers before any rank of it is started.
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

__all__ = ["FolderAnswer", "FolderQuestion", "answer", "ask", "judge", "why_not_shared", "withdraw"]

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


@dataclass(frozen=True, kw_only=True)
class FolderAnswer:
    """What a host found."""

    read: str = ""
    """The word in the controller's file; empty if there is no such file."""
    wrote: str = ""
    """The word that the host has put into a file of its own; empty if it could not."""
    trouble: str = ""
    """What stood in the way, in words."""


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


def answer(question: FolderQuestion, host: str, *, patience_s: float = _PATIENCE_S) -> FolderAnswer:
    """On the host: read the controller's word, and leave one of our own beside it. Never makes a folder; never fails.

    Args:
        host: Its name, for the name of its file: letters, digits, dots, dashes.
        patience_s: How long to look for the file where its folder is.
    """
    folder = Path(question.folder)
    if not _NAME.fullmatch(question.name) or not folder.is_absolute():
        return FolderAnswer(trouble="the question names no file of a run's folder")
    if not folder.is_dir():
        return FolderAnswer(trouble=f"it has no folder {folder}")
    read = _read_patiently(folder / question.name, patience_s)
    if not read:
        return FolderAnswer(trouble=f"its {folder} is another folder")
    wrote = secrets.token_hex(16)
    try:
        _write(_host_file(question, host), wrote)
    except OSError as error:
        return FolderAnswer(read=read, trouble=f"it cannot write into {folder} ({error.strerror})")
    return FolderAnswer(read=read, wrote=wrote)


def judge(question: FolderQuestion, host: str, found: FolderAnswer, *, patience_s: float = _PATIENCE_S) -> str:
    """On the controller: empty if the folder is shared with ``host``, else why not, in words that
    follow the host's name."""
    ours = _read_patiently(Path(question.folder) / question.name, 0.0)
    theirs = _read_patiently(_host_file(question, host), patience_s if found.wrote else 0.0)
    return why_not_shared(ours=ours, found=found, theirs=theirs, folder=question.folder)


def why_not_shared(*, ours: str, found: FolderAnswer, theirs: str, folder: str) -> str:
    """The rule: both words arrived at the other end as they were written.

    Args:
        ours: What the controller wrote.
        theirs: What the controller reads in the host's file.
    """
    if not ours or found.read != ours:
        return found.trouble or f"its {folder} is another folder"
    if not found.wrote:
        return found.trouble or f"it cannot write into {folder}"
    if theirs != found.wrote:
        return f"what it writes into {folder} is not seen here"
    return ""


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
