"""Credit over turns against hand-worked numbers and the exact values of a small game."""

from collections.abc import Iterator

import numpy as np
import pytest

from llamarl.algorithms.gae import gae, turn_gae, turn_lengths


def test_turns_of_one_token_each_are_plain_gae_over_turns() -> None:
    rng = np.random.default_rng(4)
    rewards, values = rng.normal(size=5), rng.normal(size=5)
    plain = gae(rewards, values, gamma=0.9, lam=0.8)
    for ours, expected in zip(turn_gae(rewards, values, [1] * 5, gamma=0.9, lam=0.8), plain, strict=True):
        np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-14)


def test_what_a_turn_without_trained_tokens_earned_goes_to_the_turn_before_it() -> None:
    values = np.array([0.0, 0.0])
    advantages, _ = turn_gae(np.array([4.0, 0.0, 2.0, 1.0]), values, [0, 1, 0, 1], gamma=1.0, lam=0.0)
    assert advantages.tolist() == [4.0 + 2.0, 1.0]


def test_lengths_count_trained_tokens_and_refuse_one_outside_of_every_turn() -> None:
    mask = np.array([True, True, False, False, True, False, True])
    assert turn_lengths(np.array([0, 4]), np.array([2, 7]), mask) == [2, 2]
    with pytest.raises(ValueError, match="do not add up"):
        turn_lengths(np.array([0, 4]), np.array([2, 6]), mask)


# -- a game small enough to be solved: two turns of two tokens a or b ---------------------------------------------------
# Turn 1 pays 1 for "aa", turn 2 pays 3 for the same words as turn 1, and 0 otherwise.

POLICY = {"a": 0.7, "b": 0.3}
WORDS = ("aa", "ab", "ba", "bb")


def probability(words: str) -> float:
    return float(np.prod([POLICY[letter] for letter in words]))


def pays(first: str, second: str) -> tuple[float, float]:
    return float(first == "aa"), 3.0 * (first == second)


def episodes() -> Iterator[tuple[str, str, float]]:
    for first in WORDS:
        for second in WORDS:
            yield first, second, probability(first + second)


def exact_value(prefix: str) -> float:
    """Expected rewards still to come after these letters of both turns, by enumeration."""
    total = weight = 0.0
    for first, second, p in episodes():
        if (first + second).startswith(prefix):
            one, two = pays(first, second)
            total += p * ((one if len(prefix) < 2 else 0.0) + two)
            weight += p
    return total / weight


@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
def test_with_exact_values_a_turn_s_expected_advantage_is_its_exact_one_whatever_lambda(lam: float) -> None:
    for first in WORDS:
        exact = pays(first, "")[0] + exact_value(first) - exact_value("")
        mean = 0.0
        for second in WORDS:
            values = np.array([exact_value((first + second)[:t]) for t in range(4)])
            advantages, _ = turn_gae(np.array(pays(first, second)), values, [2, 2], gamma=1.0, lam=lam)
            mean += probability(second) * advantages[0]
        assert mean == pytest.approx(exact, abs=1e-12), first
