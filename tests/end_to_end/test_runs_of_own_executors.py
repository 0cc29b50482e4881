"""The examples with executors of a user's own: they run in one process and in several, to the same bits, and a run that is
resumed, or killed and resumed, gives the bits of one that was not."""

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import OF_EXAMPLES, REPOSITORY, as_flags, train_example, wait_until, whole_as_resumed
from forked_command import Started
from same_run import assert_same_run, untimed

from llamarl.checkpoint.storage import CheckpointStore


@pytest.mark.parametrize(
    "example",
    ["filter"]
    + [
        pytest.param(name, marks=pytest.mark.long)
        for name in ("two_generators", "second_reward", "judge_model", "two_that_follow", "rows_beside")
    ],
)
def test_an_example_runs_and_resumes_like_the_standard_job(example: str, tmp_path: Path) -> None:
    recipe, settings = f"examples/executors/{example}.toml", OF_EXAMPLES
    if example == "two_that_follow":  # the second generator takes the trainer's weights, at its own temperature
        recipe = "examples/executors/two_generators.toml"
        settings = OF_EXAMPLES | {
            "executors.teacher.reads": "['more']",
            "executors.trainer.writes": "['weights', 'more']",
        }
    for row in whole_as_resumed(recipe, settings, tmp_path):
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


def rows_imitated(row: dict[str, Any]) -> None:
    """Four rows a tick beside twelve samples; no mean over samples knows of them."""
    assert row["samples/delivered"] == 12 and row["rows/groups/generated"] == 4 and row["samples/trained"] == 16
    assert row["tokens/imitated"] > 0
    assert row["tokens/trained"] == row["tokens/generated"] + row["tokens/imitated"]
    assert row["staleness/max"] == row["staleness/mean"] == min(1, row["step"])
    if row["step"] == 0:
        assert row["ratio/mean"] == pytest.approx(1.0, abs=1e-4)


CLAIMS = {
    "rows_beside": rows_imitated,
    "filter": filtered,
    "second_reward": brevity_added,
    "judge_model": judged,
    "two_generators": both_trained,
    "two_that_follow": both_trained,
}


def test_two_generators_sample_prompts_of_their_own_and_say_who_sampled(tmp_path: Path) -> None:
    recipe = "examples/executors/two_generators.toml"
    train_example(recipe, **{**OF_EXAMPLES, "run.num_ticks": 1}, **{"run.dir": tmp_path / "run"})
    rollouts = [json.loads(line) for line in (tmp_path / "run/rollouts/tick_000000.jsonl").read_text().splitlines()]
    of_teacher = {r["prompt_index"] for r in rollouts if r.get("sampled_by") == "teacher"}
    others = {r["prompt_index"] for r in rollouts if "sampled_by" not in r}
    assert others == {0, 1, 2} and len(of_teacher) == 2 and not of_teacher & others


@pytest.mark.long
def test_two_generators_that_are_killed_go_on_to_the_same_bits(tmp_path: Path) -> None:
    recipe = "examples/executors/two_generators.toml"
    settings = OF_EXAMPLES | {"run.num_ticks": 400, "run.runtime": "local", "checkpoint.every": 1, "checkpoint.keep": 0}
    process = Started(["train", recipe, *as_flags(settings | {"run.dir": tmp_path / "cut"})], cwd=REPOSITORY)
    try:
        checkpoints = tmp_path / "cut" / "checkpoints"
        wait_until(lambda: any(checkpoints.glob("tick_??????")), limit_s=180, what="a checkpoint")
    finally:
        process.kill()
        process.wait(60)
    done = CheckpointStore(checkpoints).load().tick + 1
    train_example("--resume", str(tmp_path / "cut"), **{"run.num_ticks": done + 2, "run.runtime": "inline"})
    train_example(recipe, **{**OF_EXAMPLES, "run.num_ticks": done + 2}, **{"run.dir": tmp_path / "whole"})
    assert_same_run(tmp_path / "whole", tmp_path / "cut")
    assert len(untimed(tmp_path / "whole")) == done + 2
