"""Calls of Linux that not every Python brings: one that was built against an old C library (conda's; uv's before July
2026) has no ``os.memfd_create``, no ``os.pidfd_open`` and none of their constants. Made the same way in every Python.
"""

from __future__ import annotations

import ctypes
import fcntl
import os

__all__ = ["SEAL_CONTENT", "SEAL_SIZE", "new_memory", "pidfd_open", "pidfd_send_signal", "seal"]

SEAL_SIZE = 2 | 4
"""Against shrinking and growing."""
SEAL_CONTENT = SEAL_SIZE | 1 | 8
"""Against writing and other seals too."""
_F_ADD_SEALS = 1033
_CLOSE_ON_EXEC, _ALLOW_SEALING = 1, 2
_PIDFD_SEND_SIGNAL, _PIDFD_OPEN = 424, 434  # the same on x86_64 and aarch64


def new_memory(name: str) -> int:
    """Make a file in memory (``memfd_create``) that can be sealed; its descriptor is not inherited.

    Raises:
        OSError: There is none to be had.
    """
    return _call("memfd_create", name.encode(), ctypes.c_uint(_CLOSE_ON_EXEC | _ALLOW_SEALING))


def seal(fd: int, seals: int) -> None:
    """Forbid for good what ``seals`` name of a file in memory."""
    fcntl.fcntl(fd, _F_ADD_SEALS, seals)


def pidfd_open(pid: int) -> int:
    """Make a descriptor of a process, ready to read once it has ended; not inherited.

    Raises:
        OSError: There is no such process.
    """
    return _call("syscall", *map(ctypes.c_long, (_PIDFD_OPEN, pid, 0)))


def pidfd_send_signal(pidfd: int, number: int) -> None:
    """Send a signal to the process of a descriptor.

    Raises:
        OSError: ProcessLookupError where it has ended.
    """
    _call("syscall", *map(ctypes.c_long, (_PIDFD_SEND_SIGNAL, pidfd, number, 0, 0)))


def _call(name: str, *arguments: object) -> int:
    result = int(getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
