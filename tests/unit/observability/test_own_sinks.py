"""Sinks of a user's own: they get every row, and one that fails is left out and named, and ends no run."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llamarl.config import validate
from llamarl.errors import ConfigError
from llamarl.observability.config import ObservabilityConfig
from llamarl.observability.metrics import read_metrics
from llamarl.observability.recorder import Recorder
from llamarl.observability.warning_log import read_warnings

GOOD = """
import json
class Sink:
    def __init__(self, run_dir, config, resume_after_tick):
        self.file = open(run_dir / "mine.jsonl", "a")
        self.file.write(json.dumps([config["run"]["seed"], resume_after_tick]) + "\\n")
    def write(self, row):
        self.file.write(json.dumps(row) + "\\n")
    def close(self):
        self.file.close()
"""
BAD = """
import sys
class Sink:
    def __init__(self, run_dir, config, resume_after_tick):
        self.path = run_dir / "seen"
    def write(self, row):
        with self.path.open("a") as file:
            file.write(f"{row['step']} ")
        if row["step"] == 1:
            %s
    def close(self):
        self.path.with_name("closed").touch()
"""


def run(folder: Path, source: str, num_ticks: int = 4) -> None:
    (folder / "mine.py").write_text(source)
    config = ObservabilityConfig(console="none", tensorboard=False, trace=False, sinks=(f"{folder}/mine.py:Sink",))
    recorder = Recorder(folder, config, ["trainer"], num_ticks, run_config={"run": {"seed": 7}})
    for tick in range(num_ticks):
        report: Any = SimpleNamespace(
            executor="trainer", tick=tick, metrics={"lr": 0.5}, started_s=tick, finished_s=tick + 0.5, spans=(),
            failures={}, controller_bytes=0,
        )  # fmt: skip
        recorder.on_report(report)
    recorder.close()


def test_a_sink_of_ones_own_gets_the_recipe_and_every_row(tmp_path: Path) -> None:
    run(tmp_path, GOOD)
    head, *rows = map(json.loads, (tmp_path / "mine.jsonl").read_text().splitlines())
    assert head == [7, None]
    assert rows == read_metrics(tmp_path) and len(rows) == 4


@pytest.mark.parametrize(
    ("statement", "cause"), [("1 / 0", "ZeroDivisionError: division by zero"), ("sys.exit(0)", "SystemExit: 0")]
)
def test_a_sink_that_fails_is_left_out_and_named_and_the_run_goes_on(
    tmp_path: Path, statement: str, cause: str
) -> None:
    run(tmp_path, BAD % statement)
    assert (tmp_path / "seen").read_text() == "0 1 " and (tmp_path / "closed").exists()
    assert len(read_metrics(tmp_path)) == 4
    (warning,) = read_warnings(tmp_path)
    assert (warning["step"], warning["kind"]) == (1, "sink")
    assert f"mine.py:Sink' failed in write(row): {cause}. It gets no more rows" in warning["text"]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (GOOD.replace('["seed"]', '["sead"]'), r"called as Sink\(run_dir, config, resume_after_tick\): KeyError: 'sead'"),
        (GOOD.replace("def close", "def end"), r"has write\(row\) and close\(\); this one lacks close"),
        (GOOD.replace("class Sink", "class Sunk"), r"observability\.sinks '.*mine\.py:Sink': .* has no 'Sink'"),
    ],
)  # fmt: skip
def test_a_sink_that_cannot_be_made_is_refused_before_the_first_tick(tmp_path: Path, source: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        run(tmp_path, source)


def test_a_sink_without_an_import_path_is_refused() -> None:
    with pytest.raises(ConfigError, match="sinks must be package.module:Class or path/to/file.py:Class, got 'wandb'"):
        validate({"observability": {"sinks": ["wandb"]}})
