"""Idle gaps of every executor, and what each gap waited for. Pure.

An executor may begin tick k when its tick k - 1 is done, every channel into it holds the token of
tick k - delay, and every channel out of it has room: its sink is done with tick k + delay -
capacity. Of these, the last to happen ended the gap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llamarl.observability.job_description import Edge
from llamarl.observability.trace import Slice, Trace

__all__ = ["Gap", "channels_of", "find_gaps", "timeline_columns"]

_SAME_MOMENT_S = 1e-6
_MS = 3
"""Digits after the point of a millisecond that the page keeps."""


@dataclass(frozen=True, kw_only=True)
class Gap:
    """An executor did nothing before its tick."""

    lane: str
    tick: int
    """The tick that could not begin yet."""
    start_s: float
    end_s: float
    cause_lane: str = ""
    """Executor whose tick ended last of those that it needed; empty: nothing that is known was missing."""
    cause_tick: int = -1
    cause_end_s: float = 0.0
    channel: str = ""
    for_room: bool = False
    """It waited for room on ``channel``, not for a token."""


def channels_of(job: Mapping[str, Any]) -> list[Edge]:
    """The channels that ``job.json`` names; none where it is missing."""
    found = []
    for entry in job.get("channels", []):
        try:
            name, source, sink = (str(entry[key]) for key in ("name", "source", "sink"))
            capacity = None if entry.get("capacity") is None else int(entry["capacity"])
            found.append(Edge(name=name, source=source, sink=sink, delay=int(entry["delay"]), capacity=capacity))
        except (KeyError, TypeError, ValueError, AttributeError):
            continue  # written by another version
    return found


def find_gaps(trace: Trace, channels: Sequence[Edge]) -> list[Gap]:
    """Every gap, executor by executor, in order of ticks; the first is the wait since the first executor began."""
    starts = [slices[0].start_s for slices in trace.ticks.values() if slices]
    if not starts:
        return []
    began_s = min(starts)
    ends = {lane: {s.tick: s.end_s for s in slices} for lane, slices in trace.ticks.items()}
    gaps = []
    for lane in trace.lanes:
        before_s = began_s
        for one in trace.ticks.get(lane, []):
            begin_s = max([before_s, *(at for _, at in trace.resumed if before_s <= at <= one.start_s)])
            if one.start_s - begin_s > _SAME_MOMENT_S:
                gaps.append(_explained(lane, one, begin_s, channels, ends))
            before_s = one.end_s
    return gaps


def _explained(
    lane: str, one: Slice, begin_s: float, channels: Sequence[Edge], ends: Mapping[str, Mapping[int, float]]
) -> Gap:
    needs = []  # executor, its tick, channel, whether room is what it waits for
    for channel in channels:
        if channel.sink == lane:
            needs.append((channel.source, one.tick - channel.delay, channel.name, False))
        if channel.source == lane and channel.capacity is not None:
            needs.append((channel.sink, one.tick + channel.delay - channel.capacity, channel.name, True))
    known = [(ends[who][k], who, k, name, room) for who, k, name, room in needs if k in ends.get(who, {})]
    known = [need for need in known if begin_s < need[0] <= one.start_s + _SAME_MOMENT_S]
    gap = Gap(lane=lane, tick=one.tick, start_s=begin_s, end_s=one.start_s)
    if not known:
        return gap
    at_s, who, tick, name, room = max(known, key=lambda need: need[0])
    return replace(gap, cause_lane=who, cause_tick=tick, cause_end_s=at_s, channel=name, for_room=room)


def timeline_columns(trace: Trace, channels: Sequence[Edge]) -> dict[str, Any]:
    """The page's block: times in milliseconds since the first executor began."""
    gaps = find_gaps(trace, channels)
    began_s = min((slices[0].start_s for slices in trace.ticks.values() if slices), default=0.0)

    def ms(seconds: float) -> float:
        return round(seconds * 1e3, _MS)

    def places(of: Sequence[Slice] | Sequence[Gap], prefix: str = "") -> dict[str, list[Any]]:
        return {
            f"{prefix}tick": [one.tick for one in of],
            f"{prefix}start": [ms(one.start_s - began_s) for one in of],
            f"{prefix}length": [ms(one.end_s - one.start_s) for one in of],
        }

    labels = sorted({span.label for spans in trace.spans.values() for span in spans})
    number = {label: position for position, label in enumerate(labels)}
    lanes = []
    for lane in trace.lanes:
        spans, own = trace.spans.get(lane, []), [gap for gap in gaps if gap.lane == lane]
        lanes.append(
            {
                "name": lane,
                **places(trace.ticks.get(lane, [])),
                **places(spans, "span_"),
                "span_label": [number[span.label] for span in spans],
                **places(own, "gap_"),
                "gap_cause": [gap.cause_lane for gap in own],
                "gap_cause_tick": [gap.cause_tick for gap in own],
                "gap_cause_end": [ms(gap.cause_end_s - began_s) if gap.cause_lane else None for gap in own],
                "gap_channel": [gap.channel for gap in own],
                "gap_for_room": [gap.for_room for gap in own],
            }
        )
    return {
        "lanes": lanes,
        "labels": labels,
        "resumed": [[tick, ms(at - began_s)] for tick, at in trace.resumed],
        "knows_channels": bool(channels),
    }
