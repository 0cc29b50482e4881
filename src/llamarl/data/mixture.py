"""Prompts of several tasks in one stream: which task prompt ``i`` comes from is a pure function of the seed and ``i``.

    i ──hash (seed, i), weights──▶ task t ──how many before i came from t──▶ prompt number r of t's own stream

So each task's items come in its own order, without a gap, and the position in the data is still one number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from llamarl.data.items import Split
from llamarl.data.prompts import PromptStream, splitmix
from llamarl.determinism import derive_seed
from llamarl.types import EVAL_INDEX_OFFSET, Prompt

__all__ = ["MixedStream", "choose_tasks"]

_MIXTURE = 0x6D6978
_BLOCK = 4096


def choose_tasks(weights: npt.NDArray[np.float64], seed: int, first: int, count: int) -> npt.NDArray[np.int64]:
    """The task of each of ``count`` prompts from ``first`` on, [count]: independent draws in proportion to ``weights``.

    Integer arithmetic on (seed, index), and one comparison with the cumulated weights: the same on every machine.
    """
    keys = splitmix(np.arange(first, first + count, dtype=np.uint64), derive_seed(seed, _MIXTURE))
    places = (keys >> np.uint64(11)).astype(np.float64) * 2.0**-53
    bounds = np.cumsum(weights) / np.sum(weights)
    return np.minimum(np.searchsorted(bounds, places, side="right"), len(weights) - 1).astype(np.int64)


class MixedStream:
    """Random access to the prompts of several tasks, as ``PromptStream`` gives it to those of one.

    Args:
        streams: Of each task, by its label, which its prompts then carry.
        weights: Of each, > 0; only their ratios matter.
    """

    def __init__(self, streams: Mapping[str, PromptStream], weights: Mapping[str, float], seed: int) -> None:
        self._streams = dict(streams)
        self._labels = list(streams)
        self._weights = np.array([weights[label] for label in self._labels], dtype=np.float64)
        self._seed = seed
        self._counts = [np.zeros(len(self._labels), dtype=np.int64)]
        """How many prompts of each task come before a block."""

    @property
    def num_skipped(self) -> int:
        """Of all tasks, as ``PromptStream.num_skipped``."""
        return sum(stream.num_skipped for stream in self._streams.values())

    def get(self, index: int, item: int | None = None) -> Prompt:
        """Prompt ``index`` of the training stream. Raises what ``PromptStream.get`` raises."""
        label, number = self._find(index)
        return replace(self._streams[label].get(number, item), index=index, task=label)

    def candidates(self, index: int) -> tuple[str, list[int]]:
        """As ``PromptStream.candidates``, with the label of the task."""
        label, number = self._find(index)
        return label, self._streams[label].candidates(number)[1]

    def ask_ahead(self, index: int) -> None:
        """As ``PromptStream.ask_ahead``."""
        label, number = self._find(index)
        self._streams[label].ask_ahead(number)

    def _find(self, index: int) -> tuple[str, int]:
        """The label of a prompt's task, and its number among that task's prompts."""
        block, place = divmod(index, _BLOCK)
        while len(self._counts) <= block:
            chosen = choose_tasks(self._weights, self._seed, (len(self._counts) - 1) * _BLOCK, _BLOCK)
            self._counts.append(self._counts[-1] + np.bincount(chosen, minlength=len(self._labels)))
        chosen = choose_tasks(self._weights, self._seed, block * _BLOCK, place + 1)
        task = int(chosen[-1])
        number = int(self._counts[block][task]) + int((chosen[:-1] == task).sum())
        return self._labels[task], number

    def check_training_prompts(self, num_prompts: int | None = None) -> None:
        """Of each task, as ``PromptStream.check_training_prompts``."""
        for stream in self._streams.values():
            stream.check_training_prompts(num_prompts)

    def num_items(self, split: Split) -> int | None:
        """Of all tasks together, as ``PromptStream.num_items``."""
        sizes = [stream.num_items(split) for stream in self._streams.values()]
        return None if None in sizes else sum(size or 0 for size in sizes)

    @property
    def holds_out(self) -> bool:
        """Whether any of the tasks has something to evaluate on."""
        return any(stream.holds_out for stream in self._streams.values())

    def eval_prompts(self, num_prompts: int) -> list[Prompt]:
        """Return held-out prompts of all tasks that hold some out, as many of each, one task after the other."""
        prompts: list[Prompt] = []
        streams = {label: stream for label, stream in self._streams.items() if stream.holds_out}
        for place, (label, stream) in enumerate(streams.items()):
            share = num_prompts // len(streams) + (place < num_prompts % len(streams))
            for prompt in stream.eval_prompts(share):
                prompts.append(replace(prompt, index=EVAL_INDEX_OFFSET + len(prompts), task=label))
        return prompts
