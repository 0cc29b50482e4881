"""What deaths cost a long job: the share of its time that is progress. Pure, and on paper: nothing here was run at that size.

    rates of deaths by role, seconds until each works again, what it repeats ─▶ expected time of one checkpoint's interval ─▶ goodput

Deaths come independently, at a constant rate for each role, also while another is being brought up. An interval is ``x`` seconds of
progress after its checkpoint when a role dies:

* one that carries its state (generator, reward, judges) costs ``back_s`` and its tick, ``redo_s``; all others wait for it, which is
  more than they do, since the edges hold batches;
* one whose state lies in checkpoints (trainer; or the whole job, where every death ends it) costs ``back_s`` and the repeating of
  ``x``, at ``repeats`` of the time that it took at first.

A stretch of ``s`` seconds without a death, begun anew after each, takes (exp(L s) - 1) / L on average at rate L. So one second of
progress takes exp(sum of L c) with the pauses c of the first kind, and in all

    time = exp(sum of L c) * exp(L back_s) * (exp(L repeats (every_s + save_s)) - 1) / (L repeats)

which for one role with ``repeats = 1`` is the formula of Daly (Future Generation Computer Systems 22, 2006).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["HERD_DEATHS_PER_DEVICE_HOUR", "Mortal", "goodput", "replaced", "stopped"]

HERD_DEATHS_PER_DEVICE_HOUR = 419 / (54 * 24 * 16_384)
"""419 unexpected interruptions in 54 days on 16,384 H100 (arXiv:2407.21783, Sec. 3.3.4): one in 3.1 hours."""


@dataclass(frozen=True, kw_only=True)
class Mortal:
    """Something that dies as a whole."""

    deaths_per_s: float
    back_s: float
    """Seconds from a death until it stands ready again."""
    redo_s: float = 0.0
    """Seconds of its own work that it then does again."""
    repeats: float = 0.0
    """Of the time since the last checkpoint, the share that repeating it takes; 0: its state is kept elsewhere."""

    def __post_init__(self) -> None:
        if not all(math.isfinite(v) and v >= 0 for v in (self.deaths_per_s, self.back_s, self.redo_s, self.repeats)):
            raise ValueError(f"rates, seconds and shares must be finite and >= 0, got {self}")


def goodput(mortals: Sequence[Mortal], *, every_s: float, save_s: float = 0.0) -> float:
    """Expected share of the time that is progress which is kept, 0 .. 1.

    Args:
        every_s: Seconds of progress from one checkpoint to the next, > 0.
        save_s: Seconds for which the job stands still for each.

    Raises:
        ValueError: ``every_s`` is not positive, or two of them go back to checkpoints: count those as one.
    """
    if every_s <= 0:
        raise ValueError(f"every_s must be > 0 seconds, got {every_s}")
    go_back = [one for one in mortals if one.repeats]
    if len(go_back) > 1:
        raise ValueError(f"{len(go_back)} of them go back to checkpoints: give one with the sum of their rates")
    log_time = sum(one.deaths_per_s * (one.back_s + one.redo_s) for one in mortals if not one.repeats)
    stretch_s = every_s + save_s
    for one in go_back:
        rate = one.deaths_per_s * one.repeats
        log_time += one.deaths_per_s * (one.back_s + one.redo_s)
        stretch_s = math.expm1(rate * stretch_s) / rate if rate else stretch_s
    return every_s / (math.exp(log_time) * stretch_s)


def stopped(num_devices: int, *, back_s: float, deaths_per_device_hour: float) -> tuple[Mortal, ...]:
    """A job that every death ends: all of it goes back to the last checkpoint.

    Args:
        back_s: Seconds until everything stands again.
    """
    return (Mortal(deaths_per_s=num_devices * deaths_per_device_hour / 3600, back_s=back_s, repeats=1.0),)


def replaced(
    num_devices: int,
    *,
    trainer_share: float,
    trainer_back_s: float,
    other_back_s: float,
    tick_s: float,
    deaths_per_device_hour: float,
    trainer_repeats: float = 1.0,
) -> tuple[Mortal, ...]:
    """A job in which what dies is brought up again.

    Args:
        trainer_share: Of the devices; the others generate, judge and evaluate.
        tick_s: Seconds of a tick, which whoever is no trainer does again.
        trainer_repeats: Of the time since the checkpoint, what repeating takes; less than 1 where training waits for samples, since
            nothing is generated anew.
    """
    per_s = num_devices * deaths_per_device_hour / 3600
    return (
        Mortal(deaths_per_s=per_s * trainer_share, back_s=trainer_back_s, repeats=trainer_repeats),
        Mortal(deaths_per_s=per_s * (1 - trainer_share), back_s=other_back_s, redo_s=tick_s),
    )
