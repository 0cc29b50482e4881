"""The words and numbers of rows and of a run's end: pure functions from values to lines."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from llamarl.observability.summary import RunSummary, is_graded
from llamarl.plural import plural

__all__ = [
    "bar",
    "columns",
    "duration",
    "evaluation_line",
    "held_out",
    "mean",
    "number",
    "percent",
    "tail",
    "time_left",
    "title",
    "whole",
]

_MISSING = "–"
_BAR_CELLS = 20
_MOST_WARNINGS = 8


def number(value: float | None, digits: int) -> str:
    """Fixed digits, or a dash; beyond five places before the point two significant digits."""
    if value is None:
        return _MISSING
    return f"{value:.{digits}f}" if abs(value) < 1e5 or not math.isfinite(value) else f"{value:.1e}"


def whole(value: float | None) -> str:
    """A whole number, or a dash."""
    return _MISSING if value is None else f"{value:.0f}"


def count(value: float | None) -> str:
    """A whole number with thousands separated, or a dash."""
    return _MISSING if value is None else f"{value:,.0f}"


def percent(share: float | None) -> str:
    """0.034 -> 3 %."""
    return _MISSING if share is None else f"{100 * share:.0f} %"


def duration(seconds: float | None) -> str:
    """75 -> 1:15; 3675 -> 1:01:15."""
    if seconds is None:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def bar(share: float, cells: int) -> str:
    """A share of full cells."""
    full = round(min(1.0, max(0.0, share)) * cells)
    return "█" * full + "░" * (cells - full)


def time_left(step_s: Sequence[float], num_left: int) -> float | None:
    """Seconds to go at the median pace of the last 20 ticks: one evaluation or stall must not upset it."""
    recent = sorted(step_s[-20:])
    return num_left * recent[len(recent) // 2] if recent else None


def held_out(row: Mapping[str, Any]) -> tuple[str, float | None] | None:
    """What an evaluation is judged by, its mean reward where rewards are graded; None where none ended in this row."""
    if row.get("eval/loss") is not None:
        return "held out", row["eval/loss"]
    if not evaluation_line(row):
        return None
    return ("held-out reward", row["eval/reward_mean"]) if is_graded(row) else ("accuracy", row.get("eval/accuracy"))


def evaluation_line(row: Mapping[str, Any]) -> str:
    """A line for a row in which an evaluation ended, else empty: its accuracy, or its mean reward
    where rewards are graded."""
    accuracy = row.get("eval/accuracy")
    line = f"  ▸ policy {whole(row.get('eval/policy_version')):<5} held-out "
    if accuracy is None:
        failed = row.get("eval/failed")
        return f"{line}accuracy {_MISSING}: all {plural(int(failed), 'sample')} failed" if failed else ""
    if is_graded(row):
        line += f"reward {number(row['eval/reward_mean'], 3)}  (accuracy {accuracy:.3f})"
    else:
        line += f"accuracy {accuracy:.3f}  {bar(accuracy, _BAR_CELLS)}"
    length, failed = row.get("eval/length_mean"), row.get("eval/failed")
    line += "" if length is None else f"  length {length:.1f}"
    return f"{line}  ({plural(int(failed), 'sample')} failed and left out)" if failed else line


def columns(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, int]]:
    """(title, value, width) of what ``rows`` say together: means, the largest of maxima, the sum of failures."""
    if any("time/demonstrations_s" in row for row in rows):
        return _of_demonstrations(rows)
    mean_stale, max_stale = mean(rows, "staleness/mean"), max(_values(rows, "staleness/max"), default=None)
    judged = sum(_values(rows, "groups/generated"))
    no_signal = sum(_values(rows, "groups/no_signal")) / judged if judged else None
    failed = _values(rows, "reward/failed")
    return [
        ("reward", number(mean(rows, "reward/mean"), 3), 9),
        ("stale", _MISSING if mean_stale is None else f"{number(mean_stale, 1)} / {whole(max_stale)}", 9),
        ("no-signal", percent(no_signal), 11),
        ("ratio-clip", percent(mean(rows, "ratio/clipped_fraction")), 12),
        ("length", number(mean(rows, "response/length_mean"), 1), 8),
        ("cut", percent(mean(rows, "response/truncated_fraction")), 7),
        ("tokens/s", count(mean(rows, "tokens_per_s/generated")), 10),
        ("s/tick", number(mean(rows, "time/step_s"), 2), 8),
        ("failed", whole(sum(failed) if failed else None), 8),
    ]


def _of_demonstrations(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, int]]:
    """The columns of a job in which nothing is sampled and nothing judged."""
    seconds = sum(_values(rows, "time/step_s"))
    return [
        ("loss", number(mean(rows, "loss/policy"), 4), 9),
        ("held out", number(mean(rows, "eval/loss"), 4), 11),
        ("grad norm", number(mean(rows, "grad_norm"), 2), 11),
        ("tokens/s", count(sum(_values(rows, "tokens/computed")) / seconds if seconds else None), 10),
        ("s/tick", number(mean(rows, "time/step_s"), 2), 8),
    ]


def title(summary: RunSummary) -> str:
    """How the run ended, in a few words: a run that trained on nothing is not done."""
    if summary.stopped:
        return f"stopped {summary.stopped}"
    if summary.trained_nothing:
        return "nothing was trained"
    if summary.all_skipped:
        return "nothing was learned: no update had a finite loss and gradient"
    if summary.had_gradient is False:
        return "nothing was learned: no update had a gradient"
    return summary.got_worse or "done"


def tail(summary: RunSummary) -> list[str]:
    """What came of the run and where things lie."""
    lines = ["", f"{title(summary)} · {plural(summary.num_ticks, 'tick')} in {duration(summary.wall_s)}", ""]
    lines += _warned(summary.warnings)
    facts: dict[str, str] = {}
    first, last, judged = summary.first, summary.last, "demonstrations" not in summary.idle
    if "eval/accuracy" in first:
        facts["accuracy"] = f"{number(first['eval/accuracy'], 3)} → {number(last.get('eval/accuracy'), 3)}, held out"
    if summary.is_graded:
        facts["held-out reward"] = f"{number(first['eval/reward_mean'], 3)} → {number(last.get('eval/reward_mean'), 3)}"
    if "eval/loss" in first:
        facts["held-out loss"] = f"{number(first['eval/loss'], 4)} → {number(last['eval/loss'], 4)} nats a token"
        if summary.lowest_loss is not None and summary.lowest_loss < last["eval/loss"]:
            facts["held-out loss"] += f", at its lowest {number(summary.lowest_loss, 4)}"
    if "reward/mean" in first:
        facts["reward"] = f"{first['reward/mean']:.3f} → {last['reward/mean']:.3f}"
    if summary.tokens_generated:
        rate = f", {summary.tokens_generated / summary.wall_s:,.0f} a second" if summary.wall_s > 0 else ""
        facts["tokens"] = f"{summary.tokens_generated:,} generated, {count(summary.tokens_trained)} trained{rate}"
    if summary.staleness_max is not None and judged:
        facts["staleness"] = f"mean {number(summary.staleness_mean, 2)}, max {summary.staleness_max}"
    if summary.idle:
        facts["idle"] = ", ".join(f"{name} {percent(share)}" for name, share in summary.idle.items())
    if judged:
        facts["rewards failed"] = "; ".join([count(summary.num_failed), *summary.failures])
    if summary.num_skipped:
        facts["updates skipped"] = str(summary.num_skipped)
    facts |= summary.places
    label = max(len(fact) for fact in facts)
    lines += [f"  {fact:<{label}}   {text}" for fact, text in facts.items()]
    if "trace" in summary.places:
        lines += ["", "  open the trace at https://ui.perfetto.dev"]
    return lines


def _warned(warnings: Sequence[tuple[int, str]]) -> list[str]:
    """What was warned of, once more: by now its lines have scrolled away."""
    if not warnings:
        return []
    lines = ["  warned of, by when it began; what began first is often the cause of the rest:"]
    for tick, words in warnings[:_MOST_WARNINGS]:
        lines += textwrap.wrap(words, 100, initial_indent=f"  tick {tick:<5} ", subsequent_indent=" " * 13)
    rest = len(warnings) - _MOST_WARNINGS
    return [*lines, *([f"  and {rest} more"] if rest > 0 else []), ""]


def _values(rows: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    return [float(row[key]) for row in rows if row.get(key) is not None]


def mean(rows: Sequence[Mapping[str, Any]], key: str) -> float | None:
    """Over the rows that have a value; None where none has."""
    values = _values(rows, key)
    return sum(values) / len(values) if values else None
