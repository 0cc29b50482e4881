"""Episodes of several turns repeat bit for bit, and so does a run of them that is killed, its environments too."""

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from conftest import SMALL, CommandLine, as_flags, rows, wait_until
from tools.chaos.compare import differences
from tools.chaos.processes import ranks

from llamarl.observability.events import read_events
from llamarl.observability.rollouts import read_rollouts

ENVIRONMENTS = Path(__file__).parents[1] / "small_environments.py"
EPISODES = {
    "task.name": '"episodes"',
    "task.environment": json.dumps(f"{ENVIRONMENTS}:Ledgers"),
    "task.environment_options": "{ turns = 5, fewest = 1 }",
    "task.max_turn_tokens": 14,
    "task.pool.num_workers": 2,
    "generator.max_segments": 2,
    "generator.oversubscription": 1.5,
    "generator.sampling.max_new_tokens": 64,
    "schedule.max_staleness": 1,
    "checkpoint.every": 2,
    "run.num_ticks": 4,
    "evaluation.num_prompts": 2,
    "optimizer.schedule": '"constant"',
    "observability.rollouts": "true",
}
INLINE = {"run.runtime": '"inline"'}


@pytest.fixture(scope="module")
def never_killed(llamarl: CommandLine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("never_killed") / "run"
    llamarl.train(run_dir, EPISODES | INLINE)
    return run_dir


def test_late_replies_cost_time_and_change_no_bit(llamarl: CommandLine, tmp_path: Path, never_killed: Path) -> None:
    """A tool that takes up to 0.1 s, another time for each call, against an instant one."""
    slow = {"task.environment_options": '{ turns = 5, fewest = 1, delay_s = 0.1, delays = "any" }'}
    llamarl.train(tmp_path / "run", EPISODES | slow | INLINE)
    assert not differences(tmp_path / "run", never_killed)
    assert sum(row["time/environment_wait_s"] for row in rows(tmp_path / "run")) > 0.1


def test_episodes_span_weights_and_keep_what_each_turn_was_worth(never_killed: Path) -> None:
    table = rows(never_killed)
    assert max(row["rollout/segments_max"] for row in table) == 2  # episodes were cut, and went on under later weights
    assert sum(row["rollout/carried"] for row in table) > 0
    assert max(row["episodes/turns_max"] for row in table) >= 4
    cut_inside = 0
    for rollout in read_rollouts(never_killed):
        response = rollout.response
        assert response.outcome is not None and response.turns
        assert np.isclose(response.outcome.value, sum(turn.reward for turn in response.turns))  # type: ignore[union-attr]
        spoken = np.zeros(len(response.tokens), bool)
        for turn in response.turns:
            spoken[turn.start : turn.end] = True
        assert (response.loss_mask == spoken).all() and ((response.policy_versions == -1) == ~spoken).all()
        cut_inside += len(set(response.policy_versions[spoken])) > 1
    assert cut_inside


def test_a_generator_that_dies_inside_its_episodes_is_brought_up_again_and_changes_no_bit(
    llamarl: CommandLine, tmp_path: Path, never_killed: Path
) -> None:
    run = llamarl.start(tmp_path / "run", EPISODES)
    try:
        wait_until(lambda: len(rows(tmp_path / "run")) >= 1, limit_s=120, what="a row")
        os.kill(ranks(run.pid)["generator"], signal.SIGKILL)
        said, _ = run.communicate(timeout=200)
    finally:
        run.kill()
    assert run.returncode == 0, said
    assert said.count("brought up again") == 1, said
    assert not differences(tmp_path / "run", never_killed)


def test_replies_that_joined_on_arrival_are_repeated_from_the_log(llamarl: CommandLine, tmp_path: Path) -> None:
    """Under ``latest``, with a tool that takes another time for each call, in the replay too."""
    run, again = tmp_path / "run", tmp_path / "again"
    slow = {"task.environment_options": '{ turns = 5, fewest = 1, delay_s = 0.02, delays = "any" }'}
    latest = {"schedule.weights": '"latest"', "evaluation.every": 0, **INLINE}
    llamarl.train(run, EPISODES | slow | latest)
    events = read_events(run / "events.jsonl", num_ticks=4)
    joins = [join for event in events.values() for join in event.joins]
    turns = sum(len(rollout.response.turns) for rollout in read_rollouts(run))
    assert len(joins) >= turns > 50  # what was carried at the end joined too
    llamarl.run(["train", "--replay", str(run), "--run.dir", str(again)])
    assert not differences(again, run)
    assert (again / "events.jsonl").read_bytes() == (run / "events.jsonl").read_bytes()


@pytest.mark.long
def test_tasks_with_and_without_environments_are_trained_on_together(llamarl: CommandLine, tmp_path: Path) -> None:
    recipe = tmp_path / "mixed.toml"
    recipe.write_text(
        f"""
        [run]
        runtime = "inline"
        num_ticks = 3
        [model]
        path = "bundled:tiny"
        [[task]]
        name = "episodes"
        label = "ledgers"
        environment = {json.dumps(f"{ENVIRONMENTS}:Ledgers")}
        environment_options = {{ turns = 4 }}
        max_turns = 2
        [[task]]
        name = "episodes"
        label = "mastermind"
        environment = "mastermind"
        environment_options = {{ style = "compact", pegs = 2, colors = 3 }}
        max_turn_tokens = 3
        [[task]]
        name = "steps"
        [generator]
        max_segments = 2
        sampling = {{ max_new_tokens = 80 }}
        """
    )
    of_all_tasks = {key: value for key, value in SMALL.items() if key != "task.options"}
    words = {**of_all_tasks, "run.num_ticks": 3, "observability.rollouts": "true", "run.dir": tmp_path / "run"}
    llamarl.run(["train", str(recipe), *as_flags(words)])
    turns: dict[str, set[int]] = {}
    for rollout in read_rollouts(tmp_path / "run"):
        turns.setdefault(rollout.task, set()).add(len(rollout.response.turns))
    assert turns.keys() == {"ledgers", "mastermind", "steps"}
    assert turns["ledgers"] <= {1, 2} and max(turns["mastermind"]) > 2 and turns["steps"] == {0}
    first = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[0])
    assert {f"eval/tasks/{label}/reward_mean" for label in turns} <= first.keys()
