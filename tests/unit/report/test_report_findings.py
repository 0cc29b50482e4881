"""What the page says is wrong with three broken runs, and that a healthy one is left alone."""

from pathlib import Path
from typing import Any

import pytest
from made_run import MadeRun, decode_block

from llamarl.report.run_data import RunReader
from llamarl.types import Failure

JUDGE_FAILS = Failure(kind="exception", detail="KeyError: 'answer' (my_rewards.py:7)")


def _findings(folder: Path, run: MadeRun) -> list[dict[str, object]]:
    return decode_block(RunReader(run.write(folder / "run")).blocks(5_000_000)["run"])["findings"]


def test_a_healthy_run_gives_no_finding(tmp_path: Path) -> None:
    assert _findings(tmp_path, MadeRun()) == []


@pytest.mark.parametrize("ticks", [1, 3, 8])
@pytest.mark.parametrize(
    ("broken", "kind", "view", "words"),
    [
        ({"outcome": lambda t, g, s: 0.0}, "constant_reward", "rollouts", ("reward 0", "task.reward")),
        ({"finish": lambda t, g, s: "length"}, "mostly_cut", "garbage", ("max_new_tokens (now 80)", "100%")),
        ({"outcome": lambda t, g, s: JUDGE_FAILS}, "all_rewards_failed", "failures", ("KeyError: 'answer' (my_rewards.py:7)",)),
    ],
)  # fmt: skip
def test_a_broken_run_is_told_of_from_the_first_tick_on(
    tmp_path: Path, ticks: int, broken: dict[str, Any], kind: str, view: str, words: tuple[str, ...]
) -> None:
    first, *others = _findings(tmp_path, MadeRun(ticks=ticks, **broken))
    assert (first["kind"], first["level"], first["view"]) == (kind, "bad", view)
    assert all(word in str(first["text"]) for word in words)
    assert {finding["kind"] for finding in others} <= ({"nothing_trained"} if kind == "all_rewards_failed" else set())


def test_constant_rewards_are_no_trouble_where_a_teacher_makes_the_advantages(tmp_path: Path) -> None:
    recipe = {"algorithm.advantage": "distillation", "reference.path": "bundled:tiny"}
    assert _findings(tmp_path, MadeRun(ticks=3, outcome=lambda t, g, s: 0.0, settings=recipe)) == []


def test_some_failures_are_counted_by_cause(tmp_path: Path) -> None:
    (finding,) = _findings(
        tmp_path, MadeRun(outcome=lambda t, g, s: JUDGE_FAILS if s == 0 and g == 0 else float(s % 2))
    )
    assert finding["kind"] == "some_rewards_fail" and finding["level"] == "bad"  # 6 of 48
    assert "6 of 48 responses (12.5%)" in str(finding["text"]) and "6 x exception: KeyError" in str(finding["text"])


def test_what_is_over_is_told_as_over(tmp_path: Path) -> None:
    run = MadeRun(ticks=20, finish=lambda t, g, s: "length" if t < 6 else "stop")
    (finding,) = _findings(tmp_path, run)
    assert (finding["kind"], finding["first_tick"], finding["now"]) == ("mostly_cut", 0, False)


def test_findings_stand_in_the_order_in_which_they_began(tmp_path: Path) -> None:
    run = MadeRun(
        ticks=20,
        finish=lambda t, g, s: "length" if t >= 6 else "stop",
        outcome=lambda t, g, s: JUDGE_FAILS if t >= 12 else float(s % 2),
    )
    began = [(str(f["kind"]), f["first_tick"]) for f in _findings(tmp_path, run) if f["level"] == "bad"]
    # of ticks 4 to 8 three fifths are cut; tick 12 is the first of nothing but failures
    assert began[:2] == [("mostly_cut", 8), ("all_rewards_failed", 12)]


def test_where_nothing_is_learned_nobody_is_told_that_an_executor_waits(tmp_path: Path) -> None:
    def kinds(name: str, outcome: float | None) -> set[object]:
        run = (
            MadeRun(ticks=8, overhead_s=0.5)
            if outcome is None
            else MadeRun(ticks=8, overhead_s=0.5, outcome=lambda t, g, s: outcome)
        )
        return {finding["kind"] for finding in _findings(tmp_path / name, run)}

    assert kinds("learns", None) == {"trainer_waits"} and kinds("constant", 0.0) == {"constant_reward"}
