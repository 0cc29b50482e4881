"""Plans of optimizer steps, by hand where a number is claimed and by counting where a property is."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from llamarl.trainer.config import SelectionConfig, TrainerConfig
from llamarl.trainer.step_plan import Row, StepPlan, gather_rows, plan_steps


def rows_of(advantages: dict[int, Sequence[float]], num_tokens: int = 10) -> list[Row]:
    return [
        Row(prompt=prompt, response=i, num_tokens=num_tokens, advantage=a)
        for prompt, values in sorted(advantages.items())
        for i, a in enumerate(values)
    ]


def plan(rows: Sequence[Row], *, seed: int = 0, tick: int = 0, minibatches: int = 1, epochs: int = 1, **selection: object) -> StepPlan:  # fmt: skip
    config = TrainerConfig(minibatches=minibatches, epochs=epochs, selection=SelectionConfig(**selection))  # type: ignore[arg-type]
    return plan_steps(rows, config, seed=seed, tick=tick)


EIGHT = rows_of({p: [0.5, -0.5, 0.25] for p in range(8)})


def test_a_pass_takes_each_group_once_and_whole_in_parts_that_differ_by_one_group() -> None:
    made = plan(EIGHT, minibatches=3)
    groups = [sorted({prompt for prompt, _ in step}) for step in made.steps]
    assert sorted(map(len, groups)) == [2, 3, 3]
    assert sorted(p for g in groups for p in g) == list(range(8))
    assert all(len(step) == 3 * len(g) for step, g in zip(made.steps, groups, strict=True))
    assert made.num_unused == 0 and made.budget_share is None


def test_passes_ticks_and_seeds_are_cut_differently_and_each_again_the_same() -> None:
    made = plan(EIGHT, minibatches=2, epochs=2)
    assert len(made.steps) == 4
    assert sorted(made.steps[0] + made.steps[1]) == sorted(made.steps[2] + made.steps[3])
    assert set(made.steps[:2]) != set(made.steps[2:])
    assert plan(EIGHT, minibatches=2, epochs=2) == made
    assert plan(EIGHT, minibatches=2, epochs=2, tick=1) != made
    assert plan(EIGHT, minibatches=2, epochs=2, seed=1) != made


def test_more_parts_than_groups_leave_steps_empty() -> None:
    made = plan(rows_of({0: [1.0], 1: [1.0]}), minibatches=3)
    assert sorted(map(len, made.steps)) == [0, 1, 1]
    assert plan([], minibatches=3).steps == ((), (), ())


def test_pairs_join_highest_with_lowest_greatest_contrast_first() -> None:
    group = rows_of({4: [0.1, 0.9, -0.6, 0.3, -0.2]})
    one = plan(group, pairs=1)
    assert one.steps == (((4, 1), (4, 2)),) and one.num_unused == 3  # 0.9 with -0.6
    two = plan(group, pairs=2)
    assert two.steps == (((4, 1), (4, 2), (4, 3), (4, 4)),)  # and 0.3 with -0.2; 0.1 is the odd one
    assert plan(group[:1], pairs=2).steps == ((),)  # a lone response has no partner
    ties = rows_of({0: [0.0, 0.0, 0.0, 0.0]})
    assert plan(ties, pairs=1).steps == (((0, 0), (0, 3)),)


def test_pairs_stay_together_in_a_step() -> None:
    rows = rows_of({p: [0.7, -0.7, 0.2, -0.2] for p in range(5)})
    made = plan(rows, pairs=2, minibatches=4)
    for step in made.steps:
        members = set(step)
        for prompt, response in step:
            assert (prompt, {0: 1, 1: 0, 2: 3, 3: 2}[response]) in members


def test_a_budget_takes_whole_responses_in_order_until_the_next_does_not_fit() -> None:
    lengths = [60, 30, 50, 20, 40]
    rows = [Row(prompt=i, response=0, num_tokens=n, advantage=0.0) for i, n in enumerate(lengths)]
    for seed in range(20):
        made = plan(rows, seed=seed, tokens_per_step=100)
        (taken,) = ([p for p, _ in step] for step in made.steps)
        total = sum(lengths[p] for p in taken)
        assert total <= 100 and made.num_unused == 5 - len(taken)
        assert made.budget_share == total / 100
        full = plan(rows, seed=seed, tokens_per_step=1000)  # the same order, and room for all
        assert full.num_unused == 0 and full.budget_share == 0.2
    assert len({plan(rows, seed=seed, tokens_per_step=100).steps for seed in range(20)}) > 3


def test_steps_are_filled_one_after_the_other_and_a_giant_has_a_step_of_its_own() -> None:
    rows = [Row(prompt=i, response=0, num_tokens=n, advantage=0.0) for i, n in enumerate([40, 40, 150, 40])]
    for seed in range(20):
        made = plan(rows, seed=seed, minibatches=3, tokens_per_step=100)
        for step in made.steps:
            tokens = [rows[p].num_tokens for p, _ in step]
            assert sum(tokens) <= 100 or tokens == [150]
        assert ((2, 0),) in made.steps or made.num_unused > 0
    used = Counter(len(step) for step in plan(rows[:2], minibatches=3, tokens_per_step=40).steps)
    assert used == {1: 2, 0: 1}


def test_a_budget_drops_long_responses_a_little_more_often() -> None:
    """The bias that the documentation states: the response that does not fit is longer than average."""
    lengths = [10] * 10 + [50] * 10
    rows = [Row(prompt=i, response=0, num_tokens=n, advantage=0.0) for i, n in enumerate(lengths)]
    taken: Counter[int] = Counter()
    for tick in range(400):
        taken.update(lengths[p] for p, _ in plan(rows, tick=tick, tokens_per_step=200).steps[0])
    assert 0.8 < taken[50] / taken[10] < 0.99


def test_advantage_shuffle_draws_in_proportion_without_replacement() -> None:
    """First of two draws from weights 1, 2, 5: probabilities 1/8, 2/8, 5/8. Zero weights are never drawn."""
    rows = rows_of({0: [0.5, -0.5], 1: [1.0, -1.0], 2: [2.5, -2.5], 3: [0.0, 0.0]})
    first: Counter[int] = Counter()
    for tick in range(4000):
        made = plan(rows, tick=tick, minibatches=4, shuffle="advantage")
        assert all(len(step) == 2 for step in made.steps)  # one group each
        first.update(step[0][0] for step in made.steps)
    assert set(first) == {0, 1, 2}
    for prompt, probability in enumerate((1 / 8, 2 / 8, 5 / 8)):
        deviation = math.sqrt(probability * (1 - probability) / 16000)
        assert abs(first[prompt] / 16000 - probability) < 4 * deviation


def test_advantage_shuffle_draws_every_step_anew_and_no_unit_twice_in_one() -> None:
    rows = rows_of({p: [p + 1.0, -p - 1.0] for p in range(6)})
    made = plan(rows, minibatches=2, epochs=2, shuffle="advantage")
    assert [len(step) for step in made.steps] == [6, 6, 6, 6]  # three groups of two
    assert all(len(set(step)) == 6 for step in made.steps)
    assert len(set(made.steps)) > 1
    trained = {key for step in made.steps for key in step}
    assert made.num_unused == len(rows) - len(trained)
    assert plan(rows_of({0: [0.0, 0.0], 1: [0.0]}), minibatches=2, shuffle="advantage").steps == ((), ())


def test_pairs_shuffle_and_budget_work_together() -> None:
    rows = rows_of({p: [0.9, -0.9, 0.1, -0.1] for p in range(6)}, num_tokens=7)
    made = plan(rows, pairs=1, shuffle="advantage", tokens_per_step=30, minibatches=3)
    assert [len(step) for step in made.steps] == [4, 4, 4]  # two pairs of 14 tokens
    assert {response for step in made.steps for _, response in step} == {0, 1}
    assert made.budget_share == pytest.approx(28 / 30)


def test_every_rank_gathers_the_same_sorted_rows() -> None:
    mine = [rows_of({3: [0.1, -0.3]}), [], rows_of({1: [1 / 3], 7: [-2.5]}, num_tokens=4)]
    counts = np.array([2.0, 0.0, 2.0])

    def second(rank: int) -> np.ndarray:
        sent: list[np.ndarray] = []

        def record(values: np.ndarray) -> np.ndarray:
            sent.append(values.copy())
            if len(sent) == 1:
                assert values.tolist() == [counts[r] * (r == rank) for r in range(3)]
            return counts.copy() if len(sent) == 1 else values

        gather_rows(mine[rank], rank=rank, num_ranks=3, sum_over_ranks=record)
        return sent[1]

    table = sum(second(rank) for rank in range(3))
    for rank in range(3):
        answers = iter([counts, table])
        found = gather_rows(mine[rank], rank=rank, num_ranks=3, sum_over_ranks=lambda _, a=answers: next(a))  # type: ignore[misc]
        assert found == sorted(row for rows in mine for row in rows)
