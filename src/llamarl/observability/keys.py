"""Reads ``keys.toml``: every metric key, its unit, what it says, how ranks' values become one; and
makes them one. Pure.

    rank 0: {tokens/generated: 4230, ..} ─┐
    rank 1: {tokens/generated: 3866, ..} ─┴──▶ {tokens/generated: 8096, ..} ──▶ the executor's report

A row of ``metrics.jsonl`` lists its keys in the order of the table; keys that it does not know
(parts of a reward, metrics of a user's own executor) follow in alphabetical order. Two runs of one
seed have equal rows but for the timing keys.

docs/metric_keys.md shows the table; ``python tests/tools/metric_keys.py`` writes that page.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal

__all__ = [
    "KEYS",
    "REPLICA_KEY",
    "MetricKey",
    "OverRanks",
    "is_integer_key",
    "is_timing_key",
    "key_order",
    "over_ranks",
    "own_metrics",
    "reduce_over_ranks",
]

REPLICA_KEY = "time/replica_{}_s"
"""Of each replica of a generator of several kinds, by its number."""

OverRanks = Literal["sum", "mean", "max", "min", "same"]
"""How the values of an executor's ranks become one: ``same`` is one value that any of them may
report, since it stands for all of them; two that differ are refused. A ``mean`` is weighted by
another key of the same rank, or counts each rank once. What only one rank reports is taken as it
is."""


@dataclass(frozen=True, kw_only=True)
class MetricKey:
    """One column of ``metrics.jsonl``."""

    name: str
    unit: str
    meaning: str
    ranks: OverRanks = "same"
    weight: str = ""
    """Key of the weight of a ``mean``."""
    integer: bool = False
    """Written without a decimal point."""


_TABLE: dict[str, Any] = tomllib.loads(
    (resources.files("llamarl.observability") / "keys.toml").read_text(encoding="utf-8")
)

KEYS = tuple(
    MetricKey(name=name.replace("ROLE", role), **columns)
    for name, columns in _TABLE["keys"].items()
    for role in (_TABLE["roles"] if "ROLE" in name else [""])
)
"""The table, with a key for each role where its name says ROLE."""

_POSITION = {key.name: position for position, key in enumerate(KEYS)}
_KNOWN = {key.name: key for key in KEYS}
_EXTREME = re.compile(r"(?:^|[/_])(max|min)$")
_COUNT = re.compile(r"(?:^|/)(?:tokens|samples|groups)/|(?:^|/)num_")


def is_timing_key(name: str) -> bool:
    """Whether a key depends on the clock, so that it differs from run to run: ``time/*``, ``idle/*`` and rates."""
    return name.startswith(("time/", "idle/", "recovery/")) or "_per_s" in name


def is_integer_key(name: str) -> bool:
    """Whether a key is written without a decimal point."""
    return name in _KNOWN and _KNOWN[name].integer


def over_ranks(name: str) -> tuple[OverRanks, str]:
    """How ranks' values under a key become one, and the key of a mean's weight ("" counts each rank once).

    A key that the table does not know goes by its name: ``time/*`` takes the largest; names that
    end in ``max`` or ``min`` the largest or smallest; counts (``tokens/*``, ``samples/*``,
    ``groups/*``, ``num_*``) add up; anything else is the mean over the ranks that report it.
    """
    known = _KNOWN.get(name)
    if known is not None:
        return known.ranks, known.weight
    if name.startswith("time/"):
        return "max", ""
    extreme = _EXTREME.search(name)
    if extreme is not None:
        return ("max" if extreme[1] == "max" else "min"), ""
    return ("sum" if _COUNT.search(name) else "mean"), ""


def key_order(names: Iterable[str]) -> list[str]:
    """Names in the order of the table, then unknown ones alphabetically."""
    return sorted(names, key=lambda name: (_POSITION.get(name, len(KEYS)), name))


def own_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """What a rank reports whose other values another rank reports: its times, and its memory."""
    return {key: value for key, value in metrics.items() if key.startswith(("time/", "memory/"))}


def reduce_over_ranks(executor: str, ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of an executor.

    Args:
        executor: Its name, for errors.
        ranks: What each rank reported, in rank order; a rank need not report every key.

    Raises:
        ValueError: Ranks report different values under a key that stands for all of them, or a mean without its weight.
    """
    keys = list(dict.fromkeys(key for metrics in ranks for key in metrics))
    return {key: _reduce(executor, key, ranks) for key in keys}


def _reduce(executor: str, key: str, ranks: Sequence[Mapping[str, float]]) -> float:
    reporting = [(number, metrics) for number, metrics in enumerate(ranks) if key in metrics]
    values = [metrics[key] for _, metrics in reporting]
    if len(values) == 1:
        return values[0]
    kind, weight = over_ranks(key)
    if kind == "same":
        for number, metrics in reporting[1:]:
            if metrics[key] != values[0] and not (math.isnan(metrics[key]) and math.isnan(values[0])):
                raise ValueError(
                    f"executor {executor!r}: rank {reporting[0][0]} reports {key} = {values[0]}, rank {number} reports "
                    f"{metrics[key]}, but {key} stands for all ranks: let one rank report it, or use another key"
                )
        return values[0]
    if kind == "sum":
        return math.fsum(values)
    if kind != "mean":
        return max(values) if kind == "max" else min(values)
    weights = [1.0] * len(values)
    if weight:
        missing = [number for number, metrics in reporting if weight not in metrics]
        if missing:
            raise ValueError(f"executor {executor!r}: rank {missing[0]} reports {key} without its weight, {weight}")
        weights = [metrics[weight] for _, metrics in reporting]
    total = sum(weights)
    if not total:
        return values[0]
    return sum(w * v for w, v in zip(weights, values, strict=True) if w) / total
