"""Jobs that take turns at one machine, a few ticks each, so that whatever slows it slows all of them alike.

A shared machine's speed drifts by a tenth and more within seconds and minutes: runs one after the other cannot be told apart to some
per cent. Here every job is started and warmed up, then all but one are stopped (SIGSTOP) at any time. A turn ends with a row of the
job's metrics, so a turn of n ticks has n whole steps in it, and its time is the job's own: from SIGCONT to that row.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

__all__ = ["Job"]

_POLL_S = 0.004
_WAIT_S = 300.0


class Job:
    """A ``llamarl train`` that runs only in its turns; a context manager that ends it.

    Args:
        command: Its words; the run must be long enough for all turns.
        run_dir: Where it writes ``metrics.jsonl``.
        warm_up: Ticks that it runs at once.

    Raises:
        SystemExit: It ended, or wrote no row for five minutes; with the end of its output.
    """

    def __init__(self, command: Sequence[str], run_dir: Path, warm_up: int) -> None:
        self._metrics, self._output = run_dir / "metrics.jsonl", run_dir.with_suffix(".out")
        self._rows, self._size, self._pids = 0, 0, list[int]()
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            self._wait_for(warm_up)
            self._pids = tree_of(self._process.pid)
            self._signal(signal.SIGSTOP)
        except BaseException:
            self.close()
            raise

    def turn(self, ticks: int) -> float:
        """Seconds that the job takes for its next ``ticks`` steps."""
        began = time.perf_counter()
        self._signal(signal.SIGCONT)
        self._wait_for(self._rows + ticks)
        took = time.perf_counter() - began
        self._signal(signal.SIGSTOP)
        return took

    def close(self) -> None:
        """End it, workers included."""
        self._signal(signal.SIGCONT)
        self._process.terminate()
        try:
            self._process.wait(timeout=60.0)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait(timeout=60.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _signal(self, number: signal.Signals) -> None:
        """To the controller first, which would notice workers that do not answer."""
        for pid in self._pids:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue  # it has ended; whoever waits for rows will find none

    def _wait_for(self, rows: int) -> None:
        until = time.monotonic() + _WAIT_S
        while self._count() < rows:
            if self._process.poll() is not None or time.monotonic() > until:
                text = self._output.read_text(encoding="utf-8", errors="replace")
                raise SystemExit(f"{self._metrics} has {self._rows} rows, not {rows}:\n{text[-4000:]}")
            time.sleep(_POLL_S)

    def _count(self) -> int:
        """Whole rows so far."""
        if self._metrics.exists() and self._metrics.stat().st_size > self._size:
            with self._metrics.open("rb") as file:
                file.seek(self._size)
                new = file.read()
            self._rows += new.count(b"\n")
            self._size += len(new)
        return self._rows


def tree_of(pid: int) -> list[int]:
    """A process and all that descend from it, parents first (Linux)."""
    found = [pid]
    for one in found:
        for task in Path(f"/proc/{one}/task").glob("*/children"):
            found += [int(child) for child in task.read_text(encoding="ascii").split()]
    return found
