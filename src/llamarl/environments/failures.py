"""Why samples have no reward, counted: for reports, warnings and limits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from llamarl.types import Failure, Group

__all__ = ["count_causes", "failure_cause"]

_MAX_CAUSE = 300
_RAISED = ("exception", "environment")
"""Kinds whose detail is an exception and its place."""


def failure_cause(failure: Failure) -> str:
    """One line: the kind, what was said, and for an exception its place: ``exception: KeyError: 'x' at rewards.py:7``."""
    first, *rest = failure.detail.splitlines() or [""]
    place = rest[0].strip() if rest and rest[0].lstrip().startswith("at ") else ""
    where = place.partition(": ")[0] if failure.kind in _RAISED else ""
    return f"{failure.kind}: {first[:_MAX_CAUSE]}{where and ' ' + where}"


def count_causes(groups: Iterable[Group]) -> dict[str, int]:
    """Number of failed samples of each cause, the commonest first.

    Exceptions of one type from one line are one cause, shown as the first of them: their texts often hold the sample.
    """
    shown: dict[tuple[str, ...], str] = {}
    counts: Counter[tuple[str, ...]] = Counter()
    for group in groups:
        for response in group.responses:
            if isinstance(response.outcome, Failure):
                key = _key(response.outcome)
                shown.setdefault(key, failure_cause(response.outcome))
                counts[key] += 1
    return {shown[key]: number for key, number in counts.most_common()}


def _key(failure: Failure) -> tuple[str, ...]:
    first, *rest = failure.detail.splitlines() or [""]
    if failure.kind in _RAISED and rest:
        return failure.kind, first.partition(":")[0], rest[0]
    return failure.kind, first
