"""Why samples have no reward, over the ticks of a run: causes added up by kind, and when there are too many. Pure.

``environments/failures.py`` counts the causes of one tick. Over a run ten thousand samples may fail with a hundred causes; what a
user needs is how many kinds there are, how many samples each took, and one example of each. An exception's kind is its class;
any other failure's is the failure's own.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

__all__ = ["Causes", "few_causes", "remedy", "too_many_failed"]

_MOST_CAUSES = 5
"""Of one tick, so that a report stays small."""
_OTHERS = "others: of further causes"
_KIND = re.compile(r"exception: [\w.]+|\w+")


def few_causes(causes: Mapping[str, int]) -> dict[str, int]:
    """The five commonest, and the others counted together: what a report carries to the console."""
    ordered = sorted(causes.items(), key=lambda item: -item[1])
    rest = sum(count for _, count in ordered[_MOST_CAUSES:])
    return dict(ordered[:_MOST_CAUSES]) | ({_OTHERS: rest} if rest else {})


def remedy(cause: str) -> str:
    """What to change against failures such as ``cause``: most are the reward's, but some responses never reached it."""
    found = _KIND.match(cause)
    if found and found[0] == "generation":
        return (
            "The policy itself is broken, not its reward: lower optimizer.lr (or algorithm.rho) and start again, or from a "
            "checkpoint of before"
        )
    if found and found[0] == "judge":
        return "No model that judges gave a verdict: see its section (reward_model, judge), its server and its limits"
    if found and found[0] == "environment":
        return "Mend the environment (task.environment, task.pool)"
    return "Mend the reward function (task.reward, task.pool)"


def too_many_failed(shares: Sequence[float], *, max_fraction: float, max_ticks: int) -> bool:
    """Whether failures must end the run: more than ``max_fraction`` of the samples in each of the last ``max_ticks`` ticks.

    Args:
        shares: Share of failed samples of each tick so far, the last one last.
    """
    recent = shares[-max_ticks:]
    return len(recent) == max_ticks and all(share > max_fraction for share in recent)


class Causes:
    """Failures added up by kind; the first of a kind is its example."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._examples: dict[str, str] = {}

    def add(self, failures: Mapping[str, int]) -> list[str]:
        """Count examples; returns those whose kind is new."""
        new = []
        for example, count in failures.items():
            found = _KIND.match(example)
            kind = found[0] if found else example
            if kind not in self._examples:
                self._examples[kind] = example
                new.append(example)
            self._counts[kind] += count
        return new

    def commonest(self) -> list[tuple[str, int]]:
        """(example, samples) of every kind; of equal counts the first seen first."""
        return [(self._examples[kind], count) for kind, count in self._counts.most_common()]

    def lines(self, most: int = 3) -> list[str]:
        """``40 x exception: ValueError: no number``, the commonest first."""
        return [f"{count} x {example}" for example, count in self.commonest()[:most]]
