"""When a run ends before its last tick because its held-out loss no longer falls, and which tick was best. Pure.

    trainer's reports ── eval/loss ──▶ EarlyEnd.note ──▶ the last tick, or None
                                            └─ best ──▶ the checkpoint that is kept, and of which RUN/model is made

The same losses give the same last tick, whatever the speeds: it lies so far ahead that no executor
has begun it when it is named, and it is one that is evaluated in any case. The weights before the
first tick do not count as a version: they are the model that is there already. Best is only what a
checkpoint holds: a fork has not those of its source, nor a run all of those from before it had patience.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from llamarl.channels.base import ChannelSpec
from llamarl.settings.executors import EvaluationConfig

__all__ = ["EarlyEnd", "most_ahead"]


def most_ahead(channels: Iterable[ChannelSpec]) -> int:
    """Ticks by which the first tick that nobody has begun, and nobody has been told of, can lie
    beyond one that is just done."""
    return 1 + sum(channel.capacity + channel.delay for channel in channels)


class EarlyEnd:
    """Watches the held-out loss of one run."""

    def __init__(self, evaluation: EvaluationConfig, *, num_ticks: int, ahead: int) -> None:
        """
        Args:
            num_ticks: Of the run, if nothing ends it early.
            ahead: As of ``most_ahead``.
        """
        self._evaluation = evaluation
        self._num_ticks = num_ticks
        self._ahead = ahead
        self._lowest = self._of_best = math.inf
        self._without_fall = -1  # the first one has none to fall below
        self._decided = False
        self.best: int | None = None
        """The saved tick that reported the lowest loss so far."""
        self.last: int | None = None
        """The last tick, once it is known and sooner than the run's own."""

    def note(self, tick: int, loss: float, *, saved: bool = True) -> int | None:
        """Take the loss that ``tick`` reported, in order of ticks; the last tick, once, where it is
        now known and sooner than the run's own.

        Args:
            saved: Whether there is a checkpoint of it, or will be.
        """
        if tick == 0:  # of version 0
            return None
        if saved and (self.best is None or loss < self._of_best):
            self.best, self._of_best = tick, math.inf if math.isnan(loss) else loss
        if loss < self._lowest:
            self._lowest, self._without_fall = loss, 0
        else:
            self._without_fall += 1
        if self._decided or self._without_fall < self._evaluation.patience:
            return None
        self._decided = True
        every = self._evaluation.every
        last = math.ceil((tick + self._ahead + 1) / every) * every - 1
        self.last = last if last < self._num_ticks - 1 else None
        return self.last

    def note_rows(self, rows: Iterable[Mapping[str, Any]], saved: Collection[int]) -> None:
        """Take the losses of rows of metrics, where one that is not finite is None.

        Args:
            saved: Ticks of which there is a checkpoint.
        """
        for row in rows:
            if "eval/loss" in row:
                tick, loss = int(row["step"]), row["eval/loss"]
                self.note(tick, math.nan if loss is None else float(loss), saved=tick in saved)
