"""A group of the kernel's (cgroup v2) that holds the memory of a box together: mapped or not, whoever of it holds it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from llamarl.environments.sandbox.limits import BoxLimits

__all__ = ["MemoryGroup"]

_EXTRA_MB = 64
"""MiB for bubblewrap and the box's first process."""


class MemoryGroup:
    """The group of one box, or none where this process may not make one."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    @classmethod
    def make(
        cls, limits: BoxLimits, *, root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
    ) -> MemoryGroup:
        """Beside this process's own group, where its parent hands out memory and may be written.

        Args:
            root: Where cgroup v2 is mounted.
            own: Names this process's group.
        """
        with contextlib.suppress(OSError):
            line = next((line for line in own.read_text().splitlines() if line.startswith("0::/")), "")
            parent = root / os.path.dirname(line.removeprefix("0::/"))
            if line and "memory" in (parent / "cgroup.subtree_control").read_text().split():
                folder = parent / f"llamarl-box-{os.getpid()}-{os.urandom(4).hex()}"
                folder.mkdir()
                group = cls(folder)
                try:
                    most = (limits.memory_mb + limits.disk_mb + _EXTRA_MB) << 20
                    (folder / "memory.max").write_text(str(most))
                    with contextlib.suppress(OSError):  # a machine without swap
                        (folder / "memory.swap.max").write_text("0")
                    return group
                except OSError:
                    group.close()
        return cls(None)

    @property
    def enter(self) -> list[str]:
        """Words before a command that put its process into the group."""
        if self._folder is None:
            return []
        return ["/bin/sh", "-c", 'echo $$ > "$0"; exec "$@"', str(self._folder / "cgroup.procs")]

    def was_exceeded(self) -> bool:
        """Whether the kernel ended a process of it for want of memory."""
        with contextlib.suppress(OSError):
            for line in (self._folder / "memory.events").read_text().splitlines() if self._folder else ():
                name, _, count = line.partition(" ")
                if name == "oom_kill" and count != "0":
                    return True
        return False

    def close(self) -> None:
        """Remove it, once nothing is left in it."""
        if self._folder is not None:
            with contextlib.suppress(OSError):
                self._folder.rmdir()
