"""Runs whose rewards fail do not end as if they had learned."""

from pathlib import Path
from typing import Any

from conftest import CommandLine, rows

from llamarl.observability.metrics import read_warnings

JUDGE = """
import pathlib

def judge(prompt, response, answer):
    if not (pathlib.Path(__file__).parent / "mended").exists():
        raise ValueError("no number in the response")
    return float(len(response) % 2)
"""


def failing(folder: Path) -> dict[str, Any]:
    judge = folder / "judge.py"
    judge.write_text(JUDGE)
    return {
        "task.reward": f"{judge}:judge",
        "run.num_ticks": 12,
        "run.runtime": '"inline"',
        "evaluation.every": 0,
        "reward.max_failed_ticks": 2,
        "schedule.max_staleness": 2,
        "optimizer.schedule": '"constant"',
    }


def test_a_run_whose_rewards_all_fail_ends_with_the_cause_and_goes_on_once_they_are_mended(
    llamarl: CommandLine, tmp_path: Path
) -> None:
    settings = failing(tmp_path)
    run_dir = tmp_path / "run"
    done = llamarl.train(run_dir, settings, status=4)
    assert "stopped by the run itself" in done.stdout and "\ndone" not in done.stdout
    assert "warning, tick 0: every reward of tick 0 failed" in done.stdout
    assert "ValueError: no number in the response" in done.stdout
    assert "more than 90% of the samples of ticks 0 to 1 have no reward" in done.stderr
    assert "32 x exception: ValueError: no number in the response" in done.stderr
    assert "all_rewards_failed" in {warning["kind"] for warning in read_warnings(run_dir)}
    before = rows(run_dir)
    assert len(before) < 12 and all(row["tokens/trained"] == 0 for row in before)

    (tmp_path / "mended").touch()  # what it trains from here on, it trains from the checkpoint of the stop
    llamarl.train(run_dir, settings, "--resume", str(run_dir))
    after = rows(run_dir)
    assert len(after) == 12 and after[: len(before)] == before
    assert after[-1]["tokens/trained"] > 0


def test_failed_ticks_are_counted_over_a_resume(llamarl: CommandLine, tmp_path: Path) -> None:
    settings = failing(tmp_path) | {"reward.max_failed_ticks": 3, "schedule.max_staleness": 0}
    llamarl.train(tmp_path / "whole", settings, status=4)
    llamarl.train(tmp_path / "cut", settings | {"run.num_ticks": 2}, status=4)
    llamarl.run(["train", "--resume", str(tmp_path / "cut"), "--run.num_ticks", "12"], status=4)
    assert len(rows(tmp_path / "cut")) == len(rows(tmp_path / "whole")) < 12
