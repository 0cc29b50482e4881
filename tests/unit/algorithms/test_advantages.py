from __future__ import annotations

import numpy as np
import pytest

from llamarl.algorithms.advantages import compute_advantages, group_mean, group_std, leave_one_out
from llamarl.algorithms.config import AlgorithmConfig

NAN = float("nan")


def test_group_mean_by_hand() -> None:
    np.testing.assert_allclose(group_mean(np.array([1.0, 0.0, 0.0, 1.0])), [0.5, -0.5, -0.5, 0.5])
    np.testing.assert_allclose(group_mean(np.array([3.0, 0.0, 0.0])), [2.0, -1.0, -1.0])


def test_leave_one_out_by_hand() -> None:
    # others' means: 0, 1.5, 1.5
    np.testing.assert_allclose(leave_one_out(np.array([3.0, 0.0, 0.0])), [3.0, -1.5, -1.5])


def test_leave_one_out_is_group_mean_times_n_over_n_minus_one() -> None:
    rewards = np.array([0.3, -1.0, 2.5, 0.0, 7.0])
    np.testing.assert_allclose(leave_one_out(rewards), group_mean(rewards) * 5 / 4)


def test_group_std_by_hand() -> None:
    # mean 2, std with n - 1: 2
    np.testing.assert_allclose(group_std(np.array([0.0, 2.0, 4.0])), [-1.0, 0.0, 1.0], rtol=1e-5)


def test_a_failed_sample_is_no_part_of_the_baseline() -> None:
    np.testing.assert_allclose(group_mean(np.array([1.0, NAN, 0.0])), [0.5, 0.0, -0.5])
    np.testing.assert_allclose(leave_one_out(np.array([3.0, NAN, 0.0])), [3.0, 0.0, -3.0])
    np.testing.assert_allclose(group_std(np.array([1.0, NAN, 1.0])), [0.0, 0.0, 0.0])


@pytest.mark.parametrize("estimator", ["group_mean", "leave_one_out", "group_std"])
@pytest.mark.parametrize("rewards", [[NAN, NAN], [5.0, NAN], [5.0], [2.0, 2.0, 2.0]])
def test_a_group_that_cannot_compare_has_advantage_zero(estimator: str, rewards: list[float]) -> None:
    (advantages,) = compute_advantages([np.array(rewards)], AlgorithmConfig(advantage=estimator))  # type: ignore[arg-type]
    np.testing.assert_array_equal(advantages, np.zeros(len(rewards)))


def test_groups_do_not_influence_each_other() -> None:
    together = compute_advantages([np.array([1.0, 0.0]), np.array([9.0, 3.0, 0.0])], AlgorithmConfig())
    np.testing.assert_allclose(together[0], [0.5, -0.5])
    np.testing.assert_allclose(together[1], [5.0, -1.0, -4.0])
