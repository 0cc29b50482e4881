"""Notice the death of a local process at once, and say what it died of.

A pidfd becomes readable when its process ends, whoever's child it is and whoever reaps it. Linux 5.3 and later; the cause
of death of one that has been reaped needs 6.15, before that it reads "ended".
"""

from __future__ import annotations

import fcntl
import os
import signal
import struct
from pathlib import Path

__all__ = ["cause_of_death", "open_pidfd", "process_space"]

_PIDFD_INFO_EXIT = 1 << 3
_PIDFD_INFO_SIZE = 64
_PIDFD_GET_INFO = (3 << 30) | (_PIDFD_INFO_SIZE << 16) | (0xFF << 8) | 11  # _IOWR(0xFF, 11, struct pidfd_info)
_EXIT_CODE_OFFSET = 60


def process_space() -> str:
    """Equal in two processes if and only if each can name the other by its pid: same booted kernel, same pid namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"unknown {os.getpid()}"  # no /proc: equal to nobody's, so nobody is watched by pid


def open_pidfd(pid: int) -> int | None:
    """A descriptor that turns readable when ``pid`` ends; None where the system has none.

    Raises:
        ProcessLookupError: It has ended already.
    """
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except OSError:  # a kernel or a sandbox without the call
        return None


def cause_of_death(pidfd: int) -> str:
    """What ended the process of a readable ``pidfd``, in words.

    A child that nobody has reaped yet tells its parent, and leaves that as it is; one that has been reaped (Monarch does,
    at its own time) tells the kernel's record.
    """
    try:
        ended = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        ended = None
    if ended is not None:
        exited = ended.si_code == os.CLD_EXITED
        return _describe(code=ended.si_status) if exited else _describe(signal_number=ended.si_status)
    info = bytearray(struct.pack("<Q", _PIDFD_INFO_EXIT).ljust(_PIDFD_INFO_SIZE, b"\0"))
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, info)
    except OSError:
        return "its process ended"
    (mask,) = struct.unpack_from("<Q", info)
    if not mask & _PIDFD_INFO_EXIT:
        return "its process ended"
    (status,) = struct.unpack_from("<i", info, _EXIT_CODE_OFFSET)
    if os.WIFSIGNALED(status):
        return _describe(signal_number=os.WTERMSIG(status))
    return _describe(code=os.WEXITSTATUS(status))


def _describe(*, code: int = 0, signal_number: int = 0) -> str:
    if not signal_number:
        return f"its process exited with code {code}"
    name = signal.Signals(signal_number).name if signal_number in set(signal.Signals) else "unknown"
    hint = "; the kernel does this when memory runs out" if signal_number == signal.SIGKILL else ""
    return f"its process was killed by signal {signal_number} ({name}{hint})"
