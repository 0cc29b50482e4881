"""Runs whose generator keeps, or breaks, the promise that no token is older than the printed bound; all in this process."""

import json
from pathlib import Path

import pytest
from conftest import LONG_LEDGERS, RECIPE, arguments

from llamarl.config import load_config
from llamarl.controller.run import start_run
from llamarl.errors import ExecutorFailed
from llamarl.executors.generator_shard import GeneratorShard

BOUND = 2
"""max_staleness 1 + max_segments 2 - 1."""


def run(folder: Path) -> list[float]:
    """Six ticks of partial rollouts in which some response uses every tick that it may; ``staleness/max`` of each."""
    settings = {
        "run.runtime": "inline",
        "task.options": LONG_LEDGERS,
        "run.num_ticks": 6,
        "schedule.prompts_per_step": 2,
        "schedule.max_staleness": 1,
        "generator.group_size": 2,
        "generator.max_segments": 2,
        "generator.oversubscription": 2.0,
        "evaluation.every": 0,
        "observability.console": "none",
    }
    config = load_config(RECIPE, arguments(folder, settings))
    assert config.token_staleness_bound == BOUND
    start_run(config)
    return [json.loads(line)["staleness/max"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_bound_is_reached_and_never_passed(tmp_path: Path) -> None:
    assert run(tmp_path / "run") == [0, 1, 1, 2, 2, 2]


def test_a_generator_that_keeps_groups_a_tick_too_long_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = GeneratorShard.deadlines
    monkeypatch.setattr(GeneratorShard, "deadlines", lambda *of, **by: [tick + 1 for tick in right(*of, **by)])
    with pytest.raises(
        ExecutorFailed, match=r"trainer.*StaleTokenError: trainer: tick 5: response 9/0, token 0 was sampled by"
    ):
        run(tmp_path / "run")
    assert not (tmp_path / "run" / "model").exists()
