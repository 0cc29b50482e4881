"""The processes of a run that hold its environments, found below it and killed."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

__all__ = ["environment_workers", "kill_environments"]

_PROGRAM = b"llamarl.environments.worker"


def environment_workers(run: int) -> list[int]:
    """Ids of worker processes below ``run``; their guardians are left out."""
    parents: dict[int, int] = {}
    workers: set[int] = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().split(b"\0")
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if _PROGRAM in words:
                    workers.add(int(entry.name))
    below = []
    for pid in workers:
        if parents[pid] in workers:  # else it is a guardian
            above = pid
            while above in parents and above != run:
                above = parents[above]
            below += [pid] if above == run else []
    return sorted(below)


def kill_environments(run: int) -> int:
    """``kill -9`` all of them; returns how many."""
    workers = environment_workers(run)
    for pid in workers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return len(workers)
