"""What a run's folder tells through ``llamarl.Run``."""

import math
from pathlib import Path

import pytest
from made_run import MadeRun

from llamarl.api.run import Metrics, Run
from llamarl.errors import DataError
from llamarl.types import Failure


def test_metrics_are_columns_that_pandas_reads_as_such() -> None:
    pandas = pytest.importorskip("pandas")
    metrics = Metrics([{"step": 0, "a": 1.5}, {"step": 1}, {"step": 2, "b": 4.0, "a": 2.5}])
    assert metrics["a"] == [1.5, None, 2.5] and list(metrics) == ["step", "a", "b"] and len(metrics.rows) == 3
    table = pandas.DataFrame(metrics)
    assert list(table.columns) == ["step", "a", "b"] and table["step"].tolist() == [0, 1, 2]
    assert table["a"].dtype == float and table["a"].sum() == 4.0 and math.isnan(table["a"][1])
    with pytest.raises(KeyError, match="no metric 'c' in this run; there are step, a, b"):
        metrics["c"]
    assert "c" not in metrics and metrics.get("c") is None


def test_a_run_that_went_on_answers_by_its_new_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(MadeRun(ticks=2).write(tmp_path / "run"))
    policies = iter(["policy 1", "policy 2"])
    monkeypatch.setattr("llamarl.api.llm.LLM", lambda folder: next(policies))
    monkeypatch.setattr("llamarl.controller.begun.begun_config", lambda folder, settings: run.config)
    monkeypatch.setattr("llamarl.controller.resume.resume_run", lambda config: None)
    assert [run.llm, run.llm] == ["policy 1", "policy 1"]
    run.resume(num_ticks=4)
    assert [run.llm] == ["policy 2"]


def test_rollouts_of_a_tick_are_a_list_with_the_advantages_that_were_trained(tmp_path: Path) -> None:
    made = MadeRun(ticks=2, outcome=lambda t, g, s: Failure(kind="timeout", detail="2 s") if s == 0 else float(s))
    run = Run(made.write(tmp_path / "run"))
    samples = run.rollouts(0)
    assert len(samples) == 8 and samples[0].tick == 0
    assert [sample.advantage for sample in samples] == [None, 0.75, 0.75, 0.75] * 2
    assert [sample.tick for sample in run.rollouts()] == [0] * 8 + [1] * 8
    assert list(run.rollouts())[-1].advantage == 0.75
    with pytest.raises(DataError, match="holds no rollouts of tick 7: it has those of ticks 0 to 1"):
        run.rollouts(7)
