import numpy as np
import pytest

from llamarl.algorithms.advantages import compute_advantages, group_mean, group_std, leave_one_out, overlong_penalty
from llamarl.algorithms.config import AlgorithmConfig
from llamarl.algorithms.gae import gae

NAN = float("nan")


def test_group_mean_by_hand() -> None:
    np.testing.assert_allclose(group_mean(np.array([1.0, 0.0, 0.0, 1.0])), [0.5, -0.5, -0.5, 0.5])
    np.testing.assert_allclose(group_mean(np.array([3.0, 0.0, 0.0])), [2.0, -1.0, -1.0])


def test_leave_one_out_by_hand() -> None:
    # others' means: 0, 1.5, 1.5
    np.testing.assert_allclose(leave_one_out(np.array([3.0, 0.0, 0.0])), [3.0, -1.5, -1.5])


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


def test_batch_std_by_hand() -> None:
    # all four: mean 2, deviations -2 0 0 2, std with n - 1: sqrt(8 / 3)
    scale = (8 / 3) ** 0.5
    got = compute_advantages([np.array([0.0, 2.0]), np.array([2.0, NAN, 4.0])], AlgorithmConfig(advantage="batch_std"))
    np.testing.assert_allclose(np.concatenate(got), np.array([-2, 0, 0, 0, 2]) / scale, rtol=1e-5)


def test_group_mean_batch_std_by_hand() -> None:
    # after the groups' means: -1 1 | -2 . 2; their mean is 0, std sqrt(10 / 3)
    scale = (10 / 3) ** 0.5
    config = AlgorithmConfig(advantage="group_mean_batch_std")
    got = compute_advantages([np.array([0.0, 2.0]), np.array([2.0, NAN, 6.0])], config)
    np.testing.assert_allclose(np.concatenate(got), np.array([-1, 1, -2, 0, 2]) / scale, rtol=1e-5)


@pytest.mark.parametrize("estimator", ["batch_std", "group_mean_batch_std"])
def test_ranks_that_hold_parts_of_the_step_agree_with_one_that_holds_all(estimator: str) -> None:
    config = AlgorithmConfig(advantage=estimator)  # type: ignore[arg-type]
    groups = [np.array([1.0, 0.0, 3.0]), np.array([NAN, 5.0, 4.0]), np.array([2.0, 2.5, -1.0])]
    whole = compute_advantages(groups, config)
    sent: list[list[np.ndarray]] = [[], []]

    def run(rank: int, answers: list[np.ndarray]) -> list[np.ndarray]:
        calls = iter(answers)

        def exchange(values: np.ndarray) -> np.ndarray:
            sent[rank].append(values)
            return next(calls, values)

        return compute_advantages(groups[:1] if rank == 0 else groups[1:], config, exchange)

    answers: list[np.ndarray] = []
    for call in range(2):  # each pass learns one more sum
        for rank in range(2):
            sent[rank].clear()
            run(rank, answers)
        answers.append(sent[0][call] + sent[1][call])
    for got, expected in zip([*run(0, answers), *run(1, answers)], whole, strict=True):
        np.testing.assert_allclose(got, expected)


def test_reward_is_the_reward_itself() -> None:
    (got,) = compute_advantages([np.array([1.0, NAN, -2.0])], AlgorithmConfig(advantage="reward"))
    np.testing.assert_array_equal(got, [1.0, 0.0, -2.0])


def test_overlong_penalty_by_hand() -> None:
    config = AlgorithmConfig(overlong_buffer=20, overlong_limit=100, overlong_penalty=0.5)
    lengths = [0, 80, 85, 90, 100, 300]
    assert [overlong_penalty(n, config) for n in lengths] == pytest.approx([0.0, 0.0, 0.125, 0.25, 0.5, 0.5])
    assert overlong_penalty(10**6, AlgorithmConfig()) == 0.0


@pytest.mark.parametrize("name", ["group_mean", "leave_one_out", "group_std", "group_mean_batch_std"])
@pytest.mark.parametrize("reward", [0.1, 0.2, 0.3, 0.7, 0.9])
def test_equal_rewards_leave_exactly_no_signal(name: str, reward: float) -> None:
    """7 x 0.1 less its mean is 1e-17 a member: enough to be trained, and to be drawn."""
    config = AlgorithmConfig(advantage=name)  # type: ignore[arg-type]
    for n in range(2, 33):
        silent, loud = compute_advantages([np.full(n, reward), np.array([0.1, 0.7, 0.7])], config)
        assert (silent == 0.0).all() and (loud != 0.0).all()


# Generalized advantage estimation.


def test_lambda_one_is_the_discounted_return_less_the_value_whatever_the_critic_says() -> None:
    rng = np.random.default_rng(0)
    rewards, values = rng.normal(size=7), rng.normal(size=7)
    advantages, returns = gae(rewards, values, gamma=0.8, lam=1.0)
    expected = [sum(0.8 ** (s - t) * rewards[s] for s in range(t, 7)) for t in range(7)]
    np.testing.assert_allclose(returns, expected)
    np.testing.assert_allclose(advantages, expected - values)


def test_arrays_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError, match="one shape"):
        gae(np.zeros(2), np.zeros(3), gamma=1.0, lam=1.0)


@pytest.mark.parametrize("field", ["gae_gamma", "gae_lambda"])
@pytest.mark.parametrize("value", [-0.1, 1.1])
def test_constants_outside_the_unit_interval_are_refused(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        AlgorithmConfig(**{field: value})  # type: ignore[arg-type]
