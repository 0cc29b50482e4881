"""When a run is struck is a function of the seed; who is, of those that are there."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tools.chaos.compare import differences
from tools.chaos.plan import Blow, Target, choose, plan_blows

THERE = [Target(name=name, pid=pid) for pid, name in enumerate(("controller", "environments", "generator", "trainer"))]


def blow(*draws: float, kind: str = "kill") -> Blow:
    return Blow(kind=kind, rows=1, delay_s=0.0, draws=draws)  # type: ignore[arg-type]


def test_a_seed_gives_the_same_blows_and_another_one_others() -> None:
    def plan(seed: int) -> tuple[Blow, ...]:
        return plan_blows(num_ticks=50, tick_s=1.0, kills=40, hangs=10, seed=seed)

    assert plan(3) == plan(3) != plan(4)


def test_as_many_are_struck_as_were_asked_for_some_of_them_in_pairs_and_none_after_the_last_tick_but_one() -> None:
    blows = plan_blows(num_ticks=20, tick_s=0.5, kills=200, hangs=30, seed=0, pairs=0.2)
    for kind, count in (("kill", 200), ("hang", 30)):
        assert sum(len(b.draws) for b in blows if b.kind == kind) == count
    assert {len(b.draws) for b in blows} == {1, 2}
    assert {b.rows for b in blows} == set(range(19))
    assert 0 <= min(b.delay_s for b in blows) and 0.9 < max(b.delay_s for b in blows) <= 1.0, "anywhere in two ticks"
    assert list(blows) == sorted(blows, key=lambda b: (b.rows, b.delay_s))


def test_a_draw_is_a_place_among_those_that_are_left() -> None:
    assert [t.name for t in choose(blow(0.0), THERE)] == ["controller"]
    assert [t.name for t in choose(blow(0.99), THERE)] == ["trainer"]
    assert [t.name for t in choose(blow(0.5, 0.5), THERE)] == ["generator", "environments"]
    assert choose(blow(0.5), []) == ()
    assert len(choose(blow(*[0.1] * 9), THERE)) == 4, "nobody twice"


def test_only_a_rank_hangs() -> None:
    names = {choose(blow(draw / 100, kind="hang"), THERE)[0].name for draw in range(100)}
    assert names == {"generator", "trainer"}


def test_after_a_resume_half_of_the_blows_wait_for_a_row_of_the_new_process() -> None:
    blows = plan_blows(num_ticks=20, tick_s=1.0, kills=200, hangs=0, seed=3)
    last = max(blow.rows for blow in blows)
    waiting = [blow.rows_before(10, last) for blow in blows if blow.rows <= 10]
    assert 0.35 < waiting.count(11) / len(waiting) < 0.65
    assert all(blow.rows_before(last + 1, last) == blow.rows for blow in blows)  # the run has no tick left to wait for


# Comparing runs.


def make(folder: Path, **changes: Any) -> Path:
    row = {"step": 0, "loss": 0.5, "time/step_s": 1.0} | changes
    (folder / "model").mkdir(parents=True)
    (folder / "rollouts").mkdir()
    (folder / "model" / "model.safetensors").write_bytes(b"weights")
    (folder / "rollouts" / "tick_000000.jsonl").write_text("{}\n")
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    return folder


def test_times_and_restarts_are_no_difference(tmp_path: Path) -> None:
    slow = {"time/step_s": 9.0, "recovery/generator_restarts": 2.0, "recovery/generator_lost_s": 1.5}
    assert differences(make(tmp_path / "a"), make(tmp_path / "b", **slow)) == []


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda run: (run / "model" / "model.safetensors").write_bytes(b"weight5"), "model/model.safetensors"),
        (lambda run: (run / "rollouts" / "tick_000000.jsonl").unlink(), "rollouts/tick_000000.jsonl"),
        (lambda run: (run / "rollouts" / "tick_000001.jsonl").write_text("{}\n"), "rollouts/tick_000001.jsonl"),
        (lambda run: (run / "metrics.jsonl").write_text('{"step": 0, "loss": 0.25}\n'), "metrics.jsonl: row 0, loss"),
        (lambda run: (run / "metrics.jsonl").write_text(""), "metrics.jsonl: 0 rows and 1"),
        (lambda run: (run / "metrics.jsonl").unlink(), "metrics.jsonl: not there"),
    ],
)
def test_what_differs_is_named(tmp_path: Path, change: Callable[[Path], Any], named: str) -> None:
    one, other = make(tmp_path / "a"), make(tmp_path / "b")
    change(one)
    assert differences(one, other) == [named]


def test_runs_without_weights_are_not_called_equal(tmp_path: Path) -> None:
    runs = make(tmp_path / "a"), make(tmp_path / "b")
    for run in runs:
        (run / "model" / "model.safetensors").unlink()
    assert differences(*runs) == ["weights: there are none"]
