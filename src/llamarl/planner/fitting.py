"""What to say of a job that does not fit: which role is too large, and the smallest number of devices that holds it.

Only memory counts here. A role that fits on some devices fits on more, so its least count is found by bisection; sharing the
devices takes the larger of both roles' counts, a split the first number that can be cut into a share for each.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from functools import lru_cache

from llamarl.planner.choices import Options, Workload, generator_choices, trainer_choices
from llamarl.planner.hardware import Hardware
from llamarl.planner.rooflines import tensor_parallel_sizes

__all__ = ["MOST_DEVICES", "least_devices", "nothing_fits"]

MOST_DEVICES = 65_536
"""Largest number of devices that is tried."""


@lru_cache(maxsize=64)
def least_devices(hardware: Hardware, work: Workload, options: Options) -> tuple[int | None, int | None]:
    """Fewest devices that hold the trainer alone, and the generator alone; None: no number up to ``MOST_DEVICES`` does."""
    limit = hardware.usable_memory_bytes

    def trainer(devices: int) -> bool:
        return any(True for _ in trainer_choices(hardware, work, options, devices, memory_limit=limit))

    def generator(devices: int) -> bool:
        found = generator_choices(hardware, work, options, devices, memory_limit=limit, partial=False)
        return any(True for _ in found)

    return _least(trainer), _least(generator)


def _least(holds: Callable[[int], bool]) -> int | None:
    counts = range(1, MOST_DEVICES + 1)
    index = bisect_left(counts, True, key=holds)
    return counts[index] if index < len(counts) else None


def nothing_fits(
    hardware: Hardware, work: Workload, options: Options, devices: int, *, separate: bool, one_layout: bool = False
) -> str:
    """The message for a job that does not fit on ``devices``.

    Args:
        separate: Each role is to have devices of its own; False: they may share them.
        one_layout: It did not fit in one layout for both roles; the message then gives what a layout a role needs.
    """
    head = f"{work.model.name} ({work.model.total_params / 1e9:.1f} B parameters) does not fit"
    head += f" on {devices} x {hardware.device.title}"
    head += " in one layout for both roles" if one_layout else ""
    trainer, generator = least_devices(hardware, work, options)
    if generator is None:
        most = tensor_parallel_sizes(work.model, work.model.heads, runnable=options.runnable)[-1]
        return (
            f"{head}, nor on any number up to {MOST_DEVICES}: a generator replica of this model has at most {most} "
            f"tensor-parallel rank{'s' if most > 1 else ''}{' in llamarl' if options.runnable else ''}, too few for its weights "
            "and one response; use "
            + (
                "a shorter response limit or devices with more memory"
                if options.runnable
                else "a lower generator precision, a shorter response limit or devices with more memory"
            )
        )
    if trainer is None:
        return (
            f"{head}, nor on any number up to {MOST_DEVICES}: the longest sequence's activations and a shard of the training "
            "state are too large for a device; shorten the response limit or use devices with more memory"
        )
    why = f"{head}: the trainer alone needs 16 bytes a parameter, sharded, on {trainer} or more devices, a generator "
    why += f"replica {generator}"
    shared, split = max(trainer, generator), max(trainer + generator, devices + 1)
    if separate:
        return f"{why}; {split} devices would do"
    return f"{why}; {shared} devices would do where both share them, {split} where each role has its own"
