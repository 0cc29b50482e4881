"""Plans of optimizer steps, by counting."""

from __future__ import annotations

import numpy as np

from llamarl.trainer.step_plan import plan_of_rank, plan_steps


def test_a_pass_takes_each_group_once_in_parts_that_differ_by_one_group() -> None:
    made = plan_steps(range(8), minibatches=3, epochs=1, seed=0, tick=0)
    assert sorted(map(len, made)) == [2, 3, 3]
    assert sorted(prompt for step in made for prompt in step) == list(range(8))


def test_passes_ticks_and_seeds_are_cut_differently_and_each_again_the_same() -> None:
    def plan(seed: int = 0, tick: int = 0) -> list[list[int]]:
        return plan_steps(range(8), minibatches=2, epochs=2, seed=seed, tick=tick)

    made = plan()
    assert len(made) == 4
    assert sorted(made[0] + made[1]) == sorted(made[2] + made[3]) == list(range(8))
    assert {frozenset(step) for step in made[:2]} != {frozenset(step) for step in made[2:]}
    assert plan() == made
    assert plan(tick=1) != made
    assert plan(seed=1) != made


def test_more_parts_than_groups_leave_steps_empty() -> None:
    assert sorted(map(len, plan_steps([0, 1], minibatches=3, epochs=1, seed=0, tick=0))) == [0, 1, 1]
    assert plan_steps([], minibatches=3, epochs=1, seed=0, tick=0) == [[], [], []]


def test_ranks_plan_together_and_groups_stay_whole() -> None:
    """Three ranks, the second without a group; prompts by sequence, those of a group side by side."""
    mine = [[3, 3, 5], [], [1, 1, 1, 7]]
    counts = np.array([2, 0, 2])
    everyone = np.array([3, 5, 1, 7])
    steps = plan_steps(everyone.tolist(), minibatches=2, epochs=2, seed=4, tick=9)
    for rank, prompts in enumerate(mine):
        sent: list[np.ndarray] = []

        def summed(values: np.ndarray, sent: list[np.ndarray] = sent) -> np.ndarray:
            sent.append(values.copy())
            return counts.copy() if len(sent) == 1 else everyone.copy()

        found = plan_of_rank(
            prompts, minibatches=2, epochs=2, seed=4, tick=9, rank=rank, num_ranks=3, sum_over_ranks=summed
        )
        assert sent[0].tolist() == [counts[r] * (r == rank) for r in range(3)]
        start = int(counts[:rank].sum())
        assert sent[1].tolist() == [p if start <= i < start + counts[rank] else 0 for i, p in enumerate(everyone)]
        assert found == [[i for i, prompt in enumerate(prompts) if prompt in step] for step in steps]
