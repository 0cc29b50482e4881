"""``events.jsonl``: every decision of a run that its recipe and seed do not determine, enough to repeat it bit for bit.

    {"format": 1, "platform": {...}, "check": ...}                                    head
    {"tick": 0, "rank": 0, "swaps": [[0, 0], [17, 1]], "steps": 40, "delivered": "0-3", "digest": ..., "check": ...}
    ...                                                                               one line a generator rank and tick

Only ``schedule.weights = "latest"`` makes such decisions. ``swaps`` are the decisions: engine step
of the tick, and the policy version served from it on; with an environment also ``joins``: engine
step, prompt, sample and turn of each reply that joined before it. The rest follows from them and
lets a replay notice that it is no longer the same run: engine steps of the tick, prompt indices of
the groups that left, and a digest of their tokens, log-probabilities and versions.

Each line ends in a checksum of itself, so a line that was torn or changed is known. The controller
writes a tick's lines when the report of that tick arrives, before anything is done with it: a
decision that had a consequence is in the log.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash
from pydantic import TypeAdapter

from llamarl.determinism import platform_facts
from llamarl.errors import EventLogError, FileError
from llamarl.observability.writing import LineLog, Patience
from llamarl.reading import parse_json, read_bytes

__all__ = ["EVENTS_FILE", "REPLAY_FILE", "EventLog", "TickEvent", "event_platform", "ranges", "read_events"]

EVENTS_FILE = "events.jsonl"
"""In the run's folder: what this run decided."""

REPLAY_FILE = "replay.jsonl"
"""In the run's folder, if it repeats another run: that run's log."""

_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class TickEvent:
    """What one generator rank decided in one tick."""

    tick: int
    rank: int
    swaps: tuple[tuple[int, int], ...]
    """(engine step of the tick, version served from it on); the first at step 0."""
    steps: int
    """Engine steps of the tick."""
    delivered: str
    """Prompt indices of the groups that left, as ranges: ``0-3,5``."""
    digest: str
    """Of what left: tokens, log-probabilities and versions."""
    joins: tuple[tuple[int, int, int, int], ...] = ()
    """(engine step of the tick, prompt index, sample index, turn) of each reply of an environment, in order."""

    def to_plain(self) -> dict[str, Any]:
        record: dict[str, Any] = _EVENT.dump_python(self, mode="json")
        return {key: value for key, value in record.items() if key != "joins" or value}


_EVENT = TypeAdapter(TickEvent)


class EventLog(LineLog):
    """Appends to ``RUN/events.jsonl``. The file is made with the first event."""

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        resume_after_tick: int | None = None,
        *,
        platform: Mapping[str, str] | None = None,
        patience: Patience | None = None,
    ) -> None:
        """
        Args:
            patience: With a disk that refuses a line; None: none.
            resume_after_tick: Tick of the checkpoint from which the run goes on, -1 if it had none,
                None if it is new. Lines of later ticks, torn ones too, are cut: those are decided anew.
            platform: Of the hosts that hold the ranks (``joint_facts``); None: of this machine.

        Raises:
            EventLogError: A line of a kept tick is torn, or a decision of one is missing, from the first in the log on.
            LlamaRLError: The file cannot be written.
        """
        super().__init__(Path(run_dir) / EVENTS_FILE, patience)
        self._platform = platform
        if resume_after_tick is not None and self.path.exists():
            self._cut_after(resume_after_tick)

    def append(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Write the events of a tick at once; none makes no file."""
        lines = [_line(event) for event in events]
        if lines and not self._patience.write(self.path, lambda: self.path.exists() and self.path.stat().st_size):
            lines.insert(0, _line({"format": _FORMAT, "platform": dict(self._platform or platform_facts())}))
        if lines:
            self.append_lines(b"".join(lines))

    def _cut_after(self, tick: int) -> None:
        kept, first, torn = [], tick + 1, ""
        for number, line in enumerate(read_bytes(self.path, max_bytes=None).splitlines(keepends=True), start=1):
            try:
                record = _parse(line)
            except ValueError as error:
                torn = torn or _torn(self.path, number, error)
                continue
            if record.get("tick", -1) <= tick:
                if torn:
                    raise EventLogError(torn + self._go_on_without())
                kept.append(line)
                first = min(first, record.get("tick", first))
        self.replace(kept)
        try:
            read_events(self.path, num_ticks=tick + 1, first_tick=first)
        except EventLogError as error:
            raise EventLogError(f"{error}{self._go_on_without()}") from None

    def _go_on_without(self) -> str:
        return f". To go on all the same, remove {self.path}: the run cannot be repeated from its log then"


def read_events(
    path: str | os.PathLike[str], *, num_ticks: int, first_tick: int = 0
) -> dict[tuple[int, int], TickEvent]:
    """(tick, rank) -> decisions of ticks ``first_tick`` .. ``num_ticks`` - 1, every line proved.

    Raises:
        EventLogError: The file is missing, torn or altered, of another format, or does not reach that far.
    """
    path = Path(path)
    try:
        lines = read_bytes(path, max_bytes=None).splitlines(keepends=True)
    except FileError as error:
        raise EventLogError(f"{error}: a replay needs the run's event log") from None
    found: dict[tuple[int, int], TickEvent] = {}
    for number, line in enumerate(lines, start=1):
        try:
            record = _parse(line)
            if number == 1:
                if record.get("format") != _FORMAT:
                    raise ValueError(f"format {record.get('format')!r}, this llamarl reads format {_FORMAT}")
                continue
            event = _EVENT.validate_python(record)
        except ValueError as error:
            raise EventLogError(_torn(path, number, error)) from None
        found[event.tick, event.rank] = event
    ranks = {rank for _, rank in found}
    needed = range(first_tick, num_ticks)
    missing = next((t for t in needed if any((t, r) not in found for r in ranks) or not ranks), None)
    if missing is not None:
        raise EventLogError(
            f"{path} holds no decisions of tick {missing}, needed are ticks 0 to {num_ticks - 1}: "
            + (
                f"replay what there is with --run.num_ticks {missing}, or let the run go on first (--resume)"
                if missing
                else "it is empty"
            )
        )
    return {key: event for key, event in found.items() if key[0] < num_ticks}


def event_platform(path: str | os.PathLike[str]) -> dict[str, str]:
    """Where the log was begun (``platform_facts``)."""
    try:
        platform = _parse(read_bytes(path, max_bytes=None).partition(b"\n")[0] + b"\n").get("platform")
    except ValueError as error:
        raise EventLogError(_torn(Path(path), 1, error)) from None
    return {str(key): str(value) for key, value in platform.items()} if isinstance(platform, dict) else {}


def ranges(indices: Sequence[int]) -> str:
    """``[0, 1, 2, 5]`` -> ``"0-2,5"``."""
    parts: list[list[int]] = []
    for index in sorted(indices):
        if parts and index == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], index]
        else:
            parts.append([index])
    return ",".join("-".join(map(str, part)) for part in parts)


def _line(record: Mapping[str, Any]) -> bytes:
    return (json.dumps({**record, "check": _check(record)}) + "\n").encode()


def _check(record: Mapping[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(record, sort_keys=True).encode())


def _parse(line: bytes) -> dict[str, Any]:
    if not line.endswith(b"\n"):
        raise ValueError("it does not end")
    record = parse_json(line, "it")
    if not isinstance(record, dict):
        raise ValueError("it is no JSON object")
    check = record.pop("check", None)
    if check != _check(record):
        raise ValueError("it does not match its own checksum")
    return record


def _torn(path: Path, number: int, error: Exception) -> str:
    return (
        f"{path}, line {number} is torn or was altered ({error}): the run cannot be repeated from this log. If the run was "
        f"killed, --resume cuts the log to its last checkpoint and goes on; a log that was edited is lost"
    )
