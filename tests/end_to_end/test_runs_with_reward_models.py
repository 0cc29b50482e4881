"""Runs with reward models and judges: in one process and in several, killed and resumed to the same bits, and never with another model."""

import json
import random
import shutil
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from conftest import OF_EXAMPLES, REPOSITORY, CommandLine, train_example, whole_as_resumed
from same_run import untimed

from llamarl.checkpoint.storage import CheckpointStore

sys.path.insert(0, str(REPOSITORY / "examples" / "reward_model"))
from train_classifier import train_classifier

RECIPE = "examples/reward_model/reward_model.toml"


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("classifier")
    train_classifier(folder, steps=20)
    return folder


def test_a_run_with_a_trained_classifier_is_the_same_in_processes_and_resumed(classifier: Path, tmp_path: Path) -> None:
    settings = OF_EXAMPLES | {"reward_model.path": classifier}
    rows = whole_as_resumed(RECIPE, settings, tmp_path)
    for row in rows:
        # the total is the task's reward and a tenth of the classifier's score
        total = row["reward/parts/task"] + 0.1 * row["reward/parts/adds_up"]
        assert row["reward/mean"] == pytest.approx(total) and row["reward/parts/task"] == row["reward/parts/correct"]
        assert (row["reward_model/num_scored"], row["reward_model/num_failed"]) == (12, 0)
    first = json.loads((tmp_path / "whole/rollouts/tick_000000.jsonl").read_text().splitlines()[0])
    parts = first["reward_parts"]
    assert first["reward"] == pytest.approx(parts["task"] + 0.1 * parts["adds_up"])


def test_eval_judges_the_response_that_a_reward_model_rates_highest(
    classifier: Path, tmp_path: Path, llamarl: CommandLine
) -> None:
    words = ["--recipe", str(REPOSITORY / RECIPE), "--prompts", "6", "--n", "3", "--best-of", str(classifier), "--json"]
    scores = json.loads(llamarl.run(["eval", "bundled:tiny", *words]).stdout)
    assert 0 <= scores["best_of@3"] <= scores["pass@3"] <= 1
    assert scores["best_of@3"] in [pytest.approx(n / 6) for n in range(7)]


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


@pytest.mark.long
def test_two_reward_models_alone_judge_and_their_shares_add_up(classifier: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    train_classifier(other, steps=1, seed=7)
    recipe = tmp_path / "two.toml"
    recipe.write_text((REPOSITORY / RECIPE).read_text() + SECOND.format(path=other))
    settings = {**OF_EXAMPLES, "run.num_ticks": 2, "run.runtime": "local", "reward_model.path": classifier}
    train_example(str(recipe), **settings, **{"run.dir": tmp_path / "run"})
    for row in untimed(tmp_path / "run"):
        parts = 0.1 * row["reward/parts/adds_up"] - 0.5 * row["reward/parts/brief"]
        assert row["reward/mean"] == pytest.approx(parts)
        assert "reward/parts/task" not in row
        assert row["brief/reward_model/num_scored"] == 12  # of both its ranks
    train_classifier(other, steps=1, seed=8)
    refused = train_example("--resume", str(tmp_path / "run"), status=2, **{"run.num_ticks": 3})
    assert "executors.brief.settings.reward_model.path" in refused.stderr
    assert "is not what" in refused.stderr and "\n  - reward_model.path" not in refused.stderr


RUBRIC = "'{response} {question}'"  # it answers the question itself
OF_ENGINE = {
    "judge.path": "bundled:tiny",
    "judge.rubric": RUBRIC,
    "judge.score_pattern": "'([0-9])'",
    "judge.score_range": "[0.0, 9.0]",
    "judge.max_new_tokens": 40,
    "judge.threads": 1,
    "judge.weight": 0.5,
}


@pytest.mark.long
def test_a_run_with_a_judge_on_an_engine_is_the_same_in_processes_and_resumed(classifier: Path, tmp_path: Path) -> None:
    settings = OF_EXAMPLES | OF_ENGINE | {"reward_model.path": classifier, "reward.max_failed_fraction": 1.0}
    rows = whole_as_resumed(RECIPE, settings, tmp_path)
    for row in rows:
        assert row["judge/num_requests"] == 12 == row["judge/num_scored"] + row["judge/num_failed"]
        assert row["reward/failed"] == row["judge/num_failed"]
    assert any(row["judge/num_scored"] for row in rows)
    models = json.loads((tmp_path / "whole" / "models.json").read_text())
    assert set(models) == {"judge.path", "reward_model.path"}


class Whimsical(BaseHTTPRequestHandler):
    """A judge who never says the same twice."""

    asked = 0

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        type(self).asked += 1
        text = f"SCORE: {random.random() * 10:.6f}"
        usage = {"prompt_tokens": 10, "completion_tokens": 3}
        data = json.dumps({"choices": [{"message": {"content": text}}], "usage": usage}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Says nothing."""


def test_a_run_judged_by_a_server_repeats_its_ticks_with_what_the_server_said(tmp_path: Path) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Whimsical)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    recipe = "examples/executors/filter.toml"
    settings = OF_EXAMPLES | {
        "judge.url": f"http://127.0.0.1:{server.server_address[1]}/v1",
        "judge.model": "whim",
        "checkpoint.every": 3,
        "run.num_ticks": 5,
    }
    try:
        train_example(recipe, **settings, **{"run.dir": tmp_path / "run"})
        before, asked = untimed(tmp_path / "run"), Whimsical.asked
        assert asked == 5 * 12
        shutil.rmtree(tmp_path / "run" / "checkpoints" / "tick_000004", ignore_errors=True)  # as if killed before it
        shutil.rmtree(tmp_path / "run" / "model")
        assert CheckpointStore(tmp_path / "run" / "checkpoints").load().tick == 2
        train_example("--resume", str(tmp_path / "run"))
        assert Whimsical.asked == asked  # ticks 3 and 4 were done again, and nobody was asked twice
        assert untimed(tmp_path / "run") == before and (tmp_path / "run" / "model").is_dir()
    finally:
        server.shutdown()
        server.server_close()
