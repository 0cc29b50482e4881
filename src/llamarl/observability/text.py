"""The words and numbers of the console: pure functions from values to lines."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import llamarl
from llamarl.observability.job_description import JobDescription, edge_lines
from llamarl.observability.summary import RunSummary, is_graded
from llamarl.plural import plural

__all__ = [
    "RowTable",
    "bar",
    "columns",
    "duration",
    "encodable",
    "evaluation_line",
    "head",
    "held_out",
    "lines_every",
    "number",
    "percent",
    "tail",
    "time_left",
    "title",
    "whole",
]

_MISSING = "–"
_BAR_CELLS = 20
_LINES_A_RUN = 30
_LINES_A_HEADING = 20
_MOST_WARNINGS = 8
_PLAIN = str.maketrans(
    {"─": "-", "═": "=", "▶": ">", "·": "-", "×": "x", "█": "#", "░": ".", "–": "-", "→": ">", "▸": ">", "…": "~"}
)


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


def lines_every(num_ticks: int) -> int:
    """Ticks a line, so that a run prints about 30: 1, 2, 5, 10, 20, 50 .."""
    step = 1
    while num_ticks / step > _LINES_A_RUN * 1.5:
        step = step * 5 // 2 if str(step)[0] == "2" else step * 2
    return step


def head(job: JobDescription, num_ticks: int, done: int = 0) -> list[str]:
    """What runs where."""
    lines = [
        "",
        f"llamarl {llamarl.__version__} · {job.title} · {plural(num_ticks, 'tick')}"
        + (f", {done} done" if done else ""),
    ]
    lines.append("")
    name = max((len(lane.name) for lane in job.lanes), default=0)
    places = {
        lane.name: f"{plural(lane.num_ranks, 'rank')} × {plural(lane.threads, 'thread')} on {lane.device}"
        for lane in job.lanes
    }
    place = max((len(text) for text in places.values()), default=0)
    lines += [f"  {lane.name:<{name}}   {places[lane.name]:<{place}}   {lane.detail}" for lane in job.lanes]
    arrows = edge_lines(job.edges)
    if arrows:
        lines += ["", *(f"  {line}" for line in arrows)]
    if job.facts:
        label = max(len(fact) for fact in job.facts)
        lines += ["", *(f"  {fact:<{label}}   {text}" for fact, text in job.facts.items())]
    return lines


def held_out(row: Mapping[str, Any]) -> tuple[str, float | None] | None:
    """What an evaluation is judged by, its mean reward where rewards are graded; None where none ended in this row."""
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
    mean_stale, max_stale = _mean(rows, "staleness/mean"), max(_values(rows, "staleness/max"), default=None)
    judged = sum(_values(rows, "groups/generated"))
    no_signal = sum(_values(rows, "groups/no_signal")) / judged if judged else None
    failed = _values(rows, "reward/failed")
    return [
        ("reward", number(_mean(rows, "reward/mean"), 3), 9),
        ("stale", _MISSING if mean_stale is None else f"{number(mean_stale, 1)} / {whole(max_stale)}", 9),
        ("no-signal", percent(no_signal), 11),
        ("ratio-clip", percent(_mean(rows, "ratio/clipped_fraction")), 12),
        ("length", number(_mean(rows, "response/length_mean"), 1), 8),
        ("cut", percent(_mean(rows, "response/truncated_fraction")), 7),
        ("tokens/s", count(_mean(rows, "tokens_per_s/generated")), 10),
        ("s/tick", number(_mean(rows, "time/step_s"), 2), 8),
        ("failed", whole(sum(failed) if failed else None), 8),
    ]


def _of_demonstrations(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, int]]:
    """The columns of a job in which nothing is sampled and nothing judged."""
    seconds = sum(_values(rows, "time/step_s"))
    return [
        ("loss", number(_mean(rows, "loss/policy"), 4), 9),
        ("held out", number(_mean(rows, "eval/loss"), 4), 11),
        ("grad norm", number(_mean(rows, "grad_norm"), 2), 11),
        ("tokens/s", count(sum(_values(rows, "tokens/computed")) / seconds if seconds else None), 10),
        ("s/tick", number(_mean(rows, "time/step_s"), 2), 8),
    ]


class RowTable:
    """Aligned rows under a heading that returns every 20 lines."""

    def __init__(self, executors: Sequence[str], num_ticks: int) -> None:
        self._executors = tuple(executors)
        self._num_ticks = num_ticks
        self._printed = 0
        self._step_s: list[float] = []

    def lines(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        """One line that sums up ``rows``, and a heading where due."""
        last = rows[-1]
        self._step_s += [float(row["time/step_s"]) for row in rows if row.get("time/step_s") is not None]
        num_left = self._num_ticks - int(last["step"]) - 1
        cells = [("tick", whole(last["step"]), 6), *columns(rows)]
        idle = [(name, percent(_mean(rows, f"idle/{name}")), max(len(name), 5) + 2) for name in self._executors]
        left = duration(time_left(self._step_s, num_left))
        cells += [*idle, ("left", left, 8)]
        lines = []
        if self._printed % _LINES_A_HEADING == 0:
            before = sum(width for _, _, width in cells[: -len(idle) - 1])
            span = sum(width for _, _, width in idle)
            lines += ["", " " * (before + 2) + " idle ".center(span - 2, "─")]
            lines.append("".join(f"{title:>{width}}" for title, _, width in cells))
        lines.append("".join(f"{value:>{width}}" for _, value, width in cells))
        self._printed += 1
        return lines


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


def encodable(line: str, encoding: str) -> str:
    """The line, in plain characters where the stream cannot hold ours."""
    try:
        line.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return line.translate(_PLAIN).encode("ascii", "replace").decode()
    return line


def _values(rows: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    return [float(row[key]) for row in rows if row.get(key) is not None]


def _mean(rows: Sequence[Mapping[str, Any]], key: str) -> float | None:
    values = _values(rows, key)
    return sum(values) / len(values) if values else None
