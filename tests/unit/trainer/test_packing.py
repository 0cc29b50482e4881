from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamarl.trainer.packing import balance, pack, shared_units


def test_longest_first_into_the_emptiest() -> None:
    # 7 | 5, then 4 to the second (9), then 3 to the first (10), then 1 to the second (10)
    assert balance([3, 7, 5, 4, 1], 2) == [[0, 1], [2, 3, 4]]


def test_pack_fills_the_budget_exactly_where_it_can() -> None:
    assert pack([4, 4, 4, 4], 8) == [[0, 2], [1, 3]]


def test_pack_takes_another_microbatch_where_balancing_overflows() -> None:
    # 18 tokens need at least 2 of 9, but two bins would hold 6 + 6 and 6: three do
    assert pack([6, 6, 6], 9) == [[0], [1], [2]]


def test_a_sequence_above_the_budget_is_computed_alone() -> None:
    assert pack([3, 20, 3], 8) == [[0, 2], [1]]


def test_ranks_that_step_together_get_the_same_number_of_microbatches() -> None:
    assert pack([3, 2], 8, min_microbatches=4) == [[0], [1], [], []]
    assert pack([], 8, min_microbatches=2) == [[], []]
    assert pack([20], 8, min_microbatches=2) == [[0], []]


def test_no_sequence_packs_into_nothing() -> None:
    assert pack([], 8) == [[]]


def test_a_budget_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="max_tokens"):
        pack([1], 0)
    with pytest.raises(ValueError, match="num_bins"):
        balance([1], 0)


@given(st.lists(st.integers(1, 60), max_size=40), st.integers(1, 100), st.integers(1, 6))
def test_packing_loses_nothing_keeps_the_budget_and_balances(lengths: list[int], budget: int, least: int) -> None:
    bins = pack(lengths, budget, min_microbatches=least)
    assert sorted(i for items in bins for i in items) == list(range(len(lengths)))
    assert len(bins) >= least
    loads = [sum(lengths[i] for i in items) for items in bins]
    for items, load in zip(bins, loads, strict=True):
        assert load <= budget or len(items) == 1
    within = [load for load in loads if load <= budget]
    short = [length for length in lengths if length <= budget]
    if within and short:  # greedy: the emptiest micro-batch is behind by at most one sequence
        assert max(within) - min(within) <= max(short)
    assert pack(lengths, budget, min_microbatches=least) == bins


def test_units_hold_one_group_within_the_budget() -> None:
    # prompt 5: 5 + 4 + 6 = 15 fits in 16, the third response opens a new unit with the prompt again
    assert shared_units([0, 0, 0, 1], [5, 5, 5, 2], [4, 6, 3, 20], 16) == [[0, 1], [2], [3]]
    assert shared_units([], [], [], 16) == []
