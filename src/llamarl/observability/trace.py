"""Writes and reads ``trace.json``: who did what when, one lane an executor, for
https://ui.perfetto.dev or chrome://tracing.

Each tick is one slice of its executor's lane, with the spans inside it below; the gaps between
slices are the bubbles that asynchrony is there to close. The file is a JSON array in Chrome's trace
event format, whole after every append: the closing bracket is overwritten by the next event and its
own closing bracket, in one call. (Viewers also read a file without it.) A resumed run cuts the
ticks that it repeats and goes on where the file ends, so that the time it was down takes no room.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llamarl.errors import FileError
from llamarl.observability.writing import append_all, replace_file, writes
from llamarl.reading import open_regular, parse_json

__all__ = ["TRACE_FILE", "Slice", "Trace", "TraceWriter", "idle_share", "read_trace"]

TRACE_FILE = "trace.json"

_END = b"\n]\n"
_LEAD_S = 0.1
"""Room before the first event: executors that start together may report in another order than they started."""

Interval = tuple[float, float]
"""(start, end), seconds."""


def idle_share(intervals: Iterable[Interval], window: Interval) -> float:
    """Share of ``window`` that no interval covers, 0 .. 1. Intervals may overlap, nest and reach beyond the window."""
    start, end = window
    if end <= start:
        return 0.0
    busy, reached = 0.0, start
    for first, last in sorted(intervals):
        first, last = max(first, reached), min(last, end)
        if last > first:
            busy += last - first
            reached = last
    return max(0.0, 1.0 - busy / (end - start))


class TraceWriter:
    """Appends slices; see the module. One process writes."""

    def __init__(
        self, path: str | os.PathLike[str], lanes: Sequence[str], *, resume_after_tick: int | None = None
    ) -> None:
        """
        Args:
            path: The file; its folder exists.
            lanes: Executors, in the order in which they are shown.
            resume_after_tick: Cut the ticks after this one and go on at the end of what is left.
                None begins a new file.

        Raises:
            LlamaRLError: The file cannot be written.
        """
        self.path = Path(path)
        self._origin_s: float | None = None
        lines: list[bytes] = []  # of a long run they are a gigabyte, and their values several
        self._lane: dict[str, Any] = {}
        ends = [0.0]
        for event in () if resume_after_tick is None else _kept_events(self.path, resume_after_tick):
            lines.append(_line(event))
            if "ts" in event:
                ends.append(event["ts"] + event.get("dur", 0.0))
            if event.get("name") == "thread_name":
                self._lane[str(event.get("args", {}).get("name"))] = event.get("tid")
        self._shift_us = max(ends) + _LEAD_S * 1e6
        if len(ends) > 1:
            resumed = {"name": f"resumed after tick {resume_after_tick}", "ph": "i", "s": "g", "ts": self._shift_us}
            lines.append(_line(resumed | {"pid": 1, "tid": 0, "args": {"tick": resume_after_tick}}))
        else:
            lines, self._lane = [_line(_metadata("process_name", 0, {"name": "llamarl"}))], {}
        for name in lanes:
            if name not in self._lane:  # of executors that a resume adds too
                self._lane[name] = number = len(self._lane) + 1
                lines.append(_line(_metadata("thread_name", number, {"name": name})))
                lines.append(_line(_metadata("thread_sort_index", number, {"sort_index": number})))
        head = b"[\n" + b",\n".join(lines)
        with writes(self.path):
            replace_file(self.path, head + _END)
            self._file = os.open(self.path, os.O_WRONLY)
        self._end = len(head)

    def step(
        self,
        lane: str,
        tick: int,
        started_s: float,
        finished_s: float,
        *,
        spans: Iterable[tuple[str, float, float]] = (),
        args: Mapping[str, Any] | None = None,
    ) -> None:
        """One tick of one executor. ``spans`` (label, start, end) lie on the same clock; what
        reaches out of the tick is cut, and what ended before it, such as the bringing up of its
        ranks, lies there.

        Raises:
            LlamaRLError: The file cannot be written.
        """
        details = {"tick": tick} | dict(args or {})
        events = [self._slice(f"tick {tick}", "tick", lane, started_s, finished_s, details)]
        for label, start, end in sorted(spans, key=lambda span: (span[1], -span[2])):
            if not (start < end <= started_s and self._origin_s is not None and start >= self._origin_s):
                start, end = max(start, started_s), min(end, finished_s)
            if end >= start:
                events.append(self._slice(label, "span", lane, start, end, {"tick": tick}))
        self._append(events)

    def close(self) -> None:
        """Idempotent. The file is whole already."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _ts(self, at_s: float) -> int:
        """Nanoseconds on the file's own clock; integers, so that a span stays inside its tick after rounding."""
        if self._origin_s is None:
            self._origin_s = at_s
        return round((at_s - self._origin_s) * 1e9 + self._shift_us * 1e3)

    def _slice(
        self, name: str, category: str, lane: str, started_s: float, finished_s: float, args: Mapping[str, Any]
    ) -> dict[str, Any]:
        start, end = self._ts(started_s), self._ts(finished_s)
        place = {"ts": start / 1e3, "dur": (end - start) / 1e3, "pid": 1, "tid": self._lane[lane]}
        return {"name": name, "cat": category, "ph": "X"} | place | {"args": dict(args)}

    def _append(self, events: Sequence[Mapping[str, Any]]) -> None:
        data = b"".join(b",\n" + _line(event) for event in events)
        with writes(self.path):
            append_all(self._file, data + _END, self._end)
        self._end += len(data)


def _metadata(name: str, lane: int, args: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": 1, "tid": lane, "args": dict(args)}


def _line(event: Mapping[str, Any]) -> bytes:
    return json.dumps(event, separators=(",", ":")).encode()


def _kept_events(path: Path, after_tick: int) -> Iterator[dict[str, Any]]:
    """Events of an earlier file up to a tick."""
    for event in _events(path) if path.exists() else ():
        try:
            if event["ph"] in ("M", "X", "i") and int(event.get("args", {}).get("tick", -1)) <= after_tick:
                yield event
        except (ValueError, TypeError, AttributeError, KeyError, OverflowError):
            continue  # no event of ours


def _events(path: Path) -> Iterator[dict[str, Any]]:
    """The events of a file. A bracket, or a line in which a kill fell, is left out."""
    with open_regular(path, max_bytes=None) as file:
        for line in file:
            try:
                event = parse_json(line.rstrip(b"\r\n,"), str(path))
            except FileError:
                continue
            if isinstance(event, dict):
                yield event


@dataclass(frozen=True, slots=True)
class Slice:
    """One tick of an executor, or a span inside it. Seconds on the trace's own clock."""

    tick: int
    start_s: float
    end_s: float
    label: str = ""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """``trace.json`` as read: who worked when."""

    lanes: tuple[str, ...] = ()
    ticks: dict[str, list[Slice]] = field(default_factory=dict)
    """Executor -> its ticks, in order."""
    spans: dict[str, list[Slice]] = field(default_factory=dict)
    """Executor -> what its ticks spent their time on."""
    resumed: tuple[tuple[int, float], ...] = ()
    """(last tick kept, second) of each resume."""


def read_trace(path: Path) -> Trace:
    """Slices of a trace; a line that a kill tore, or that is no event of ours, is left out."""
    names: dict[int, str] = {}
    ticks: dict[int, dict[int, Slice]] = {}
    spans: dict[int, list[Slice]] = {}
    resumed: list[tuple[int, float]] = []
    for event in _events(path):
        try:
            kind, lane, args = event["ph"], int(event["tid"]), event.get("args", {})
            if kind == "M" and event["name"] == "thread_name":
                names[lane] = str(args["name"])
            elif kind == "X":
                start_s = event["ts"] / 1e6
                found = Slice(int(args["tick"]), start_s, start_s + event["dur"] / 1e6, str(event["name"]))
                if event.get("cat") == "tick":
                    ticks.setdefault(lane, {})[found.tick] = found
                else:
                    spans.setdefault(lane, []).append(found)
            elif kind == "i" and str(event["name"]).startswith("resumed"):
                resumed.append((int(args["tick"]), event["ts"] / 1e6))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            continue  # an event of another program
    return Trace(
        lanes=tuple(names[lane] for lane in sorted(names)),
        ticks={names[lane]: [found[t] for t in sorted(found)] for lane, found in ticks.items() if lane in names},
        spans={names[lane]: found for lane, found in spans.items() if lane in names},
        resumed=tuple(resumed),
    )
