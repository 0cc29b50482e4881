"""The near splits of a recipe as real jobs that take turns at this machine (``finals.py`` decides, ``taking_turns.py`` stops them)."""

from __future__ import annotations

import contextlib
import math
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from llamarl.config import RunConfig, save_config, validate
from llamarl.errors import LlamaRLError
from llamarl.simulator.calibration import only_steps
from llamarl.simulator.finals import (
    affordable,
    best_of_kinds,
    handicaps,
    in_order,
    joined,
    measured_steps,
    of_its_kind,
    still_in,
)
from llamarl.simulator.splits import Split, apply
from llamarl.simulator.taking_turns import Job

__all__ = ["run_finals"]

_TURN_S = 1.5
_MANY_TICKS = 1_000_000
"""More than any final takes: its jobs are ended, not done."""
_MOST_OF_MEMORY = 0.6
"""Share of the free memory that the finalists may take."""
_SAY_EVERY_S = 30.0
_PATIENCE = 20.0
"""How many times as long as forecast a job may take before it is given up."""

Log = Callable[[str], None]


@dataclass
class _Finalist:
    """A job in the final, and what its turns took."""

    job: Job
    ticks: int
    """Of a turn."""
    turns: list[float] = field(default_factory=list)
    """Seconds a step."""


def run_finals(
    config: RunConfig,
    splits: Sequence[Split],
    *,
    budget_s: float = 420.0,
    least_rounds: int = 4,
    log: Log = lambda line: None,
) -> dict[str, float]:
    """Name -> measured seconds a step: first of the best split of each kind, then of the schedules of the kind that won.

    The jobs of a final take turns until one is left, or until its time is over: a third of ``budget_s`` for the kinds, the rest for the
    schedules, starts not counted. They run without evaluations and checkpoints. Fewer take part where memory or time does not suffice
    for all; a job that fails is left out, and the log says why. Fewer than two need no final, and give nothing; so do systems other
    than Linux.

    Args:
        splits: Fastest forecast first.
        least_rounds: Turns of each in any case; where steps are too long for that, fewer take part.
    """
    if sys.platform != "linux":
        log("finals: jobs take turns on Linux only; the forecasts decide")
        return {}
    precision = config.generator.quantization
    handicap = handicaps(splits, precision)
    best = best_of_kinds(splits, precision)
    kinds = _final(config, best, handicap, "kinds", budget_s / 3, least_rounds, log)
    won = min(best, key=lambda one: handicap[one.name] * kinds.get(one.name, math.inf))
    schedules = _final(config, of_its_kind(splits, won), handicap, "schedules", budget_s * 2 / 3, least_rounds, log)
    return joined(kinds, schedules, won.name)


def _final(
    config: RunConfig,
    splits: Sequence[Split],
    handicap: dict[str, float],
    of: str,
    budget_s: float,
    least_rounds: int,
    log: Log,
) -> dict[str, float]:
    if len(splits) < 2:
        return {}
    ticks = {s.name: max(1, math.ceil(_TURN_S / s.result.step_s)) for s in splits}
    count = affordable([ticks[s.name] * s.result.step_s for s in splits], budget_s, least_rounds)
    if count < len(splits):
        log(f"final of {of}: steps are too long for more than {count} of {len(splits)} in {budget_s:.0f} s")
    if count < 2:
        return {}
    log(f"final of {of}: {count} splits take turns, for up to {budget_s:.0f} s after they have started")
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        playing = _started(config, splits[:count], ticks, Path(folder), stack, log)
        took = _play(playing, handicap, budget_s, least_rounds, log)
    return measured_steps(took) if len(took) > 1 else {}


def _started(
    config: RunConfig,
    splits: Sequence[Split],
    ticks: dict[str, int],
    folder: Path,
    stack: contextlib.ExitStack,
    log: Log,
) -> dict[str, _Finalist]:
    found: dict[str, _Finalist] = {}
    free = _free_bytes()
    for i, split in enumerate(splits):
        if found and (len(found) + 1) / len(found) * (free - _free_bytes()) > _MOST_OF_MEMORY * free:
            left_out = ", ".join(one.name for one in splits[i:])
            log(f"  memory does not hold more than {len(found)} jobs at once, left out: {left_out}")
            break
        log(f"  {split.name} starts")
        try:
            job = _job(apply(config, split.settings), folder / f"{i}", ticks[split.name], split.result.step_s)
        except LlamaRLError as error:
            log(f"  without {split.name}, which failed: {error}")
            continue
        found[split.name] = _Finalist(stack.enter_context(job), ticks[split.name])
    return found


def _play(
    playing: dict[str, _Finalist], handicap: dict[str, float], budget_s: float, least_rounds: int, log: Log
) -> dict[str, list[float]]:
    """Name -> what the turns of each took that did not fail."""
    took = {name: one.turns for name, one in playing.items()}
    began = said = time.monotonic()
    rounds = 0
    while len(playing) > 1 and (rounds < least_rounds or time.monotonic() - began < budget_s):
        for name in in_order(list(playing), rounds):
            one = playing[name]
            try:
                one.turns.append(one.job.turn(one.ticks) / one.ticks)
            except LlamaRLError as error:
                log(f"  without {name}, which failed: {error}")
                playing.pop(name).job.close()
                del took[name]
        rounds += 1
        if rounds % 2 == 0 and playing:  # each has run in both orders equally often
            stay = still_in({name: one.turns for name, one in playing.items()}, handicap)
            for name in [name for name in playing if name not in stay]:
                playing.pop(name).job.close()
                log(f"  after {rounds} rounds without {name}, {measured_steps(took)[name]:.3g} s a step")
        if time.monotonic() - said > _SAY_EVERY_S:
            said = time.monotonic()
            log(f"  {rounds} rounds, {len(playing)} splits left, {said - began:.0f} of {budget_s:.0f} s")
    return took


def _job(config: RunConfig, folder: Path, ticks: int, step_s: float) -> Job:
    """The recipe's steps until it is closed, all it writes in ``folder``; its deadlines stand still while it is stopped.

    Args:
        ticks: Of a turn, each forecast to take ``step_s``.
    """
    raw = only_steps(config)
    warm_up = config.schedule.max_staleness + config.generator.max_segments
    deadline_s = config.deadlines.setup_s + _PATIENCE * step_s * max(warm_up, ticks)
    raw["run"] |= {"dir": str(folder / "run"), "num_ticks": _MANY_TICKS}
    raw["observability"] |= {"console": "none", "wandb": False}
    folder.mkdir(parents=True)
    save_config(validate(raw), folder / "recipe.toml")
    return Job(["train", str(folder / "recipe.toml")], folder / "run", warm_up, deadline_s=deadline_s)


def _free_bytes() -> int:
    """What the machine has free, or what is left of the container's limit."""
    meminfo = Path("/proc/meminfo").read_text(encoding="ascii").split("\n")
    free = next(int(line.split()[1]) * 1024 for line in meminfo if line.startswith("MemAvailable"))
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and used.is_file() and (most := limit.read_text(encoding="ascii").strip()) != "max":
        free = min(free, max(0, int(most) - int(used.read_text(encoding="ascii"))))
    return free
