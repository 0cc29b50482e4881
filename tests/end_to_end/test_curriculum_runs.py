"""Runs whose prompts are chosen by their pass rates: what they ask, and that they repeat whatever dies."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import CommandLine, kill_after_rows, wait_for_rows
from same_run import assert_same_run, rows
from test_survival import INLINE, kill

from llamarl.data.curriculum import BANDS
from llamarl.data.prompts import shuffled
from llamarl.observability.rollouts import Rollout, read_rollouts

REWARD = """def score(response, answer):
    return float(response.rpartition("#")[2].strip() == answer)
"""
LONG = [
    f"{' '.join(f'{name}{digit}' for name, digit in zip('abcdefghijklmnop', row, strict=True))} =\n"
    for row in ("1234567890123456", "9876543210987654")
]
SHORT = [f"a{one} b{other} =\n" for one in range(3) for other in range(4)]


@pytest.fixture(scope="module")
def questions() -> list[str]:
    """Twelve ledgers within reach, and two that are longer than a response may be, sixfold."""
    return [*SHORT, *(f"{i * ' '}{question}" for i in range(6) for question in LONG)]


@pytest.fixture(scope="module")
def settings(questions: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("task")
    (folder / "reward.py").write_text(REWARD)
    lines = [{"question": q, "answer": str(sum(int(c) for c in q if c.isdigit()))} for q in questions]
    (folder / "questions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return {
        "task.name": '"function"',
        "task.data": json.dumps(str(folder / "questions.jsonl")),
        "task.reward": json.dumps(f"{folder / 'reward.py'}:score"),
        "task.eval_fraction": 0,
        "data.candidates": 3,
        "run.num_ticks": 12,
        "generator.max_segments": 2,
        "generator.oversubscription": 1.5,
        "evaluation.every": 0,
        "checkpoint.every": 5,
    }


@pytest.fixture(scope="module")
def undisturbed(llamarl: CommandLine, settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    llamarl.train(run_dir, settings | INLINE)
    return run_dir


def test_each_tick_asks_what_the_rule_says_of_verdicts_as_old_as_its_weights(
    llamarl: CommandLine, settings: dict[str, Any], questions: list[str], tmp_path: Path
) -> None:
    llamarl.train(tmp_path / "run", settings | INLINE | {"generator.max_segments": 1, "generator.oversubscription": 1})
    asked: dict[int, dict[int, list[Rollout]]] = defaultdict(lambda: defaultdict(list))
    for sample in read_rollouts(tmp_path / "run"):
        asked[sample.tick][sample.response.prompt_index].append(sample)
    table, known = rows(tmp_path / "run"), dict[int, tuple[int, float]]()
    for tick in range(12):
        for samples in asked[tick - 2].values() if tick >= 2 else ():
            rate = np.mean([s.response.outcome.value for s in samples])  # type: ignore[union-attr]
            known[questions.index(samples[0].prompt)] = (samples[0].response.prompt_index, rate)
        mean = np.mean([rate for _, rate in known.values()]) if known else 0.5
        for index, samples in asked[tick].items():
            epoch, first = divmod(3 * index, 24)
            candidates = shuffled(24, 0, epoch)[first : first + 3].tolist()
            late = {place: rate for place, (then, rate) in known.items() if index - then < 2 * 24 // 3}
            rates = [late.get(place, mean) for place in candidates]
            teaching = [place for place, rate in zip(candidates, rates, strict=True) if 0.25 <= rate < 1]
            unknown = [place for place in candidates if place not in late]
            expected = (teaching or unknown or candidates)[0]
            assert questions.index(samples[0].prompt) == expected, (tick, candidates, rates)
        assert sum(table[tick][f"groups/pass_rate/{band}"] for band in BANDS) == len(asked[tick])
    assert any(
        asked[tick][index][0].prompt != questions[shuffled(24, 0, epoch)[3 * index - 24 * epoch]]
        for tick in asked
        for index in asked[tick]
        for epoch in [3 * index // 24]
    ), "it chose"


def test_a_run_whose_processes_die_and_that_is_killed_and_resumed_ends_with_the_same_bits(
    llamarl: CommandLine, settings: dict[str, Any], undisturbed: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    run = llamarl.start(run_dir, settings)
    for number, executor in ((2, "generator"), (4, "reward")):
        wait_for_rows(run, run_dir, number)
        kill(run, executor)
    kill_after_rows(run, run_dir, 8)
    assert 8 <= len(rows(run_dir)) < 12, "it was killed in its middle"
    llamarl.run(["train", "--resume", str(run_dir), '--run.runtime="inline"'])
    assert_same_run(run_dir, undisturbed)
