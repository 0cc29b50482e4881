import numpy as np
import pytest

from llamarl.algorithms.advantages import compute_advantages, overlong_penalty
from llamarl.algorithms.gae import gae
from llamarl.settings.algorithms import AlgorithmConfig

NAN = float("nan")
BY_HAND: list[tuple[str, list[list[float]], list[float]]] = [
    ("group_mean", [[1.0, 0.0, 0.0, 1.0], [3.0, 0.0, 0.0]], [0.5, -0.5, -0.5, 0.5, 2.0, -1.0, -1.0]),
    ("group_mean", [[1.0, NAN, 0.0]], [0.5, 0.0, -0.5]),
    ("leave_one_out", [[3.0, 0.0, 0.0]], [3.0, -1.5, -1.5]),  # others' means: 0, 1.5, 1.5
    ("leave_one_out", [[3.0, NAN, 0.0]], [3.0, 0.0, -3.0]),
    ("group_std", [[0.0, 2.0, 4.0]], [-1.0, 0.0, 1.0]),  # mean 2, std with n - 1: 2
    ("group_std", [[1.0, NAN, 1.0]], [0.0, 0.0, 0.0]),
    # all four: mean 2, deviations -2 0 0 2, std with n - 1
    ("batch_std", [[0.0, 2.0], [2.0, NAN, 4.0]], [x / (8 / 3) ** 0.5 for x in (-2, 0, 0, 0, 2)]),
    # after the groups' means: -1 1 | -2 . 2; their mean is 0
    ("group_mean_batch_std", [[0.0, 2.0], [2.0, NAN, 6.0]], [x / (10 / 3) ** 0.5 for x in (-1, 1, -2, 0, 2)]),
    ("reward", [[1.0, NAN, -2.0]], [1.0, 0.0, -2.0]),
]
"""Estimator, rewards of each group (of a failed sample none), advantages one after the other."""


@pytest.mark.parametrize(("estimator", "rewards", "expected"), BY_HAND)
def test_advantages_by_hand(estimator: str, rewards: list[list[float]], expected: list[float]) -> None:
    got = compute_advantages(list(map(np.array, rewards)), AlgorithmConfig(advantage=estimator))  # type: ignore[arg-type]
    np.testing.assert_allclose(np.concatenate(got), expected, rtol=1e-5)


@pytest.mark.parametrize("estimator", ["group_mean", "leave_one_out", "group_std"])
@pytest.mark.parametrize("rewards", [[NAN, NAN], [5.0, NAN], [5.0], [2.0, 2.0, 2.0]])
def test_a_group_that_cannot_compare_has_advantage_zero(estimator: str, rewards: list[float]) -> None:
    (advantages,) = compute_advantages([np.array(rewards)], AlgorithmConfig(advantage=estimator))  # type: ignore[arg-type]
    np.testing.assert_array_equal(advantages, np.zeros(len(rewards)))


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
