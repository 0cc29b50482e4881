"""The statistics that benchmarks claim with, against values from a table."""

import math

import pytest
from harness import paired_ratio


@pytest.mark.parametrize(("rounds", "rank"), [(6, 1), (10, 2), (20, 6), (25, 8)])
def test_the_interval_of_a_median_has_the_ranks_of_the_sign_test(rounds: int, rank: int) -> None:
    found = paired_ratio([100.0 + i for i in range(rounds)], [100.0] * rounds)
    assert found["low"] == pytest.approx(1.0 + (rank - 1) / 100)
    assert found["high"] == pytest.approx(1.0 + (rounds - rank) / 100)


def test_drift_that_both_sides_of_a_round_share_falls_out() -> None:
    drift = [1.0, 1.5, 1.1, 0.8, 2.0, 1.3, 0.9, 1.2]
    assert paired_ratio([1.02 * d for d in drift], drift) == pytest.approx({"median": 1.02, "low": 1.02, "high": 1.02})


def test_too_few_rounds_show_nothing() -> None:
    assert paired_ratio([2.0] * 5, [1.0] * 5) == {"median": 2.0, "low": 0.0, "high": math.inf}
