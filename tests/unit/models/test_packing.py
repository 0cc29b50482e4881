import time

from hypothesis import given
from hypothesis import strategies as st

from llamarl.models.packing import balance, for_several_at_once, pack, shared_units


def test_longest_first_into_the_emptiest() -> None:
    # 7 | 5, then 4 to the second (9), then 3 to the first (10), then 1 to the second (10)
    assert balance([3, 7, 5, 4, 1], 2) == [[0, 1], [2, 3, 4]]


def test_ties_go_to_the_bin_that_is_named_and_to_those_after_it() -> None:
    assert balance([2, 2, 2, 2], 3) == [[0, 3], [1], [2]]
    assert balance([2, 2, 2, 2], 3, first=1) == [[2], [0, 3], [1]]
    assert balance([5, 2, 2], 3, first=5) == [[1], [2], [0]]


def test_pack_fills_the_budget_exactly_where_it_can() -> None:
    assert pack([4, 4, 4, 4], 8) == [[0, 2], [1, 3]]


def test_pack_takes_another_microbatch_where_balancing_overflows() -> None:
    # 18 tokens need at least 2 of 9, but two bins would hold 6 + 6 and 6: three do
    assert pack([6, 6, 6], 9) == [[0], [1], [2]]


def test_many_sequences_that_fill_half_a_micro_batch_each_are_packed_at_once() -> None:
    # from 356 micro-batches on each number is tried, up to one a sequence
    lengths = [9_000 + 7 * (i % 401) for i in range(512)]
    began = time.process_time()
    assert len(pack(lengths, 16_384)) == 512
    assert time.process_time() - began < 2.0


def test_ranks_that_step_together_get_the_same_number_of_microbatches() -> None:
    assert pack([3, 2], 8, min_microbatches=4) == [[0], [1], [], []]
    assert pack([], 8, min_microbatches=2) == [[], []]
    assert pack([20], 8, min_microbatches=2) == [[0], []]


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


def test_the_largest_micro_batches_go_first_and_the_one_left_over_is_cut_in_two() -> None:
    microbatches, costs = [[0, 1], [2, 3, 4, 5], [6]], [20, 36, 24]
    lengths = [9, 9, 8, 8, 8, 8, 20]
    # 36 and 24 are a round of two threads; 20 is left, two sequences of 9 behind one prompt
    assert for_several_at_once(microbatches, costs, lengths, 2) == [[2, 3, 4, 5], [6], [0], [1]]


def test_whole_rounds_are_only_put_in_order_and_equal_ones_keep_theirs() -> None:
    assert for_several_at_once([[0], [1], [2], [3]], [5, 7, 7, 5], [5, 7, 7, 5], 2) == [[1], [2], [0], [3]]


def test_two_left_of_four_threads_are_halved_and_three_left_as_they_are() -> None:
    lengths = [4] * 12
    assert for_several_at_once([[0, 1, 2, 3], [4, 5, 6, 7]], [20, 20], lengths, 4) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    three = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert for_several_at_once(three, [20] * 3, lengths, 4) == three


def test_pieces_are_cut_by_tokens_and_a_single_sequence_stays_whole() -> None:
    assert for_several_at_once([[0, 1, 2]], [20], [10, 3, 3], 2) == [[0], [1, 2]]
    assert for_several_at_once([[0, 1, 2]], [20], [1, 1, 50], 3) == [[0], [1], [2]]
    assert for_several_at_once([[0]], [20], [20], 4) == [[0]]


def test_every_sequence_is_in_one_micro_batch_whatever_the_sizes() -> None:
    for num_units in range(1, 12):
        for at_once in (2, 3, 4):
            microbatches = [[3 * unit, 3 * unit + 1, 3 * unit + 2] for unit in range(num_units)]
            lengths = [1 + (7 * i) % 11 for i in range(3 * num_units)]
            costs = [sum(lengths[i] for i in items) for items in microbatches]
            found = for_several_at_once(microbatches, costs, lengths, at_once)
            assert all(found) and sorted(i for items in found for i in items) == list(range(3 * num_units))
