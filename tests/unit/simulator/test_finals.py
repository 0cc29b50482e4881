"""Which splits run against each other, who leaves, and which is proposed then; the jobs are made up."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from llamarl.config import RunConfig, validate
from llamarl.errors import ExecutorFailed
from llamarl.simulator import run_finals as final_jobs
from llamarl.simulator.finals import (
    affordable,
    best_of_kinds,
    in_order,
    joined,
    measured_steps,
    of_its_kind,
    propose_split,
    still_in,
)
from llamarl.simulator.run_finals import run_finals
from llamarl.simulator.splits import Split


def split(
    name: str, forecast_s: float, *, staleness: int = 1, precision: str = "none", threads: tuple[int, int] = (1, 1)
) -> Split:
    result: Any = SimpleNamespace(step_s=forecast_s)
    settings = {
        "schedule.max_staleness": staleness,
        "generator.max_segments": 1,
        "generator.quantization": precision,
        "generator.threads": threads[0],
        "trainer.threads": threads[1],
    }
    return Split(name=name, settings=settings, result=result)


def test_kinds_are_threads_precision_and_turns_and_the_near_ones_take_part() -> None:
    splits = [
        split("own", 1.0),
        split("own, staler", 1.01, staleness=2),
        split("own 2+1", 1.1, threads=(2, 1)),
        split("own 1+2", 1.2, threads=(1, 2)),
        split("in turn", 1.29, staleness=0),
        split("own 2+2", 1.31, threads=(2, 2)),
    ]
    assert [one.name for one in best_of_kinds(splits, "none")] == ["own", "own 2+1", "own 1+2", "in turn"]
    assert [one.name for one in best_of_kinds(splits, "none", most=2)] == ["own", "own 2+1"]
    assert [one.name for one in best_of_kinds(splits, "int8")] == [
        "own",
        "own 2+1",
        "own 1+2",
        "in turn",
    ]  # none allowed


def test_another_precision_takes_one_place_and_only_where_it_is_forecast_to_be_faster() -> None:
    int8 = [split("int8", 0.8, precision="int8"), split("int8 2+1", 0.9, precision="int8", threads=(2, 1))]
    own = [split("own", 1.0), split("own 2+1", 1.1, threads=(2, 1))]
    assert [one.name for one in best_of_kinds([*int8, *own], "none")] == ["own", "int8", "own 2+1"]
    slower = [*own, split("int8", 1.11, precision="int8")]
    assert [one.name for one in best_of_kinds(slower, "none")] == ["own", "own 2+1"]


def test_schedules_of_a_kind_differ_by_their_schedule_only() -> None:
    one = split("one", 1.0, staleness=1)
    near = split("two", 1.14, staleness=2)
    splits = [one, near, split("far", 1.16), split("2+1", 1.0, threads=(2, 1)), split("int8", 0.9, precision="int8")]
    assert of_its_kind(splits, one) == [one, near]
    assert of_its_kind([split("faster", 0.8), *splits], one)[0] is one  # whoever won the kinds takes part in any case
    assert of_its_kind(splits, one, most=1) == [one]


def test_two_finals_are_joined_by_who_took_part_in_both() -> None:
    kinds, schedules = {"a": 2.0, "b": 3.0}, {"a": 1.0, "c": 0.9}
    assert joined(kinds, schedules, "a") == {"a": 1.0, "b": 1.5, "c": 0.9}
    assert joined(kinds, {}, "a") == kinds and joined({}, schedules, "a") == schedules
    assert joined(kinds, {"c": 0.9, "d": 1.0}, "a") == {"c": 0.9, "d": 1.0}  # it failed in the second


def test_as_many_take_part_as_have_time_for_their_least_rounds() -> None:
    assert affordable([2.0, 2.0, 3.0], budget_s=28.0, least_rounds=4) == 3
    assert affordable([2.0, 2.0, 3.0], budget_s=27.9, least_rounds=4) == 2
    assert affordable([600.0, 600.0], budget_s=420.0, least_rounds=4) == 0


def test_who_is_slower_by_more_than_chance_leaves_and_who_may_be_as_fast_stays() -> None:
    fast = [1.0, 1.1] * 5
    turns = {
        "fast": fast,
        "drifts with it": [s + d for s, d in zip(fast, [0.19, 0.21] * 5, strict=True)],
        "may be": [s + d for s, d in zip(fast, [0.5, -0.3] * 5, strict=True)],  # 0.1 more; its standard error is 0.133
    }
    same = dict.fromkeys(turns, 1.0)
    assert still_in(turns, same) == ["fast", "may be"]
    assert still_in({name: seconds[:8] for name, seconds in turns.items()}, same) == list(turns)  # too early
    assert still_in(turns, {**same, "fast": 2.0}) == ["drifts with it", "may be"]  # 2 to 2.2 against 1.19 to 1.31


def test_who_left_early_is_measured_by_the_rounds_that_all_ran() -> None:
    found = measured_steps({"left": [3.0, 3.0], "stayed": [2.0, 2.0, 4.0, 4.0]})
    assert found == {"left": 4.5, "stayed": 3.0}  # 1.5 times the other's, whose mean is 3
    assert measured_steps({}) == {}


@pytest.mark.parametrize(
    ("measured", "proposed"),
    [
        ({"one": 1.0, "two": 0.9, "int8": 1.0}, "two"),  # the forecast said otherwise
        ({"one": 1.0, "two": 0.995, "int8": 1.0}, "one"),  # equal within 1%: less staleness
        ({"one": 1.0, "two": 0.985, "int8": 1.0}, "two"),
        ({"one": 1.0, "two": 1.0, "int8": 0.9}, "one"),  # 11% do not pay for another precision
        ({"one": 1.0, "two": 1.0, "int8": 0.8}, "int8"),
        ({"one": 1.0}, "one"),  # what was not measured is not proposed
        ({"two": 1.0, "int8": 0.5}, "one"),  # the best forecast did not run: these were made for a narrower question
        ({}, "one"),
        ({"gone": 1.0}, "one"),
    ],
)
def test_what_was_measured_decides(measured: dict[str, float], proposed: str) -> None:
    splits = [split("one", 0.8), split("two", 0.9, staleness=2), split("int8", 1.0, precision="int8")]
    assert propose_split(splits, measured, "none").name == proposed


def test_a_much_faster_forecast_in_another_precision_has_to_run_too() -> None:
    splits = [split("int8", 0.5, precision="int8"), split("one", 1.0), split("two", 1.1, staleness=2)]
    assert propose_split(splits, {"one": 1.0, "two": 0.8}, "none").name == "int8"
    assert propose_split(splits, {"one": 1.0, "two": 0.8, "int8": 0.75}, "none").name == "two"


def test_each_begins_as_often_as_any_other_and_every_other_round_runs_backwards() -> None:
    rounds = [in_order(["a", "b", "c"], turn) for turn in range(6)]
    assert rounds == [list("abc"), list("cba"), list("bca"), list("acb"), list("cab"), list("bac")]


class MadeUpJob(contextlib.AbstractContextManager["MadeUpJob"]):
    """Takes what its split is said to need, in all turns or until it fails."""

    clock_s = 0.0

    def __init__(self, step_s: float, fails_after: int) -> None:
        self.step_s, self.left, self.closed = step_s, fails_after, False

    def turn(self, ticks: int) -> float:
        assert not self.closed
        self.left -= 1
        if self.left < 0:
            raise ExecutorFailed("out of memory")
        took = self.step_s * ticks * (1.0 + 0.001 * (self.left % 3))
        MadeUpJob.clock_s += took
        return took

    def close(self) -> None:
        self.closed = True

    def __exit__(self, *error: object) -> None:
        self.close()


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[dict[int, tuple[float, int]], list[MadeUpJob]]]:
    """(staleness -> (seconds a step, turns before it fails; -1: it does not start), the jobs that were started)."""
    plan: dict[int, tuple[float, int]] = {}
    started: list[MadeUpJob] = []

    def job(config: RunConfig, *_: object) -> MadeUpJob:
        step_s, fails_after = plan[config.schedule.max_staleness]
        if fails_after < 0:
            raise ExecutorFailed("no weights")
        started.append(MadeUpJob(step_s, fails_after))
        return started[-1]

    monkeypatch.setattr(final_jobs, "_job", job)
    monkeypatch.setattr(final_jobs, "time", SimpleNamespace(monotonic=lambda: MadeUpJob.clock_s))
    yield plan, started
    assert all(one.closed for one in started)


def final(staleness: int) -> Split:
    return split(f"s{staleness}", 0.5, staleness=staleness)


def test_whoever_is_slower_leaves_and_the_final_ends_with_one(jobs: Any) -> None:
    plan, started = jobs
    plan |= {1: (0.6, 999), 2: (0.5, 999), 3: (0.55, 999)}
    lines: list[str] = []
    found = run_finals(validate({}), [final(s) for s in (1, 2, 3)], budget_s=300.0, log=lines.append)
    assert found == pytest.approx({"s1": 0.6, "s2": 0.5, "s3": 0.55}, rel=0.01)
    assert [line.strip().partition(", ")[0] for line in lines[-2:]] == [
        "after 10 rounds without s1",
        "after 10 rounds without s3",
    ]
    assert {999 - one.left for one in started} == {10}


def test_the_kind_that_wins_plays_on_with_its_schedules(jobs: Any) -> None:
    plan, started = jobs
    plan |= {0: (0.6, 999), 1: (0.5, 999), 2: (0.4, 999)}
    splits = [split("in turn", 0.45, staleness=0), split("s1", 0.5), split("s2", 0.51, staleness=2)]
    found = run_finals(validate({}), splits, budget_s=300.0)
    assert found == pytest.approx({"in turn": 0.6, "s1": 0.5, "s2": 0.4}, rel=0.01)
    assert [one.step_s for one in started] == [0.6, 0.5, 0.5, 0.4]
    assert propose_split(splits, found, "none").name == "s2"


def test_a_job_that_fails_is_left_out_and_named(jobs: Any) -> None:
    plan, _ = jobs
    plan |= {1: (0.5, 999), 2: (0.5, 3), 3: (0.5, -1), 4: (0.5, 999)}
    lines: list[str] = []
    found = run_finals(validate({}), [final(s) for s in (1, 2, 3, 4)], budget_s=90.0, least_rounds=6, log=lines.append)
    assert set(found) == {"s1", "s4"}
    assert "  without s3, which failed: no weights" in lines and "  without s2, which failed: out of memory" in lines


def test_one_that_is_left_by_failures_says_nothing(jobs: Any) -> None:
    plan, _ = jobs
    plan |= {1: (0.5, 999), 2: (0.5, 2)}
    assert run_finals(validate({}), [final(1), final(2)], budget_s=60.0) == {}


def test_fewer_take_part_where_memory_does_not_hold_them(jobs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, _ = jobs
    plan |= {s: (0.5, 999) for s in (1, 2, 3, 4)}
    free = iter([100, 80, 60, 40])  # 20 a job: three take 60 of 100, and a fourth would take more than that
    monkeypatch.setattr(final_jobs, "_free_bytes", lambda: next(free))
    lines: list[str] = []
    found = run_finals(validate({}), [final(s) for s in (1, 2, 3, 4)], budget_s=60.0, log=lines.append)
    assert set(found) == {"s1", "s2", "s3"}
    assert "  memory does not hold more than 3 jobs at once, left out: s4" in lines


def test_fewer_take_part_where_their_steps_are_long(jobs: Any) -> None:
    plan, started = jobs
    plan |= {s: (40.0, 999) for s in (1, 2, 3)}
    lines: list[str] = []
    slow = [split(f"s{s}", 40.0, staleness=s) for s in (1, 2, 3)]
    assert set(run_finals(validate({}), slow, budget_s=600.0, log=lines.append)) == {"s1", "s2"}
    assert lines[0] == "final of schedules: steps are too long for more than 2 of 3 in 400 s"
    started.clear()
    hours = [split("a", 600.0), split("b", 600.0, staleness=2)]
    assert run_finals(validate({}), hours, budget_s=420.0) == {} and not started


def test_one_alone_needs_no_final(jobs: Any) -> None:
    assert run_finals(validate({}), [final(1)]) == {}
