"""What a program in a box may use, and what became of it. Plain data; imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["BoxFailed", "BoxLimits", "BoxResult", "Limit", "limit_in_words"]

Limit = Literal["time", "memory", "processes", "disk", "output"]
"""What a program exceeded."""


class BoxFailed(RuntimeError):
    """The box itself failed, before or beside the program: nothing is known of the program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxLimits:
    """What a program may use."""

    wall_s: float = 10.0
    """Seconds of wall clock, from the start of the program in its box."""
    memory_mb: int = 512
    """MiB of address space of each process, and of resident memory of all together."""
    processes: int = 16
    """Processes and threads at once."""
    disk_mb: int = 32
    """MiB of files in the box's folder, which is in memory, and of any one file."""
    files: int = 1000
    """Files and folders in the box's folder."""
    output_bytes: int = 1 << 20
    """Bytes of standard output, and as many of standard error; a program that writes more is ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxResult:
    """What a program did."""

    status: int | None
    """Its exit status; None where it did not exit: a signal, or the box was ended around it."""
    signal: int | None
    """That ended it, if one did."""
    stdout: str
    """At most ``output_bytes`` of it; what is no UTF-8 is replaced."""
    stderr: str
    wall_s: float
    """Seconds from the start of the program to the end of its box."""
    limit: Limit | None
    """The limit that it met, as far as can be told. ``memory``, ``processes`` and ``disk`` are also told from the error
    that Python ends with, which the program can write itself: it explains, it decides nothing."""

    @property
    def ok(self) -> bool:
        """It exited with status 0."""
        return self.status == 0


_WORDS: tuple[tuple[str, Limit], ...] = (
    ("MemoryError", "memory"),
    ("OSError: [Errno 12]", "memory"),
    ("OSError: [Errno 28]", "disk"),
    ("OSError: [Errno 27]", "disk"),
    ("BlockingIOError: [Errno 11]", "processes"),
    ("RuntimeError: can't start new thread", "processes"),
)


def limit_in_words(stderr: str) -> Limit | None:
    """The limit that the last line of a traceback speaks of, or the last error for whose lines Python
    had no memory: 3.13 then tells of the object alone."""
    last = stderr.rstrip().rpartition("\n")[2]
    if last == "lost sys.stderr":
        last = stderr.rpartition("object type name: ")[2]
    return next((limit for words, limit in _WORDS if last.startswith(words)), None)
