"""Runs that learn from a teacher: same bits twice and where the teacher dies; another tokenizer is refused by name."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import CommandLine, kill_after_rows, rows, wait_for_rows
from same_run import assert_same_run
from test_survival import INLINE, kill

from llamarl.models.folders import resolve_model_path

TINY = resolve_model_path("bundled:tiny")
SETTINGS: dict[str, Any] = {
    "algorithm.advantage": '"distillation"',
    "reference.threads": 1,
    "run.num_ticks": 6,
    "evaluation.every": 0,
    "checkpoint.every": 3,
}


@pytest.fixture(scope="module")
def teacher(llamarl: CommandLine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model, some ticks of reinforcement learning on."""
    run_dir = tmp_path_factory.mktemp("teacher") / "run"
    llamarl.train(run_dir, {"evaluation.every": 0, "optimizer.lr": 1e-3} | INLINE)
    return run_dir / "model"


@pytest.fixture(scope="module")
def undisturbed(llamarl: CommandLine, teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    llamarl.train(run_dir, {**SETTINGS, **INLINE, "reference.path": json.dumps(str(teacher))})
    return run_dir


def test_the_policy_comes_nearer_to_its_teacher(undisturbed: Path) -> None:
    table = rows(undisturbed)
    assert table[0]["kl/reference"] > 1e-4
    assert min(row["kl/reference"] for row in table[3:]) < table[0]["kl/reference"]
    assert {"reward/mean", "ratio/mean", "time/reference_s"} <= table[0].keys()


def test_a_teacher_that_dies_is_brought_up_again_and_the_bits_are_the_same(
    llamarl: CommandLine, teacher: Path, undisturbed: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    run = llamarl.start(run_dir, {**SETTINGS, "reference.path": json.dumps(str(teacher))})
    wait_for_rows(run, run_dir, 2)
    kill(run, "reference")
    said, _ = run.communicate(timeout=240)
    assert run.returncode == 0, said
    assert re.search(r"'reference' rank 0 died .*SIGKILL", said), said
    assert_same_run(run_dir, undisturbed)


def test_towards_likeliest_tokens_a_run_that_loses_its_teacher_and_is_resumed_has_the_same_bits(
    llamarl: CommandLine, teacher: Path, tmp_path: Path
) -> None:
    settings = {**SETTINGS, "reference.path": json.dumps(str(teacher)), "algorithm.teacher_top_k": 8}
    llamarl.train(tmp_path / "calm", {**settings, **INLINE})
    fallen = [row["kl/reference"] for row in rows(tmp_path / "calm")]
    assert 0 < min(fallen[3:]) < fallen[0] and rows(tmp_path / "calm")[0]["loss/policy"] == pytest.approx(fallen[0])
    run_dir = tmp_path / "run"
    run = llamarl.start(run_dir, settings)
    wait_for_rows(run, run_dir, 2)
    kill(run, "reference")
    kill_after_rows(run, run_dir, 4)
    assert "'reference' rank 0 died" in run.communicate(timeout=60)[0]
    llamarl.run(["train", "--resume", str(run_dir)])
    assert_same_run(run_dir, tmp_path / "calm")


def other_tokenizer(folder: Path) -> Path:
    """The bundled model with two of its tokens exchanged."""
    shutil.copytree(TINY, folder)
    file = folder / "tokenizer.json"
    stored = json.loads(file.read_text())
    vocabulary = stored["model"]["vocab"]
    (one, first), (other, second) = list(vocabulary.items())[-2:]
    vocabulary[one], vocabulary[other] = second, first
    file.write_text(json.dumps(stored))
    return folder


def test_a_teacher_of_another_tokenizer_is_refused_by_name(llamarl: CommandLine, tmp_path: Path) -> None:
    folder = other_tokenizer(tmp_path / "other")
    done = llamarl.train(tmp_path / "run", {**SETTINGS, "reference.path": json.dumps(str(folder))}, status=2)
    assert (
        f"reference.path: the teacher {folder} has another tokenizer than bundled:tiny (2 tokens differ" in done.stderr
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "reference.path is '', but algorithm.advantage is 'distillation': name the teacher"),
        ({"reference.path": '"bundled:tiny"', "algorithm.kl_coef": 0.1}, "the reference model is the teacher"),
        (
            {"reference.path": '"bundled:tiny"', "algorithm.teacher_top_k": 44},
            "algorithm.teacher_top_k: 44 is more than the 43 tokens that ",
        ),
        (
            {"reference.path": '"bundled:tiny"', "dynamic_sampling.enabled": "true"},
            "drops groups whose rewards agree, but with algorithm.advantage 'distillation'",
        ),
    ],
)
def test_what_has_no_meaning_beside_a_teacher_is_refused(
    llamarl: CommandLine, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    done = llamarl.train(tmp_path / "run", {**SETTINGS, **changes}, status=2)
    assert said in done.stderr, done.stderr
