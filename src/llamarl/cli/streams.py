"""A program that outlives its console: standard streams that may be closed, or close, without ending it.

    print, rich, logging ─▶ text layer ─▶ buffer ─▶ descriptor ─▶ terminal, pipe, file
                                                        └─ fails once: /dev/null from then on

A long run must not end because ``| head`` has read enough, the terminal is gone or the disk of a log file is full.
"""

from __future__ import annotations

import io
import os
import select
import sys
from typing import Any, TextIO

__all__ = ["open_missing_streams", "outlive_the_console"]


def open_missing_streams() -> None:
    """Give a process that was started with closed standard descriptors (``>&-``) the null device in their place.

    Without it the next file that is opened becomes standard output, and is written into by whoever prints.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)  # the lowest free number: this one
            assert null == descriptor, f"descriptor {descriptor} was closed, the null device came as {null}"
            os.set_inheritable(descriptor, True)
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)


def outlive_the_console() -> None:
    """From now on a failure to write to standard output or error is no error: what follows goes to the null device."""
    sys.stdout = _outliving(sys.stdout)
    sys.stderr = _outliving(sys.stderr)


def _outliving(stream: TextIO) -> TextIO:
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError, AttributeError):  # a test's own stream
        return stream
    raw = _Outliving(descriptor)
    try:
        stream.flush()
    except OSError:
        raw.give_up()
    return io.TextIOWrapper(
        io.BufferedWriter(raw), encoding=stream.encoding, errors=stream.errors, line_buffering=True, write_through=False
    )


class _Outliving(io.RawIOBase):
    """Writes to a descriptor until that fails, which it hides. A full one is waited for, also where whoever shares it (a terminal
    with a program beside this one) made it non-blocking."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: Any, /) -> int:
        while True:
            try:
                return os.write(self._descriptor, data)
            except BlockingIOError:
                select.select([], [self._descriptor], [])
            except OSError:
                self.give_up()
                return memoryview(data).nbytes

    def give_up(self) -> None:
        """The descriptor stays open, so that nobody else gets its number, and children that share it may print."""
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self._descriptor)
        os.close(null)
