"""What the controller holds of executors, so that a report that it has taken stays true when its process dies.

    report of tick k ─┬─ tokens ─▶ held until the sink's tick that takes them is taken ─▶ handles that name the controller's
                      │                                                                    descriptors go into the marking
                      └─ state  ─▶ held until that of the executor's next tick is

Only descriptors: no byte of a payload passes through the controller. A report whose process has ended before its tokens could be
held is not taken: its tick counts as not done (docs/survival.md).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from llamarl.channels.base import ChannelSpec, Handle
from llamarl.channels.data import DataHandle
from llamarl.errors import ChannelError
from llamarl.runtime.base import Report
from llamarl.runtime.kept_states import KeptState
from llamarl.transports.held import HeldSegments
from llamarl.transports.segments import SegmentHandle

__all__ = ["KeptTokens"]


class KeptTokens:
    """Of one job.

    Args:
        fresh: Executors that keep a journal: before their first report there is nothing to hold of them.
    """

    def __init__(self, channels: Sequence[ChannelSpec], fresh: Collection[str]) -> None:
        self._segments = HeldSegments()
        self._reads: dict[str, list[ChannelSpec]] = {}
        for channel in channels:
            self._reads.setdefault(channel.sink, []).append(channel)
        self._tokens: dict[tuple[str, int], list[SegmentHandle]] = {}
        """Channel and source tick -> segments that its token lies in."""
        self._recent: dict[tuple[str, int, int], SegmentHandle] = {}
        """Channel, source rank and slot -> the segment last seen there: kept open, so that it keeps its name from tick to tick."""
        self._states: dict[str, tuple[KeptState, ...]] = {}
        delayed = {channel.source for channel in channels if channel.delay}  # what lies on it at start is not held
        self._whole = set(fresh) - delayed

    @property
    def whole(self) -> frozenset[str]:
        """Executors of which all that is needed is held."""
        return frozenset(self._whole)

    @property
    def num_segments(self) -> int:
        return len(self._segments)

    def state(self, executor: str) -> tuple[KeptState, ...]:
        """Of its last report, one a rank; empty before the first."""
        return self._states.get(executor, ())

    def take(self, report: Report) -> Report | None:
        """Hold what ``report`` names, and let go what its executor has read: the same report with handles that outlive their
        process. None if the process has ended before."""
        if report.executor in self._whole:
            try:
                held = self._hold(report)
            except ChannelError:  # it lives, and what it made cannot be held: from now on its death ends the run
                self._whole.discard(report.executor)
            else:
                if held is None:
                    return None
                report = held
        for channel in self._reads.get(report.executor, ()):
            self._let_go(self._tokens.pop((channel.name, report.tick - channel.delay), []))
        return report

    def close(self) -> None:
        """Let all go."""
        self._segments.close()

    def _hold(self, report: Report) -> Report | None:
        """Raises ChannelError: something of it cannot be held, though its process lives."""
        states = [state for state in report.journal if isinstance(state, KeptState)]
        if not states or len(states) < len(report.journal):
            raise ChannelError("a rank keeps no journal")
        handles = {name: list(of_ranks) for name, of_ranks in report.outputs.items()}
        segments = [state.segment for state in states]
        segments += [_segment(handle) for of_ranks in handles.values() for handle in of_ranks if handle is not None]
        held: list[SegmentHandle] = []
        try:
            for segment in segments:
                one = self._segments.hold(segment)
                if one is None:
                    self._let_go(held)
                    return None
                held.append(one)
        except ChannelError:
            self._let_go(held)
            raise
        place = iter(held)
        before = self._states.get(report.executor, ())
        self._states[report.executor] = tuple(replace(state, segment=next(place)) for state in states)
        self._let_go([state.segment for state in before])
        outputs: dict[str, tuple[Handle, ...]] = {}
        for name, of_ranks in handles.items():
            now = [None if h is None else replace(h, address=next(place)) for h in of_ranks]
            outputs[name] = tuple(now)
            tokens = self._tokens[name, report.tick] = []
            for handle in now:
                if handle is not None:
                    tokens.append(handle.address)
                    self._remember((name, handle.source_rank, handle.slot), handle.address)
        return replace(report, outputs=outputs)

    def _remember(self, slot: tuple[str, int, int], segment: SegmentHandle) -> None:
        before = self._recent.get(slot)
        self._segments.hold(segment)
        self._recent[slot] = segment
        if before is not None:
            self._segments.let_go(before)

    def _let_go(self, segments: Sequence[SegmentHandle]) -> None:
        for segment in segments:
            self._segments.let_go(segment)


def _segment(handle: Handle) -> SegmentHandle:
    if isinstance(handle, DataHandle) and isinstance(handle.address, SegmentHandle):
        return handle.address
    raise ChannelError(f"a {type(handle).__name__} cannot be held")
