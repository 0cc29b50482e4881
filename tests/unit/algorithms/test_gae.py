"""Generalized advantage estimation against hand-worked cases and its two limits."""

from __future__ import annotations

import numpy as np
import pytest

from llamarl.algorithms.config import AlgorithmConfig
from llamarl.algorithms.gae import gae, suffix_sums
from llamarl.algorithms.kl import sampled_kl


def test_three_tokens_by_hand() -> None:
    """gamma 0.9, lambda 0.5: delta = (0 + 0.9 * 2 - 1, 0 + 0.9 * 4 - 2, 5 - 4) = (0.8, 1.6, 1)."""
    advantages, returns = gae(np.array([0.0, 0.0, 5.0]), np.array([1.0, 2.0, 4.0]), gamma=0.9, lam=0.5)
    np.testing.assert_allclose(advantages, [0.8 + 0.45 * (1.6 + 0.45), 1.6 + 0.45 * 1.0, 1.0])
    np.testing.assert_allclose(returns, advantages + [1.0, 2.0, 4.0])


def test_lambda_one_is_the_discounted_return_less_the_value_whatever_the_critic_says() -> None:
    rng = np.random.default_rng(0)
    rewards, values = rng.normal(size=7), rng.normal(size=7)
    advantages, returns = gae(rewards, values, gamma=0.8, lam=1.0)
    expected = [sum(0.8 ** (s - t) * rewards[s] for s in range(t, 7)) for t in range(7)]
    np.testing.assert_allclose(returns, expected)
    np.testing.assert_allclose(advantages, expected - values)


def test_lambda_zero_is_the_one_step_difference() -> None:
    rewards, values = np.array([1.0, 2.0]), np.array([0.5, 0.25])
    advantages, _ = gae(rewards, values, gamma=0.5, lam=0.0)
    np.testing.assert_allclose(advantages, [1 + 0.5 * 0.25 - 0.5, 2 - 0.25])


def test_a_perfect_critic_leaves_no_advantage() -> None:
    advantages, _ = gae(np.array([0.0, 0.0, 1.0]), np.ones(3), gamma=1.0, lam=0.3)
    assert advantages.tolist() == [0.0, 0.0, 0.0]


def test_arrays_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError, match="one shape"):
        gae(np.zeros(2), np.zeros(3), gamma=1.0, lam=1.0)


def test_suffix_sums() -> None:
    assert suffix_sums(np.array([1.0, 2.0, 4.0])).tolist() == [7.0, 6.0, 4.0]


@pytest.mark.parametrize("field", ["gae_gamma", "gae_lambda"])
@pytest.mark.parametrize("value", [-0.1, 1.1])
def test_constants_outside_the_unit_interval_are_refused(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        AlgorithmConfig(**{field: value})  # type: ignore[arg-type]


def test_k1_of_recorded_log_probs_averages_to_the_kl_of_two_coins() -> None:
    """mu = (0.8, 0.2), reference = (0.5, 0.5): KL = 0.8 log 1.6 + 0.2 log 0.4, by k1 and by k3 alike."""
    mu, reference = np.log([0.8, 0.2]), np.log([0.5, 0.5])
    expected = 0.8 * np.log(1.6) + 0.2 * np.log(0.4)
    for estimator in ("k1", "k3"):
        got = sampled_kl(mu, reference, estimator=estimator)
        assert got @ [0.8, 0.2] == pytest.approx(expected)
