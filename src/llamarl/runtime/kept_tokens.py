"""What the controller holds of executors, so that a report that it has taken stays true when its process dies.

    report of tick k ─┬─ tokens ─▶ held until the sink's tick that takes them is taken ─▶ handles that name the controller's
                      │            (if the sink's state is in checkpoints alone: until       descriptors go into the marking
                      │            one that contains that tick is finished)
                      └─ state  ─▶ held until that of the executor's next tick is

Only descriptors: nothing is copied, but what came from other hosts
    (:mod:`llamarl.runtime.copy_to_controller`). Weights on another host are not
held: they go with their process, and are made again. A report whose process has ended before its tokens could be
held is not taken: its tick counts as not done (docs/survival.md).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from llamarl.channels.base import ChannelKind, ChannelSpec, Handle
from llamarl.channels.data import DataHandle
from llamarl.errors import ChannelError
from llamarl.runtime.base import Report, SetupReport
from llamarl.runtime.kept_states import KeptState
from llamarl.transports.held import HeldSegments
from llamarl.transports.segments import SegmentHandle, is_elsewhere, open_segment
from llamarl.transports.slots import HEADER_BYTES, SlotState, parse_header
from llamarl.weight_sync.manifest import SlotHandle

__all__ = ["MAX_PAST_BYTES", "MAX_PAST_SEGMENTS", "KeptTokens"]

MAX_PAST_BYTES = 256 << 20
MAX_PAST_SEGMENTS = 256
"""Most that is held, per executor, of what it has read since its last checkpoint. Beyond, it is not
brought up again until the next one."""

_Tokens = Mapping[str, tuple[Handle, ...]]
"""Channel -> handles."""


class KeptTokens:
    """Of one job.

    Args:
        executors: All names.
        journaled: Those that tell of their state after each tick. The others' lies in checkpoints alone.
        first_tick: Of the run: the states before it can be had from where the run began.
    """

    def __init__(
        self,
        channels: Sequence[ChannelSpec] = (),
        executors: Collection[str] = (),
        journaled: Collection[str] = (),
        *,
        first_tick: int = 0,
    ) -> None:
        self._segments = HeldSegments()
        self._reads: dict[str, list[ChannelSpec]] = {name: [] for name in executors}
        for channel in channels:
            self._reads[channel.sink].append(channel)
        self._source = {channel.name: channel.source for channel in channels}
        self._kept = {channel.name for channel in channels if channel.kept}
        self._tokens: dict[tuple[str, int], tuple[Handle, ...]] = {}
        """Channel and source tick -> its token, held, as long as it lies on the edge."""
        self._missing: set[tuple[str, int]] = set()
        """Tokens on edges that were not whole when their process ended, and are to be made again."""
        self._recent: dict[tuple[str, int, int], SegmentHandle] = {}
        """Channel, source rank and slot -> the segment last seen there: kept open, so that it keeps
        its name from tick to tick."""
        self._states: dict[str, tuple[KeptState, ...]] = {}
        self._journaled = frozenset(journaled)
        self._done = dict.fromkeys(self._reads, first_tick)
        """Executor -> its next tick."""
        self._saved = first_tick
        """The first tick whose state before it can be had."""
        rewinds = (name for name, reads in self._reads.items() if name not in self._journaled and _are_kept(reads))
        self._past: dict[str, dict[int, dict[str, tuple[Handle, ...]]]] = {name: {} for name in rewinds}
        """Executor whose state is in checkpoints alone -> tick that has counted -> what it read."""
        self._past_from = dict.fromkeys(self._past, first_tick)
        """Executor -> first tick from which on all that is held."""
        self._whole = self._journaled | self._past.keys()

    def begin(self, ready: Mapping[str, SetupReport]) -> Mapping[str, SetupReport] | None:
        """Hold what lies on edges at start: the same reports with handles that outlive their
        processes. None if one of these has ended already."""
        held = {}
        for name, report in ready.items():
            tokens: dict[str, dict[int, tuple[Handle, ...]]] = {}
            for channel, ticks in report.initial_tokens.items():
                for tick, handles in ticks.items():
                    try:
                        now = self._hold_all(channel, handles)
                    except ChannelError:  # it cannot be held: its process' death ends the run
                        self._whole -= {name}
                        now = handles
                    else:
                        if now is None:
                            return None
                        self._place(channel, tick, now)
                    tokens.setdefault(channel, {})[tick] = now
            held[name] = replace(report, initial_tokens=tokens)
        return held

    @property
    def num_segments(self) -> int:
        return len(self._segments)

    def replaceable(self) -> Mapping[str, int]:
        """Executors of which all that is needed is held -> the first tick that each would do again."""
        found = {}
        for name in self._reads:
            if name not in self._whole:
                continue
            if name in self._journaled:
                found[name] = self._done[name]
            elif self._past_from[name] <= self._saved:
                found[name] = self._saved
        return found

    def state(self, executor: str) -> tuple[KeptState, ...]:
        """Of its last report, one a rank; empty before the first, or where it keeps none."""
        return self._states.get(executor, ())

    def inputs(self, executor: str, tick: int) -> _Tokens:
        """What an executor read at a tick that has counted."""
        return self._past[executor][tick]

    def take_counted(self, reports: Iterable[Report]) -> list[Report]:
        """Take what counted before this process began, in order: states and tokens lie in memory of
        this one. Weights are not among the tokens, and are made again."""
        taken = []
        for report in reports:
            made = {name for name, source in self._source.items() if source == report.executor}
            self._missing |= {(name, report.tick) for name in made - report.outputs.keys()}
            held = self.take(report, is_new=False)
            assert held is not None, "memory of this process has gone"
            taken.append(held)
        return taken

    def take(self, report: Report, *, is_new: bool = True) -> Report | None:
        """Hold what ``report`` names, and let go what its executor has read: the same report with
        handles that outlive their process. Of a tick that has counted before, only tokens that were
        not whole then are left in it. None if the process has ended before.

        Args:
            is_new: False: it counted before this process began. Then it may lack the state, which a
                later one tells, and there is no limit to what is held of what its executor has
                read.
        """
        name, tick = report.executor, report.tick
        if tick < self._done[name]:
            return self._take_again(report)
        if name in self._whole:
            try:
                held = self._hold(report, is_new=is_new)
            except ChannelError:  # it lives, and what it made cannot be held: from now on its death ends the run
                self._whole -= {name}
            else:
                if held is None:
                    return None
                report = held
        self._done[name] = tick + 1
        read = {edge.name: self._tokens.pop((edge.name, tick - edge.delay), None) for edge in self._reads[name]}
        self._missing -= {(edge.name, tick - edge.delay) for edge in self._reads[name]}
        if name in self._past and (name in self._whole or not is_new):
            self._remember(name, tick, read, limited=is_new)
        else:
            self._let_go(handle for handles in read.values() for handle in handles or ())
        return report

    def torn(self, executor: str) -> frozenset[tuple[str, int]]:
        """(channel, tick) of tokens of an executor whose processes have ended that were not whole
        by then, or lay with them on another host. They are let go."""
        torn = {
            token for token, handles in self._tokens.items()
            if self._source[token[0]] == executor and not all(map(_is_whole, handles))
        }  # fmt: skip
        for token in torn:
            self._let_go(self._tokens.pop(token))
        self._missing |= torn
        return frozenset(torn)

    def saved(self, tick: int) -> None:
        """The states after ``tick`` are in a checkpoint: what was read until then is let go."""
        self._saved = max(self._saved, tick + 1)
        for name, past in self._past.items():
            for old in [t for t in past if t < self._saved]:
                self._let_go(handle for handles in past.pop(old).values() for handle in handles)
            self._past_from[name] = max(self._past_from[name], self._saved)

    def close(self) -> None:
        """Let all go."""
        self._segments.close()

    def _take_again(self, report: Report) -> Report | None:
        wanted = {name: of for name, of in report.outputs.items() if (name, report.tick) in self._missing}
        for name, handles in list(wanted.items()):
            try:
                held = self._hold_all(name, handles)
            except ChannelError:
                self._whole -= {report.executor}
            else:
                if held is None:
                    return None
                wanted[name] = held
                self._place(name, report.tick, held)
            self._missing.discard((name, report.tick))
        return replace(report, outputs=wanted)

    def _remember(
        self, executor: str, tick: int, read: Mapping[str, tuple[Handle, ...] | None], *, limited: bool
    ) -> None:
        """Keep what was read, or forget all that was if it becomes too much."""
        past = self._past[executor]
        past[tick] = {name: handles for name, handles in read.items() if handles is not None}
        segments = [_segment(h) for of in past.values() for handles in of.values() for h in handles if h is not None]
        too_much = limited and (
            len(segments) > MAX_PAST_SEGMENTS or sum(segment.size for segment in segments) > MAX_PAST_BYTES
        )
        if too_much or len(past[tick]) < len(read):
            for tokens in past.values():
                self._let_go(handle for handles in tokens.values() for handle in handles)
            past.clear()
            self._past_from[executor] = tick + 1

    def _hold(self, report: Report, *, is_new: bool) -> Report | None:
        """Raises ChannelError: something of it cannot be held, though its process lives."""
        journaled = report.executor in self._journaled and (is_new or bool(report.journal))
        states = [state for state in report.journal if isinstance(state, KeptState)]
        if journaled and (not states or len(states) < len(report.journal)):
            raise ChannelError("a rank keeps no journal")
        done: list[Handle] = []
        kept: list[SegmentHandle] = []
        outputs: dict[str, tuple[Handle, ...]] = {}
        try:
            for name, handles in report.outputs.items():
                held = self._hold_all(name, handles)
                if held is None:
                    self._let_go(done)
                    return None
                outputs[name] = held
                done += held
            for state in states if journaled else ():
                one = self._segments.hold(state.segment)
                if one is None:
                    break
                kept.append(one)
        except ChannelError:
            self._let_go(done)
            self._let_go_segments(kept)
            raise
        if journaled and len(kept) < len(states):  # a process has ended
            self._let_go(done)
            self._let_go_segments(kept)
            return None
        if journaled:
            before = self._states.get(report.executor, ())
            self._states[report.executor] = tuple(
                replace(state, segment=segment) for state, segment in zip(states, kept, strict=True)
            )
            self._let_go_segments([state.segment for state in before])
        for name, handles in outputs.items():
            self._place(name, report.tick, handles)
        return replace(report, outputs=outputs, journal=self._states.get(report.executor, ()))

    def _hold_all(self, channel: str, handles: Sequence[Handle]) -> tuple[Handle, ...] | None:
        """The handles of a token as this process's descriptors; None if a process has ended.
        Versions of the weights that lie on another host, and can be made again, stay as they are.

        Raises:
            ChannelError: They cannot be held; none is.
        """
        held: list[Handle] = []
        try:
            for handle in handles:
                if handle is None or (_is_lent(handle) and self._source[channel] in self._past):
                    held.append(handle)
                    continue
                one = self._segments.hold(_segment(handle))
                if one is None:
                    self._let_go(held)
                    return None
                held.append(replace(handle, address=one))
        except ChannelError:
            self._let_go(held)
            raise
        return tuple(held)

    def _place(self, channel: str, tick: int, handles: tuple[Handle, ...]) -> None:
        """A token that is held lies on its edge. Slots that are written again and again stay open besides."""
        self._tokens[channel, tick] = handles
        for handle in handles if channel not in self._kept else ():
            if handle is not None and not _is_lent(handle):
                place = channel, handle.source_rank, handle.slot
                before = self._recent.get(place)
                self._segments.hold(handle.address)
                self._recent[place] = handle.address
                if before is not None:
                    self._segments.let_go(before)

    def _let_go(self, handles: Iterable[Handle]) -> None:
        for handle in handles:
            if handle is not None and not _is_lent(handle):
                self._segments.let_go(handle.address)

    def _let_go_segments(self, segments: Iterable[SegmentHandle]) -> None:
        for segment in segments:
            self._segments.let_go(segment)


def _are_kept(reads: Sequence[ChannelSpec]) -> bool:
    return all(channel.kept and channel.kind is not ChannelKind.WEIGHTS and not channel.latest for channel in reads)


def _segment(handle: Handle) -> SegmentHandle:
    if isinstance(handle, DataHandle | SlotHandle) and isinstance(handle.address, SegmentHandle):
        return handle.address
    raise ChannelError(f"a {type(handle).__name__} cannot be held")


def _is_lent(handle: Handle) -> bool:
    """Whether it is of a version of the weights on another host."""
    return isinstance(handle, SlotHandle) and isinstance(handle.address, SegmentHandle) and is_elsewhere(handle.address)


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
