"""What replicas of each kind of device make in how long: the layouts that fit, times by prompts, the least time for a whole tick. Pure.

    kind, layout ─▶ seconds of a tick by its prompts ─▶ prompts in T seconds ─▶ least T in which all kinds make a tick

For a time T every layout of a kind makes ``replicas x prompts(T)``, and what one kind makes does not hang on another. So the least
T that all together make a tick in is found by bisection, with each kind's best layout at that T.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

from llamarl.planner.choices import (
    GeneratorChoice,
    Options,
    Workload,
    fits,
    generator_choice,
    powers,
    precisions_of,
    slot_counts,
)
from llamarl.planner.generation import GeneratorDemand, weight_bytes
from llamarl.planner.hardware import Hardware
from llamarl.planner.rooflines import GeneratorLayout, tensor_parallel_sizes

__all__ = ["GeneratorKinds", "Pool", "ReplicaTimes", "deal", "layouts_of"]

_ROUNDS = 24
"""Of bisection: T is found to a part in ten thousand."""


@dataclass(frozen=True, kw_only=True)
class Pool:
    """All devices of one kind."""

    hardware: Hardware
    devices: int

    @property
    def name(self) -> str:
        return self.hardware.device.name


@dataclass
class ReplicaTimes:
    """Times of one replica of a kind and layout, by its prompts; each is worked out once."""

    hardware: Hardware
    work: Workload
    options: Options
    layout: GeneratorLayout
    partial: bool
    replicas: int
    """Of the kind, if all of its devices generated."""
    _found: dict[int, GeneratorChoice | None] = field(default_factory=dict)

    def choice(self, prompts: int) -> GeneratorChoice | None:
        """The best number of sequences at once; None: too little memory."""
        if prompts not in self._found:
            self._found[prompts] = self._choose(prompts)
        return self._found[prompts]

    def _choose(self, prompts: int) -> GeneratorChoice | None:
        work, options = self.work, self.options
        share = prompts * work.group_size
        top = math.ceil(share * options.oversubscription) if self.partial else share
        # The longest response of a tick may come to any replica; a partial tick's time is that of the slowest of its kind.
        total = share * self.replicas if self.partial else work.sequences
        best: GeneratorChoice | None = None
        for slots in slot_counts(top, min(options.max_slots, top)):
            demand = GeneratorDemand(
                lengths=work.response,
                prompt_tokens=work.prompt_tokens,
                group_size=work.group_size,
                sequences=share,
                total_sequences=total,
                slots=slots,
                partial=self.partial,
                max_segments=options.max_segments if self.partial else 1,
                oversubscription=options.oversubscription if self.partial else 1.0,
            )
            found = generator_choice(self.hardware, work.model, self.layout, demand, 1)
            if not fits(found.memory, self.hardware.usable_memory_bytes):
                continue
            if best is not None and found.time_s >= best.time_s:
                break  # fewer at once only queue longer
            best = found
        return best

    @cached_property
    def _curve(self) -> tuple[list[int], list[float]]:
        """Numbers of prompts and their times, ascending: each about a third more than the one before."""
        most = self.work.prompts_per_step
        counts = sorted({1, most, *(n for i in range(2, 64) if (n := round(4 ** (i / 5))) < most)})
        found = [(count, choice.time_s) for count in counts if (choice := self.choice(count)) is not None]
        # A few groups may take longer than some more: a partial tick then waits for one group's longest response.
        times = list(accumulate((time_s for _, time_s in reversed(found)), min))[::-1]
        return [count for count, _ in found], times

    @property
    def least_s(self) -> float:
        """Of a tick, however few its prompts; infinite where none fits."""
        return min(self._curve[1], default=math.inf)

    def prompts_in(self, seconds: float) -> int:
        """The most prompts that it makes in this time, between the points of the curve by straight lines; 0: none."""
        counts, times = self._curve
        at = bisect_right(times, seconds)
        if at in (0, len(times)):
            return counts[-1] if at and times else 0
        share = (seconds - times[at - 1]) / (times[at] - times[at - 1])
        return int(counts[at - 1] + share * (counts[at] - counts[at - 1]))

    def time_s(self, prompts: int) -> float:
        """By the same lines; infinite beyond what fits."""
        counts, times = self._curve
        if not counts or prompts > counts[-1]:
            return math.inf
        at = max(1, bisect_left(counts, prompts))
        if len(counts) == 1:
            return times[0]
        share = (prompts - counts[at - 1]) / (counts[at] - counts[at - 1])
        return times[at - 1] + share * (times[at] - times[at - 1])


class GeneratorKinds:
    """Every layout of every kind, for one workload."""

    def __init__(self, pools: Sequence[Pool], work: Workload, options: Options, *, partial: bool) -> None:
        self.work = work
        self.layouts = {pool.name: list(layouts_of(pool, work, options, partial)) for pool in pools}

    def best(
        self, devices: dict[str, int], late: dict[tuple[str, GeneratorLayout], float]
    ) -> list[tuple[ReplicaTimes, int]]:
        """For each kind that takes part: its layout and number of replicas, of the least time for a tick; empty: none fits.

        Args:
            devices: By kind.
            late: By kind and layout, seconds of a tick in which it cannot decode.
        """
        prompts = self.work.prompts_per_step

        def at(seconds: float) -> list[tuple[ReplicaTimes, int, int]]:
            chosen = []
            for name, count in devices.items():
                options = [
                    (found, replicas, replicas * found.prompts_in(seconds - late[name, found.layout]))
                    for found in self.layouts[name]
                    if (replicas := min(count // found.layout.devices, prompts))
                ]
                if options and (best := max(options, key=lambda one: one[2]))[2]:
                    chosen.append(best)
            return chosen

        def enough(seconds: float) -> bool:
            return sum(made for _, _, made in at(seconds)) >= prompts

        low, high = 1e-6, 1.0
        while not enough(high):
            low, high = high, high * 4.0
            if high > 1e9:
                return []
        for _ in range(_ROUNDS):
            middle = (low * high) ** 0.5
            low, high = (low, middle) if enough(middle) else (middle, high)
        return [(found, replicas) for found, replicas, _ in _needed(at(high), prompts)]


def _needed(chosen: list[tuple[ReplicaTimes, int, int]], prompts: int) -> list[tuple[ReplicaTimes, int, int]]:
    """Without kinds whose replicas would get nothing once the others have all."""
    ordered = sorted(chosen, key=lambda one: -one[2])
    while len(ordered) > 1 and sum(made for _, _, made in ordered[:-1]) >= prompts:
        ordered.pop()
    return ordered


def layouts_of(pool: Pool, work: Workload, options: Options, partial: bool) -> Iterator[ReplicaTimes]:
    hardware = pool.hardware
    for pp in powers(min(options.max_pipeline, work.model.layers)):
        for tp in tensor_parallel_sizes(work.model, pool.devices // pp, runnable=options.runnable):
            for precision in precisions_of(hardware, work.model, options):
                layout = GeneratorLayout(tp, pp, precision, options.captured, options.runnable)
                if weight_bytes(hardware, work.model, layout) <= hardware.usable_memory_bytes:
                    yield ReplicaTimes(hardware, work, options, layout, partial, pool.devices // layout.devices)


def deal(times_s: Sequence[Callable[[int], float]], replicas: Sequence[int], prompts: int) -> list[list[int]]:
    """Prompts of each replica of each kind, one after the other to the replica that is then done first.

    Replicas of a kind are alike, so they are dealt to in rounds: what differs is how many their kind has had.

    Args:
        times_s: By kind, seconds of a replica's tick by its prompts; they do not fall.
        replicas: By kind.

    Returns:
        [kinds][replicas of the kind]
    """
    had = [0] * len(replicas)
    for _ in range(prompts):
        kind = min(range(len(replicas)), key=lambda k: (times_s[k](had[k] // replicas[k] + 1), k))
        had[kind] += 1
    return [
        [count // number + (replica < count % number) for replica in range(number)]
        for count, number in zip(had, replicas, strict=True)
    ]
