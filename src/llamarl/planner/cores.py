"""Roles on the cores of one CPU: a lone trainer uses what the generator leaves of them. Pure.

    core 0   generator ──────────────────┐ trainer ───────────
    core 1   trainer ────────────────────┼────────────────────     time ─▶
             part 0 │ part 1 │ part 2 .. │ .. last part, update

A trainer with a thread a core computes a micro-batch in each, at a lower priority than the generator (``trainer/side_by_side.py``):
beside a generator at work it has the other cores, and all of them otherwise. So no core is idle while the trainer has work, and
a step takes at least the work of both by the cores. Seconds of *one core* are what the rooflines give.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from llamarl.planner.hardware import Hardware
from llamarl.planner.training import TrainerTime
from llamarl.trainer.config import MOST_AT_ONCE

__all__ = ["SIDE_BY_SIDE", "core_rate", "core_share", "finished_s", "scaled", "shares_cores"]

SIDE_BY_SIDE = 0.85
"""Of a core's rate, what it reaches while the others compute micro-batches too: they share cache and memory. SmolLM2-135M's
trainer takes 50 s of two cores for what takes 40 to 45 s of one (docs/results.md, a step on two cores)."""


def shares_cores(hardware: Hardware, devices: int) -> bool:
    """Whether devices are cores of one CPU, of which a lone trainer takes what is left."""
    node = hardware.device.devices_per_node
    return hardware.device.train_precision == "fp32" and 2 <= devices <= min(node, MOST_AT_ONCE)


def core_rate(threads: int) -> float:
    """Cores' worth of work that a second of so many threads does."""
    return threads * (SIDE_BY_SIDE if threads > 1 else 1.0)


def core_share(threads: int, cores: int) -> float:
    """Of a core, what each of so many threads that work at once has."""
    return min(1.0, cores / threads)


def finished_s(parts: Sequence[tuple[float, float]], *, cores: float, held: float = 0.0, held_s: float = 0.0) -> float:
    """When the last of ``parts`` is done, each begun when it is there and the one before is done.

    Args:
        parts: (second at which it is there, its work in seconds of one core), in order.
        cores: That work on it once nobody else does.
        held: Of these, what another role takes until ``held_s``.
    """
    now = 0.0
    for ready_s, work in parts:
        now = max(now, ready_s)
        beside = (cores - held) * max(0.0, held_s - now)
        if work <= beside:
            now += work / (cores - held)
        else:
            now = max(now, held_s) + (work - beside) / cores
    return now


def scaled(time: TrainerTime, factor: float) -> TrainerTime:
    """The same tick, every part of it longer or shorter by ``factor``."""
    return replace(time, **{name: seconds * factor for name, seconds in vars(time).items()})
