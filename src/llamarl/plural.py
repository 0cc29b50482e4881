"""A count with its noun, as a reader expects it: 1 version, 2 versions."""

from __future__ import annotations

__all__ = ["plural"]


def plural(count: float, noun: str) -> str:
    """``plural(1, "rank")`` is "1 rank", ``plural(2048, "rank")`` "2,048 ranks"; a noun that ends in ch, s or x takes "es"."""
    ending = "" if count == 1 else "es" if noun.endswith(("ch", "s", "x")) else "s"
    return f"{count:,} {noun}{ending}"
