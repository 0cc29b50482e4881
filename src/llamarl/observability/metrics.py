"""``metrics.jsonl``: one JSON object a trainer tick, in order, the same bytes in every run but for timing keys.

    reports of tick k, from each executor, in any order ──TickJoin──▶ all of tick k, in order of ticks ──▶ one row

A row is written with one call when every executor has reported its tick. A resumed run cuts the
rows beyond its checkpoint and writes them again; since the run repeats itself bit for bit, the file
ends up as if nothing had happened.

``warnings.jsonl`` beside it holds what the run warned of, a line each with ``step``, ``kind``, ``text``.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from llamarl.errors import ConfigError, FileError, LlamaRLError
from llamarl.observability.keys import is_integer_key, is_timing_key, key_order
from llamarl.observability.writing import LineLog, Patience, writes
from llamarl.reading import open_regular, parse_json, read_bytes

__all__ = [
    "METRICS_FILE",
    "MetricsLog",
    "Row",
    "TickJoin",
    "WARNINGS_FILE",
    "WarningLog",
    "merge_metrics",
    "read_metrics",
    "read_warnings",
    "row_to_line",
    "strip_timing",
]

METRICS_FILE = "metrics.jsonl"
WARNINGS_FILE = "warnings.jsonl"

Row = dict[str, float | int | None]
"""Metric key -> value; None where the value is not finite."""

T = TypeVar("T")


class TickJoin(Generic[T]):
    """Holds what executors deliver until a tick is complete. Executors may be several ticks apart;
    ticks leave in order."""

    def __init__(self, executors: Sequence[str], first_tick: int = 0) -> None:
        self._executors = tuple(executors)
        self._next = first_tick
        self._waiting: dict[int, dict[str, T]] = {}

    def add(self, executor: str, tick: int, item: T) -> list[tuple[int, dict[str, T]]]:
        """Deliver one item; returns the ticks that it completes, each with its items in the order of the executors."""
        items = self._waiting.setdefault(tick, {})
        assert executor in self._executors and executor not in items and tick >= self._next, (executor, tick)
        items[executor] = item
        complete = []
        while len(self._waiting.get(self._next, ())) == len(self._executors):
            found = self._waiting.pop(self._next)
            complete.append((self._next, {name: found[name] for name in self._executors}))
            self._next += 1
        return complete


class MetricsLog(LineLog):
    """Writes rows; see the module. One process writes."""

    def __init__(
        self, run_dir: str | os.PathLike[str], resume_after_tick: int | None = None, *, patience: Patience | None = None
    ) -> None:
        """
        Args:
            run_dir: The run's folder; made if missing.
            patience: With a disk that refuses a row; None: none.
            resume_after_tick: Tick of the checkpoint from which the run goes on: later rows are
                cut. -1 starts over in a folder whose run had no checkpoint yet. None is a new run.

        Raises:
            ConfigError: The run is new and the folder already has metrics.
            LlamaRLError: The folder cannot be written.
        """
        super().__init__(Path(run_dir) / METRICS_FILE, patience)
        self.rows: tuple[Row, ...] = ()
        """Rows kept from before the resume."""
        with writes(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            holds_rows = self.path.exists() and self.path.stat().st_size > 0
        if holds_rows:
            if resume_after_tick is None:
                raise ConfigError(
                    f"run.dir: {self.path.parent} already holds a run ({METRICS_FILE}): resume it with "
                    f"--resume {self.path.parent}, or choose another run.dir"
                )
            rows = _whole_rows(self.path)
            kept = [(row, line) for row, line in rows if int(row.get("step") or 0) <= resume_after_tick]
            self.replace(line for _, line in kept)
            self.rows = tuple(row for row, _ in kept)
        self.append_lines(b"")  # tells at once where the folder cannot be written

    def write(self, row: Mapping[str, Any]) -> Row:
        """Append one row; returns it as a reader will see it.

        Raises:
            LlamaRLError: The disk is full or not writable, for longer than it is waited for.
        """
        line = row_to_line(row)
        self.append_lines(line)
        return json.loads(line)


class MetricClash(LlamaRLError, ValueError):
    """Two executors report different values under one key."""


def merge_metrics(tick: int, reported: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """One row from what each executor reported for ``tick``.

    ``time/*`` and ``tokens/*`` keys that several report are added; another key may come from
    several only with one value.

    Raises:
        MetricClash: Two executors report different values under one key; the message names them.
    """
    row: dict[str, float] = {"step": tick}
    owner: dict[str, str] = {"step": "the controller"}
    for executor, metrics in reported.items():
        for key, value in metrics.items():
            if key not in row:
                row[key], owner[key] = value, executor
            elif key.startswith(("time/", "tokens/")):
                row[key] += value
            elif row[key] != value and not (math.isnan(row[key]) and math.isnan(value)):
                raise MetricClash(
                    f"tick {tick}: {owner[key]} reports {key} = {row[key]}, {executor} reports {value}: "
                    f"let one of them choose another key"
                )
    return row


def row_to_line(row: Mapping[str, Any]) -> bytes:
    """Stable key order, shortest round-trip floats, whole numbers for counts, null for what is not finite."""
    return (json.dumps({key: _plain(key, row[key]) for key in key_order(row)}, allow_nan=False) + "\n").encode()


def read_metrics(run_dir: str | os.PathLike[str]) -> list[Row]:
    """Rows of a run's folder (or of the file itself). A line that is not whole is left out, as the last one is after a kill.

    Raises:
        LlamaRLError: There is no such file.
    """
    path = Path(run_dir)
    path = path / METRICS_FILE if path.is_dir() else path
    try:
        return [row for row, _ in _whole_rows(path)]
    except FileError as error:
        raise LlamaRLError(str(error)) from error


def strip_timing(row: Mapping[str, Any]) -> Row:
    """The part of a row that is the same in every run of one seed."""
    return {key: value for key, value in row.items() if not is_timing_key(key)}


def _plain(key: str, value: Any) -> float | int | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    number = float(value)
    if not math.isfinite(number):
        return None
    return int(number) if is_integer_key(key) and number.is_integer() else number


def _whole_rows(path: Path) -> Iterator[tuple[Row, bytes]]:
    """Rows with their lines; one that is not whole is left out."""
    with open_regular(path, max_bytes=None) as file:
        for line in file:
            try:
                row = parse_json(line, METRICS_FILE)
            except FileError:
                continue
            if line.endswith(b"\n") and isinstance(row, dict) and all(map(_is_value, row.values())):
                yield {sys.intern(key): value for key, value in row.items()}, line  # each key once, not once a row


def _is_value(value: Any) -> bool:
    return value is None or (isinstance(value, (int, float)) and math.isfinite(value))


class WarningLog(LineLog):
    """Appends warnings; those of ticks that a resumed run repeats are cut first. One process writes."""

    def __init__(self, run_dir: str | os.PathLike[str], resume_after_tick: int | None = None) -> None:
        """
        Raises:
            LlamaRLError: The folder cannot be read or written.
        """
        super().__init__(Path(run_dir) / WARNINGS_FILE)
        last = -1 if resume_after_tick is None else resume_after_tick
        kept = [warning for warning in read_warnings(run_dir) if warning["step"] <= last]
        self.said = frozenset(str(warning["kind"]) for warning in kept)
        """Kinds that were warned of before the resume."""
        if self.path.exists():
            self.replace(map(_warning_line, kept))

    def write(self, step: int, kind: str, text: str) -> None:
        """
        Raises:
            LlamaRLError: The disk is full or not writable.
        """
        self.append_lines(_warning_line({"step": step, "kind": kind, "text": text}))


def read_warnings(run_dir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The warnings of a run, oldest first; none where it has no such file. A line that is not whole is left out.

    Raises:
        LlamaRLError: The file cannot be read.
    """
    path = Path(run_dir) / WARNINGS_FILE
    if not path.exists():
        return []
    found = []
    for line in read_bytes(path, max_bytes=None).splitlines():
        try:
            warning = parse_json(line, WARNINGS_FILE)
        except FileError:
            continue
        if isinstance(warning, dict) and isinstance(warning.get("step"), int) and {"kind", "text"} <= warning.keys():
            found.append(warning)
    return found


def _warning_line(warning: dict[str, Any]) -> bytes:
    return (json.dumps(warning, ensure_ascii=False) + "\n").encode("utf-8", "replace")
