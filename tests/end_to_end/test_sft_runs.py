"""``llamarl sft`` from rows to a model: it learns, repeats, survives, and its model goes on into reinforcement learning."""

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CommandLine, kill_after_rows, rows
from forked_command import Started
from safetensors.torch import load_file
from same_run import contents, untimed

from llamarl.data.items import split_questions
from llamarl.models.folders import resolve_model_path

ROWS = [{"prompt": f"{a}+{b}=", "completion": f"{a + b}"} for a in range(1, 8) for b in range(1, 8) if a + b < 10]
SETTINGS: dict[str, Any] = {
    "optimizer.lr": 1e-3,
    "trainer.threads": 1,
    "checkpoint.every": 3,
    "evaluation.num_prompts": 6,
    "evaluation.every": 4,
    "observability.console": '"plain"',
}
TINY = resolve_model_path("bundled:tiny")
EPOCHS = ("--epochs", "4", "--batch", "8")
INLINE = '--run.runtime="inline"'
"""In one process, to the same bits as in several."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("data") / "sums.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return file


def words(data: Path, run_dir: Path, **more: Any) -> list[str]:
    given = {**SETTINGS, "run.dir": json.dumps(str(run_dir)), **{k.replace("__", "."): v for k, v in more.items()}}
    return ["sft", "bundled:tiny", str(data), *EPOCHS, *(f"--{key}={value}" for key, value in given.items())]


@pytest.fixture(scope="module")
def undisturbed(llamarl: CommandLine, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    llamarl.run([*words(data, run_dir), INLINE])
    return run_dir


def assert_same(one: Path, other: Path) -> None:
    assert contents(one / "model") == contents(other / "model")
    assert untimed(one) == untimed(other)


def test_it_passes_over_the_rows_as_often_as_asked_and_learns_them(undisturbed: Path) -> None:
    table = rows(undisturbed)
    held_out = sum(split_questions([row["prompt"] for row in ROWS], seed=0, fraction=0.1))
    assert held_out >= 1 and len(table) == math.ceil(4 * (len(ROWS) - held_out) / 8)
    assert {row["samples/trained"] for row in table} == {8}
    losses = [row["eval/loss"] for row in table if "eval/loss" in row]
    assert [row["eval/policy_version"] for row in table if "eval/loss" in row][0] == 0
    assert losses[-1] < losses[0] / 2, losses


@pytest.mark.parametrize(
    "settings",
    [{"trainer.fsdp": 2}, {"algorithm.kl_coef": 0.1, "trainer.max_tokens_per_microbatch": 96}],
    ids=["two ranks", "reference"],
)
def test_what_is_held_out_changes_nothing_of_what_is_learnt(
    llamarl: CommandLine, data: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    uneven = tmp_path / "uneven.jsonl"
    long = [{"prompt": "9" * (1 + k % 9) + "+1=", "completion": str(7**60)[: 5 + 7 * k % 40]} for k in range(40)]
    uneven.write_text("".join(json.dumps(row) + "\n" for row in long))
    for every in (0, 1):
        runtime = [] if "trainer.fsdp" in settings else [INLINE]
        given = {**settings, "evaluation.every": every, "run.num_ticks": 3, "task.eval_fraction": 0.3}
        llamarl.run(
            [*(w for w in words(uneven, tmp_path / str(every), **given) if w not in EPOCHS), "--batch", "8", *runtime]
        )
    assert contents(tmp_path / "0" / "model") == contents(tmp_path / "1" / "model")
    assert sum("eval/loss" in row for row in rows(tmp_path / "1")) == 3


OVERFITTING = {"optimizer.lr": 1e-2, "evaluation.every": 3, "evaluation.patience": 2, "checkpoint.every": 3}


def overfitting(data: Path, run_dir: Path, **more: Any) -> list[str]:
    """So many epochs at such a rate that held-out loss rises early."""
    return [*words(data, run_dir, **OVERFITTING, **more), "--epochs", "60"]


@pytest.fixture(scope="module")
def ended_early(llamarl: CommandLine, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("early") / "run"
    done = llamarl.run([*overfitting(data, run_dir), INLINE])
    assert "held-out loss has not fallen for 2 evaluations (evaluation.patience)" in done.stderr + done.stdout
    return run_dir


def lowest(run_dir: Path) -> int:
    """The tick of the lowest held-out loss of a version that was trained."""
    losses = {row["step"]: row["eval/loss"] for row in rows(run_dir) if "eval/loss" in row and row["step"]}
    return min(losses, key=losses.__getitem__)


def test_a_run_whose_held_out_loss_rises_ends_and_its_model_is_of_the_lowest(
    llamarl: CommandLine, ended_early: Path, tmp_path: Path
) -> None:
    table, best = rows(ended_early), lowest(ended_early)
    losses = [row["eval/loss"] for row in table if "eval/loss" in row and row["step"] >= best]
    assert 10 < len(table) < 60 * 40 / 8 and len(table) % 3 == 0
    assert min(losses) == losses[0] and len(losses) >= 3, "two evaluations without a fall, and what followed"
    llamarl.run(["export", str(ended_early), "--out", str(tmp_path / "best"), "--tick", str(best)])
    assert contents(ended_early / "model") == contents(tmp_path / "best")


def test_a_run_that_ends_early_ends_with_the_same_bits_where_it_is_killed(
    llamarl: CommandLine, data: Path, ended_early: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "killed"
    kill_after_rows(Started(overfitting(data, run_dir), together=True), run_dir, 8)
    assert len(rows(run_dir)) < len(rows(ended_early)), "it was killed in its middle"
    llamarl.run(["train", "--resume", str(run_dir), INLINE])
    assert_same(run_dir, ended_early)
    done = llamarl.run(["train", "--resume", str(run_dir), INLINE])
    assert f"complete at {len(rows(ended_early))} ticks" in done.stdout
    shutil.rmtree(run_dir / "model")
    llamarl.run(["train", "--resume", str(run_dir), INLINE])
    assert contents(run_dir / "model") == contents(ended_early / "model")


def test_a_run_that_is_about_to_end_early_does_so_where_the_resume_names_its_whole_length_again(
    llamarl: CommandLine, ended_early: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(ended_early, run_dir)
    shutil.rmtree(run_dir / "model")
    shutil.rmtree(run_dir / "checkpoints" / f"tick_{len(rows(ended_early)) - 1:06d}")
    done = llamarl.run(["train", "--resume", str(run_dir), "--run.num_ticks", "300", INLINE])
    assert "held-out loss has not fallen for 2 evaluations" in done.stderr + done.stdout
    assert len(rows(run_dir)) == len(rows(ended_early))
    assert contents(run_dir / "model") == contents(ended_early / "model")


def test_adapters_alone_learn_the_rows_and_the_rest_of_the_model_stays(
    llamarl: CommandLine, data: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "lora"
    llamarl.run([*words(data, run_dir, lora__rank=8, optimizer__lr=1e-2), INLINE])
    losses = [row["eval/loss"] for row in rows(run_dir) if "eval/loss" in row]
    assert losses[-1] < losses[0] / 2, losses
    assert (run_dir / "adapter" / "adapter_model.safetensors").is_file()
    before, after = (load_file(folder / "model.safetensors") for folder in (TINY, run_dir / "model"))
    changed = {name for name, weight in after.items() if not torch.equal(weight, before[name])}
    assert changed and all(".self_attn." in name or ".mlp." in name for name in changed)


def test_two_ranks_train_as_one_does_to_rounding(
    llamarl: CommandLine, data: Path, undisturbed: Path, tmp_path: Path
) -> None:
    llamarl.run(
        words(data, tmp_path / "two", trainer__fsdp=2, run__num_ticks=6, optimizer__decay_ticks=len(rows(undisturbed)))
    )
    for one, two in zip(rows(undisturbed)[:6], rows(tmp_path / "two"), strict=True):
        for key in ("loss/policy", "grad_norm", *(["eval/loss"] if "eval/loss" in one and two["step"] < 5 else [])):
            assert two[key] == pytest.approx(one[key], rel=1e-3), (two["step"], key)


def test_the_model_is_where_reinforcement_learning_begins(
    llamarl: CommandLine, undisturbed: Path, tmp_path: Path
) -> None:
    llamarl.train(
        tmp_path / "rl",
        {"model.path": json.dumps(str(undisturbed / "model")), "run.num_ticks": 2, "evaluation.every": 0},
        INLINE,
    )
    assert len(rows(tmp_path / "rl")) == 2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"schedule__colocated": "true"}, "schedule.colocated: with algorithm.name 'sft' nothing is sampled"),
        ({"dynamic_sampling__enabled": "true"}, "dynamic_sampling.enabled"),
        ({"task__name": "math"}, "task.name is 'math', but algorithm.name is 'sft': that imitates rows of data"),
        ({"evaluation__patience": 2, "evaluation__every": 0}, "counts evaluations, but evaluation.every is 0"),
        (
            {"evaluation__patience": 2, "evaluation__every": 4, "checkpoint__every": 3},
            "so that not every evaluation has one",
        ),
        (
            {"algorithm__name": "aipo"},
            "task.name is 'demonstrations', but algorithm.name is 'aipo': rows to imitate have no judge",
        ),
    ],
)
def test_what_an_sft_job_cannot_have_is_refused_before_it_starts(
    llamarl: CommandLine, data: Path, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    done = llamarl.run(words(data, tmp_path / "run", **changes), status=2)
    assert said in done.stderr, done.stderr
    assert not os.path.exists(tmp_path / "run")


def test_wrong_files_and_numbers_are_told_in_a_line(llamarl: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "row.jsonl").write_text(
        '{"prompt": "a1 b2 =", "completion": "#3"}\n{"prompt": "a1", "completion": " "}\n'
    )
    blank = llamarl.run(["sft", "bundled:tiny", str(tmp_path / "row.jsonl")], status=2)
    assert "row.jsonl:2: field 'completion' is blank" in blank.stderr
    (tmp_path / "row.jsonl").write_text('{"prompt": "a1 b2 =", "completion": "#3"}\n' * 2)
    long = llamarl.run(["sft", "bundled:tiny", str(tmp_path / "row.jsonl"), "--data.max_prompt_tokens", "4"], status=2)
    assert "row.jsonl:1 (" in long.stderr and "raise data.max_prompt_tokens" in long.stderr
    missing = llamarl.run(["sft", "bundled:tiny", str(tmp_path / "none.jsonl")], status=2)
    assert "no file or folder" in missing.stderr
    (tmp_path / "empty.jsonl").write_text("")
    empty = llamarl.run(["sft", "bundled:tiny", str(tmp_path / "empty.jsonl")], status=2)
    assert "got an empty file" in empty.stderr
    none = llamarl.run(["sft", "bundled:tiny", str(tmp_path / "empty.jsonl"), "--epochs", "0"], status=2)
    assert "--epochs must be above 0, got 0" in none.stderr
