"""Repeating a run bit for bit from tick 0: what must be true of it, and of the machine."""

from __future__ import annotations

import filecmp
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llamarl.config import RunConfig, begun_in, load_config, to_plain
from llamarl.controller.begun_settings import differences
from llamarl.controller.fork import FORKED_FROM
from llamarl.controller.prepare import Prepared, absolute_dir, plan_run, prepare
from llamarl.controller.run import start
from llamarl.controller.run_folder import CONFIG_FILE
from llamarl.controller.settle import refuse_other_models
from llamarl.determinism import platform_differences
from llamarl.errors import ConfigError
from llamarl.observability.events import EVENTS_FILE, event_platform, read_events
from llamarl.observability.keys import is_timing_key
from llamarl.observability.metrics import read_metrics
from llamarl.plural import plural

__all__ = ["check_replay", "compare_runs", "plan_replay", "replay_run"]


def plan_replay(config: RunConfig, source: Path, *, every_key: bool = True) -> str:
    """What ``replay_run`` would run, as text (``plan_run``); changes nothing, and refuses what that would."""
    return plan_run(config, every_key=every_key, prepared_by=lambda asked: _checked(asked, source))


def replay_run(config: RunConfig, source: Path) -> bool:
    """Repeat the run in ``source`` in a new folder, ``config.run.dir``, and say whether it has the same bits.

    Args:
        config: What ``source`` saved, with overrides that change no bit.

    Raises:
        ConfigError: The configuration would give other bits, or the new folder holds a run.
        EventLogError: The log of ``source`` is missing, torn or too short.
    """
    prepared, by_log = _checked(config, source), config.schedule.weights == "latest"
    if not by_log:
        print(
            f"{source} made no decisions that need a log (schedule.weights = 'exact'): running it again",
            file=sys.stderr,
        )
    start(prepared, repeats=source, by_log=by_log)
    equal, words = compare_runs(source, absolute_dir(prepared.config))
    print(words)
    return equal


def _checked(config: RunConfig, source: Path) -> Prepared:
    """The replay as it would run. Makes nothing."""
    if (source / FORKED_FROM).exists():
        raise ConfigError(
            f"--replay: {source} goes on from a checkpoint of another run ({FORKED_FROM}), so it cannot be repeated from tick 0"
        )
    settings = to_plain(load_config(source / CONFIG_FILE)), to_plain(config)
    if not config.hosts.wanted:  # else the hosts say what they are when they are asked
        check_replay(source, *settings, config.run.num_ticks)
    prepared = prepare(config)
    if prepared.hosts is not None:
        check_replay(source, *settings, config.run.num_ticks, prepared.facts)
    refuse_other_models(prepared.local, source)
    return prepared


def compare_runs(source: Path, again: Path) -> tuple[bool, str]:
    """Find whether two runs have the same bits, and say it in a line.

    Compared are the rows of their metrics, but for times, memory and evaluations, and the weights of their policies
    where both have come to the same end.
    """
    here, there = (
        {int(row["step"]): row for row in read_metrics(run) if row["step"] is not None} for run in (again, source)
    )
    for tick in sorted(here.keys() & there.keys()):
        for key in sorted(here[tick].keys() | there[tick].keys()):
            timed = is_timing_key(key) or key.startswith(("eval/", "memory/"))
            if not timed and (one := here[tick].get(key)) != (other := there[tick].get(key)):
                return False, f"OTHER BITS than {source}, from tick {tick} on: {key} is {one}, there {other}"
    if not here.keys() & there.keys():
        return False, f"no tick of {source} was repeated: nothing is known of its bits"
    equal = f"equal bits: {plural(len(here.keys() & there.keys()), 'row')} but for times"
    own = sorted(path.name for path in (again / "model").glob("*.safetensors"))
    if here.keys() != there.keys() or not own or not all((source / "model" / name).is_file() for name in own):
        return True, f"{equal} as in {source}"
    if wrong := [
        name for name in own if not filecmp.cmp(again / "model" / name, source / "model" / name, shallow=False)
    ]:
        return False, f"OTHER BITS than {source}: the rows are equal, model/{wrong[0]} differs"
    return True, f"{equal}, and the policy's weights, as in {source}"


def check_replay(
    source: Path,
    original: Mapping[str, Any],
    current: Mapping[str, Any],
    num_ticks: int,
    platform: Mapping[str, str] | None = None,
) -> None:
    """Refuse a replay that could not give the bits of ``source``. Of one without a log nobody knows the platform.

    Args:
        original: The configuration that ``source`` saved, as plain values.
        current: That of the replay.
        platform: Of the hosts of the replay; None: of this machine.

    Raises:
        ConfigError: The configuration, the library versions or the processor differ; each difference is named.
        EventLogError: The log is missing, torn, or does not reach ``num_ticks``.
    """
    found = [str(difference) for difference in differences(original, current, begun_in(source / CONFIG_FILE))]
    if original["schedule"]["weights"] == "latest":
        log = source / EVENTS_FILE
        read_events(log, num_ticks=num_ticks)
        found += platform_differences(event_platform(log), platform)
    if found:
        raise ConfigError(
            f"--replay: {source} cannot be repeated bit for bit under other settings:\n"
            + "\n".join(f"  - {line}" for line in found)
            + "\nOnly keys that change no bit may differ, such as run.num_ticks, and the sections evaluation, checkpoint and "
            "observability."
        )
