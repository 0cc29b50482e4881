"""Shows a run while it goes on: a head, progress, an end. A live panel on a terminal, lines of rows elsewhere.

What it says is made by plain functions: the head in ``job_description.py``, rows and the end in ``text.py``. It is kept in
``RUN/log.jsonl`` too, a line an object with ``time``, ``level`` (info, warning, error) and ``text``.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from llamarl.observability import text
from llamarl.observability.job_description import JobDescription, head
from llamarl.observability.summary import RunSummary
from llamarl.observability.writing import append_all, writes
from llamarl.progress import SILENCE_S
from llamarl.settings.observability import ObservabilityConfig

__all__ = ["LOG_FILE", "ConsoleReporter", "LiveLines", "RowTable", "lines_every"]

LOG_FILE = "log.jsonl"

_REFRESH_S = 1.0
"""Between two looks at what executors are at, on a live display."""
_ENDS_S = 10.0
"""Longest wait for the thread: a question to the ranks is given up before."""

_LINES_A_RUN = 30
_LINES_A_HEADING = 20


class ConsoleReporter:
    """Shows a run on ``file`` in the way that the configuration asks for."""

    def __init__(
        self,
        config: ObservabilityConfig,
        job: JobDescription,
        num_ticks: int,
        *,
        done: int = 0,
        file: TextIO | None = None,
        log: Path | None = None,
    ) -> None:
        """
        Args:
            num_ticks: Ticks of the whole run.
            done: Ticks that lie behind it at a resume.
            file: Where to; standard output if None.
            log: File that gets every line that is shown, too; None: none.

        Raises:
            LlamaRLError: It cannot be written.
        """
        stream = file if file is not None else sys.stdout
        kind = config.console
        if kind == "auto":
            is_terminal = getattr(stream, "isatty", bool)()  # some notebooks' streams do not say
            kind = "rich" if is_terminal and os.environ.get("TERM", "") not in ("", "dumb") else "plain"
        live = kind == "rich"
        self._log, self._lock = -1, threading.Lock()  # a descriptor follows the file where the folder is moved
        if log is not None and kind != "none":
            with writes(log):  # a pipe in its place is refused, not waited for
                self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
        self._console = Console(
            file=stream, highlight=False, quiet=kind == "none", force_terminal=live, force_jupyter=False
        )
        self._num_ticks = num_ticks
        self._every = lines_every(num_ticks)
        self._table = RowTable([lane.name for lane in job.lanes], num_ticks)
        self._window: list[Mapping[str, Any]] = []
        self._finished = False
        self._quiet = kind == "none"
        self._began_s = self._said_s = time.monotonic()
        self._say(*head(job, num_ticks, done))
        self._panel = _Panel(job, num_ticks, done, self._console) if live else None
        if self._panel is None:
            self._say("")

    @property
    def is_live(self) -> bool:
        """Whether there is a display that is drawn anew."""
        return self._panel is not None

    def silence_left_s(self) -> float:
        """Seconds until ``working`` is due."""
        if self.is_live:
            return _REFRESH_S
        return SILENCE_S if self._quiet else max(0.0, self._said_s + SILENCE_S - time.monotonic())

    def working(self, executors: Mapping[str, str]) -> None:
        """Show what executors are at: executor -> words."""
        if self._panel is not None:
            self._panel.working = executors
        elif executors and not self._finished:
            words = " · ".join(f"{name} {at}" for name, at in executors.items())
            self._say(f"  {text.duration(time.monotonic() - self._began_s)}  {words}")

    def stopping(self, words: str) -> bool:
        """Show in the live panel that the run was asked to stop; False where there is none. Safe in a signal handler."""
        if self._panel is None:
            return False
        self._panel.stopping = words
        return True

    def on_report(self, executor: str, tick: int) -> None:
        """An executor has finished a tick."""
        if self._panel is not None:
            self._panel.ticks[executor] = tick

    def on_row(self, row: Mapping[str, Any]) -> None:
        """A tick is complete."""
        evaluation = text.evaluation_line(row)
        if evaluation:
            self._say(evaluation, style="green")
        if self._panel is not None:
            self._panel.add(row)
            return
        self._window.append(row)
        tick = int(row["step"])
        if tick % self._every == 0 or tick == self._num_ticks - 1:
            self._say_window()

    def message(self, line: str) -> None:
        """Say something once."""
        self._say(
            *textwrap.indent(line, "  ").splitlines(),
            style="yellow",
            level="warning" if line.startswith("warning") else "info",
        )

    def failed(self, cause: str) -> None:
        """Keep what ends the run, which whoever started it is told elsewhere."""
        self._keep(cause.splitlines(), "error")

    def finish(self, summary: RunSummary) -> None:
        """Say what came of it; further calls are ignored. Also after a failure: a terminal must be left as it was."""
        if self._finished:
            return
        self._finished = True
        if self._panel is not None:
            self._panel.live.stop()
        self._say_window()
        self._say(*text.tail(summary))
        self._close_log()

    def _say_window(self) -> None:
        if self._window:
            self._say(*self._table.lines(self._window))
            self._window = []

    def _say(self, *lines: str, style: str = "", level: str = "info") -> None:
        self._said_s = time.monotonic()
        encoding = self._console.encoding
        for line in lines:  # a question mark where the stream cannot hold a character
            said = Text(line.rstrip().encode(encoding, "replace").decode(encoding), style)
            with contextlib.suppress(OSError, SystemExit):  # rich ends a program whose reader is gone: a run goes on
                self._console.print(said, soft_wrap=True)
        self._keep(lines, level)

    def _keep(self, lines: Iterable[str], level: str) -> None:
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        said = [{"time": now, "level": level, "text": line.strip()} for line in lines if line.strip()]
        data = "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in said)
        try:
            with self._lock:
                if self._log >= 0:
                    append_all(self._log, data.encode("utf-8", "replace"))
        except OSError as error:  # it is for looking at: the run goes on
            self._close_log()
            self.message(f"cannot write {LOG_FILE}: {error.strerror}. It ends here; the run goes on")

    def _close_log(self) -> None:
        with self._lock:
            if self._log >= 0:
                os.close(self._log)
            self._log = -1


class RowTable:
    """Aligned rows under a heading that returns every 20 lines."""

    def __init__(self, executors: Sequence[str], num_ticks: int) -> None:
        self._executors = tuple(executors)
        self._num_ticks = num_ticks
        self._printed = 0
        self._step_s: list[float] = []

    def lines(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        """One line that sums up ``rows``, and a heading where due."""
        last = rows[-1]
        self._step_s += [float(row["time/step_s"]) for row in rows if row.get("time/step_s") is not None]
        num_left = self._num_ticks - int(last["step"]) - 1
        cells = [("tick", text.whole(last["step"]), 6), *text.columns(rows)]
        idle = [
            (name, text.percent(text.mean(rows, f"idle/{name}")), max(len(name), 5) + 2) for name in self._executors
        ]
        left = text.duration(text.time_left(self._step_s, num_left))
        cells += [*idle, ("left", left, 8)]
        lines = []
        if self._printed % _LINES_A_HEADING == 0:
            before = sum(width for _, _, width in cells[: -len(idle) - 1])
            span = sum(width for _, _, width in idle)
            lines += ["", " " * (before + 2) + " idle ".center(span - 2, "─")]
            lines.append("".join(f"{title:>{width}}" for title, _, width in cells))
        lines.append("".join(f"{value:>{width}}" for _, value, width in cells))
        self._printed += 1
        return lines


def lines_every(num_ticks: int) -> int:
    """Ticks a line, so that a run prints about 30: 1, 2, 5, 10, 20, 50 .."""
    step = 1
    while num_ticks / step > _LINES_A_RUN * 1.5:
        step = step * 5 // 2 if str(step)[0] == "2" else step * 2
    return step


class _Panel:
    """The live panel at the bottom of a terminal; what else is said scrolls above it."""

    def __init__(self, job: JobDescription, num_ticks: int, done: int, console: Console) -> None:
        self._job, self._num_ticks = job, num_ticks
        self.ticks: dict[str, int] = {}
        """Executor -> the last tick that it finished."""
        self.working: Mapping[str, str] = {}
        """Executor -> what it is at."""
        self.stopping = ""
        self._row: Mapping[str, Any] = {}
        self._held_out: tuple[str, float | None] = ("held out", None)
        self._num_failed = 0
        self._step_s: list[float] = []
        self._progress = Progress(
            TextColumn("[bold]ticks done"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[left]} left ·"),
            TimeElapsedColumn(),
            console=console,
            expand=True,
        )
        self._task = self._progress.add_task("", total=num_ticks, completed=done, left="?")
        self.live = Live(get_renderable=self._render, console=console, refresh_per_second=4, transient=True)
        self.live.start()

    def add(self, row: Mapping[str, Any]) -> None:
        self._row = row
        self._num_failed += int(row.get("reward/failed") or 0)
        self._step_s.append(float(row.get("time/step_s") or 0.0))
        self._held_out = text.held_out(row) or self._held_out
        done = int(row["step"]) + 1
        left_s = text.time_left(self._step_s, self._num_ticks - done)
        self._progress.update(self._task, completed=done, left=text.duration(left_s))

    def _render(self) -> Group:
        row = self._row
        said = {title: value for title, value, _ in text.columns([row]) if title not in ("ratio-clip", "s/tick")}
        if "failed" in said:
            said["failed"] = str(self._num_failed)
        said[self._held_out[0]] = text.number(self._held_out[1], 3)
        facts = Text("   ").join(Text.assemble((f"{title} ", "dim"), (value, "bold")) for title, value in said.items())
        lanes = Table.grid(padding=(0, 2))
        for lane in self._job.lanes:
            idle = row.get(f"idle/{lane.name}")
            tick = self.ticks.get(lane.name)
            lanes.add_row(
                Text(f"  {lane.name}", style="bold"),
                Text("starting" if tick is None and not row else f"tick {text.whole(tick)}", style="dim"),
                Text("" if idle is None else text.bar(1.0 - idle, 10), style="cyan"),
                Text(f"idle {text.percent(idle)}"),
                Text(self.working.get(lane.name, lane.detail), style="dim"),
            )
        asked = [Text(f"  {self.stopping}", style="yellow")] if self.stopping else []
        return Group(Text(""), self._progress, facts, lanes, *asked)


class LiveLines:
    """Shows how far the executors are while nothing else is said: a thread asks, every second where
    there is a live display, else after half a minute of silence, until it is closed.

    Args:
        ask: Executor -> what it is at, in words, of those at work; takes a few seconds at most.
    """

    def __init__(self, ask: Callable[[], Mapping[str, str]], console: ConsoleReporter) -> None:
        self._ask, self._console = ask, console
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="llamarl-live-lines", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Say no more. Idempotent."""
        self._closed.set()
        self._thread.join(_ENDS_S)

    def _run(self) -> None:
        while not self._closed.wait(self._console.silence_left_s()):
            if self._console.silence_left_s() <= 0 or self._console.is_live:
                found = self._ask()
                if not self._closed.is_set():
                    self._console.working(found)
