"""``llamarl new``, ``recipes`` and ``completion``: what a newcomer types first."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from llamarl.cli import eval as eval_verb
from llamarl.cli.main import main
from llamarl.config import load_config, validate
from llamarl.controller.preflight import find_missing
from llamarl.errors import ConfigError
from llamarl.reading import find_recipe, shipped_or_path, shipped_recipes


def test_a_new_task_is_a_recipe_without_a_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new", 'my "task"']) == 0
    config = load_config('my "task"/recipe.toml', [], [find_missing])
    assert (config.task.name, config.run.dir) == ("function", 'runs/my "task"')
    lines = (tmp_path / 'my "task"' / "questions.jsonl").read_text().splitlines()
    assert len(lines) == len({json.loads(line)["question"] for line in lines}) == 400


def test_its_own_test_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new", "mine"]) == 0
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "mine"], timeout=60, capture_output=True, text=True)
    assert "3 passed" in done.stdout


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "kept.txt").write_text("mine")
    assert main(["new", str(tmp_path)]) != 0
    assert "holds something" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["kept.txt"]


def test_every_shipped_recipe_says_what_it_is_for_and_is_found_by_name() -> None:
    recipes = shipped_recipes()
    assert {"tiny", "smollm2", "ppo_critic", "colocated", "mastermind", "smollm2_second_try"} <= set(recipes)
    for name, purpose in recipes.items():
        assert len(purpose) > 20 and find_recipe(name).is_file()


def test_a_file_of_the_same_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").write_text("[run]\nseed = 5\n")
    assert load_config("tiny").run.seed == 5


def test_a_name_of_nothing_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean tiny"):
        find_recipe("tyny")


def test_recipes_prints_one_as_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "tiny"]) == 0
    assert capsys.readouterr().out == find_recipe("tiny").read_text(encoding="utf-8")


def test_a_shipped_name_is_its_file_for_plan_and_simulate_too_and_other_sources_stay() -> None:
    assert Path(shipped_or_path("tiny")) == find_recipe("tiny") and find_recipe("tiny").is_file()
    assert shipped_or_path("Llama-3.1-8B") == "Llama-3.1-8B"
    assert shipped_or_path("runs/tiny") == "runs/tiny"


def test_what_is_no_number_is_null_in_the_json_of_an_evaluation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scores = {"samples": 1, "failed": 0, "accuracy": 1.0, "accuracy_error": float("nan")}
    monkeypatch.setattr(eval_verb, "_evaluate", lambda *_, **__: (scores, iter(())))
    monkeypatch.setattr(eval_verb, "_compute_as_in_a_run", lambda threads: None)
    assert main(["eval", "bundled:tiny", "--json"]) == 0
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail) == scores | {"accuracy_error": None}


def test_a_run_without_its_metrics_has_no_accuracy_before_and_costs_no_evaluation(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("")
    assert eval_verb._before(SimpleNamespace(run=tmp_path), validate({})) == {}  # type: ignore[arg-type]


@pytest.mark.parametrize(("key", "expected"), [("", {"accuracy_before": 0.25}), ("of_another_version = 1", {})])
def test_a_run_of_another_version_has_no_accuracy_before_and_costs_no_evaluation(
    key: str, expected: dict[str, float], tmp_path: Path
) -> None:
    """It is read when everything has been sampled."""
    config = validate({"model": {"path": "bundled:tiny"}, "task": {"name": "steps"}})
    (tmp_path / "config.toml").write_text(
        f'[model]\npath = "bundled:tiny"\n[task]\nname = "steps"\n[checkpoint]\n{key}\n'
    )
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "eval/policy_version": 0, "eval/accuracy": 0.25}\n')
    assert eval_verb._before(SimpleNamespace(run=tmp_path), config) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("key", "value", "same"),
    [
        ("generator.sampling.max_new_tokens", 1024, False),
        ("generator.sampling.top_p", 0.9, False),
        ("data.system_prompt", "Think.", False),
        ("run.seed", 7, False),
        ("evaluation.temperature", 0.5, False),
        ("generator.sampling.temperature", 0.5, True),
        ("generator.engine.dtype", "bfloat16", True),
        ("evaluation.threads", 3, True),
    ],
)
def test_the_accuracy_before_is_told_only_where_it_was_asked_the_same(
    key: str, value: object, same: bool, tmp_path: Path
) -> None:
    recipe = '[model]\npath = "bundled:tiny"\n[task]\nname = "steps"\n'
    (tmp_path / "config.toml").write_text(recipe)
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "eval/policy_version": 0, "eval/accuracy": 0.25}\n')
    config = load_config(tmp_path / "config.toml", [f"--{key}={json.dumps(value)}"])
    assert bool(eval_verb._before(SimpleNamespace(run=tmp_path), config)) == same  # type: ignore[arg-type]
