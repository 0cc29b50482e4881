"""Runs on data too small for a tenth of it to be anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from llamarl.config import load_config
from llamarl.controller.prepare import prepare

RECIPE = Path(__file__).resolve().parents[3] / "recipes" / "tiny.toml"


@pytest.mark.parametrize(("rows", "evaluated"), [(1, False), (2, True), (6, True)])
def test_a_lone_question_trains_without_evaluation_and_that_is_said(
    rows: int, evaluated: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(f'{{"question": "a{i} b2 =\\n", "answer": "{i + 2}"}}\n' for i in range(rows)))
    words = ["--run.dir", str(tmp_path / "run"), "--run.runtime", "inline", "--run.cores", "2"]
    prepared = prepare(load_config(RECIPE, [*words, "--task.name", "math", "--task.data", str(file)]))
    assert (prepared.config.evaluation.every > 0) is (prepared.local.evaluation.every > 0) is evaluated
    assert ("evaluator" in {spec.name for spec in prepared.graph.executors}) is evaluated
    assert ("nothing is held out, so this run is not evaluated" in capsys.readouterr().err) is not evaluated
