"""Jobs that take turns at one machine, a few ticks each, so that whatever slows it slows all of them alike.

A shared machine's speed drifts by a tenth and more within seconds and minutes: runs one after the other cannot be told apart to some
per cent. Here every job is started and warmed up, then all but one are stopped (SIGSTOP) at any time. A turn ends with a row of the
job's metrics, so a turn of n ticks has n whole steps in it, and its time is the job's own: from SIGCONT to that row.

Linux only: it needs stop signals and ``/proc``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from llamarl.errors import DeadlineExceeded, ExecutorFailed
from llamarl.running_time import running_s

__all__ = ["Job"]

_POLL_S = 0.004
_GUARD = 'while read pid; do pids="$pids $pid"; done; kill -CONT $pids; kill -TERM "$1"'
"""A shell's: it outlives whoever is killed without a chance to clean up, and ends the job that nobody would wake any more."""


class Job:
    """A ``llamarl train`` that runs only in its turns; a context manager that ends it.

    Args:
        words: What follows ``llamarl`` on its command line; the run must be long enough for all turns.
        run_dir: Where it writes ``metrics.jsonl``.
        warm_up: Ticks that it runs at once.
        deadline_s: Longest wait for the rows of one turn, and for those of the warm-up.

    Raises:
        ExecutorFailed: It ended before its time; with the end of its output.
        DeadlineExceeded: Its next rows did not come in time; the same.
    """

    def __init__(self, words: Sequence[str], run_dir: Path, warm_up: int, *, deadline_s: float = 600.0) -> None:
        self._metrics, self._output = run_dir / "metrics.jsonl", run_dir.with_suffix(".out")
        self._deadline_s = deadline_s
        self._rows, self._size, self._pids = 0, 0, list[int]()
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[str] | None = None
        try:
            command = [sys.executable, "-m", "llamarl.cli.main", *words]
            with self._output.open("wb") as output:
                self._process = subprocess.Popen(
                    command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
                )
            self._guard = subprocess.Popen(
                ["sh", "-c", _GUARD, "guard", str(self._process.pid)],
                stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True,
            )  # fmt: skip
            self._wait_for(warm_up)
            self._stop()
        except BaseException:
            self.close()
            raise

    def turn(self, ticks: int) -> float:
        """Seconds that the job takes for its next ``ticks`` steps."""
        rows = self.rows + ticks
        began = time.perf_counter()
        self._signal(signal.SIGCONT)
        self._wait_for(rows)
        took = time.perf_counter() - began
        self._stop()
        return took

    @property
    def rows(self) -> int:
        """Whole rows in its metrics so far: steps that it has finished."""
        if self._metrics.exists() and self._metrics.stat().st_size > self._size:
            with self._metrics.open("rb") as file:
                file.seek(self._size)
                new = file.read()
            self._rows += new.count(b"\n")
            self._size += len(new)
        return self._rows

    @property
    def returncode(self) -> int | None:
        """Of the job's command; None while it lives."""
        return self._process.returncode if self._process else None

    def close(self) -> None:
        """End it, workers included. Safe to call twice."""
        if self._process and self._process.poll() is None:
            self._signal(signal.SIGCONT)
            self._process.terminate()
            try:
                self._process.wait(timeout=60.0)
            except subprocess.TimeoutExpired:
                self._signal(signal.SIGKILL)
                self._process.wait(timeout=60.0)
        if self._guard:
            self._guard.kill()
            self._guard.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _stop(self) -> None:
        """All of it, workers that have just started included; the controller first, which would notice those that do not answer."""
        assert self._process and self._guard and self._guard.stdin
        self._signal(signal.SIGSTOP)
        while new := [pid for pid in tree_of(self._process.pid) if pid not in self._pids]:
            self._pids += new
            self._guard.stdin.writelines(f"{pid}\n" for pid in new)
            self._guard.stdin.flush()
            self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):  # it has ended: whoever waits for rows will say so
                os.kill(pid, number)

    def _wait_for(self, rows: int) -> None:
        assert self._process
        until = running_s() + self._deadline_s
        while self.rows < rows:
            ended, late = self._process.poll() is not None, running_s() > until
            if ended or late:
                text = self._output.read_text(encoding="utf-8", errors="replace")[-4000:]
                what = f"{self._metrics} has {self._rows} rows, {rows} were awaited"
                if ended:
                    raise ExecutorFailed(f"{what}; the job ended with exit code {self._process.returncode}:\n{text}")
                raise DeadlineExceeded(f"{what} for {self._deadline_s:g} s:\n{text}")
            time.sleep(_POLL_S)


def tree_of(pid: int) -> list[int]:
    """A process and all that descend from it, parents first (Linux)."""
    found = [pid]
    for one in found:
        for task in Path(f"/proc/{one}/task").glob("*/children"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
                found += [int(child) for child in task.read_text(encoding="ascii").split()]
    return found
