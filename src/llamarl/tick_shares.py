"""How many prompt groups of each tick a replica gets, and which: by its share, never by the clock. Pure.

    shares 5, 3; 4 groups a tick       tick 0    1    2    3    4 ..     in the long run
    replica 0: 2.5 a tick                   3    2    3    2    3        5 of 8
    replica 1: 1.5 a tick                   1    2    1    2    1        3 of 8

Each gets the whole part of its quota ``groups * share / sum of shares``. What is then left of the
groups goes to the largest remainders (of equal ones, to the first), and remainders are carried: who
got less than its quota has more to show at the next tick. So a tick's count differs from the quota
by less than 1, and over any number of ticks shares hold but for a few groups.

The tick's prompts are dealt in rounds, one to each replica that still gets some. Equal shares of a
number that divides are thus dealt as cards are: prompt p goes to replica p modulo the replicas.

Shares are numbers as they are written: 0.1 is a tenth. Everything here is counted in whole numbers,
so no rounding of the machine decides who gets a prompt.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction

__all__ = ["Dealing", "smallest_quota"]


def smallest_quota(shares: Sequence[float], groups: int) -> tuple[int, float]:
    """The replica that gets fewest of ``groups`` groups a tick, and how many on average."""
    parts = list(map(_exact, shares))
    least = min(range(len(parts)), key=lambda replica: parts[replica])
    return least, float(groups * parts[least] / sum(parts))


class Dealing:
    """Of a run: the same answers on every rank that asks.

    Args:
        shares: Of each replica, above 0; only their ratios count.
        groups: Of a tick, over all replicas.

    Raises:
        ValueError: A share is not above 0, or so small that its replica would have nothing to do at some ticks.
    """

    def __init__(self, shares: Sequence[float], groups: int) -> None:
        parts = list(map(_exact, shares))
        if not parts or min(parts) <= 0:
            raise ValueError(f"shares must be above 0, got {list(shares)}")
        self._groups = groups
        total = sum(parts)
        quotas = [groups * part / total for part in parts]
        if min(quotas) < 1:
            raise ValueError(f"each replica needs a group a tick: {groups} groups in shares {list(shares)}")
        self.quotas = tuple(map(float, quotas))
        """Groups of a tick that each replica gets on average."""
        self._whole = [math.floor(quota) for quota in quotas]
        self._left = groups - sum(self._whole)
        self._unit = math.lcm(*(quota.denominator for quota in quotas))
        self._remainders = [int((quota - whole) * self._unit) for quota, whole in zip(quotas, self._whole, strict=True)]
        self._owed = [0] * len(parts)
        """What each has been given too little so far, in parts of ``_unit``."""
        self._counts: list[tuple[int, ...]] = []
        self._ends: list[list[int]] = [[] for _ in parts]
        """Of each replica: its groups up to and with each tick of ``_counts``."""
        self._period = 0
        """Ticks after which nobody is owed anything, so that all begins anew; 0: not met so far."""

    @property
    def num_replicas(self) -> int:
        return len(self._whole)

    def counts(self, tick: int) -> tuple[int, ...]:
        """[replicas] groups that each delivers at ``tick``, at least 1."""
        while not self._period and tick >= len(self._counts):
            self._deal_next()
        return self._counts[tick % self._period if self._period else tick]

    def ahead(self, replica: int, tick: int, num_ticks: int) -> list[int]:
        """Groups that a replica delivers at ``tick`` and at those after it."""
        return [self.counts(at)[replica] for at in range(tick, tick + num_ticks)]

    def num_active(self, replica: int, tick: int, *, oversubscription: float, max_segments: int) -> int:
        """Groups that a replica keeps active at ``tick``: no more than can leave before the last of them is due.

        Args:
            oversubscription: Groups to keep active, as a multiple of those that it delivers.
            max_segments: Ticks in which a group must leave.
        """
        delivers = self.ahead(replica, tick, max_segments)
        wanted = int(self.quotas[replica] * oversubscription)
        return max(delivers[0], min(wanted, sum(delivers)))

    def prompt_index(self, replica: int, number: int) -> int:
        """Of the ``number``-th prompt that a replica gets in a run."""
        ends = self._ends[replica]
        while not self._period and (not ends or ends[-1] <= number):
            self._deal_next()
        cycle, number = divmod(number, ends[-1]) if self._period else (0, number)
        at = bisect_right(ends, number)
        rounds = number - (ends[at - 1] if at else 0)
        counts = self._counts[at]
        before = sum(min(count, rounds) for count in counts) + sum(count > rounds for count in counts[:replica])
        return (cycle * self._period + at) * self._groups + before

    def _deal_next(self) -> None:
        owed = [had + remainder for had, remainder in zip(self._owed, self._remainders, strict=True)]
        uneven = [replica for replica, remainder in enumerate(self._remainders) if remainder]
        counts = list(self._whole)
        for replica in sorted(uneven, key=lambda replica: -owed[replica])[: self._left]:
            counts[replica] += 1
            owed[replica] -= self._unit
        self._owed = owed
        self._counts.append(tuple(counts))
        for ends, count in zip(self._ends, counts, strict=True):
            ends.append((ends[-1] if ends else 0) + count)
        if not any(owed):
            self._period = len(self._counts)


def _exact(share: float) -> Fraction:
    return Fraction(str(share))
