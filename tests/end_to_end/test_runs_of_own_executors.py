"""The examples with executors of a user's own: they run in one process and in several, to the same bits, and a run that is
resumed, or killed and resumed, gives the bits of one that was not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY, wait_until
from forked_command import Started, run_llamarl
from safetensors.torch import load_file

from llamarl.checkpoint.storage import CheckpointStore
from llamarl.observability.keys import is_timing_key

SMALL = {
    "run.num_ticks": 4,
    "run.runtime": "inline",
    "schedule.prompts_per_step": 3,
    "generator.group_size": 4,
    "checkpoint.every": 2,
    "observability.console": "none",
    "observability.tensorboard": "false",
    "observability.trace": "false",
}


def train(*words: str, **changes: Any) -> None:
    settings = [word for key, value in changes.items() for word in (f"--{key}", str(value))]
    done = run_llamarl(["train", *words, *settings], cwd=REPOSITORY, limit_s=280)
    assert done.returncode == 0, done.stdout + done.stderr


def rows(run_dir: Path) -> list[dict[str, Any]]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if not is_timing_key(key)} for line in lines]


def assert_equal_runs(whole: Path, other: Path, num_ticks: int) -> None:
    assert rows(whole) == rows(other) and len(rows(whole)) == num_ticks
    for name, tensor in load_file(whole / "model" / "model.safetensors").items():
        assert tensor.equal(load_file(other / "model" / "model.safetensors")[name]), name


@pytest.mark.parametrize(
    "example",
    ["filter"]
    + [
        pytest.param(name, marks=pytest.mark.long)
        for name in ("two_generators", "second_reward", "judge_model", "two_that_follow")
    ],
)
def test_an_example_runs_and_resumes_like_the_standard_job(example: str, tmp_path: Path) -> None:
    recipe, settings = f"examples/executors/{example}.toml", SMALL
    if example == "two_that_follow":  # the second generator takes the trainer's weights, at its own temperature
        recipe = "examples/executors/two_generators.toml"
        settings = SMALL | {"executors.teacher.reads": "['more']", "executors.trainer.writes": "['weights', 'more']"}
    train(recipe, **settings, **{"run.dir": tmp_path / "whole"})
    train(recipe, **{**settings, "run.num_ticks": 2, "run.runtime": "local"}, **{"run.dir": tmp_path / "cut"})
    train("--resume", str(tmp_path / "cut"), **{"run.num_ticks": 4, "run.runtime": "inline"})
    assert_equal_runs(tmp_path / "whole", tmp_path / "cut", 4)
    for row in rows(tmp_path / "whole"):
        CLAIMS[example](row)


def filtered(row: dict[str, Any]) -> None:
    """What was dropped is generated and not trained."""
    assert 0 < row["groups/too_long"] <= 3
    assert row["samples/trained"] == 4 * (3 - row["groups/too_long"])


def brevity_added(row: dict[str, Any]) -> None:
    """0.1 * (1 - tokens / 80) more than the first reward."""
    brevity = 0.1 * (1 - row["response/length_mean"] / 80)
    assert row["reward/with_brevity"] == pytest.approx(row["reward/mean"] + brevity)


def judged(row: dict[str, Any]) -> None:
    """At tick 0 the judge is the policy: its mean log-probs are of the size of the policy's entropy."""
    assert -1 < row["judge/logprob_mean"] < 0
    if row["step"] == 0:
        assert row["judge/logprob_mean"] == pytest.approx(-row["entropy"], rel=0.5)


def both_trained(row: dict[str, Any]) -> None:
    """Every token of both is trained; the frozen model's have no age, those of the policy are at most one version old."""
    assert row["samples/delivered"] == 12 and row["teacher/samples/delivered"] == 8
    assert row["samples/trained"] == 20
    policy, teacher = row["response/length_mean"], row["teacher/response/length_mean"]
    assert row["tokens/generated"] == row["tokens/trained"] == pytest.approx(12 * policy + 8 * teacher)
    assert row["staleness/max"] == row["staleness/mean"] == min(1, row["step"])


CLAIMS = {
    "filter": filtered,
    "second_reward": brevity_added,
    "judge_model": judged,
    "two_generators": both_trained,
    "two_that_follow": both_trained,
}


def test_two_generators_sample_prompts_of_their_own_and_say_who_sampled(tmp_path: Path) -> None:
    recipe = "examples/executors/two_generators.toml"
    train(recipe, **{**SMALL, "run.num_ticks": 1}, **{"run.dir": tmp_path / "run"})
    rollouts = [json.loads(line) for line in (tmp_path / "run/rollouts/tick_000000.jsonl").read_text().splitlines()]
    of_teacher = {r["prompt_index"] for r in rollouts if r.get("sampled_by") == "teacher"}
    others = {r["prompt_index"] for r in rollouts if "sampled_by" not in r}
    assert others == {0, 1, 2} and len(of_teacher) == 2 and not of_teacher & others


@pytest.mark.long
def test_two_generators_that_are_killed_go_on_to_the_same_bits(tmp_path: Path) -> None:
    recipe = "examples/executors/two_generators.toml"
    settings = SMALL | {"run.num_ticks": 400, "run.runtime": "local", "checkpoint.every": 1, "checkpoint.keep": 0}
    words = [
        word for key, value in (settings | {"run.dir": tmp_path / "cut"}).items() for word in (f"--{key}", str(value))
    ]
    process = Started(["train", recipe, *words], cwd=REPOSITORY)
    try:
        checkpoints = tmp_path / "cut" / "checkpoints"
        wait_until(lambda: any(checkpoints.glob("tick_??????")), limit_s=180, what="a checkpoint")
    finally:
        process.kill()
        process.wait(60)
    done = CheckpointStore(checkpoints).load().tick + 1
    train("--resume", str(tmp_path / "cut"), **{"run.num_ticks": done + 2, "run.runtime": "inline"})
    train(recipe, **{**SMALL, "run.num_ticks": done + 2}, **{"run.dir": tmp_path / "whole"})
    assert_equal_runs(tmp_path / "whole", tmp_path / "cut", done + 2)
