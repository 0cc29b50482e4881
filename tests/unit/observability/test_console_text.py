"""The words of the console, and the two displays."""

import io
import json
import os
import re
import sys
from datetime import datetime
from pathlib import Path

import pytest

from llamarl.errors import LlamaRLError
from llamarl.observability import text
from llamarl.observability.console import ConsoleReporter, RowTable, lines_every
from llamarl.observability.job_description import Edge, JobDescription, Lane, edge_lines
from llamarl.observability.summary import RunSummary
from llamarl.settings.observability import ObservabilityConfig

JOB = JobDescription(
    title="tiny",
    lanes=(Lane(name="generator", detail="8 x 8 samples"), Lane(name="trainer", num_ranks=2, threads=4, device="cuda")),
    edges=(Edge(name="weights", source="trainer", sink="generator", delay=2),),
    facts={"model": "bundled:tiny"},
)


def _row(tick: int, **more: float) -> dict[str, float]:
    row = {"step": tick, "reward/mean": 0.25 * tick, "staleness/mean": 1.0, "staleness/max": tick, "time/step_s": 2.0}
    return (
        row | {"idle/generator": 0.1, "idle/trainer": 0.5, "tokens_per_s/generated": 1234.0, "reward/failed": 1} | more
    )


@pytest.mark.parametrize(
    ("seconds", "words"), [(0, "0:00"), (75.4, "1:15"), (3675, "1:01:15"), (59.6, "1:00"), (None, "?")]
)
def test_durations(seconds: float | None, words: str) -> None:
    assert text.duration(seconds) == words


@pytest.mark.parametrize(("num_ticks", "every"), [(1, 1), (45, 1), (60, 2), (200, 5), (400, 10), (900, 20), (2000, 50)])
def test_a_run_prints_about_thirty_lines(num_ticks: int, every: int) -> None:
    assert lines_every(num_ticks) == every
    assert num_ticks / every <= 45


def test_time_left_takes_the_median_pace_of_recent_ticks() -> None:
    assert text.time_left([], 10) is None
    assert text.time_left([100.0] + [1.0] * 19 + [50.0], 10) == 10.0  # one stall and the first tick do not count


def test_the_graph_is_drawn_as_a_chain_and_its_delayed_edges() -> None:
    edges = [
        Edge(name="scored", source="reward", sink="trainer"),
        Edge(name="weights", source="trainer", sink="generator", delay=2),
        Edge(name="completions", source="generator", sink="reward"),
        Edge(name="prompts", source="reference", sink="trainer"),
    ]
    assert edge_lines(edges) == [
        "generator ──completions──▶ reward ──scored──▶ trainer",
        "reference ──prompts──▶ trainer",
        "trainer ══weights, 2 ticks later══▶ generator",
    ]


def test_a_line_sums_up_its_rows() -> None:
    two = [
        _row(2, **{"groups/no_signal": 1, "groups/generated": 4, "response/truncated_fraction": 0.5}),
        _row(3, **{"groups/no_signal": 7, "groups/generated": 12, "response/truncated_fraction": 1.0}),
    ]
    lines = RowTable(["generator", "trainer"], 10).lines(two)
    heading, values = lines[-2].split(), lines[-1].split("  ")
    names = "tick reward stale no-signal ratio-clip length cut tokens/s s/tick failed generator trainer left"
    assert heading == names.split()
    assert [v.strip() for v in values if v.strip()] == [
        "3", "0.625", "1.0 / 3", "50 %", "–", "–", "75 %", "1,234", "2.00", "2", "10 %", "50 %", "0:12",
    ]  # fmt: skip
    assert len(lines[-1]) == len(lines[-2])


def test_the_heading_returns_every_twenty_lines() -> None:
    table = RowTable(["trainer"], 100)
    headings = [len(table.lines([_row(tick)])) > 1 for tick in range(41)]
    assert [tick for tick, shown in enumerate(headings) if shown] == [0, 20, 40]


def test_an_evaluation_has_a_line_of_its_own() -> None:
    assert text.evaluation_line(_row(1)) == ""
    line = text.evaluation_line(_row(1, **{"eval/accuracy": 0.75, "eval/policy_version": 10, "eval/length_mean": 3.25}))
    assert line == "  ▸ policy 10    held-out accuracy 0.750  ███████████████░░░░░  length 3.2"
    some = {"eval/accuracy": 0.75, "eval/policy_version": 10, "eval/failed": 138}
    assert text.evaluation_line(_row(1, **some)).endswith("░░░░░  (138 samples failed and left out)")
    right_or_wrong = text.evaluation_line(_row(1, **{"eval/accuracy": 0.75, "eval/reward_mean": 0.75}))
    assert "held-out accuracy 0.750" in right_or_wrong


def test_an_evaluation_of_nothing_but_failures_is_told_and_is_the_last_one() -> None:
    good = _row(0, **{"eval/accuracy": 0.75, "eval/reward_mean": 0.75, "eval/failed": 0, "eval/policy_version": 0})
    failed = _row(1, **{"eval/accuracy": None, "eval/reward_mean": None, "eval/failed": 8, "eval/policy_version": 4})
    assert text.evaluation_line(failed) == "  ▸ policy 4     held-out accuracy –: all 8 samples failed"
    summary = RunSummary()
    for row in (good, failed, _row(2)):
        summary.add(row)
    assert any("0.750 → –, held out" in line for line in text.tail(summary))


def test_where_rewards_are_graded_an_evaluation_shows_the_mean_reward() -> None:
    first, last = (
        {"eval/accuracy": 0.1, "eval/reward_mean": value, "eval/policy_version": 10} for value in (0.35, 0.54)
    )
    assert text.evaluation_line(_row(1, **last)) == "  ▸ policy 10    held-out reward 0.540  (accuracy 0.100)"
    summary = RunSummary()
    summary.add(_row(0, **first))
    summary.add(_row(1, **last))
    lines = text.tail(summary)
    assert "  held-out reward   0.350 → 0.540" in lines


def test_a_held_out_loss_of_zero_is_the_lowest() -> None:
    summary = RunSummary()
    for tick, loss in enumerate((1.0, 0.0, 2.0)):
        summary.add(_row(tick, **{"eval/loss": loss, "eval/policy_version": tick + 1}))
    assert summary.lowest_loss == 0.0


NO_GRADIENT = "nothing was learned: no update had a gradient"


@pytest.mark.parametrize(
    ("rows", "stopped", "words"),
    [
        ([{"tokens/trained": 5, "grad_norm": 0.5}], "", "done"),
        ([{"tokens/trained": 5, "grad_norm": 0.0}, {"tokens/trained": 5, "grad_norm": None}], "", NO_GRADIENT),
        ([{"tokens/trained": 5, "grad_norm": None}, {"tokens/trained": 5, "grad_norm": 0.5}], "", "done"),
        (
            [{"tokens/trained": 5, "grad_norm": None}] * 2,
            "",
            "nothing was learned: no update had a finite loss and gradient",
        ),
        ([{"tokens/trained": 5, "grad_norm": 0.0}] * 2, "", NO_GRADIENT),
        ([{"tokens/trained": 0, "grad_norm": 0.0}] * 2, "", "nothing was trained"),
        ([{"tokens/trained": 0, "grad_norm": 0.0}] * 2, "by the user", "stopped by the user"),
        ([{"tokens/generated": 5}], "", "done"),  # no trainer in the job
        ([], "", "done"),
    ],
)
def test_a_run_that_trained_on_nothing_is_not_done(rows: list[dict[str, float]], stopped: str, words: str) -> None:
    summary = RunSummary(stopped=stopped)
    for tick, row in enumerate(rows):
        summary.add({"step": tick, **row})
    assert text.title(summary) == words


@pytest.mark.parametrize(
    ("evaluations", "words"),
    [
        ([(0.375, 0.375), (0.0, 0.0)], "accuracy fell from 0.375 to 0.000"),
        ([(0.3, 0.3), (0.9, 0.9), (0.4, 0.4)], "accuracy fell from 0.900 to 0.400"),
        ([(0.94, 0.94), (0.86, 0.86)], "done"),
        ([(0.04, 0.04), (0.01, 0.01)], "accuracy fell from 0.040 to 0.010"),
        ([(0.1, 0.5), (0.1, 0.3)], "held-out reward fell from 0.500 to 0.300"),
        ([(0.1, -0.5), (0.1, -0.52)], "done"),
        ([(0.3, 0.3), (None, None)], "done"),  # of nothing but failures
    ],
)
def test_a_policy_that_got_worse_is_the_headline(
    evaluations: list[tuple[float | None, float | None]], words: str
) -> None:
    summary = RunSummary()
    for tick, (accuracy, reward) in enumerate(evaluations):
        found = {"eval/accuracy": accuracy, "eval/reward_mean": reward, "eval/failed": 8 * (accuracy is None)}
        summary.add({"step": tick, "tokens/trained": 5, "grad_norm": 0.5, **found})
    assert text.tail(summary)[1].startswith(f"{words} · ")


def test_a_held_out_loss_that_rose_is_the_headline() -> None:
    summary = RunSummary()
    for tick, loss in enumerate((1.0, 0.8, 1.5)):
        summary.add({"step": tick, "tokens/trained": 5, "grad_norm": 0.5, "eval/loss": loss})
    assert text.title(summary) == "held-out loss rose from 1.0000 to 1.5000"


def test_the_end_of_fine_tuning_speaks_of_no_staleness_and_no_rewards() -> None:
    summary = RunSummary()
    staleness = {"staleness/mean": 0.0, "staleness/max": 0, "tokens/trained": 5, "grad_norm": 0.5}
    summary.add({"step": 0, "time/step_s": 1.0, "idle/demonstrations": 0.5, "idle/trainer": 0.0, **staleness})
    said = "\n".join(text.tail(summary))
    assert "demonstrations 50 %" in said and "staleness" not in said and "reward" not in said


def test_the_end_repeats_what_was_warned_of_in_the_order_in_which_it_began() -> None:
    summary = RunSummary()
    summary.warnings = ((2, "the policy runs away. Lower optimizer.lr"), (14, "no signal " + "and more of it " * 20))
    lines = text.tail(summary)
    place = lines.index("  tick 2     the policy runs away. Lower optimizer.lr")
    assert "by when it began" in lines[place - 1]
    assert lines[place + 1].startswith("  tick 14    no signal and more") and lines[place + 2].startswith(
        " " * 13 + "and more"
    )
    assert max(map(len, lines)) <= 100
    summary.warnings = tuple((tick, "x") for tick in range(11))
    assert "  and 3 more" in text.tail(summary)


def test_the_end_names_the_causes_of_failed_rewards() -> None:
    summary = RunSummary()
    summary.add(_row(0, **{"reward/failed": 47}))
    summary.failures = ("40 x exception: ValueError: no number", "7 x timeout: too slow")
    lines = text.tail(summary)
    assert "  rewards failed   47; 40 x exception: ValueError: no number; 7 x timeout: too slow" in lines


class _Stream(io.StringIO):
    """As some notebooks have it."""

    isatty = property()  # type: ignore[assignment]


@pytest.mark.parametrize("out", [io.StringIO(), _Stream()])
def test_a_plain_run_reads_from_head_to_end(out: io.StringIO) -> None:
    reporter = ConsoleReporter(ObservabilityConfig(console="auto"), JOB, 60, file=out)
    summary = RunSummary()
    for tick in range(4):
        row = _row(tick, **({"eval/accuracy": 0.4 + 0.1 * tick, "eval/policy_version": tick} if tick in (0, 3) else {}))
        reporter.on_report("trainer", tick)
        reporter.on_row(row)
        summary.add(row)
    reporter.message("a remark")
    summary.places = {"trace": "RUN/trace.json"}
    reporter.finish(summary)
    reporter.finish(summary)  # ignored
    lines = out.getvalue().splitlines()
    assert "llamarl" in lines[1] and "tiny · 60 ticks" in lines[1]
    assert "  generator   1 rank × 1 thread on cpu      8 x 8 samples" in lines
    assert "  trainer     2 ranks × 4 threads on cuda" in lines
    assert "  trainer ══weights, 2 ticks later══▶ generator" in lines
    rows = [line.split()[0] for line in lines if line.split() and line.split()[0] in ("0", "1", "2", "3")]
    assert rows == ["0", "2", "3"]  # each sums up what came since the one before
    assert "  a remark" in lines
    assert "done · 4 ticks in 0:08" in lines
    assert any(line.split() == ["accuracy", "0.400", "→", "0.700,", "held", "out"] for line in lines)
    assert any(line.split() == ["rewards", "failed", "4"] for line in lines)
    assert sum(line.startswith("done") for line in lines) == 1
    assert not any(line != line.rstrip() or "\x1b" in line for line in lines)


def test_rows_that_await_their_line_are_shown_when_a_run_stops_early() -> None:
    out = io.StringIO()
    reporter = ConsoleReporter(ObservabilityConfig(console="plain"), JOB, 60, file=out)
    summary = RunSummary()
    reporter.on_row(_row(0))
    summary.add(_row(0))
    summary.stopped = "by an error"
    reporter.finish(summary)
    assert "stopped by an error · 1 tick in 0:02" in out.getvalue()
    assert any(line.split()[:2] == ["0", "0.000"] for line in out.getvalue().splitlines())


def test_the_live_display_shows_lanes_and_keeps_evaluations(terminal: io.StringIO) -> None:
    reporter = ConsoleReporter(ObservabilityConfig(), JOB, 4, file=terminal)
    reporter.on_report("generator", 0)
    reporter.on_row(_row(0, **{"eval/accuracy": 0.5, "eval/policy_version": 0}))
    reporter.message("a remark")
    reporter.finish(RunSummary())
    shown = terminal.getvalue()
    for words in ("held-out accuracy 0.500", "a remark", "1/4", "idle 10 %", "tokens/s", "done"):
        assert words in shown
    assert "\x1b[?25h" in shown  # the cursor is back


def test_the_live_display_of_fine_tuning_keeps_the_held_out_loss_and_counts_no_rewards(terminal: io.StringIO) -> None:
    reporter = ConsoleReporter(ObservabilityConfig(), JOB, 4, file=terminal)
    for tick, held in enumerate(({"eval/loss": 1.4271, "eval/policy_version": 0}, {})):
        row = {"step": tick, "loss/policy": 1.25, "time/demonstrations_s": 0.05, "time/step_s": 2.0}
        reporter.on_row(row | held)
    reporter.finish(RunSummary())
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())
    assert "2/4" in shown and "held out 1.427" in shown.partition("2/4")[2]
    assert "failed 0" not in shown


def test_no_console_prints_nothing() -> None:
    out = io.StringIO()
    reporter = ConsoleReporter(ObservabilityConfig(console="none"), JOB, 4, file=out)
    reporter.on_row(_row(0))
    reporter.finish(RunSummary())
    assert out.getvalue() == ""


def test_a_console_whose_reader_is_gone_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    with open(write, "w", encoding="utf-8") as out:
        monkeypatch.setattr(sys, "stdout", out)
        reporter = ConsoleReporter(ObservabilityConfig(console="plain"), JOB, 60, log=tmp_path / "log.jsonl")
        os.close(read)
        reporter.message("a remark")
        reporter.finish(RunSummary())
        monkeypatch.undo()
    assert "a remark" in (tmp_path / "log.jsonl").read_text()


def test_a_stream_without_our_characters_gets_question_marks() -> None:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii")
    ConsoleReporter(ObservabilityConfig(console="plain"), JOB, 4, file=out)
    out.flush()
    assert b"trainer ??weights, 2 ticks later??? generator" in raw.getvalue()


def test_totals_weigh_idle_by_time_and_staleness_by_tokens() -> None:
    summary = RunSummary()
    summary.add({"step": 0, "time/step_s": 1.0, "idle/trainer": 0.9, "staleness/mean": 0.0, "tokens/trained": 100})
    summary.add({"step": 1, "time/step_s": 3.0, "idle/trainer": 0.1, "staleness/mean": 2.0, "tokens/trained": 300})
    summary.add({"step": 2, "grad_norm": None})
    assert summary.num_ticks == 3 and summary.wall_s == 4.0
    assert summary.idle == {"trainer": pytest.approx(0.3)}
    assert summary.staleness_mean == pytest.approx(600 / 400)
    assert summary.tokens_trained == 400 and not summary.first


def test_a_huge_reward_stays_within_its_column() -> None:
    assert [text.number(v, 3) for v in (None, 0.5, 99999.0, -1e38, float("inf"))] == [
        "–",
        "0.500",
        "99999.000",
        "-1.0e+38",
        "inf",
    ]


def test_the_log_keeps_what_was_said_with_time_and_level_and_what_ended_the_run(tmp_path: Path) -> None:
    log, out = tmp_path / "log.jsonl", io.StringIO()
    reporter = ConsoleReporter(ObservabilityConfig(console="plain"), JOB, 60, file=out, log=log)
    reporter.on_row(_row(0))
    reporter.message("a remark")
    reporter.message("warning, tick 0: something\nits cure")
    assert out.getvalue().endswith("\n  warning, tick 0: something\n  its cure\n")
    reporter.failed("it broke\nin two lines")
    reporter.finish(RunSummary(stopped="by an error"))
    kept = [json.loads(line) for line in log.read_text().splitlines()]
    of_level = {level: [one["text"] for one in kept if one["level"] == level] for level in ("info", "warning", "error")}
    assert of_level["error"] == ["it broke", "in two lines"]
    assert of_level["warning"] == ["warning, tick 0: something", "its cure"]
    assert "a remark" in of_level["info"] and any(text.startswith("0    0.000") for text in of_level["info"])
    assert [one["text"] for one in kept if one["level"] != "error"] == [
        line.strip() for line in out.getvalue().splitlines() if line.strip()
    ]
    times = [datetime.fromisoformat(one["time"]) for one in kept]
    assert times == sorted(times) and times[0].tzinfo is not None


def test_a_log_that_cannot_be_written_ends_and_says_so_once(tmp_path: Path) -> None:
    out = io.StringIO()
    reporter = ConsoleReporter(ObservabilityConfig(console="plain"), JOB, 60, file=out, log=Path("/dev/full"))
    reporter.on_row(_row(0))
    reporter.finish(RunSummary())
    assert out.getvalue().count("No space left on device. It ends here") == 1 and "done" in out.getvalue()
    os.mkfifo(tmp_path / "log.jsonl")
    with pytest.raises(LlamaRLError, match=r"cannot write .*log\.jsonl"):
        ConsoleReporter(ObservabilityConfig(console="plain"), JOB, 60, file=out, log=tmp_path / "log.jsonl")
