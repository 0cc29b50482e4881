"""Warnings in the run's folder, and how the recorder says each once."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from llamarl.observability.config import ObservabilityConfig
from llamarl.observability.recorder import Recorder
from llamarl.observability.warning_log import WarningLog, read_warnings

QUIET = ObservabilityConfig(console="none", tensorboard=False, trace=False)


def report(tick: int, failed: int) -> Any:
    return SimpleNamespace(
        executor="trainer",
        tick=tick,
        metrics={"samples/delivered": 4.0, "reward/failed": float(failed), "tokens/trained": 9.0 * (failed < 4)},
        started_s=0.0,
        finished_s=1.0,
        spans=(),
        controller_bytes=0,
        failures={"exception: ValueError: no number": failed} if failed else {},
    )


def test_a_kind_of_trouble_is_said_once_also_over_a_resume(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, QUIET, ["trainer"], 6)
    for tick, failed in enumerate([0, 4, 4, 4]):
        recorder.on_report(report(tick, failed))
    assert recorder.summary().failures == ("12 x exception: ValueError: no number",)
    recorder.close()
    (warning,) = read_warnings(tmp_path)
    assert (warning["step"], warning["kind"]) == (1, "all_rewards_failed")
    assert "every reward of " in warning["text"] and "ValueError: no number" in warning["text"]

    resumed = Recorder(tmp_path, QUIET, ["trainer"], 6, resume_after_tick=2)
    resumed.on_report(report(3, 4))
    resumed.close()
    assert read_warnings(tmp_path) == [warning]  # said before the resume
    again = Recorder(tmp_path, QUIET, ["trainer"], 6, resume_after_tick=0)
    assert read_warnings(tmp_path) == []  # of a tick that is done again
    again.on_report(report(1, 4))
    again.close()
    assert read_warnings(tmp_path) == [warning]


def test_a_line_torn_by_a_kill_is_left_out(tmp_path: Path) -> None:
    log = WarningLog(tmp_path)
    log.write(3, "no_signal", "an example")
    with log.path.open("ab") as file:
        file.write(b'{"step": 4, "ki')
    assert read_warnings(tmp_path) == [{"step": 3, "kind": "no_signal", "text": "an example"}]
    assert WarningLog(tmp_path, resume_after_tick=3).said == {"no_signal"}
    assert log.path.read_bytes().endswith(b"}\n")
