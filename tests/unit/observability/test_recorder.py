"""The hub: from reports to rows, curves and trace, with times and idle shares worked by hand."""

import contextlib
import json
import math
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from made_run import Report
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from waiting import wait_until

from llamarl.bounded_server import MAX_CONNECTIONS
from llamarl.controller.recorder import Recorder
from llamarl.errors import ConfigError
from llamarl.observability import sinks
from llamarl.observability.metrics import read_metrics, read_warnings, strip_timing
from llamarl.settings.observability import ObservabilityConfig

QUIET = ObservabilityConfig(console="none")
EXECUTORS = ("generator", "reward", "trainer")


def _run(recorder: Recorder, first: int, last: int, slow: float = 1.0, at: float = 100.0) -> None:
    """Generator 0-4, reward 4-5, trainer 5-8 (times ``slow``); the next tick of each begins 5 s later."""
    for tick in range(first, last):
        start = at + 5 * slow * (tick - first)
        recorder.on_report(
            Report(
                "generator",
                tick,
                {"tokens/generated": 100.0},
                start,
                start + 4 * slow,
                (("weight_sync/pull", start, start + 0.5 * slow), ("generate", start + 0.5 * slow, start + 4 * slow)),
            )
        )
        recorder.on_report(Report("reward", tick, {"reward/failed": 0}, start + 4 * slow, start + 5 * slow))
        trained = {"policy_version": tick + 1, "reward/mean": tick / 8, "staleness/mean": 1.0, "staleness/max": 1}
        spans = (("weight_sync/publish", start + 7.75 * slow, start + 8 * slow),)
        recorder.on_report(Report("trainer", tick, trained, start + 5 * slow, start + 8 * slow, spans, 300))


def test_the_time_between_two_processes_of_a_run_is_no_time_of_a_tick(tmp_path: Path) -> None:
    now = time.monotonic() + 1000.0
    recorder = Recorder(tmp_path, QUIET, EXECUTORS, 3)
    _run(recorder, 0, 1, at=now - 5000.0)  # told by the journal of a process that ended then
    _run(recorder, 1, 3, at=now)
    recorder.close()
    assert [row["time/step_s"] for row in read_metrics(tmp_path)] == pytest.approx([8.0, 8.0, 5.0])
    assert read_metrics(tmp_path)[1]["idle/trainer"] == pytest.approx(0.625)


def test_times_idle_shares_rates_and_bytes_of_two_ticks(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, QUIET, EXECUTORS, 2)
    _run(recorder, 0, 2)
    recorder.close()
    first, second = read_metrics(tmp_path)
    assert first["step"] == 0 and second["step"] == 1
    assert [first[f"time/{name}_s"] for name in EXECUTORS] == [4.0, 1.0, 3.0]
    assert first["time/step_s"] == 8.0  # since the run began
    assert second["time/step_s"] == 5.0  # trainer ends at 108 and 113
    assert first["idle/generator"] == 0.0 and first["idle/reward"] == 0.8  # reward waits 4 of 5 s for its first batch
    assert first["idle/trainer"] == 0.625  # 5 of 8 s
    assert second["idle/generator"] == pytest.approx(0.2)  # free from 104 to 105, then works to 109
    assert second["idle/trainer"] == pytest.approx(0.4)  # free from 108 to 110, then works to 113
    assert second["time/weight_sync_s"] == 0.75  # pulled in 0.5, published in 0.25
    assert second["tokens_per_s/generated"] == 20.0


def test_a_resumed_run_leaves_the_rows_of_an_uninterrupted_one_but_for_timing(tmp_path: Path) -> None:
    whole = Recorder(tmp_path / "whole", QUIET, EXECUTORS, 6)
    _run(whole, 0, 6)
    whole.close()
    killed = Recorder(tmp_path / "killed", QUIET, EXECUTORS, 6)
    _run(killed, 0, 5)  # never closed
    resumed = Recorder(tmp_path / "killed", QUIET, EXECUTORS, 6, resume_after_tick=2)
    _run(resumed, 3, 6, slow=2.0, at=7.0)
    summary = resumed.summary()
    resumed.close()
    rows = [read_metrics(tmp_path / name) for name in ("whole", "killed")]
    assert [strip_timing(row) for row in rows[0]] == [strip_timing(row) for row in rows[1]]
    assert [list(row) for row in rows[0]] == [list(row) for row in rows[1]]
    assert rows[0] != rows[1]
    assert summary.num_ticks == 6 and summary.tokens_generated == 600
    ticks = [e for e in json.loads((tmp_path / "killed/trace.json").read_text()) if e.get("cat") == "tick"]
    assert [e["args"]["tick"] for e in ticks if e["tid"] == 3] == [0, 1, 2, 3, 4, 5]
    starts = [e["ts"] for e in ticks if e["tid"] == 3]
    assert starts == sorted(starts)


def test_tensorboard_reads_the_rows_and_forgets_repeated_steps(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, QUIET, EXECUTORS, 4)
    _run(recorder, 0, 4)  # killed: never closed
    resumed = Recorder(tmp_path, QUIET, EXECUTORS, 4, resume_after_tick=1)
    _run(resumed, 2, 4)
    resumed.close()
    curves = EventAccumulator(str(tmp_path / "tensorboard"))
    curves.Reload()
    assert [(e.step, e.value) for e in curves.Scalars("reward/mean")] == [(0, 0.0), (1, 0.125), (2, 0.25), (3, 0.375)]
    assert "step" not in curves.Tags()["scalars"]


def test_the_trace_has_a_lane_an_executor_with_spans(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, QUIET, EXECUTORS, 1)
    _run(recorder, 0, 1)
    events = json.loads((tmp_path / "trace.json").read_text())
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {1: "generator", 2: "reward", 3: "trainer"}
    shown = [(names[e["tid"]], e["name"]) for e in events if e["ph"] == "X"]
    assert shown == [
        ("generator", "tick 0"),
        ("generator", "weight_sync/pull"),
        ("generator", "generate"),
        ("reward", "tick 0"),
        ("trainer", "tick 0"),
        ("trainer", "weight_sync/publish"),
    ]


def test_nothing_is_written_that_is_switched_off(tmp_path: Path) -> None:
    config = ObservabilityConfig(console="none", tensorboard=False, trace=False)
    recorder = Recorder(tmp_path, config, EXECUTORS, 1)
    _run(recorder, 0, 1)
    recorder.close()
    recorder.close()
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_trace_and_curves_begin_with_the_first_tick_and_a_run_goes_on_without_them(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, QUIET, EXECUTORS, 2)
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl"}
    (tmp_path / "trace.json").mkdir()
    (tmp_path / "tensorboard").touch()
    _run(recorder, 0, 2)
    recorder.close()
    assert [row["step"] for row in read_metrics(tmp_path)] == [0, 1]
    assert [(one["step"], one["kind"]) for one in read_warnings(tmp_path)] == [(0, "trace"), (0, "sink")]


def test_not_a_number_in_a_report_leaves_whole_json_everywhere(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, QUIET, ("trainer",), 1)
    [row] = recorder.on_report(Report("trainer", 0, {"grad_norm": float("nan"), "lr": 0.5}, 0.0, 1.0))
    assert row["grad_norm"] is None and row["lr"] == 0.5

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    for name in ("trace.json", "metrics.jsonl"):
        json.loads((tmp_path / name).read_text(), parse_constant=refuse)


def test_rows_that_were_lost_are_spoken_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorder = Recorder(tmp_path, QUIET, EXECUTORS, 4)
    _run(recorder, 0, 1)
    Recorder(tmp_path, ObservabilityConfig(console="plain"), EXECUTORS, 4, resume_after_tick=2)
    assert "metrics.jsonl lacks 2 rows of before the resume, from step 1" in capsys.readouterr().out


def test_rollouts_of_repeated_ticks_are_removed(tmp_path: Path) -> None:
    folder = tmp_path / "rollouts"
    folder.mkdir()
    for tick in (1, 2, 3):
        (folder / f"tick_{tick:06d}.jsonl").touch()
    Recorder(tmp_path, QUIET, EXECUTORS, 4, resume_after_tick=1)
    assert [p.name for p in folder.iterdir()] == ["tick_000001.jsonl"]


def test_the_summary_names_what_lies_in_the_folder(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    recorder = Recorder(tmp_path, QUIET, EXECUTORS, 4)
    _run(recorder, 0, 3)
    summary = recorder.summary(stopped="by the user")
    assert list(summary.places) == ["policy", "metrics", "trace", "curves"]
    assert (summary.num_ticks, summary.staleness_max, summary.last["reward/mean"]) == (3, 1, 0.25)
    assert summary.wall_s == 18.0 and summary.stopped == "by the user"


def test_prometheus_finds_the_last_row_until_the_run_ends(tmp_path: Path) -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = ObservabilityConfig(console="none", prometheus_port=port)
        with pytest.raises(ConfigError, match=f"observability.prometheus_port: {port}: .*in use"):
            Recorder(tmp_path / "other", config, EXECUTORS, 2)
    recorder = Recorder(tmp_path, config, EXECUTORS, 2)
    silent = [socket.create_connection(("127.0.0.1", port), timeout=20) for _ in range(MAX_CONNECTIONS)]
    for tick in range(2):
        _run(recorder, tick, tick + 1)
        page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20).read().decode()
        found = {
            sample.name: sample for family in parser.text_string_to_metric_families(page) for sample in family.samples
        }
        assert found["llamarl_step"].value == tick and found["llamarl_step"].labels == {"run": tmp_path.name}
        assert found["llamarl_reward_mean"].value == 0.125 * tick
    recorder.close()
    for connection in silent:
        connection.close()
    with socket.create_server(("0.0.0.0", port)):
        pass


def test_prometheus_keeps_an_accuracy_between_two_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("prometheus_client")
    monkeypatch.setattr(sinks, "BoundedServer", lambda *_: SimpleNamespace(serve_forever=lambda: None))
    sink = sinks.PrometheusSink(0, "mine")
    sink.write({"step": 0, "eval/accuracy": 0.25, "grad_norm": 1.0})
    sink.write({"step": 1, "grad_norm": None})
    found = [sink._registry.get_sample_value(f"llamarl_{key}", {"run": "mine"}) for key in ("step", "eval_accuracy")]
    assert found == [1.0, 0.25]
    assert math.isnan(sink._registry.get_sample_value("llamarl_grad_norm", {"run": "mine"}))


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="no prometheus (Debian: apt-get install prometheus)")
def test_the_real_prometheus_scrapes_a_run(tmp_path: Path) -> None:
    port, own = _free_port(), _free_port()
    job = {"job_name": "llamarl", "scrape_interval": "1s", "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}
    (tmp_path / "prometheus.yml").write_text(json.dumps({"scrape_configs": [job]}))
    recorder = Recorder(tmp_path / "mine", ObservabilityConfig(console="none", prometheus_port=port), EXECUTORS, 3)
    _run(recorder, 0, 3)
    words = ["prometheus", "--config.file=prometheus.yml", f"--web.listen-address=127.0.0.1:{own}"]
    with subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            found: list[Any] = []

            def scraped() -> bool:
                with contextlib.suppress(OSError):
                    asked = urllib.request.urlopen(
                        f"http://127.0.0.1:{own}/api/v1/query?query=llamarl_reward_mean", timeout=20
                    )
                    found[:] = json.load(asked)["data"]["result"]
                return bool(found)

            wait_until(scraped, 60)
        finally:
            server.terminate()
            recorder.close()
    (one,) = found
    assert (one["metric"]["run"], float(one["value"][1])) == ("mine", 0.25)


def test_prometheus_without_its_package_is_named_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigError, match=r"pip install 'llamarl\[prometheus\]'"):
        Recorder(tmp_path, ObservabilityConfig(console="none", prometheus_port=1), EXECUTORS, 1)


@pytest.mark.parametrize("what", ["trace", "tensorboard", "warnings"])
def test_a_disk_that_refuses_what_is_only_looked_at_ends_that_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    recorder = Recorder(tmp_path, ObservabilityConfig(console="plain"), EXECUTORS, 3)
    _run(recorder, 0, 1)
    full = os.open("/dev/full", os.O_WRONLY)
    if what == "trace":
        monkeypatch.setattr(recorder._trace.file, "_file", full)
    elif what == "tensorboard":
        monkeypatch.setattr(recorder._curves.file, "_file", full)
        monkeypatch.setattr(recorder._curves.file._records._writer, "_descriptor", full)
    else:
        monkeypatch.setattr(recorder._warnings, "path", Path("/dev/full"))
        recorder.warn(1, "kind", "something else")
    _run(recorder, 1, 3)
    recorder.close()
    assert [row["step"] for row in read_metrics(tmp_path)] == [0, 1, 2]
    said = capsys.readouterr().out
    while_it_ran, _, repeated = said.partition("warned of, ")
    assert while_it_ran.count("No space left on device") == 1 and "warning, tick 1: " in while_it_ran
    assert "tick 1 " in repeated
    if what == "warnings":
        assert "something else" in said
    else:
        (kept,) = read_warnings(tmp_path)
        assert kept["step"] == 1 and kept["kind"] == {"trace": "trace", "tensorboard": "sink"}[what]
        assert "resume" not in kept["text"]
