"""Whether two runs of a chaos trial are equal, and what differs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tools.chaos.compare import differences


def make(folder: Path, **changes: Any) -> Path:
    row = {"step": 0, "loss": 0.5, "time/step_s": 1.0} | changes
    (folder / "model").mkdir(parents=True)
    (folder / "rollouts").mkdir()
    (folder / "model" / "model.safetensors").write_bytes(b"weights")
    (folder / "rollouts" / "tick_000000.jsonl").write_text("{}\n")
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    return folder


def test_times_and_restarts_are_no_difference(tmp_path: Path) -> None:
    slow = {"time/step_s": 9.0, "recovery/generator_restarts": 2.0, "recovery/generator_lost_s": 1.5}
    assert differences(make(tmp_path / "a"), make(tmp_path / "b", **slow)) == []


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda run: (run / "model" / "model.safetensors").write_bytes(b"weight5"), "model/model.safetensors"),
        (lambda run: (run / "rollouts" / "tick_000000.jsonl").unlink(), "rollouts/tick_000000.jsonl"),
        (lambda run: (run / "rollouts" / "tick_000001.jsonl").write_text("{}\n"), "rollouts/tick_000001.jsonl"),
        (lambda run: (run / "metrics.jsonl").write_text('{"step": 0, "loss": 0.25}\n'), "metrics.jsonl: row 0, loss"),
        (lambda run: (run / "metrics.jsonl").write_text(""), "metrics.jsonl: 0 rows and 1"),
        (lambda run: (run / "metrics.jsonl").unlink(), "metrics.jsonl: not there"),
    ],
)
def test_what_differs_is_named(tmp_path: Path, change: Callable[[Path], Any], named: str) -> None:
    one, other = make(tmp_path / "a"), make(tmp_path / "b")
    change(one)
    assert differences(one, other) == [named]


def test_runs_without_weights_are_not_called_equal(tmp_path: Path) -> None:
    runs = make(tmp_path / "a"), make(tmp_path / "b")
    for run in runs:
        (run / "model" / "model.safetensors").unlink()
    assert differences(*runs) == ["weights: there are none"]
