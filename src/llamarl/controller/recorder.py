"""The hub of a run's records: reports come in, events, rows, curves, trace and console go out.

    report (executor, tick) ──┬──▶ events.jsonl          at once, before anything else
                              ├──▶ trace.json            at once
                              ├──▶ console               at once
                              └──▶ join by tick ──▶ row ──▶ metrics.jsonl, TensorBoard, sinks, console
                                                     └────▶ ledger (must close), findings ──▶ warnings.jsonl, console

The recorder adds what only it can know: how long each executor's tick took, how long it stood idle before, how long the
trainer's step took from end to end, and the rates. It lives in the controller's process and sees no payload. Event log,
trace and curves are begun with the first that is written to them.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from llamarl.channels.base import ChannelSpec
from llamarl.errors import CheckpointError, FileError
from llamarl.executors.base import ExecutorSpec
from llamarl.observability.console import LOG_FILE, ConsoleReporter
from llamarl.observability.events import EventLog
from llamarl.observability.findings import Causes, NewFindings
from llamarl.observability.job_description import Edge, JobDescription, Lane, write_job
from llamarl.observability.ledger import check_ledger
from llamarl.observability.metrics import (
    METRICS_FILE,
    WARNINGS_FILE,
    MetricsLog,
    Row,
    TickJoin,
    WarningLog,
    merge_metrics,
    read_warnings,
)
from llamarl.observability.rollouts import ROLLOUTS_FOLDER, cut_after
from llamarl.observability.sinks import GuardedSink, PrometheusSink, TensorBoardSink
from llamarl.observability.summary import RunSummary
from llamarl.observability.trace import TRACE_FILE, TraceWriter, idle_share
from llamarl.observability.trained_tokens import TRAINED_FOLDER
from llamarl.observability.writing import CannotWrite, Patience
from llamarl.plural import plural
from llamarl.runtime.base import Report
from llamarl.settings.observability import ObservabilityConfig

__all__ = ["Recorder", "TENSORBOARD_FOLDER", "WEIGHT_SYNC_SPAN", "describe_job"]

TENSORBOARD_FOLDER = "tensorboard"

_TRAINER = "trainer"
"""The executor whose ticks are the run's steps."""

_Timed = tuple[Report, float | None]
"""And the end of the executor's tick before; None for its first."""

WEIGHT_SYNC_SPAN = "weight_sync"
"""Spans whose label begins with this add up to ``time/weight_sync_s``."""


class _Closes(Protocol):
    def close(self) -> None: ...


T = TypeVar("T", bound=_Closes)


class _LookedAt(Generic[T]):
    """A file that nothing but eyes depends on: begun with the first that is written to it. A disk that refuses it ends it,
    not the run.

    Args:
        begin: Opens it; None: there is none.
        warn: Tells the user: called with ``tick`` and ``text``.
    """

    def __init__(self, begin: Callable[[], T] | None, warn: Callable[..., None]) -> None:
        self._begin, self._warn = begin, warn
        self.file: T | None = None

    def write(self, tick: int, write: Callable[[T], None]) -> None:
        """Have ``write`` add to it what ``tick`` brought."""
        if self._begin is None:
            return
        try:
            if self.file is None:
                self.file = self._begin()
            write(self.file)
        except (CannotWrite, FileError) as error:
            self.close()
            self._begin = None
            cause = error.cause if isinstance(error, CannotWrite) else error
            self._warn(tick=tick, text=f"{cause}. It ends here; the run goes on")

    def close(self) -> None:
        """Idempotent."""
        if self.file is not None:
            self.file.close()


class Recorder:
    """See the module. Every executor reports every tick, each in order."""

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        config: ObservabilityConfig,
        executors: Sequence[str],
        num_ticks: int,
        resume_after_tick: int | None = None,
        *,
        job: JobDescription | None = None,
        run_config: Mapping[str, Any] | None = None,
        group_baseline: bool = True,
        written_until: int = -1,
        disk_s: float = 0.0,
        platform: Mapping[str, str] | None = None,
    ) -> None:
        """
        Args:
            executors: Names, in the order in which they are shown.
            num_ticks: Ticks of the whole run, those before a resume included.
            resume_after_tick: Tick of the checkpoint from which the run goes on; -1 if it had none
                yet; None if it is new.
            job: What runs where, for the head of the console.
            run_config: The resolved configuration, for the sinks.
            group_baseline: Whether a group whose rewards are all equal gives no gradient, for the warnings.
            written_until: Tick of which the files of ranks (rollouts) stay, though its rows are written again: beyond
                ``resume_after_tick`` where the run goes on from its journal.
            disk_s: Seconds for which a row or an event waits for a disk that refuses it.
            platform: Of the hosts that hold the ranks, for the event log; None: of this machine.

        Raises:
            EventLogError: The event log of a run that goes on is torn, or lacks a decision of a tick that stays.
            ConfigError: A new run in a folder that holds one, or an extra that is not installed.
            LlamaRLError: The folder cannot be written.
        """
        self.run_dir = Path(run_dir)
        self._of_journal = range(written_until + 2 if written_until >= 0 else 0)  # carried tokens reach a tick further
        patience = Patience(disk_s)
        self._open_events = partial(EventLog, self.run_dir, resume_after_tick, platform=platform, patience=patience)
        self._events = None if resume_after_tick is None else self._open_events()
        self._log = MetricsLog(self.run_dir, resume_after_tick, patience=patience)
        self._warnings = WarningLog(self.run_dir, resume_after_tick)
        self._findings = NewFindings(group_baseline=group_baseline, rows=self._log.rows, said=self._warnings.said)
        self._warned = [
            (int(one["step"]), str(one["text"])) for one in read_warnings(self.run_dir) if one["kind"] != "restart"
        ]
        self._causes = Causes()
        self._sinks: list[PrometheusSink | GuardedSink] = []
        if resume_after_tick is not None:
            for name in (ROLLOUTS_FOLDER, TRAINED_FOLDER):
                cut_after(self.run_dir / name, max(resume_after_tick, written_until))
        path, folder = self.run_dir / TRACE_FILE, self.run_dir / TENSORBOARD_FOLDER
        trace = partial(TraceWriter, path, executors, resume_after_tick=resume_after_tick)
        curves = partial(TensorBoardSink, folder, resume_after_tick=resume_after_tick)
        self._trace = _LookedAt(trace if config.trace else None, partial(self.warn, kind="trace"))
        self._curves = _LookedAt(curves if config.tensorboard else None, partial(self.warn, kind="sink"))
        if config.prometheus_port:
            self._sinks.append(PrometheusSink(config.prometheus_port, self.run_dir.name))
        self._sinks += [
            GuardedSink(name, self.run_dir, run_config or {}, resume_after_tick, partial(self.warn, kind="sink"))
            for name in config.sinks
        ]
        self._join: TickJoin[_Timed] = TickJoin(executors, 0 if resume_after_tick is None else resume_after_tick + 1)
        self._finishes: dict[str, float] = {}
        self._began_s = time.monotonic()
        self._first_start_s: dict[bool, float] = {}
        """Of reports of this process, and of those that its journal tells of earlier ones."""
        self._summary = RunSummary()
        for row in self._log.rows:
            self._summary.add(row)
        lanes = tuple(Lane(name=name) for name in executors)
        description = job or JobDescription(title=self.run_dir.name, lanes=lanes)
        if job is not None:
            write_job(self.run_dir, job)
        self.console = ConsoleReporter(
            config, description, num_ticks, done=len(self._log.rows), log=self.run_dir / LOG_FILE
        )
        self._report_gap(resume_after_tick)
        self._last_row: Mapping[str, Any] | None = self._log.rows[-1] if self._log.rows else None
        self._closed = False

    def on_report(self, report: Report) -> list[Row]:
        """Take one report; returns the rows that it completed (mostly none or one).

        Raises:
            ValueError: A tick reported twice, an unknown executor, or one key with two values.
            LlamaRLError: The disk is full or not writable, or what the journal tells of a tick cannot be.
        """
        if report.events:
            self._events = self._events or self._open_events()
            self._events.append(report.events)
        try:
            return self._take(report)
        except (ValueError, ArithmeticError, AssertionError) as error:
            if report.tick not in self._of_journal:
                raise
            journal = self.run_dir / "journal"
            raise CheckpointError(
                f"what {journal} tells of tick {report.tick} cannot be used: {error}; remove {journal} to go on from the checkpoint"
            ) from error

    def _take(self, report: Report) -> list[Row]:
        timed = report, self._finishes.get(report.executor)
        self._finishes[report.executor] = report.finished_s
        own = self._is_own(report)
        self._first_start_s[own] = min(report.started_s, self._first_start_s.get(own, report.started_s))
        # Bytes through the controller vary by a few with process ids, so they are no key of metrics.jsonl.
        args = {key: float(value) for key, value in report.metrics.items() if math.isfinite(value)}
        args |= {"controller/bytes": float(report.controller_bytes)}
        self._trace.write(
            report.tick,
            lambda trace: trace.step(
                report.executor, report.tick, report.started_s, report.finished_s, spans=report.spans, args=args
            ),
        )
        self.console.on_report(report.executor, report.tick)
        return [self._write(tick, items) for tick, items in self._join.add(report.executor, report.tick, timed)]

    @property
    def rows(self) -> Sequence[Mapping[str, Any]]:
        """Those that are written, also from before a resume."""
        return self._log.rows

    def message(self, text: str) -> None:
        """Show a line to the user."""
        self.console.message(text)

    def warn(self, tick: int, kind: str, text: str) -> None:
        """Tell the user, and keep it in ``warnings.jsonl`` where that can be written."""
        self._keep_warning(tick, kind, text)
        self._warned.append((tick, text))
        self.message(f"warning, tick {tick}: {text}")

    def restarted(self, tick: int, text: str) -> None:
        """Note that an executor was restarted before its ``tick``."""
        self._keep_warning(tick, "restart", text)
        self.message(f"tick {tick}: {text}")

    def sync(self) -> None:
        """Have the disk hold every row and event so far. Call it before a checkpoint is finished.

        Raises:
            LlamaRLError: The disk failed.
        """
        self._log.sync()
        if self._events is not None:
            self._events.sync()

    def summary(self, stopped: str = "") -> RunSummary:
        """Totals so far, and where things lie."""
        places = {}
        for label, name in (
            ("policy", "model"),
            ("metrics", METRICS_FILE),
            ("rollouts", ROLLOUTS_FOLDER),
            ("checkpoints", "checkpoints"),
            ("warnings", WARNINGS_FILE),
            ("trace", TRACE_FILE),
            ("curves", TENSORBOARD_FOLDER),
        ):
            if os.path.exists(self.run_dir / name):  # False where the folder is out of reach
                places[label] = str(self.run_dir / name)
        self._summary.stopped, self._summary.places = stopped, places
        self._summary.failures = tuple(self._causes.lines())
        self._summary.warnings = tuple(self._warned)
        return self._summary

    def close(self, stopped: str = "") -> None:
        """Close every file and print the summary. Idempotent.

        Args:
            stopped: By what the run was stopped early ("by the user"); empty where it reached its last tick.
        """
        if self._closed:
            return
        self._closed = True
        self._trace.close()
        self._curves.close()
        for sink in self._sinks:
            sink.close(stopped)
        self.console.finish(self.summary(stopped))

    def _write(self, tick: int, items: Mapping[str, _Timed]) -> Row:
        row = self._timing(items) | merge_metrics(tick, {name: report.metrics for name, (report, _) in items.items()})
        if "tokens/generated" in row and row["time/step_s"] > 0:
            row["tokens_per_s/generated"] = row["tokens/generated"] / row["time/step_s"]
        written = self._log.write(row)
        self._summary.add(written)
        self._curves.write(tick, lambda curves: curves.write(written))
        for sink in self._sinks:
            sink.write(written)
        self.console.on_row(written)
        self._warn(written, [report.failures for report, _ in items.values()])
        self._check_tokens(written)
        return written

    def _warn(self, row: Row, failures: Sequence[Mapping[str, int]]) -> None:
        """Say what goes wrong, each kind once, and each new kind of cause for a failed reward."""
        new = [cause for found in failures for cause in self._causes.add(found)]
        said = ""
        for kind, text in self._findings.look(row, [cause for found in failures for cause in found]).items():
            self.warn(int(row["step"] or 0), kind, text)
            said += text
        for cause in new:
            if cause not in said:
                self.message(f"rewards fail, from tick {row['step']}: {cause}")

    def _keep_warning(self, tick: int, kind: str, text: str) -> None:
        try:
            self._warnings.write(tick, kind, text)
        except CannotWrite as error:  # the user is told all the same
            self.message(f"warning, tick {tick}: {error.cause}")

    def _check_tokens(self, row: Row) -> None:
        """Every row must account for every token, given the one before it; after a gap there is nothing to go by."""
        before, self._last_row = self._last_row, row
        follows = int(before["step"] or 0) + 1 == row["step"] if before is not None else row["step"] == 0
        if follows:
            check_ledger(row, before)

    def _timing(self, items: Mapping[str, _Timed]) -> dict[str, float]:
        """What the clock says of one tick. An executor's own value under the same key takes precedence."""
        row: dict[str, float] = {}
        weight_sync_s = 0.0
        for name, (report, before) in items.items():
            own = self._is_own(report)
            between_processes = own and before is not None and before < self._began_s  # no time of the run
            if before is None or between_processes:
                before = self._first_start_s[own]
            before = min(before, report.started_s)
            row[f"time/{name}_s"] = report.finished_s - report.started_s
            row[f"idle/{name}"] = idle_share([(report.started_s, report.finished_s)], (before, report.finished_s))
            if name == _TRAINER:
                row["time/step_s"] = report.finished_s - before
            weight_sync_s += sum(
                end - start for label, start, end in report.spans if label.startswith(WEIGHT_SYNC_SPAN)
            )
        row["time/weight_sync_s"] = weight_sync_s
        return row

    def _is_own(self, report: Report) -> bool:
        return report.started_s >= self._began_s

    def _report_gap(self, resume_after_tick: int | None) -> None:
        """A run that lost rows (a machine that lost power, a file removed by hand) says so instead of hiding it."""
        if resume_after_tick is None:
            return
        missing = set(range(resume_after_tick + 1)) - {int(row.get("step") or 0) for row in self._log.rows}
        if missing:
            self.message(
                f"{METRICS_FILE} lacks {plural(len(missing), 'row')} of before the resume, from step {min(missing)}"
            )


def describe_job(
    title: str,
    executors: Sequence[ExecutorSpec],
    channels: Sequence[ChannelSpec],
    *,
    details: Mapping[str, str],
    facts: Mapping[str, str],
    version_bytes: Mapping[str, float],
) -> JobDescription:
    """The description of a graph.

    Args:
        details: Executor -> what it does, in a few words.
        version_bytes: Weights channel -> bytes of one version at a source rank, if all hold as much.
    """
    lanes = tuple(Lane(**_shared(Lane, spec), detail=details.get(spec.name, "")) for spec in executors)
    edges = tuple(Edge(**_shared(Edge, spec), version_bytes=version_bytes.get(spec.name)) for spec in channels)
    return JobDescription(title=title, lanes=lanes, edges=edges, facts=dict(facts))


def _shared(kind: type[Lane | Edge], spec: Any) -> dict[str, Any]:
    """The fields of a part of the job that its description has too."""
    return {field.name: getattr(spec, field.name) for field in fields(kind) if hasattr(spec, field.name)}
