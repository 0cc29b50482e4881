"""Which blocks a step's decoding sequences hold, as an array in which only what is new is written.

A sequence of a thousand tokens holds hundreds of blocks and takes a further one every ``block_size``
steps: turning its list into an array anew would be most of what the host does between two steps.
"""

from __future__ import annotations

import operator

import numpy as np
import numpy.typing as npt

__all__ = ["BlockTables"]


class BlockTables:
    """Rows that stay from one step to the next.

    A list that was written for the step before is taken to hold the same blocks and perhaps more.
    So entries that a decode step has read must not change; the scheduler keeps to that, and gives a
    sequence that begins anew another list.
    """

    def __init__(self) -> None:
        self.begin_in(np.empty((0, 0), np.int64))

    def begin_in(self, memory: npt.NDArray[np.int64]) -> None:
        """Forget all rows, and write those to come into ``memory``, [rows, width]."""
        self._rows = memory
        self._lists: list[list[int]] = []
        self._written = np.zeros(len(memory), np.int64)  # entries of each row that its list has given

    def write(self, lists: list[list[int]], counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """[len(lists), width] the first ``counts`` blocks of each list, which the last of them follows: it
        fills up a row, so that a NaN of one sequence cannot reach another. Valid until the next call."""
        n, most = len(lists), int(counts.max(initial=0))
        if n > len(self._rows) or most > self._rows.shape[1]:
            self.begin_in(np.empty((max(n, len(self._rows)), max(most + most // 2, self._rows.shape[1])), np.int64))
        rows, written = self._rows, self._written
        if len(self._lists) != n or not all(map(operator.is_, lists, self._lists)):
            row_of = {id(blocks): row for row, blocks in enumerate(self._lists)}
            before = np.array([row_of.get(id(blocks), -1) for blocks in lists], np.int64)
            known = before >= 0
            rows[:n][known] = rows[before[known]]
            written[:n] = np.where(known, written[before], 0)
            self._lists = lists
        for row in np.flatnonzero(written[:n] != counts).tolist():
            blocks, first, count = lists[row], written[row], counts[row]
            rows[row, first:count] = blocks[first:count]
            rows[row, count:] = blocks[count - 1]
        written[:n] = counts
        return rows[:n]
