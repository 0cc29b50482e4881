"""Counts and sizes as a reader expects them: 1 version, 2 versions, 1.30 GB."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["format_bytes", "plural", "table"]


def plural(count: float, noun: str) -> str:
    """``plural(1, "rank")`` is "1 rank", ``plural(2048, "rank")`` "2,048 ranks"; a noun that ends
    in ch, s or x takes "es"."""
    ending = "" if count == 1 else "es" if noun.endswith(("ch", "s", "x")) else "s"
    return f"{count:,} {noun}{ending}"


def format_bytes(nbytes: float) -> str:
    """``1.30 GB``; decimal units."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= factor:
            return f"{nbytes / factor:.2f} {unit}"
    return f"{nbytes:.0f} B"


def table(rows: Sequence[Sequence[str]], *, ruled: bool = False) -> list[str]:
    """Columns of one width each; with a rule under the first row."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [lines[0], *(["  ".join("-" * width for width in widths)] if ruled else []), *lines[1:]]
