"""The processes of a run, found below it and killed: those that hold its environments, and its ranks."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

__all__ = ["environment_workers", "kill_all", "kill_environments", "ranks"]

_WORKER = b"llamarl.environments.worker"
_RANK = b"llamarl.runtime.rank_process"


def environment_workers(run: int) -> list[int]:
    """Ids of worker processes below ``run``; their guardians are left out."""
    return sorted(_below(run, _WORKER))


def ranks(run: int) -> dict[str, int]:
    """Name of each rank below ``run``, such as ``trainer[0]``, and its process; guards are left out."""
    return {words[-1]: pid for pid, words in _below(run, _RANK).items()}


def kill_environments(run: int) -> int:
    """``kill -9`` all workers; returns how many."""
    return kill_all(environment_workers(run))


def kill_all(pids: list[int]) -> int:
    """``kill -9`` each; returns how many were given."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return len(pids)


def _below(run: int, program: bytes) -> dict[int, list[str]]:
    """Processes below ``run`` that are of a program and whose parent is too, with their command lines."""
    parents: dict[int, int] = {}
    found: dict[int, list[str]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if program in words:
                    found[int(entry.name)] = [word.decode("utf-8", "replace") for word in words]
    below = {}
    for pid, words in found.items():
        above = pid
        while above in parents and above != run:
            above = parents[above]
        if parents[pid] in found and above == run:  # else it is a guard
            below[pid] = words
    return below
