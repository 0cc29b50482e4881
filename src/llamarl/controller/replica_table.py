"""Unlike generator replicas for people: which ranks each kind has, how it computes, what it gets of a tick. Pure."""

from __future__ import annotations

from llamarl.config import RunConfig
from llamarl.executors.config import GeneratorConfig
from llamarl.plural import plural

__all__ = ["replica_line", "replica_table"]


def replica_table(config: RunConfig) -> str:
    """A row a kind of ``generator.replicas``; empty where all are alike."""
    if not config.generator.replicas:
        return ""
    rows = [("kind", "replicas", "ranks", "tp", "precision", "prompts a tick of each")]
    first = 0
    for place, kind in enumerate(config.generator.replicas):
        own = config.generator.as_of_kind(place)
        last = first + own.dp * own.tp * own.pp - 1
        ranks = f"{first}-{last}" if last > first else str(first)
        rows.append((f"{place}", f"{kind.dp}", ranks, _sizes(own), _precision(config, place), _prompts(config, place)))
        first = last + 1
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def replica_line(config: RunConfig) -> str:
    """The same in a line."""
    kinds = config.generator.replicas
    each = [
        f"{kind.dp} x tp {_sizes(config.generator.as_of_kind(place))} {_precision(config, place)}, "
        f"{plural(1, 'prompt') if (prompts := _prompts(config, place)) == '1' else f'{prompts} prompts'} a tick"
        for place, kind in enumerate(kinds)
    ]
    return "; ".join(each)


def _sizes(own: GeneratorConfig) -> str:
    return f"{own.tp}" + (f" x pp {own.pp}" if own.pp > 1 else "")


def _precision(config: RunConfig, kind: int) -> str:
    own = config.generator.as_of_kind(kind)
    return own.engine.dtype if own.quantization == "none" else f"{own.engine.dtype} {own.quantization}"


def _prompts(config: RunConfig, kind: int) -> str:
    """``4``, or ``3.75 (3 or 4)`` where the share makes no whole number."""
    first = sum(one.dp for one in config.generator.replicas[:kind])
    quota = config.dealing.quotas[first]
    return f"{quota:g}" if quota == int(quota) else f"{quota:.3g} ({int(quota)} or {int(quota) + 1})"
