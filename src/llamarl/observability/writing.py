"""How files of a run's folder are written: whole or not at all, or a line at a time; and what is
done when the disk refuses.

A run whose records are lost must not go on, and a disk that refuses today may take them in a
minute: somebody makes room, a server comes back. So whoever writes what cannot be made again waits
for the disk, says so, and ends the run when it has waited too long.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from llamarl.errors import LlamaRLError
from llamarl.running_time import running_s

__all__ = ["CannotWrite", "LineLog", "Patience", "append_all", "keep_file", "replace_file", "writes"]

T = TypeVar("T")

_MAY_PASS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENFILE, errno.EMFILE}
)
"""No room, read-only, or out of reach; a file that is not there, or not ours, stays so."""
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0


@dataclass(frozen=True)
class Patience:
    """With a disk that refuses."""

    limit_s: float = 0.0
    """Seconds to wait for it; 0: none."""
    tell: Callable[[str], None] = lambda text: print(f"llamarl: {text}", file=sys.stderr, flush=True)
    writer: str = ""
    """Tells apart processes that may replace a file by the same bytes at the same time."""

    def write(self, path: Path, write: Callable[[], T]) -> T:
        """What ``write`` returns, which is called again while the disk refuses.

        Raises:
            LlamaRLError: It refuses for too long, or for a reason that does not pass.
        """
        began_s, pause_s = None, _FIRST_PAUSE_S
        while True:
            try:
                done = write()
                break
            except OSError as error:
                now_s = running_s()
                if error.errno not in _MAY_PASS or now_s - (now_s if began_s is None else began_s) >= self.limit_s:
                    raise CannotWrite(f"cannot write {path}: {error.strerror}") from error
                if began_s is None:
                    began_s = now_s
                    self.tell(
                        f"cannot write {path}: {error.strerror}. The run waits until it can, {self.limit_s:g} s at most "
                        f"(deadlines.disk_s); then it ends"
                    )
            time.sleep(pause_s)
            pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)
        if began_s is not None:
            self.tell(f"{path} could be written after {running_s() - began_s:.0f} s: the run goes on")
        return done

    def append(self, path: Path, descriptor: int, data: bytes) -> None:
        """All of ``data`` to an open file, each byte once.

        Raises:
            LlamaRLError: As ``write``.
        """
        rest = memoryview(data)

        def write_rest() -> None:
            nonlocal rest
            while rest:
                rest = rest[os.write(descriptor, rest) :]

        self.write(path, write_rest)

    def replace(self, path: Path, data: bytes | memoryview) -> None:
        """A file whole or not at all; its folder is made, but not that one's.

        Raises:
            LlamaRLError: As ``write``.
        """

        def write_file() -> None:
            path.parent.mkdir(exist_ok=True)
            replace_file(path, data, writer=self.writer)

        self.write(path, write_file)


class CannotWrite(LlamaRLError):
    """What a run says when its folder fails under it.

    Args:
        cause: What is wrong, without what to do.
    """

    def __init__(self, cause: str) -> None:
        super().__init__(
            f"{cause}. Checkpoints taken so far are untouched: free some space or make the folder writable, then resume the run"
        )
        self.cause = cause


@contextlib.contextmanager
def writes(path: Path) -> Iterator[None]:
    """Turn a failed system call into the error for the user that names ``path``."""
    try:
        yield
    except OSError as error:
        raise CannotWrite(f"cannot write {path}: {error.strerror}") from error


class LineLog:
    """Appends lines to one file, which is made with the first of them and never reached through a
    link. One process writes."""

    def __init__(self, path: Path, patience: Patience | None = None) -> None:
        """
        Args:
            patience: With a disk that refuses a line; None: none.
        """
        self.path = path
        self._patience = patience or Patience()

    def append_lines(self, data: bytes) -> None:
        """Write whole lines at once; they survive the death of this process, and after ``sync`` that of the machine.

        Raises:
            LlamaRLError: The disk is full or not writable, for longer than it is waited for.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        file = self._patience.write(self.path, lambda: os.open(self.path, flags, 0o644))
        try:
            self._patience.append(self.path, file, data)
        finally:
            os.close(file)

    def replace(self, lines: Iterable[bytes]) -> None:
        """Replace the file at once, so that a kill leaves the old or the new.

        Raises:
            LlamaRLError: The disk is full or not writable.
        """
        with writes(self.path):
            replace_file(self.path, b"".join(lines))

    def sync(self) -> None:
        """Return when the disk has every line.

        Raises:
            LlamaRLError: The disk failed.
        """
        with writes(self.path):
            if self.path.exists():
                with open(self.path, "rb") as file:
                    os.fsync(file.fileno())


def append_all(descriptor: int, data: bytes, offset: int | None = None) -> None:
    """Write all of ``data``, in one call unless the system takes less.

    Raises:
        OSError: As the system reports.
    """
    rest = memoryview(data)
    while rest:
        count = os.write(descriptor, rest) if offset is None else os.pwrite(descriptor, rest, offset)
        rest = rest[count:]
        offset = None if offset is None else offset + count


def keep_file(path: Path, data: bytes) -> None:
    """Write a file that other processes may be reading: whole, and only where it is not there as it is; with its folder.

    Raises:
        OSError: As the system reports.
    """
    path.parent.mkdir(exist_ok=True)
    if not path.is_file() or path.read_bytes() != data:
        replace_file(path, data, writer=str(os.getpid()))


def replace_file(path: Path, data: bytes | memoryview, *, writer: str = "") -> None:
    """Write a file whole or not at all.

    Args:
        writer: See ``Patience``.

    Raises:
        OSError: As the system reports; then an earlier file is as it was.
    """
    partial = path.with_name(f".{path.name}.{writer}.partial" if writer else f".{path.name}.partial")
    try:
        partial.unlink(missing_ok=True)  # what a kill left, or a link to somewhere else
        with open(partial, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
