"""Rewards and advantages of tokens, worked by hand."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from made_responses import made_group
from training_fixtures import make_response

from llamarl.settings.algorithms import AlgorithmConfig
from llamarl.trainer.batch import make_microbatch, make_sequences
from llamarl.trainer.credit import response_reward, standardize, token_advantages, value_targets
from llamarl.types import Failure, Group, Response, Score, Turn


def _response(reward: float | None = 1.0, *, values: list[float] | None = None) -> Response:
    """Four tokens, the second not the policy's; behaviour and reference log-probs of the others differ by 1, 2 and -1."""
    outcome = Failure(kind="timeout", detail="") if reward is None else Score(value=reward)
    mask = [True, False, True, True]
    response = make_response(0, 0, [5, 6, 7, 8], outcome, logprobs=[-1.0, 0.0, -2.0, -3.0], mask=mask)
    nan = float("nan")
    return dataclasses.replace(
        response,
        reference_logprobs=np.array([-2.0, nan, -4.0, -2.0], np.float32),
        values=None if values is None else np.array([values[0], nan, *values[1:]], np.float32),
    )


def _config(**settings: Any) -> AlgorithmConfig:
    return AlgorithmConfig(**settings)


def test_kl_in_the_reward_takes_the_sum_over_trained_tokens_off() -> None:
    config = _config(kl_coef=0.1, kl_place="reward", kl_estimator="k1")
    assert response_reward(_response(), config) == pytest.approx(1 - 0.1 * (1 + 2 - 1))
    squares = _config(kl_coef=0.1, kl_place="reward", kl_estimator="k2")
    assert response_reward(_response(), squares) == pytest.approx(1 - 0.1 * (1 + 4 + 1) / 2)
    k3 = _config(kl_coef=0.1, kl_place="reward", kl_estimator="k3")  # r - 1 - log r, log r = -1, -2, 1
    total = (math.exp(-1) - 1 + 1) + (math.exp(-2) - 1 + 2) + (math.e - 1 - 1)
    assert response_reward(_response(), k3) == pytest.approx(1 - 0.1 * total)
    assert token_advantages(_response(), 0.5, k3) is None  # every token has the response's advantage


def test_a_failed_response_has_no_reward_with_kl_either() -> None:
    assert math.isnan(response_reward(_response(None), _config(kl_coef=0.1, kl_place="reward")))


def test_kl_as_token_rewards_charges_a_token_with_what_follows_from_it() -> None:
    config = _config(kl_coef=0.1, kl_place="token_reward", kl_estimator="k1")
    assert response_reward(_response(), config) == 1.0
    got = token_advantages(_response(), 0.5, config)
    assert got is not None
    np.testing.assert_allclose(got, [0.5 - 0.1 * (1 + 2 - 1), 0.5 - 0.1 * (2 - 1), 0.5 + 0.1])


def test_kl_without_reference_log_probs_is_refused() -> None:
    bare = dataclasses.replace(_response(), reference_logprobs=None)
    for place in ("reward", "token_reward"):
        with pytest.raises(ValueError, match="wire a reference executor"):
            make_sequences([_group(bare)], _config(kl_coef=0.1, kl_place=place))


def _group(*responses: Response) -> Group:
    return made_group(responses, tokens=[3, 4])


def test_gae_pays_the_reward_at_the_last_trained_token_and_kl_where_it_arises() -> None:
    """gamma 1, lambda 0.5, values 0.5 0.25 0.75, reward 1, KL 0.1 * (1, 2, -1):
    delta = (-0.1 + 0.25 - 0.5, -0.2 + 0.75 - 0.25, 1.1 - 0.75) = (-0.35, 0.3, 0.35)."""
    config = _config(
        advantage="gae", gae_lambda=0.5, kl_coef=0.1, kl_place="token_reward", kl_estimator="k1", gae_normalize=False
    )
    response = _response(values=[0.5, 0.25, 0.75])
    a = [-0.35 + 0.5 * (0.3 + 0.5 * 0.35), 0.3 + 0.5 * 0.35, 0.35]
    np.testing.assert_allclose(token_advantages(response, 99.0, config), a, atol=1e-7)
    np.testing.assert_allclose(
        value_targets(response, np.array([0.5, 0.25, 0.75], np.float32), config),
        np.add(a, [0.5, 0.25, 0.75]),
        atol=1e-7,
    )
    (sequence,) = make_sequences([_group(response)], config)
    batch = make_microbatch([sequence], [1.0], torch.device("cpu"))
    np.testing.assert_allclose(batch.advantages.numpy(), a, atol=1e-6)
    assert sequence.has_signal


def test_gae_without_values_is_refused() -> None:
    with pytest.raises(ValueError, match="wire a critic executor"):
        make_sequences([_group(_response())], _config(advantage="gae"))


def test_gae_advantages_are_standardised_over_the_tokens_of_the_step() -> None:
    config = _config(advantage="gae", gae_lambda=1.0)
    responses = [_response(reward, values=[0.0, 0.0, 0.0]) for reward in (1.0, 0.0)]
    first, second = make_sequences([_group(*responses)], config)  # advantages 1 1 1 and 0 0 0
    deviation = math.sqrt(6 * 0.25 / 5)
    np.testing.assert_allclose(first.token_advantages, [0.5 / deviation] * 3, rtol=1e-6)
    np.testing.assert_allclose(second.token_advantages, [-0.5 / deviation] * 3, rtol=1e-6)
    assert first.advantage == pytest.approx(0.5 / deviation)


def test_standardising_adds_up_over_ranks() -> None:
    """This rank holds 1 and 3, another 5 and 7: mean 4, deviation sqrt(20 / 3)."""
    others = iter([np.array([2.0, 12.0]), np.array([10.0])])
    (got,) = standardize([np.array([1.0, 3.0])], lambda mine: mine + next(others))
    np.testing.assert_allclose(got, np.array([-3.0, -1.0]) / math.sqrt(20 / 3), rtol=1e-7)
    (lone,) = standardize([np.array([2.0])], lambda mine: mine)
    assert lone.tolist() == [0.0]


def _episode(values: list[float]) -> Response:
    """Two turns of two trained tokens with one token of the environment between them, worth 0.25 and 1; the judge of the whole
    adds 0.5."""
    mask = [True, True, False, True, True]
    return dataclasses.replace(
        make_response(0, 0, [5, 6, 7, 8, 9], Score(value=1.75), mask=mask),
        turns=(
            Turn(start=0, end=2, finish_reason="stop", reply="", reward=0.25),
            Turn(start=3, end=5, finish_reason="stop", reply="", reward=1.0),
        ),
        values=np.array([values[0], values[1], math.nan, values[2], values[3]], np.float32),
    )


def test_turn_gae_pays_each_turn_its_reward_and_the_last_one_what_the_whole_earned_besides() -> None:
    config = _config(advantage="turn_gae", gae_gamma=0.5, gae_lambda=0.5)
    second = 1.5 - 0.25
    first = 0.25 + 0.5 * 0.25 - 0.5 + 0.25 * second
    found = token_advantages(_episode([0.5, 9.0, 0.25, 9.0]), 0.0, config)
    assert found is not None and found.tolist() == [first, first, second, second]
    targets = value_targets(_episode([0.0] * 4), np.array([0.5, 9.0, 0.25, 9.0]), config)
    assert targets.tolist() == [first + 0.5, first + 0.5, 1.5, 1.5]


def test_a_response_without_turns_is_one_turn() -> None:
    found = token_advantages(_response(1.0, values=[0.5, 0.25, 0.125]), 0.0, _config(advantage="turn_gae"))
    assert found is not None and found.tolist() == [0.5] * 3
