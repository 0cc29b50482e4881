"""The ranks of a run, found below it: for tests that kill them."""

from __future__ import annotations

import contextlib
from pathlib import Path

__all__ = ["ranks"]

_RANK = b"llamarl.runtime.rank_process"


def ranks(run: int) -> dict[str, int]:
    """Name of each rank below ``run``, such as ``trainer[0]``, and its process; guards, whose parent is no rank, are left out."""
    parents: dict[int, int] = {}
    found: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if _RANK in words:
                    found[int(entry.name)] = words[-1].decode("utf-8", "replace")
    below = {}
    for pid, name in found.items():
        above = pid
        while above in parents and above != run:
            above = parents[above]
        if parents[pid] in found and above == run:
            below[name] = pid
    return below
