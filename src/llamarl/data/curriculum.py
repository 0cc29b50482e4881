"""A curriculum: which of several items is asked next, by what is known of their pass rates. Pure.

    verdicts of ticks up to k - delay ─▶ PassRates: (task, item) -> right, wrong of its last groups ─┐
    prompt i ─▶ its candidates: C items of the shuffled data, each once an epoch ────────────────────┴─▶ the first that teaches

An item teaches where some answers to it are right and not all: a quarter of them at least, for what is
right less often may be so by luck. Of one that was not asked lately nothing is known, for the policy has
changed since: it counts as the task's mean one. Where none of the candidates teaches, one of which
nothing is known is asked, else the first. A choice draws nothing: it is the same on every machine,
after a resume, and when a tick is done again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from llamarl.types import OWN_PROMPTS, RIGHT, Group, Score

__all__ = ["BANDS", "Outcome", "PassRates", "bands", "outcomes_of", "teaches"]

Outcome = tuple[str, int, int, int, int]
"""Task, item, number of the prompt that it was, and how many answers were right and wrong."""

BANDS = ("none", "few", "some", "most", "all")
"""Of an item's answers in a tick that are right: none, less than a third, up to two thirds, more, all."""


class PassRates:
    """What is known of each item at some tick: how many answers were right when it was last asked."""

    def __init__(self, window: int, outcomes: Iterable[Outcome] = ()) -> None:
        """
        Args:
            window: Prompts after which what is known of an item counts no more.
        """
        self._window = window
        self._last: dict[tuple[str, int], tuple[int, int, int]] = {}
        self._sums: dict[str, tuple[int, int]] = {}
        """Of all items of a task."""
        self.add(outcomes)

    def add(self, outcomes: Iterable[Outcome]) -> None:
        """Take in a tick's; older ones of the same items go, for the policy that gave them has changed.

        Raises:
            ValueError: They are none: what was read may be anybody's.
        """
        for task, item, index, right, wrong in outcomes:
            if right < 0 or wrong < 0:
                raise ValueError(f"item {item} of task {task!r} has {right} right and {wrong} wrong answers")
            _, *before = self._last.get((task, item), (0, 0, 0))
            sums = self._sums.get(task, (0, 0))
            self._last[task, item] = (index, right, wrong)
            self._sums[task] = (sums[0] + right - before[0], sums[1] + wrong - before[1])

    def choose(self, task: str, items: Sequence[int], index: int) -> int:
        """The item for prompt ``index``: the first that teaches, as far as is known; else the first of which nothing is
        known; else the first."""
        unknown = 0 if teaches(*self._sums.get(task, (1, 1))) else 1

        def rank(item: int) -> int:
            then, *counts = self._last.get((task, item), (-self._window, 0, 0))
            return unknown if index - then >= self._window else 0 if teaches(*counts) else 2

        return min(items, key=rank)

    def state(self) -> list[Outcome]:
        """What another one can be made of."""
        return [(*key, *counts) for key, counts in self._last.items()]


def teaches(right: int, wrong: int) -> bool:
    """Whether so many answers to an item leave something to learn from it."""
    return wrong > 0 and 3 * right >= wrong


def outcomes_of(groups: Iterable[Group]) -> list[Outcome]:
    """What a tick's verdicts say of its items; a reward of 1 or more is a right answer, and a failed sample none.

    Answers of a second generator, which may be another model's, say nothing: its prompts are counted apart.
    """
    counts: dict[tuple[str, int], list[int]] = {}
    for group in (one for one in groups if one.prompt.index < OWN_PROMPTS):
        for response in group.responses:
            if isinstance(response.outcome, Score):
                of_item = counts.setdefault((group.prompt.task, group.prompt.item), [group.prompt.index, 0, 0])
                of_item[1 + (response.outcome.value < RIGHT)] += 1
    return [(task, item, index, right, wrong) for (task, item), (index, right, wrong) in sorted(counts.items())]


def bands(outcomes: Iterable[Outcome]) -> dict[str, int]:
    """How many items lie in each of ``BANDS``."""
    found = dict.fromkeys(BANDS, 0)
    for *_, right, wrong in outcomes:
        found[_band(right, right + wrong)] += 1
    return found


def _band(right: int, answers: int) -> str:
    if right in (0, answers):
        return "all" if right else "none"
    return "few" if 3 * right < answers else "some" if 3 * right <= 2 * answers else "most"
