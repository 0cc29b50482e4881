"""Repeating a run whose decisions lie in an event log: what must be true of it, and what the controller must wait for.

A replay fires each generator tick only when the newest version that the tick took has been published, so no executor ever
waits inside a tick, and both runtimes can repeat a run of either. It cannot deadlock: tick k took versions <= k only, and
these depend on batches before k.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from llamarl.channels.base import ChannelSpec
from llamarl.checkpoint.platform import platform_differences
from llamarl.checkpoint.snapshot import FREE_TO_CHANGE, run_differences
from llamarl.errors import ConfigError
from llamarl.observability.events import EVENTS_FILE, REPLAY_FILE, event_platform, read_events

__all__ = ["check_replay", "needs_of", "replay_folder", "take_log"]

_SAME_BITS = FREE_TO_CHANGE | {"run.runtime", "run.cores"}
"""What a replay may change: the threads of each executor are settled in the recipe that the run saved."""


def replay_folder(source: Path) -> str:
    """Where the replay of ``source`` goes unless the user says otherwise."""
    return f"{source}-replay"


def check_replay(source: Path, original: Mapping[str, Any], current: Mapping[str, Any], num_ticks: int) -> None:
    """Refuse a replay that could not give the bits of ``source``.

    Args:
        original: The configuration that ``source`` saved, as plain values.
        current: That of the replay.

    Raises:
        ConfigError: The configuration, the library versions or the processor differ; each difference is named.
        EventLogError: The log is missing, torn, or does not reach ``num_ticks``.
    """
    differences = run_differences({"config": original}, {"config": current}, ignore=_SAME_BITS)
    log = source / EVENTS_FILE
    read_events(log, num_ticks=num_ticks)
    differences += platform_differences(event_platform(log))
    if differences:
        raise ConfigError(
            f"--replay: {source} cannot be repeated bit for bit under other settings:\n"
            + "\n".join(f"  - {line}" for line in differences)
            + "\nOnly run.dir, run.num_ticks, run.runtime and the sections checkpoint and observability may differ."
        )


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
