"""Orders of a run: who works at what, since when, and what is repeated before it.

firing ─▶ give ─────────────▶ runtime          report ─▶ next_order ─▶ the next of what is repeated, then the order that waits
Redo ──▶ again: repeated ticks ─▶ runtime
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from llamarl.channels.base import Handle
from llamarl.controller.marking import Firing, Marking
from llamarl.runtime.base import Order, Restarts, Runtime

__all__ = ["Orders", "SavedTicks"]


class SavedTicks(Protocol):
    """Which ticks are saved, and where."""

    def due(self, tick: int) -> bool:
        """Whether the state after ``tick`` is saved, as far as it is decided."""
        ...

    def folder_for(self, tick: int) -> Path | None:
        """Folder for the state after ``tick``, or None if this tick is not saved."""
        ...


class Orders:
    """Of one run.

    Args:
        checkpoints: None: nothing is saved.
    """

    def __init__(self, runtime: Runtime, marking: Marking, checkpoints: SavedTicks | None) -> None:
        self._runtime = runtime
        self._marking = marking
        self._checkpoints = checkpoints
        self._repeat: dict[str, int] = {}
        """Executor -> the tick, of those that have counted, that it repeats next."""
        self._begins: dict[str, int] = {}
        """Executor -> the first tick that it repeats; of earlier ones it makes tokens that are lost."""
        self.since_s: dict[str, float] = {}
        """Executor at work -> when it was told to, on the runtime's clock."""
        self.tick: dict[str, int] = {}
        """Executor -> the tick that it was told to do last."""

    def give(self, firing: Firing) -> None:
        """An executor is to fire, once it has repeated what it must."""
        if firing.executor not in self._repeat:
            self._send(firing.executor, firing.tick, firing.inputs, firing.later)

    def again(self, executor: str, first_tick: int) -> None:
        """An executor was brought up again with the state before ``first_tick``: it repeats the
        ticks from there that have counted, then does the one that was out, if there was one. Before
        that it makes those tokens again which lay on edges when that state was saved, and were
        lost."""
        lost = (tick for _, tick in self._marking.withdrawn(executor))
        self._begins[executor] = first_tick
        self._repeat[executor] = min([first_tick, *lost])
        self.next_order(executor)

    def next_order(self, executor: str) -> None:
        """An executor has reported, or stands ready."""
        self.drop(executor)
        tick = self._repeat.get(executor)
        if tick is None:
            return
        if tick < self._marking.done_ticks[executor]:
            assert isinstance(self._runtime, Restarts)
            self._repeat[executor] = tick + 1
            if tick < self._begins[executor]:
                self._fire(Order(executor=executor, tick=tick))
            else:
                self._send(executor, tick, self._runtime.inputs_again(executor, tick), {})
            return
        del self._repeat[executor]
        if (firing := self._marking.refire(executor)) is not None:
            self.give(firing)

    def drop(self, executor: str) -> None:
        """Nothing is out to it any more."""
        self.since_s.pop(executor, None)

    def ages_s(self) -> Mapping[str, float]:
        """Executor at work -> since when."""
        return {name: self._runtime.now() - at_s for name, at_s in self.since_s.items()}

    def _send(
        self,
        executor: str,
        tick: int,
        inputs: Mapping[str, tuple[Handle, ...]],
        later: Mapping[str, Mapping[int, tuple[Handle, ...]]],
    ) -> None:
        order = Order(
            executor=executor,
            tick=tick,
            inputs=inputs,
            later=later,
            save_to=self._checkpoints.folder_for(tick) if self._checkpoints else None,
            flush_saves=tick == self._marking.num_ticks - 1,
            saves=self._saves_ahead(executor, tick),
        )
        self._fire(order)

    def _fire(self, order: Order) -> None:
        self._runtime.fire(order)
        self.since_s[order.executor], self.tick[order.executor] = self._runtime.now(), order.tick

    def _saves_ahead(self, executor: str, tick: int) -> tuple[int, ...]:
        """Ticks from this one on that are saved while a token that it makes may still lie on an edge."""
        if self._checkpoints is None:
            return ()
        reach = max((channel.delay for channel in self._marking.graph.outputs[executor]), default=0)
        ahead = range(tick, min(tick + reach, self._marking.num_ticks))
        return tuple(number for number in ahead if self._checkpoints.due(number))
