"""Runs on data too small for a tenth of it to be anything."""

from pathlib import Path

import pytest

from llamarl.config import load_config
from llamarl.controller.prepare import prepare
from llamarl.controller.settle import with_num_ticks
from llamarl.errors import ConfigError

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


def test_patience_is_refused_where_nothing_is_held_out(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "a1 b2 =\\n", "completion": "3\\n"}\n')
    words = ["--task.name", "demonstrations", "--task.data", str(file), "--task.eval_fraction", "0"]
    words += ["--algorithm.name", "sft", "--evaluation.every", "1", "--evaluation.patience", "2"]
    with pytest.raises(ConfigError, match=r"^evaluation.patience is of held-out rows, .* raise task.eval_fraction$"):
        prepare(load_config(None, words))


@pytest.mark.parametrize(("epochs", "num_ticks"), [(1, 3), (0.5, 2), (10, 25)])
def test_epochs_are_as_many_ticks_as_the_training_questions_need(epochs: float, num_ticks: int, tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(f'{{"question": "a{i} b2 =\\n", "answer": "{i + 2}"}}\n' for i in range(10)))
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text('{"question": "c1 c1 =\\n", "answer": "2"}\n')
    words = ["--task.name", "math", "--task.data", str(file), "--task.eval_data", str(held_out)]
    config = load_config(RECIPE, [*words, "--schedule.prompts_per_step", "4", "--run.epochs", str(epochs)])
    settled = with_num_ticks(config).run
    assert (settled.num_ticks, settled.epochs) == (num_ticks, 0)


def test_epochs_of_a_task_that_makes_its_questions_itself_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"run.epochs has no meaning for a task that makes its questions itself"):
        with_num_ticks(load_config(RECIPE, ["--run.epochs", "1"]))
