"""One executor's metrics from those of its ranks, as ``keys.py`` says of each key. Pure.

    rank 0: {tokens/generated: 4230, ..} ─┐
    rank 1: {tokens/generated: 3866, ..} ─┴──▶ {tokens/generated: 8096, ..} ──▶ the executor's report

A value that any rank could tell is told by one of them; the others send what is their own (:func:`own_metrics`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from llamarl.observability.keys import over_ranks

__all__ = ["own_metrics", "reduce_over_ranks"]


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
