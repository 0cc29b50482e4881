"""The log of ticks: what those that have counted made and others still need, outside of their processes.

    report of tick k ─▶ take ──▶ its segments are held ─▶ handles that name the controller's descriptors go into the marking
                        │          tokens  until the sink's tick that takes them is taken (if the sink's state is in
                        │                  checkpoints alone: until one that contains that tick is finished)
                        │          states  until that of the executor's next tick is
                        └▶ append ─▶ queue ─▶ thread ─▶ RUN/journal: what the report says, its tokens of data, its states
                                                        until a checkpoint contains the tick

What is held outlives its rank, what is written the controller, too: a resume reads it back into
memory of its own (:mod:`llamarl.controller.journaled`) and goes on from there. The form of both is
:mod:`llamarl.runtime.tick_record`.

Holding copies nothing: it opens a descriptor. What ranks of other hosts made is copied here first,
but for weights, which are as large as the model: they go with their process and are made again, as
they are not written either. A report whose process has ended before its tokens could be held is not
taken: its tick counts as not done (docs/survival.md). Files are not flushed: they survive the
controller, and of a machine's death as much as the disk has by then.
"""

from __future__ import annotations

import dataclasses
import queue
import shutil
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from llamarl.channels.base import ChannelKind, ChannelSpec, Handle
from llamarl.channels.data import DataHandle
from llamarl.errors import ChannelError, SourceGone
from llamarl.plural import plural
from llamarl.runtime.base import Report, SetupReport
from llamarl.runtime.tick_record import State, next_number, record_files, write_record
from llamarl.runtime.worker import RankReport, RankSetup
from llamarl.transports.held import HeldSegment
from llamarl.transports.remote_segment import copy_of
from llamarl.transports.segments import Segment, SegmentHandle, is_elsewhere, open_segment
from llamarl.transports.slots import HEADER_BYTES, SlotState, parse_header
from llamarl.weight_sync.slot import SlotHandle

__all__ = ["JOURNAL_FOLDER", "MAX_PAST_BYTES", "MAX_PAST_SEGMENTS", "Resumed", "TickLog", "copy_to_controller"]

JOURNAL_FOLDER = "journal"
"""In the run's folder."""
MAX_PAST_BYTES = 256 << 20
MAX_PAST_SEGMENTS = 256
"""Most that is held, per executor, of what it has read since its last checkpoint. Beyond, it is not
brought up again until the next one."""
MAX_BACKLOG_BYTES = 256 << 20
"""Where more waits to be written, nothing is added."""

K = TypeVar("K")
R = TypeVar("R", RankReport, RankSetup)


@dataclass(frozen=True)
class Resumed:
    """Where a run goes on, beyond its checkpoint."""

    reports: tuple[Report, ...] = ()
    """In the order in which they counted."""
    segments: list[Segment] = field(default_factory=list)
    """The memory that they name; whoever holds them may close it."""

    @property
    def last_tick(self) -> int:
        """Of anybody; -1 if there is none."""
        return max((report.tick for report in self.reports), default=-1)

    def describe(self, run_dir: Path) -> str:
        """For the console."""
        done = {report.executor: report.tick + 1 for report in self.reports}
        places = ", ".join(f"{name} after {plural(ticks, 'tick')}" for name, ticks in done.items())
        return f"{run_dir} goes on from its journal: {places}; nothing of these is generated or judged anew"


@dataclass(frozen=True)
class _Held:
    """Handles whose memory outlives its process for as long as this object lives."""

    handles: tuple[Handle, ...] = ()
    segments: tuple[HeldSegment, ...] = ()


@dataclass(kw_only=True)
class _Kept:
    """What is held of one executor."""

    reads: list[ChannelSpec]
    journaled: bool
    """It tells of its state after each tick."""
    rewinds: bool
    """Its state lies in checkpoints alone, and it reads nothing that cannot be held until the next one."""
    next_tick: int
    past_from: int
    """First tick from which on all that it has read is held, if it rewinds."""
    whole: bool
    """Nothing is missing of what is to be held of it; if something is, its death ends the run."""
    past: dict[int, dict[str, _Held]] = field(default_factory=dict)
    """Tick that has counted -> what it read, if it rewinds."""
    states: _Held = _Held()
    """After its last tick."""


class TickLog:
    """Of one job. All calls come from one thread; another one writes.

    Args:
        folder: ``RUN/journal``; None: nothing is written.
        run_id: Of the run: files of another one in this folder are not read.
        resumed: What counted before this process began; ``begin`` takes it.
        tell: Called once, with why, if writing cannot go on: the run does, and a resume then begins
            at the last checkpoint.
    """

    def __init__(
        self,
        folder: Path | None = None,
        run_id: str = "",
        *,
        resumed: Resumed | None = None,
        tell: Callable[[str], None] = print,
    ) -> None:
        self._resumed = resumed if resumed is not None else Resumed()
        self.counted = self._resumed.reports
        """What counted before this process began, in order."""
        self._segments: WeakValueDictionary[bytes, HeldSegment] = WeakValueDictionary()
        """By nonce: a slot that is written again is held once."""
        self._of: dict[str, _Kept] = {}
        self._source: dict[str, str] = {}
        self._weights: frozenset[str] = frozenset()
        self._one_slot: frozenset[str] = frozenset()
        """Channels whose slots are written again and again."""
        self._tokens: dict[tuple[str, int], _Held] = {}
        """Channel and source tick -> its token, held, as long as it lies on the edge."""
        self._missing: set[tuple[str, int]] = set()
        """Tokens on edges that were not whole when their process ended, and are to be made again."""
        self._recent: dict[tuple[str, int, int], HeldSegment] = {}
        """Channel, source rank and slot -> the segment last seen there: kept open, so that it keeps
        its name from tick to tick."""
        self._saved = 0
        """The first tick whose state before it can be had."""
        self._folder, self._run_id, self._tell = folder, run_id, tell
        self._number = next_number(folder) if folder is not None and folder.is_dir() else 0
        self._backlog = 0
        self._off = ""
        """Why nothing is written any more."""
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write_all, name="llamarl-journal", daemon=True)
        if folder is not None:
            self._thread.start()

    def begin(
        self,
        channels: Sequence[ChannelSpec],
        ready: Mapping[str, SetupReport],
        journaled: Collection[str] = (),
        *,
        first_tick: int = 0,
    ) -> Mapping[str, SetupReport]:
        """Hold what lies on edges at start, and what counted before this process began: the setup
        reports with handles that outlive their processes.

        Args:
            ready: Of all executors.
            journaled: Those that tell of their state after each tick. The others' lies in checkpoints alone.
            first_tick: Of the run: the states before it can be had from where the run began.

        Raises:
            SourceGone: A process has ended already; to be called again when it has been replaced.
        """
        self._let_go()
        self._saved = first_tick
        self._source = {channel.name: channel.source for channel in channels}
        self._weights = frozenset(channel.name for channel in channels if channel.kind is ChannelKind.WEIGHTS)
        self._one_slot = frozenset(channel.name for channel in channels if not channel.kept)
        for name in ready:
            reads = [channel for channel in channels if channel.sink == name]
            rewinds = name not in journaled and all(map(_is_kept, reads))
            self._of[name] = _Kept(
                reads=reads,
                journaled=name in journaled,
                rewinds=rewinds,
                next_tick=first_tick,
                past_from=first_tick,
                whole=rewinds or name in journaled,
            )
        held = {name: self._begin(setup) for name, setup in ready.items()}
        self.counted = tuple(map(self._take_counted, self.counted))
        for segment in self._resumed.segments:
            segment.close()
        return held

    def _begin(self, setup: SetupReport) -> SetupReport:
        own, made = self._of[setup.executor], setup.initial_tokens
        try:
            held = {name: {tick: self._hold(own, of) for tick, of in ticks.items()} for name, ticks in made.items()}
        except SourceGone:
            raise
        except ChannelError:  # it cannot be held: its process' death ends the run
            own.whole = False
            return setup
        for channel, ticks in held.items():
            for tick, token in ticks.items():
                self._place(channel, tick, token)
        tokens = {name: {tick: token.handles for tick, token in ticks.items()} for name, ticks in held.items()}
        return dataclasses.replace(setup, initial_tokens=tokens)

    def _take_counted(self, report: Report) -> Report:
        """States and tokens lie in memory of this process. Weights are not among the tokens, and are made again."""
        made = {name for name, source in self._source.items() if source == report.executor}
        self._missing |= {(name, report.tick) for name in made - report.outputs.keys()}
        held = self.take(report, is_new=False)
        assert held is not None, "memory of this process has gone"
        return held

    def replaceable(self) -> Mapping[str, int]:
        """Executors of which all that is needed is held -> the first tick that each would do again."""
        return {
            name: own.next_tick if own.journaled else self._saved
            for name, own in self._of.items()
            if own.whole and (own.journaled or own.past_from <= self._saved)
        }

    def states(self, executor: str) -> tuple[State, ...]:
        """Of its last report, one a rank; empty before the first, or where it keeps none."""
        return self._of[executor].states.handles

    def inputs(self, executor: str, tick: int) -> Mapping[str, tuple[Handle, ...]]:
        """What an executor read at a tick that has counted."""
        return {name: token.handles for name, token in self._of[executor].past[tick].items()}

    def take(self, report: Report, *, is_new: bool = True) -> Report | None:
        """Hold what ``report`` names, and let go what its executor has read: the same report with
        handles that outlive their process. Of a tick that has counted before, only tokens that were
        not whole then are left in it. None if the process has ended before.

        Args:
            is_new: False: it counted before this process began. Then it may lack the state, which a
                later one tells, and there is no limit to what is held of what its executor has
                read.
        """
        own, tick = self._of[report.executor], report.tick
        counts = tick >= own.next_tick
        if not counts:
            wanted = {name: of for name, of in report.outputs.items() if (name, tick) in self._missing}
            report = dataclasses.replace(report, outputs=wanted)
        if own.whole or not counts:
            try:
                report = self._hold_report(own, report, states=counts, is_new=is_new)
            except SourceGone:
                return None
            except ChannelError:  # it lives, and what it made cannot be held: from now on its death ends the run
                own.whole = False
        if not counts:
            self._missing -= {(name, tick) for name in report.outputs}
            return report
        own.next_tick = tick + 1
        taken = {edge.name: (edge.name, tick - edge.delay) for edge in own.reads}
        read = {name: self._tokens.pop(token, None) for name, token in taken.items()}
        self._missing.difference_update(taken.values())
        if own.rewinds and (own.whole or not is_new):
            self._remember(own, tick, read, limited=is_new)
        return report

    def torn(self, executor: str) -> frozenset[tuple[str, int]]:
        """(channel, tick) of tokens of an executor whose processes have ended that were not whole
        by then, or lay with them on another host. They are let go."""
        made = {token: held for token, held in self._tokens.items() if self._source[token[0]] == executor}
        torn = {token for token, held in made.items() if not all(map(_is_whole, held.handles))}
        for token in torn:
            del self._tokens[token]
        self._missing |= torn
        return frozenset(torn)

    def _hold_report(self, own: _Kept, report: Report, *, states: bool, is_new: bool) -> Report:
        """Raises ChannelError: something of it cannot be held; nothing of it is."""
        told = report.journal if states and own.journaled and (is_new or report.journal) else None
        if told is not None and not (told and all(isinstance(state, State) for state in told)):
            raise ChannelError("a rank keeps no journal")
        outputs = {name: self._hold(own, handles) for name, handles in report.outputs.items()}
        if told is not None:
            own.states = self._hold(own, told)
        for name, token in outputs.items():
            self._place(name, report.tick, token)
        made = {name: token.handles for name, token in outputs.items()}
        return dataclasses.replace(report, outputs=made, journal=own.states.handles if states else report.journal)

    def _hold(self, own: _Kept, handles: tuple[Handle, ...]) -> _Held:
        """The same handles as this process's descriptors. Versions of the weights that lie on another
        host, and can be made again, stay as they are.

        Raises:
            SourceGone: A process has ended.
            ChannelError: One cannot be held.
        """
        named, segments = list(handles), []
        for number, handle in enumerate(handles):
            if handle is None or (_is_lent(handle) and own.rewinds):
                continue
            if (address := _address(handle)) is None:
                raise ChannelError(f"a {type(handle).__name__} cannot be held")
            segment = self._segments[address.nonce] = self._segments.get(address.nonce) or HeldSegment(address)
            segments.append(segment)
            named[number] = dataclasses.replace(handle, address=segment.handle)
        return _Held(tuple(named), tuple(segments))

    def _place(self, channel: str, tick: int, token: _Held) -> None:
        """A token that is held lies on its edge. Slots that are written again and again stay open besides."""
        self._tokens[channel, tick] = token
        for handle in token.handles if channel in self._one_slot else ():
            if handle is not None and not _is_lent(handle):
                self._recent[channel, handle.source_rank, handle.slot] = self._segments[handle.address.nonce]

    def _remember(self, own: _Kept, tick: int, read: Mapping[str, _Held | None], *, limited: bool) -> None:
        """Keep what was read, or forget all that was if it becomes too much."""
        own.past[tick] = {name: token for name, token in read.items() if token is not None}
        tokens = [token for past in own.past.values() for token in past.values()]
        sizes = [segment.handle.size for token in tokens for segment in token.segments]
        too_much = limited and (len(sizes) > MAX_PAST_SEGMENTS or sum(sizes) > MAX_PAST_BYTES)
        if too_much or len(own.past[tick]) < len(read):
            own.past.clear()
            own.past_from = tick + 1

    def _let_go(self) -> None:
        for memory in (self._of, self._tokens, self._missing, self._recent):
            memory.clear()

    def saved(self, tick: int) -> None:
        """The states after ``tick`` are in a finished checkpoint: what was held, and written, to do
        ticks again until then goes."""
        if tick < self._saved:
            return
        self._saved = tick + 1
        for own in self._of.values():
            own.past = {at: read for at, read in own.past.items() if at > tick}
            own.past_from = max(own.past_from, self._saved)
        if self._folder is not None:
            self._work.put(partial(self._remove, tick))

    def close(self, *, done: bool = False) -> None:
        """Let all go, and return when all is written. Idempotent.

        Args:
            done: The run has reached its end: there is nothing to go on from.
        """
        self._let_go()
        if self._thread.is_alive():
            self._work.put(None)
            self._thread.join(60.0)
        if self._folder is not None and (done or self._off):
            shutil.rmtree(self._folder, ignore_errors=True)

    def append(self, report: Report) -> None:
        """Write a report that counts, as ``take`` has given it; returns at once."""
        if self._folder is None or self._off:
            return
        outputs = {name: handles for name, handles in report.outputs.items() if name not in self._weights}
        made = [handle for handles in (*outputs.values(), report.journal) for handle in handles if handle is not None]
        held = [self._segments.get(address.nonce) if (address := _address(handle)) else None for handle in made]
        if None in held:
            self._stop(f"what {report.executor!r} made at tick {report.tick} is not held by the controller")
            return
        if self._backlog > MAX_BACKLOG_BYTES:
            self._stop("the disk is too slow for it")
        num_bytes = sum(handle.address.size for handle in made)
        self._backlog += num_bytes
        report = dataclasses.replace(report, outputs=outputs)
        self._work.put(partial(self._write, self._number, report, held, num_bytes))
        self._number += 1

    def _write(self, number: int, report: Report, held: Sequence[HeldSegment | None], num_bytes: int) -> None:
        """
        Args:
            held: What the report names, which may be let go now.
        """
        assert self._folder is not None
        try:
            if not self._off:
                write_record(self._folder, number, report, self._run_id)
        finally:
            self._backlog -= num_bytes

    def _stop(self, why: str) -> None:
        assert self._folder is not None
        if not self._off:
            self._off, folder = why, self._folder
            self._work.put(partial(shutil.rmtree, folder, ignore_errors=True))  # the disk may need the room
            self._tell(f"the journal of ticks ends here: {why}. A resume begins at the last checkpoint")

    def _write_all(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except OSError as error:
                self._stop(f"{self._folder}: {error.strerror}")
            del work  # and with it what was held to be written

    def _remove(self, tick: int) -> None:
        assert self._folder is not None
        for path, of_tick in record_files(self._folder):
            if of_tick <= tick:
                path.unlink(missing_ok=True)


def copy_to_controller(result: R, deadline_s: float) -> tuple[R, list[Segment]]:
    """Copy what a rank of another host made, but for weights, into memory of this process before its
    report counts; any thread. Closing the segments frees what nobody holds.

    Args:
        deadline_s: For each piece.

    Raises:
        ChannelError: Its process has ended, or there is no memory here.
        DeadlineExceeded: It did not come in time.
    """
    copies: list[Segment] = []

    def copied(made: Mapping[K, Handle]) -> dict[K, Handle]:
        return {key: copied_one(handle) for key, handle in made.items()}

    def copied_one(handle: Handle) -> Handle:
        there = _address(handle)
        if there is None or isinstance(handle, SlotHandle) or not is_elsewhere(there):
            return handle
        copies.append(copy_of(there, deadline_s))
        here = dataclasses.replace(handle, address=copies[-1].handle)
        return dataclasses.replace(here, original=there) if isinstance(here, DataHandle) else here

    try:
        made: dict[str, Any]
        if isinstance(result, RankSetup):
            made = {"initial_tokens": {name: copied(ticks) for name, ticks in result.initial_tokens.items()}}
        else:
            made = {"outputs": copied(result.outputs), "journal": copied_one(result.journal)}
        return dataclasses.replace(result, **made), copies
    except BaseException:
        for segment in copies:
            segment.close()
        raise


def _is_kept(channel: ChannelSpec) -> bool:
    return channel.kept and channel.kind is not ChannelKind.WEIGHTS and not channel.latest


def _address(handle: Handle) -> SegmentHandle | None:
    """Of the segment that a token, or a state, lies in; None if that is something else."""
    known = isinstance(handle, DataHandle | SlotHandle | State) and isinstance(handle.address, SegmentHandle)
    return handle.address if known else None


def _is_lent(handle: Handle) -> bool:
    """Whether it is of a version of the weights on another host."""
    address = _address(handle)
    return isinstance(handle, SlotHandle) and address is not None and is_elsewhere(address)


def _is_whole(handle: Handle) -> bool:
    """Whether what the handle of a process that has ended promises is there, written to its end.
    Data is before its report; a version of the weights may be announced while it is still being
    copied."""
    if handle is None:
        return True
    if _is_lent(handle):
        return False
    if not isinstance(handle, SlotHandle) or handle.manifest_checksum is not None:
        return True
    segment = open_segment(handle.address)
    try:
        header = parse_header(segment.bytes[:HEADER_BYTES])
    finally:
        segment.close()
    return header is not None and (header.state, header.generation) == (SlotState.READY, handle.generation)
