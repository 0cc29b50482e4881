"""Runs with reward models: in one process and in several, killed and resumed to the same bits, and never with another model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY, wait_until
from safetensors.torch import load_file

from llamarl.checkpoint.storage import CheckpointStore
from llamarl.observability.keys import is_timing_key

sys.path.insert(0, str(REPOSITORY / "examples" / "reward_model"))
from train_classifier import train_classifier

RECIPE = "examples/reward_model/reward_model.toml"
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


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("classifier")
    train_classifier(folder, steps=20)
    return folder


def command(*words: str, **changes: Any) -> list[str]:
    settings = [word for key, value in changes.items() for word in (f"--{key}", str(value))]
    return [sys.executable, "-m", "llamarl.cli.main", "train", *words, *settings]


def attempt(*words: str, **changes: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*words, **changes), capture_output=True, text=True, timeout=280, cwd=REPOSITORY)


def train(*words: str, **changes: Any) -> None:
    done = attempt(*words, **changes)
    assert done.returncode == 0, done.stdout + done.stderr


def rows(run_dir: Path) -> list[dict[str, Any]]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if not is_timing_key(key)} for line in lines]


def assert_equal_runs(whole: Path, other: Path, num_ticks: int) -> None:
    assert rows(whole) == rows(other) and len(rows(whole)) == num_ticks
    for name, tensor in load_file(whole / "model" / "model.safetensors").items():
        assert tensor.equal(load_file(other / "model" / "model.safetensors")[name]), name


def test_a_run_with_a_trained_classifier_is_the_same_in_processes_and_resumed(classifier: Path, tmp_path: Path) -> None:
    settings = SMALL | {"reward_model.path": classifier}
    train(RECIPE, **settings, **{"run.dir": tmp_path / "whole"})
    train(RECIPE, **{**settings, "run.num_ticks": 2, "run.runtime": "local"}, **{"run.dir": tmp_path / "cut"})
    train("--resume", str(tmp_path / "cut"), **{"run.num_ticks": 4, "run.runtime": "inline"})
    assert_equal_runs(tmp_path / "whole", tmp_path / "cut", 4)
    for row in rows(tmp_path / "whole"):
        # the total is the task's reward and a tenth of the classifier's score
        total = row["reward/parts/task"] + 0.1 * row["reward/parts/adds_up"]
        assert row["reward/mean"] == pytest.approx(total) and row["reward/parts/task"] == row["reward/parts/correct"]
        assert (row["reward_model/num_scored"], row["reward_model/num_failed"]) == (12, 0)
    first = json.loads((tmp_path / "whole/rollouts/tick_000000.jsonl").read_text().splitlines()[0])
    parts = first["reward_parts"]
    assert first["reward"] == pytest.approx(parts["task"] + 0.1 * parts["adds_up"])


def test_a_run_that_is_killed_goes_on_to_the_same_bits(classifier: Path, tmp_path: Path) -> None:
    settings = SMALL | {"reward_model.path": classifier}
    long = {"run.num_ticks": 400, "run.runtime": "local", "checkpoint.every": 1, "checkpoint.keep": 0}
    process = subprocess.Popen(command(RECIPE, **{**settings, **long, "run.dir": tmp_path / "cut"}), cwd=REPOSITORY)
    checkpoints = tmp_path / "cut" / "checkpoints"
    try:
        wait_until(lambda: any(checkpoints.glob("tick_??????")), limit_s=180, what="a checkpoint")
    finally:
        process.kill()
        process.wait(60)
    done = CheckpointStore(checkpoints).load().tick + 1
    train("--resume", str(tmp_path / "cut"), **{"run.num_ticks": done + 2, "run.runtime": "inline"})
    train(RECIPE, **{**settings, "run.num_ticks": done + 2}, **{"run.dir": tmp_path / "whole"})
    assert_equal_runs(tmp_path / "whole", tmp_path / "cut", done + 2)


SECOND = """
[reward]
weight = 0.0

[executors.brief]
factory = "llamarl.executors.reward_model:RewardModelExecutor"
reads = ["rated"]
writes = ["rated_twice"]
ranks = 2

[executors.brief.settings.reward_model]
path = "{path}"
name = "brief"
weight = -0.5

[executors.reward]
reads = ["rated_twice"]
"""


def test_two_reward_models_alone_judge_and_their_shares_add_up(classifier: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    train_classifier(other, steps=1, seed=7)
    recipe = tmp_path / "two.toml"
    recipe.write_text((REPOSITORY / RECIPE).read_text() + SECOND.format(path=other))
    settings = {**SMALL, "run.num_ticks": 2, "run.runtime": "local", "reward_model.path": classifier}
    train(str(recipe), **settings, **{"run.dir": tmp_path / "run"})
    for row in rows(tmp_path / "run"):
        parts = 0.1 * row["reward/parts/adds_up"] - 0.5 * row["reward/parts/brief"]
        assert row["reward/mean"] == pytest.approx(parts)
        assert "reward/parts/task" not in row
        assert row["brief/reward_model/num_scored"] == 12  # of both its ranks
    train_classifier(other, steps=1, seed=8)
    refused = attempt("--resume", str(tmp_path / "run"), **{"run.num_ticks": 3})
    assert refused.returncode != 0
    assert "executors.brief.settings.reward_model.path" in refused.stderr
    assert "holds another model than" in refused.stderr and "\n  - reward_model.path" not in refused.stderr
