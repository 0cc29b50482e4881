"""What a user sees while a run goes on: a head, progress, an end. Live on a terminal, plain lines elsewhere.

Both displays take the same calls from the recorder; what they say is made by plain functions (``text.py``).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any, Protocol, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from llamarl.observability import text
from llamarl.observability.config import ObservabilityConfig
from llamarl.observability.job_description import JobDescription
from llamarl.observability.summary import RunSummary, is_graded

__all__ = ["ConsoleReporter"]


class _Display(Protocol):
    def start(self) -> None: ...
    def on_report(self, executor: str, tick: int) -> None: ...
    def on_row(self, row: Mapping[str, Any]) -> None: ...
    def message(self, line: str) -> None: ...
    def finish(self, summary: RunSummary) -> None: ...


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
    ) -> None:
        """
        Args:
            num_ticks: Ticks of the whole run.
            done: Ticks that lie behind it at a resume.
            file: Where to; standard output if None.
        """
        stream = file if file is not None else sys.stdout
        kind = config.console
        if kind == "auto":
            kind = "rich" if stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb") else "plain"
        display: _Display
        if kind == "none":
            display = _Silent()
        elif kind == "rich":
            display = _Rich(job, num_ticks, done, Console(file=stream, highlight=False))
        else:
            display = _Plain(job, num_ticks, done, config.console_every, stream)
        self._display = display
        self._finished = False
        display.start()

    def on_report(self, executor: str, tick: int) -> None:
        """An executor has finished a tick."""
        self._display.on_report(executor, tick)

    def on_row(self, row: Mapping[str, Any]) -> None:
        """A tick is complete."""
        self._display.on_row(row)

    def message(self, line: str) -> None:
        """Say something once."""
        self._display.message(line)

    def finish(self, summary: RunSummary) -> None:
        """Say what came of it; further calls are ignored. Also after a failure: a terminal must be left as it was."""
        if not self._finished:
            self._finished = True
            self._display.finish(summary)


class _Silent:
    def start(self) -> None: ...
    def on_report(self, executor: str, tick: int) -> None: ...
    def on_row(self, row: Mapping[str, Any]) -> None: ...
    def message(self, line: str) -> None: ...
    def finish(self, summary: RunSummary) -> None: ...


class _Plain:
    """Lines that a log file, a pager or a README can hold."""

    def __init__(self, job: JobDescription, num_ticks: int, done: int, every: int, stream: TextIO) -> None:
        self._job, self._num_ticks, self._done, self._stream = job, num_ticks, done, stream
        self._every = every or text.lines_every(num_ticks)
        self._table = text.RowTable([lane.name for lane in job.lanes], num_ticks)
        self._window: list[Mapping[str, Any]] = []

    def start(self) -> None:
        self._say(*text.head(self._job, self._num_ticks, self._done), "")

    def on_report(self, executor: str, tick: int) -> None: ...

    def on_row(self, row: Mapping[str, Any]) -> None:
        self._window.append(row)
        evaluation = text.evaluation_line(row)
        if evaluation:
            self._say(evaluation)
        tick = int(row["step"])
        if (tick + 1) % self._every == 0 or tick + 1 == self._num_ticks:
            self._say(*self._table.lines(self._window))
            self._window = []

    def message(self, line: str) -> None:
        self._say(f"  {line}")

    def finish(self, summary: RunSummary) -> None:
        if self._window:
            self._say(*self._table.lines(self._window))
            self._window = []
        self._say(*text.tail(summary))

    def _say(self, *lines: str) -> None:
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        for line in lines:
            self._stream.write(text.encodable(line.rstrip(), encoding) + "\n")
        self._stream.flush()


class _Rich:
    """A live panel at the bottom; evaluations, messages, head and end scroll above it."""

    def __init__(self, job: JobDescription, num_ticks: int, done: int, console: Console) -> None:
        self._job, self._num_ticks, self._done, self._console = job, num_ticks, done, console
        self._ticks: dict[str, int] = {}
        self._row: Mapping[str, Any] = {}
        self._held_out: tuple[str, float | None] = ("accuracy", None)
        self._num_failed = 0
        self._step_s: list[float] = []
        self._progress = Progress(
            TextColumn("[bold]tick"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[left]} left"),
            TextColumn("·"),
            TimeElapsedColumn(),
            console=console,
            expand=True,
        )
        self._task = self._progress.add_task("", total=num_ticks, completed=done, left="?")
        self._live = Live(get_renderable=self._render, console=console, refresh_per_second=4, transient=True)

    def start(self) -> None:
        for line in text.head(self._job, self._num_ticks, self._done):
            self._console.print(Text(line), soft_wrap=True)
        self._live.start()

    def on_report(self, executor: str, tick: int) -> None:
        self._ticks[executor] = tick

    def on_row(self, row: Mapping[str, Any]) -> None:
        self._row = row
        self._num_failed += int(row.get("reward/failed") or 0)
        self._step_s.append(float(row.get("time/step_s") or 0.0))
        tick = int(row["step"])
        left_s = text.time_left(self._step_s, self._num_ticks - tick - 1)
        self._progress.update(self._task, completed=tick + 1, left=text.duration(left_s))
        evaluation = text.evaluation_line(row)
        if evaluation:
            graded = is_graded(row)
            self._held_out = ("held out", row["eval/reward_mean"]) if graded else ("accuracy", row.get("eval/accuracy"))
            self._console.print(Text(evaluation, style="green"), soft_wrap=True)

    def message(self, line: str) -> None:
        self._console.print(Text(f"  {line}", style="yellow"), soft_wrap=True)

    def finish(self, summary: RunSummary) -> None:
        self._live.stop()
        for line in text.tail(summary):
            self._console.print(Text(line), soft_wrap=True)

    def _render(self) -> Group:
        row = self._row
        facts = Table.grid(padding=(0, 3))
        facts.add_row(
            *(
                Text.assemble((label + " ", "dim"), (value, "bold"))
                for label, value in (
                    ("reward", text.number(row.get("reward/mean"), 3)),
                    (self._held_out[0], text.number(self._held_out[1], 3)),
                    ("no signal", text.percent(text.no_signal([row]))),
                    ("staleness", text.staleness(row.get("staleness/mean"), row.get("staleness/max"))),
                    ("tokens/s", text.count(row.get("tokens_per_s/generated"))),
                    ("length", text.number(row.get("response/length_mean"), 1)),
                    ("cut", text.percent(row.get("response/truncated_fraction"))),
                    ("failed rewards", str(self._num_failed)),
                )
            )
        )
        lanes = Table.grid(padding=(0, 2))
        for lane in self._job.lanes:
            idle = row.get(f"idle/{lane.name}")
            tick = self._ticks.get(lane.name)
            lanes.add_row(
                Text(f"  {lane.name}", style="bold"),
                Text("starting" if tick is None and not self._row else f"tick {text.whole(tick)}", style="dim"),
                Text(text.busy_bar(idle), style="cyan") if idle is not None else Text(""),
                Text(f"idle {text.percent(idle)}"),
                Text(lane.detail, style="dim"),
            )
        return Group(Text(""), self._progress, facts, lanes)
