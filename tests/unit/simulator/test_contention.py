"""Roles that slow one another, and the evaluator beside them: schedules worked by hand."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest

from llamarl.errors import PlanError
from llamarl.executors.evaluator import evaluation_due
from llamarl.planner.lengths import grouped
from llamarl.simulator.contention import Contention
from llamarl.simulator.costs import EvaluationCost, LinearGeneratorCost
from llamarl.simulator.scenario import Failures, durations_scenario
from llamarl.simulator.simulate import simulate

TWO = Contention(cores=2, threads={"generator": 1, "trainer": 1}, slowdown={"generator": 1.5, "trainer": 1.25})


def test_roles_that_work_in_turn_are_never_slowed() -> None:
    alone = durations_scenario(generator_s=6, reward_s=1, trainer_s=5, max_staleness=0)
    assert simulate(dataclasses.replace(alone, contention=TWO)).step_s == simulate(alone).step_s == 12


def test_a_tick_is_slowed_for_as_long_as_the_other_works() -> None:
    # Generator 6, trainer 2, staleness 1: the trainer works 2.5 s, in which the generator does 2.5 / 1.5; the rest it does alone.
    scenario = durations_scenario(generator_s=6, reward_s=0, trainer_s=2, max_staleness=1, contention=TWO)
    found = {(r.executor, r.tick): r.finished_s - r.started_s for r in simulate(scenario).reports}
    assert found["trainer", 50] == pytest.approx(2.5)
    assert found["generator", 50] == pytest.approx(2.5 + (6 - 2.5 / 1.5))
    assert found["trainer", 99] == pytest.approx(2.0)  # the last one has nobody beside it


def test_threads_beyond_the_cores_take_turns() -> None:
    crowded = Contention(cores=2, threads={"generator": 2, "trainer": 2})
    result = simulate(durations_scenario(generator_s=4, reward_s=0, trainer_s=4, max_staleness=1, contention=crowded))
    assert result.step_s == pytest.approx(8, rel=0.01)  # nothing is gained over working in turn, but at the ends


def test_without_a_slow_down_the_shared_clock_is_the_plain_one() -> None:
    free = Contention(cores=8, threads={"generator": 1, "trainer": 1})
    rng = random.Random(0)
    for _ in range(20):
        generator, reward, trainer = (rng.uniform(0.1, 3) for _ in range(3))
        plain = durations_scenario(
            generator_s=generator, reward_s=reward, trainer_s=trainer, sync_s=rng.choice([0.0, 0.4]),
            max_staleness=rng.randrange(4), num_ticks=25,
        )  # fmt: skip
        shared = simulate(dataclasses.replace(plain, contention=free))
        assert shared.step_s == pytest.approx(simulate(plain).step_s, rel=1e-9)
        assert shared.idle == pytest.approx(simulate(plain).idle, abs=1e-9)


def test_versions_arrive_within_a_tick_of_a_shared_machine_as_on_the_plain_clock() -> None:
    free = Contention(cores=4, threads={"generator": 1, "trainer": 1})
    for sync, level in ((0.0, 1), (0.5, 2)):
        plain = durations_scenario(
            generator_s=6, reward_s=1, trainer_s=4, sync_s=sync, max_staleness=level, tokens=1000, weights="latest"
        )
        alone, shared = simulate(plain), simulate(dataclasses.replace(plain, contention=free))
        assert alone.staleness_mean == pytest.approx((1 + 4 + sync) / 6, abs=0.01)
        assert shared.staleness_mean == pytest.approx(alone.staleness_mean, abs=1e-3)
        assert shared.step_s == pytest.approx(alone.step_s)


def test_a_slowed_tick_is_told_of_a_version_at_the_work_it_has_done() -> None:
    # The trainer's 4 s beside the generator take 5 s, in which the generator does 5 / 1.5 of its 6 s; 2.67 s alone follow.
    slowed = durations_scenario(
        generator_s=6, reward_s=0, trainer_s=4, max_staleness=1, tokens=1000, weights="latest", contention=TWO
    )
    result = simulate(slowed)
    assert result.role_s["generator"] == pytest.approx(5 + (6 - 5 / 1.5), abs=0.01)
    # Tokens of the first 3.33 s of work are one version old, those after them none.
    assert result.staleness_mean == pytest.approx(5 / 1.5 / 6, abs=0.01)


def test_a_failure_on_a_shared_machine_loses_what_it_loses_elsewhere() -> None:
    scenario = durations_scenario(
        generator_s=3, reward_s=0, trainer_s=3, failures=Failures(device_mtbf_hours=0.02, restart_s=5, checkpoint_every=4)
    )  # fmt: skip
    free = Contention(cores=2, threads={"generator": 1, "trainer": 1})
    shared, plain = simulate(dataclasses.replace(scenario, contention=free)), simulate(scenario)
    assert plain.num_failures > 0 and shared.num_failures == plain.num_failures
    assert shared.total_s == pytest.approx(plain.total_s)


def test_the_evaluator_works_when_the_real_one_does_and_slows_the_others() -> None:
    evaluation = EvaluationCost(every=4, prompts=1, generator=LinearGeneratorCost(step_s=3.0))
    for every in (1, 3, 4, 7):
        due = [EvaluationCost(every=every, prompts=1, generator=LinearGeneratorCost()).due(k, 10) for k in range(10)]
        assert due == [k == 0 or evaluation_due(k + 1, every=every, num_ticks=10) for k in range(10)]
    three = Contention(cores=2, threads={"generator": 1, "trainer": 1, "evaluator": 1})
    scenario = durations_scenario(
        generator_s=2, reward_s=0, trainer_s=2, max_staleness=1, num_ticks=12, evaluation=evaluation, contention=three
    )
    result = simulate(scenario)
    spent = [r.finished_s - r.started_s for r in result.reports if r.executor == "evaluator"]
    assert [k for k, seconds in enumerate(spent) if seconds] == [0, 3, 7, 11]
    # Three threads on two cores: 3 s of a tick do 2 s of its work, and nobody waits for an evaluation of 4.5 s.
    assert spent[3] == spent[7] == pytest.approx(4.5)
    assert spent[11] == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Contention(cores=0, threads={}), "cores must be at least 1"),
        (lambda: Contention(cores=1, threads={}, slowdown={"trainer": 0.5}), "1 to 100"),
        (lambda: EvaluationCost(every=0, prompts=1, generator=LinearGeneratorCost()), "every must be at least 1"),
    ],
)
def test_nonsense_is_refused(make: object, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        make()  # type: ignore[operator]


def test_lengths_of_groups_travel_together() -> None:
    lengths = grouped([[3, 4], [50, 60]])
    assert (lengths.mean, lengths.limit) == (pytest.approx(29.25), 60)
    drawn = lengths.sample(41, np.random.default_rng(0))
    assert len(drawn) == 41
    assert {tuple(pair) for pair in drawn[:40].reshape(-1, 2).tolist()} == {(3, 4), (50, 60)}
    with pytest.raises(PlanError, match="groups of one size"):
        grouped([1, 2, 3])
