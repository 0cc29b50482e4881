"""Holds the memory of all processes of a box together by a control group of the kernel, where this user may make one.

    own group ─▶ the folder where another can be made ─▶ llamarl-box-PID-N: limit ─▶ the box's first process joins, its children inherit

What ``inside`` counts every few milliseconds is what processes hold; the kernel counts at once, and
also what it holds for them (socket buffers, pipes, files in memory). Without a group, as in most
containers and for users without a delegated one, that count is all.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from pathlib import Path

__all__ = ["MemoryGroup", "find_parent_of_groups", "make_memory_group", "parent_of_groups"]

_NAME = "llamarl-box-"
_REMOVE_S = 2.0
_numbers = itertools.count()


class MemoryGroup:
    """One group. ``words`` put what they precede on a command line into it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.words = ("/bin/sh", "-c", 'echo 0 > "$0" && exec "$@"', str(folder / "cgroup.procs"))

    def has_killed(self) -> bool:
        """Say whether the kernel ended one of its processes because together they held too much."""
        for name in ("memory.events", "memory.oom_control"):
            with contextlib.suppress(OSError):
                words = (self._folder / name).read_text(encoding="ascii").split()
                return "oom_kill" in words and words[words.index("oom_kill") + 1] != "0"
        return False

    def remove(self) -> None:
        """Remove it once its last process has gone, which takes a moment. Idempotent."""
        until = time.monotonic() + _REMOVE_S
        while self._folder.exists() and time.monotonic() < until:
            with contextlib.suppress(OSError):
                self._folder.rmdir()
                return
            time.sleep(0.005)


def make_memory_group(num_bytes: int) -> MemoryGroup | None:
    """Make a group whose processes may hold so much together; None where that cannot be had."""
    try:
        if (parent := find_parent_of_groups()) is None:
            return None
        _remove_left(parent)
        folder = parent / f"{_NAME}{os.getpid()}-{next(_numbers)}"
        folder.mkdir()
    except OSError:
        return None
    try:
        limit = "memory.max" if (folder / "memory.max").exists() else "memory.limit_in_bytes"
        (folder / limit).write_text(str(num_bytes), encoding="ascii")
        for name, value in (("memory.swap.max", 0), ("memory.memsw.limit_in_bytes", num_bytes)):
            with contextlib.suppress(OSError):  # there is no swap, or nobody counts it
                if (folder / name).exists():
                    (folder / name).write_text(str(value), encoding="ascii")
    except OSError:
        with contextlib.suppress(OSError):
            folder.rmdir()
        return None
    return MemoryGroup(folder)


def find_parent_of_groups() -> Path | None:
    """Find the folder in which this process may make a group that counts memory; None without one."""
    try:
        return parent_of_groups(
            Path("/proc/self/cgroup").read_text(encoding="utf-8"),
            Path("/proc/self/mountinfo").read_text(encoding="utf-8"),
        )
    except OSError:
        return None


def parent_of_groups(cgroup: str, mountinfo: str) -> Path | None:
    """Find the folder in which a process may make a group that counts memory.

    Args:
        cgroup: What ``/proc/self/cgroup`` says.
        mountinfo: What ``/proc/self/mountinfo`` says.

    Returns:
        With control groups of version 1 the process's own; with version 2 the nearest one above it
        that hands the memory controller down. None: there is none, or it may not be written.
    """
    own = {line.split(":", 2)[1]: line.split(":", 2)[2] for line in cgroup.splitlines() if line.count(":") >= 2}
    versions = {name: path for names, path in own.items() for name in names.split(",")}
    for line in mountinfo.splitlines():
        mount, _, system = line.partition(" - ")
        kind, _, options = (*system.split(" ", 2), "", "")[:3]
        is_first = kind == "cgroup" and "memory" in options.split(",") and "memory" in versions
        if not is_first and not (kind == "cgroup2" and "" in versions and "memory" not in versions):
            continue
        root, top = mount.split()[3:5]
        path = versions["memory" if is_first else ""]
        if not f"{path}/".startswith(f"{root.rstrip('/')}/"):
            continue
        folder = Path(top) / path[len(root.rstrip("/")) :].strip("/")
        if not is_first:
            above = [one for one in (folder, *folder.parents) if one.is_relative_to(top)]
            folder = next((one for one in above if _hands_down(one)), Path())
        may_write = os.access(folder, os.W_OK) and os.access(folder / "cgroup.procs", os.W_OK)
        return folder if may_write and folder != Path() else None
    return None


def _hands_down(folder: Path) -> bool:
    try:
        return "memory" in (folder / "cgroup.subtree_control").read_text(encoding="ascii").split()
    except OSError:
        return False


def _remove_left(parent: Path) -> None:
    """Remove empty groups of processes that were killed."""
    for folder in parent.glob(f"{_NAME}*"):
        owner = folder.name.removeprefix(_NAME).partition("-")[0]
        if not os.path.exists(f"/proc/{owner}"):
            with contextlib.suppress(OSError):  # its processes are still ending
                folder.rmdir()
