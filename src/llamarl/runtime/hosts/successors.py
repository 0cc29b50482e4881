"""Controllers that this host has started in the place of others that are gone: ``llamarl train --resume`` of the run's copy here."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

__all__ = ["Successors"]

LOG_FILE = "standby.log"
"""In the run's folder: what the successor prints."""
_STOP_S = 30.0
"""For a controller to end in order: it saves what it can."""


class Successors:
    """All of one daemon.

    Args:
        say: Takes a line for who looks at the daemon.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._running: dict[asyncio.subprocess.Process, asyncio.Task[None]] = {}

    async def begin(self, folder: Path, words: Sequence[str]) -> None:
        """Go on with the run in ``folder``."""
        with open(folder / LOG_FILE, "ab") as log:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "llamarl.cli.take_over", str(folder), *words),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._say(f"the controller of a run is gone; the run goes on here, in {folder} (it writes to {LOG_FILE} there)")
        self._running[process] = asyncio.create_task(self._tell_of_end(process, folder))

    async def end(self) -> None:
        """Have those that run stop in order; then they are killed."""
        for process in self._running:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        if not self._running:
            return
        _, late = await asyncio.wait(self._running.values(), timeout=_STOP_S)
        for process, task in self._running.items():
            if task in late:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()

    async def _tell_of_end(self, process: asyncio.subprocess.Process, folder: Path) -> None:
        code = await process.wait()
        self._say(f"the run in {folder} has ended with exit code {code}")
