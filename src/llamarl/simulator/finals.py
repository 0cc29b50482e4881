"""Which splits run against each other, who leaves, and which is proposed then: decisions, no processes (``run_finals.py``).

    forecasts ─▶ best_of_kinds ─▶ jobs in turns ─▶ of_its_kind, of the best kind ─▶ jobs in turns ─▶ propose_split
                                  (still_in, measured_steps)

A forecast is good to some per cent, and so is a single run on a machine whose speed drifts. Jobs that take turns of a second or two
see the same drift, and differ by what they are. Whoever is slower than another by more than chance leaves, so that the time goes to
those that are hard to tell apart.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from llamarl.simulator.splits import PRECISION_GAIN, Split, least_stale, recommend_split

__all__ = [
    "affordable",
    "best_of_kinds",
    "handicaps",
    "in_order",
    "joined",
    "measured_steps",
    "measurements_decide",
    "of_its_kind",
    "propose_split",
    "still_in",
]

_CHANCE = 3.0
"""Standard errors of the difference by which one must be slower to leave: it is asked often, of several."""
_LEAST_ROUNDS = 10
"""Before anyone leaves."""

Turns = Mapping[str, Sequence[float]]
"""Name -> seconds a step in every round that it took part in, from the first on."""


def best_of_kinds(splits: Sequence[Split], precision: str, *, within: float = 0.3, most: int = 4) -> list[Split]:
    """The fastest forecast of each kind: threads, precision, roles at once or in turn.

    Kinds rest on constants that were measured at different times, so forecasts that differ by ``within`` do not tell which is faster.
    Another precision than the recipe's has to be much faster to be proposed: it takes part where it is forecast to be faster at all.

    Args:
        splits: Fastest first, as ``forecast_splits`` gives them.
        precision: The recipe's ``generator.quantization``.

    Returns:
        The fastest of the recipe's precision, then that of another one, then the rest: who comes late may be left out.
    """
    best: dict[tuple[Any, ...], Split] = {}
    for split in splits:
        best.setdefault(_kind(split), split)
    own = [split for split in best.values() if split.settings["generator.quantization"] == precision]
    others = [split for split in best.values() if split.settings["generator.quantization"] != precision]
    if not own:
        return _near(others, within)[:most]
    faster = [split for split in others if split.result.step_s < own[0].result.step_s][:1]
    return [own[0], *faster, *_near(own, within)[1 : most - len(faster)]]


def of_its_kind(splits: Sequence[Split], one: Split, *, within: float = 0.15, most: int = 6) -> list[Split]:
    """``one``, and the splits that differ from it by their schedule only and are forecast to be about as fast."""
    same = [split for split in splits if _kind(split) == _kind(one) and split is not one]
    limit = min(split.result.step_s for split in [one, *same]) * (1.0 + within)
    return [one, *(split for split in same if split.result.step_s <= limit)][:most]


def _kind(split: Split) -> tuple[Any, ...]:
    s = split.settings
    return s["schedule.max_staleness"] > 0, s["generator.threads"], s["trainer.threads"], s["generator.quantization"]


def _near(splits: Sequence[Split], within: float) -> list[Split]:
    return [split for split in splits if split.result.step_s <= splits[0].result.step_s * (1.0 + within)]


def affordable(turn_s: Sequence[float], budget_s: float, least_rounds: int) -> int:
    """How many of the first can take ``least_rounds`` turns within the budget; turns are forecast to last ``turn_s``."""
    in_all = 0.0
    for count, seconds in enumerate(turn_s):
        in_all += seconds * least_rounds
        if in_all > budget_s:
            return count
    return len(turn_s)


def handicaps(splits: Sequence[Split], precision: str) -> dict[str, float]:
    """Name -> how many times its seconds count: another precision than the recipe's has to be faster by ``PRECISION_GAIN``."""
    return {
        split.name: 1.0 if split.settings["generator.quantization"] == precision else 1.0 + PRECISION_GAIN
        for split in splits
    }


def still_in(turns: Turns, handicap: Mapping[str, float]) -> list[str]:
    """Who may be the fastest yet; the others are slower than the fastest so far by more than chance.

    Args:
        turns: Of those that are still in: of equal length.
        handicap: As of ``handicaps``.
    """
    scaled = {name: [handicap[name] * s for s in seconds] for name, seconds in turns.items()}
    best = min(scaled, key=lambda name: statistics.fmean(scaled[name]))
    rounds = len(scaled[best])
    if rounds < _LEAST_ROUNDS:
        return list(turns)
    kept = []
    for name, seconds in scaled.items():
        more = [a - b for a, b in zip(seconds, scaled[best], strict=True)]
        chance = statistics.stdev(more) / math.sqrt(rounds)
        if name == best or statistics.fmean(more) <= _CHANCE * chance:
            kept.append(name)
    return kept


def measured_steps(turns: Turns) -> dict[str, float]:
    """Name -> seconds a step over all rounds; of who left early, by what it took in the rounds that all took part in."""
    if not turns:
        return {}
    longest = max(turns.values(), key=len)
    whole = statistics.fmean(longest)
    return {name: whole * sum(seconds) / sum(longest[: len(seconds)]) for name, seconds in turns.items()}


def joined(kinds: Mapping[str, float], schedules: Mapping[str, float], both: str) -> dict[str, float]:
    """Seconds a step of two finals, in which ``both`` took part, as if all had been measured in the second one."""
    if both not in kinds or both not in schedules:
        return dict(schedules or kinds)
    return {**{name: seconds * schedules[both] / kinds[both] for name, seconds in kinds.items()}, **schedules}


def propose_split(splits: Sequence[Split], measured_s: Mapping[str, float], precision: str) -> Split:
    """The split to propose: of those that were measured, where these decide, or by forecast (``recommend_split``).

    The rule is the same for both but for what counts as equal: 1% of the fastest measured, 2% of the fastest forecast.

    Args:
        splits: Fastest forecast first.
        measured_s: Name -> seconds a step.
    """
    if not measurements_decide(splits, measured_s, precision):
        return recommend_split(splits, precision)
    known = [split for split in splits if split.name in measured_s]
    return least_stale(known, measured_s, precision, tolerance=0.01)


def measurements_decide(splits: Sequence[Split], measured_s: Mapping[str, float], precision: str) -> bool:
    """Whether the split whose forecast is the best, handicaps counted, was measured too: else others were asked about."""
    handicap = handicaps(splits, precision)
    return min(splits, key=lambda split: handicap[split.name] * split.result.step_s).name in measured_s


def in_order(names: list[str], turn: int) -> list[str]:
    """Another one begins in every second round, and every other round runs backwards."""
    at = turn // 2 % len(names)
    order = [*names[at:], *names[:at]]
    return order[::-1] if turn % 2 else order
