"""How far a tick has come, in words, and when those who wait are told."""

import io
import time
from collections.abc import Iterator, Mapping

import pytest
from waiting import wait_until

from llamarl import progress
from llamarl.observability.console import ConsoleReporter, LiveLines
from llamarl.observability.job_description import JobDescription, Lane
from llamarl.settings.observability import ObservabilityConfig

JOB = JobDescription(title="tiny", lanes=(Lane(name="generator", detail="samples groups"),))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    yield now
    progress.forget()


def test_what_is_done_so_far_tells_what_is_left(clock: list[float]) -> None:
    done = [0]
    progress.watch("sampling", "group", 8, lambda: done[0], lambda: "2,100 tokens")
    assert progress.told() == "sampling 8 groups, 2,100 tokens"
    done[0], clock[0] = 1, 105.0  # of less than a fifth nothing is foretold
    assert progress.told() == "sampling 1 of 8 groups, 2,100 tokens"
    done[0], clock[0] = 2, 110.0  # ten seconds for two: thirty for six
    assert progress.told() == "sampling 2 of 8 groups, 2,100 tokens, about 30 s left"
    done[0] = 9  # of more than were asked for
    assert progress.told() == "sampling 8 of 8 groups, 2,100 tokens"
    progress.forget()
    assert progress.told() == ""


def test_a_log_gets_a_line_only_after_half_a_minute_of_silence(clock: list[float]) -> None:
    out = io.StringIO()
    reporter = ConsoleReporter(ObservabilityConfig(console="plain"), JOB, 4, file=out)
    clock[0] += 29.0
    assert reporter.silence_left_s() == 1.0
    clock[0] += 36.0
    assert reporter.silence_left_s() == 0.0
    reporter.working({"generator": "sampling 5 of 8 groups", "evaluator": "starting"})
    assert out.getvalue().endswith("  1:05  generator sampling 5 of 8 groups · evaluator starting\n")
    assert reporter.silence_left_s() == 30.0
    before = out.getvalue()
    reporter.working({})
    assert out.getvalue() == before


def test_a_live_display_shows_what_executors_are_at_in_place_of_what_they_do(terminal: io.StringIO) -> None:
    reporter = ConsoleReporter(ObservabilityConfig(), JOB, 4, file=terminal)
    asked: list[float] = []

    def ask() -> Mapping[str, str]:
        asked.append(time.monotonic())
        return {"generator": "sampling 5 of 8 groups"}

    lines = LiveLines(ask, reporter)
    wait_until(lambda: "sampling 5 of 8 groups" in terminal.getvalue())
    lines.close()
    count = len(asked)
    time.sleep(1.2)
    assert count >= 1 and len(asked) == count


def test_a_verb_without_a_terminal_says_after_silence_how_far_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "SILENCE_S", 0.01)
    said = ""
    with progress.shown():
        progress.watch("judging", "response", 8, lambda: 3)
        while "judging 3 of 8 responses" not in said:
            said += capsys.readouterr().err
        progress.forget()
    capsys.readouterr()
    time.sleep(0.05)
    assert capsys.readouterr().err == ""


def test_a_verb_on_a_terminal_has_one_line_that_changes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm-256color", "COLUMNS": "80"}.items():
        monkeypatch.setenv(name, value)
    said, done = "", 3
    with progress.shown():
        progress.watch("sampling", "response", 8, lambda: done)
        while "sampling 4 of 8 responses" not in said:
            said += capsys.readouterr().err
            done = 4 if "sampling 3 of 8 responses" in said else 3
    progress.forget()
    assert said.count("\n") <= 1
