"""The event log that a replay follows: where it lies, and what the controller must wait for because of it.

A replay fires each generator tick only when the newest version that the tick took has been published, so no executor ever
waits inside a tick, and both runtimes can repeat a run of either. It cannot deadlock: tick k took versions <= k only, and
these depend on batches before k.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from llamarl.channels.base import ChannelSpec
from llamarl.observability.events import EVENTS_FILE, REPLAY_FILE, read_events

__all__ = ["needs_of", "take_log"]


def take_log(source: Path, run_dir: Path) -> None:
    """Put the log of ``source`` into the folder of its replay: a killed replay goes on from there."""
    shutil.copyfile(source / EVENTS_FILE, run_dir / REPLAY_FILE)


def needs_of(run_dir: Path, num_ticks: int) -> Callable[[ChannelSpec, int], int] | None:
    """For ``run_graph``: the source tick that a tick of a replay needs on the weights edge; None if this is no replay.

    Raises:
        EventLogError: The log is torn or does not reach ``num_ticks``.
    """
    if not (run_dir / REPLAY_FILE).exists():
        return None
    newest: dict[int, int] = {}
    for (tick, _), event in read_events(run_dir / REPLAY_FILE, num_ticks=num_ticks).items():
        newest[tick] = max(newest.get(tick, 0), *(version for _, version in event.swaps))

    def needs(channel: ChannelSpec, tick: int) -> int:
        return max(tick - channel.delay, newest[tick] - 1)

    return needs
