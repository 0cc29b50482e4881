"""Corrections for old samples, each worked by hand in float64: weights of whole responses, masks, the unbiased KL,
effective sample size, advantages of several rewards."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from made_responses import made_response
from torch import Tensor

from llamarl.algorithms.advantages import compute_advantages, max_rl, shaped_reward, shaping
from llamarl.algorithms.base import TokenBatch
from llamarl.algorithms.diagnostics import effective_share, weight_sums
from llamarl.algorithms.kl import k3, unbiased
from llamarl.algorithms.registry import LOSSES
from llamarl.settings.algorithms import AlgorithmConfig
from llamarl.trainer.credit import response_reward, reward_parts
from llamarl.trainer.objective import ratio_keep_mask, top_entropy_mask
from llamarl.types import Failure, Score


def _batch(
    pi: list[float], mu: list[float], advantages: list[float], ids: list[int], entropy: list[float] | None = None
) -> TokenBatch:
    """Of probabilities."""
    return TokenBatch(
        policy_logprobs=torch.tensor(pi, dtype=torch.float64).log().requires_grad_(),
        behavior_logprobs=torch.tensor(mu, dtype=torch.float64).log(),
        advantages=torch.tensor(advantages, dtype=torch.float64),
        sequence_ids=torch.tensor(ids),
        num_sequences=max(ids) + 1,
        entropy=None if entropy is None else torch.tensor(entropy, dtype=torch.float64),
    )


def _gradient(batch: TokenBatch, **config: Any) -> tuple[list[float], list[bool]]:
    out = LOSSES[config["name"]](batch, AlgorithmConfig(**config))
    return torch.autograd.grad(out.losses.sum(), batch.policy_logprobs)[0].tolist(), out.clipped.tolist()


def test_a_response_has_one_weight_the_product_of_its_ratios_cut_at_rho() -> None:
    # ratios 2, 0.75 | 4, 2: products 1.5 and 8, the latter cut at 3
    batch = _batch([0.4, 0.3, 0.8, 0.2], [0.2, 0.4, 0.2, 0.1], [1.0, 1.0, -2.0, -2.0], [0, 0, 1, 1])
    gradient, clipped = _gradient(batch, name="sequence_is", rho=3.0)
    assert gradient == pytest.approx([-1.5, -1.5, 6.0, 6.0], rel=1e-12)
    assert clipped == [False, False, True, True]
    assert _gradient(batch, name="sequence_is", rho="none")[0] == pytest.approx([-1.5, -1.5, 16.0, 16.0], rel=1e-12)


def test_dppo_leaves_out_what_moved_on_by_probability_not_by_ratio() -> None:
    # moved by 0.3, 0.009 (ratio 10), 0.3, -0.3, -0.3; bounds 0.2
    pi, mu = [0.8, 0.01, 0.8, 0.2, 0.2], [0.5, 0.001, 0.5, 0.5, 0.5]
    batch = _batch(pi, mu, [1.0, 1.0, -1.0, -1.0, 1.0], [0, 0, 1, 1, 2])
    gradient, clipped = _gradient(batch, name="dppo", rho=4.0)
    # up with A > 0: out; a rare token: trains, its weight cut; up with A < 0: trains; down with A < 0: out; down with A > 0
    assert gradient == pytest.approx([0.0, -4.0, 1.6, 0.0, -0.4], rel=1e-12)
    assert clipped == [True, False, False, True, False]


def test_off_policy_mask_drops_responses_that_fell_and_are_blamed() -> None:
    # geometric means: 0.25, 0.25, 4, 0.7
    pi, mu = [0.1, 0.1, 0.1, 0.1, 0.8, 0.35], [0.4, 0.4, 0.4, 0.4, 0.2, 0.5]
    batch = _batch(pi, mu, [-1.0, -1.0, 1.0, 1.0, -1.0, -1.0], [0, 0, 1, 1, 2, 3])
    kept = ratio_keep_mask(batch, AlgorithmConfig(ratio_mask="off_policy", ratio_mask_low=0.5))
    assert kept.tolist() == [False, False, True, True, True, True]
    assert ratio_keep_mask(batch, AlgorithmConfig(ratio_mask="sequence", ratio_mask_low=0.5, ratio_mask_high=2.0)).tolist() \
        == [False, False, False, False, False, True]  # fmt: skip


def _distributions(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs of the policy, of what sampled and of a reference over three tokens."""
    return logits.log_softmax(0), *(
        torch.tensor(p, dtype=torch.float64).log() for p in ([0.6, 0.3, 0.1], [0.2, 0.2, 0.6])
    )


def test_the_unbiased_kl_has_the_value_and_the_gradient_of_the_kl_by_samples_of_another_policy() -> None:
    logits = torch.tensor([0.3, -0.4, 0.9], dtype=torch.float64, requires_grad=True)
    pi, mu, reference = _distributions(logits)
    exact = (pi.exp() * (pi - reference)).sum()
    (wanted,) = torch.autograd.grad(exact, logits, retain_graph=True)
    terms = unbiased(reference - pi, (pi - mu).exp())
    expected = (mu.exp() * terms).sum()  # over what mu samples
    assert expected.item() == pytest.approx(exact.item(), rel=1e-12)
    torch.testing.assert_close(torch.autograd.grad(expected, logits, retain_graph=True)[0], wanted)
    plain = (mu.exp() * k3(reference - pi)).sum()
    assert (torch.autograd.grad(plain, logits)[0] - wanted).abs().max() > 0.05


def test_the_unbiased_kl_is_refused_in_the_reward() -> None:
    with pytest.raises(ValueError, match="kl_place is 'reward'"):
        AlgorithmConfig(kl_coef=0.1, kl_estimator="unbiased", kl_place="reward")


def test_the_least_sure_tokens_of_each_response_train() -> None:
    entropy = [0.1, 0.9, 0.5, 0.5, 0.2, 0.7, 0.3]
    batch = _batch([0.5] * 7, [0.5] * 7, [1.0] * 7, [0, 0, 0, 0, 0, 1, 1], entropy)
    assert top_entropy_mask(batch, 0.4).tolist() == [False, True, True, False, False, True, False]
    assert top_entropy_mask(batch, 0.2).tolist() == [False, True, False, False, False, True, False]
    assert top_entropy_mask(batch, 1.0).all()


def test_effective_samples_are_all_where_weights_agree_and_one_where_one_carries_all() -> None:
    # weights 1.5, 1.5 and 6
    batch = _batch([0.4, 0.3, 0.3, 0.6], [0.2, 0.4, 0.2, 0.1], [1.0] * 4, [0, 0, 1, 2])
    count, total, squares = weight_sums(batch).tolist()
    assert (count, total, squares) == pytest.approx((3, 9.0, 40.5), rel=1e-12)
    assert effective_share(count, total, squares) == pytest.approx(81 / (3 * 40.5))
    assert effective_share(4, 8.0, 16.0) == 1.0
    assert effective_share(4, 1000.0, 1e6) == 0.25
    assert effective_share(0, 0.0, 0.0) == 0.0


def test_max_rl_divides_by_the_rate_of_success() -> None:
    assert max_rl(np.array([1.0, 0.0, 0.0, 0.0])).tolist() == [3.0, -1.0, -1.0, -1.0]
    assert max_rl(np.array([1.0, 1.0, 1.0, 0.0])).tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 3, -1.0])
    assert max_rl(np.array([0.0, 0.0, np.nan])).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("size", [2, 3, 8])
def test_max_rl_is_on_average_the_gradient_of_pass_at_k_by_k_up_to_one_less_than_the_group(size: int) -> None:
    """Right with probability p = 0.3 = sigmoid(theta): by theta log p has the gradient 1 - p, log (1 - p) has - p, and pass@k
    has k (1 - p)^(k - 1) p (1 - p)."""
    p, found = 0.3, 0.0
    for right in range(size + 1):
        rewards = np.array([1.0] * right + [0.0] * (size - right))
        chance = math.comb(size, right) * p**right * (1 - p) ** (size - right)
        found += chance * float((max_rl(rewards) * np.where(rewards == 1, 1 - p, -p)).mean())
    assert found == pytest.approx(sum((1 - p) ** (k - 1) * p * (1 - p) for k in range(1, size)), rel=1e-12)


def test_gdpo_normalises_each_reward_apart_so_that_a_small_one_counts_as_much() -> None:
    """Answer right 1, 0, 0, 1 and format, worth a tenth, 0.1, 0.1, 0, 0: added up, format would hardly count."""
    parts = [(1.0, 0.1), (0.0, 0.1), (0.0, 0.0), (1.0, 0.0)]
    responses = [
        made_response(i, outcome=Score(value=a + f, parts={"answer": a, "format": f})) for i, (a, f) in enumerate(parts)
    ]
    table = reward_parts(responses)
    assert table.tolist() == [list(row) for row in parts]
    rewards = np.array([a + f for a, f in parts])
    (found,) = compute_advantages([rewards], AlgorithmConfig(advantage="gdpo"), parts=[table])
    # apart: +-0.5 / std(1/sqrt(3)) each; sums 2c, 0, -2c, 0 with c = 0.866; over their deviation, sqrt(8 c^2 / 3)
    assert found.tolist() == pytest.approx([math.sqrt(1.5), 0.0, -math.sqrt(1.5), 0.0], abs=1e-4)


def test_gdpo_of_one_reward_is_the_group_mean_over_the_deviation_of_the_step_and_a_failure_counts_nowhere() -> None:
    responses = [
        made_response(0, outcome=Score(value=1.0)),
        made_response(1, outcome=Score(value=0.0)),
        made_response(2, outcome=Failure(kind="exception", detail="x")),
    ]
    table = reward_parts(responses)
    assert np.isnan(table[2, 0]) and table[:2, 0].tolist() == [1.0, 0.0]
    (found,) = compute_advantages([np.array([1.0, 0.0, np.nan])], AlgorithmConfig(advantage="gdpo"), parts=[table])
    assert found.tolist() == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5), 0.0], abs=1e-4)


def test_short_right_answers_and_long_tries_are_worth_most() -> None:
    config = AlgorithmConfig(cosine_length=100)
    rewards = [[value + shaping(value, [0] * n, config) for n in (0, 50, 100, 300)] for value in (1.0, 0.0)]
    assert rewards[0] == pytest.approx([1.0, 0.75, 0.5, 0.5]) and rewards[1] == pytest.approx([-1.0, -0.75, -0.5, -0.5])
    third = 1.0 + shaping(1.0, [0] * 33, AlgorithmConfig(cosine_length=99))  # cos(pi / 3) is a half
    assert third == pytest.approx(0.875)


def test_runs_that_were_there_before_are_charged() -> None:
    config = AlgorithmConfig(repetition_penalty=2.0, repetition_ngram=2)
    # pairs 12, 21, 12, 21, 13: three distinct of five
    assert shaping(1.0, [1, 2, 1, 2, 1, 3], config) == pytest.approx(-0.8)
    assert shaping(0.0, np.array([1, 2, 3, 4], np.int32), config) == shaping(0.0, [7], config) == 0.0
    assert shaping(0.0, [5] * 11, config) == pytest.approx(-1.8)


def test_what_an_environment_repeats_is_not_charged_to_the_policy() -> None:
    """It says 7 8 9 after each of three turns; of what the policy wrote, 1 2, 3 4 and 1 2, one pair of three was there before."""
    config = AlgorithmConfig(repetition_penalty=0.6, repetition_ngram=2)
    tokens, says = [1, 2, 7, 8, 9, 3, 4, 7, 8, 9, 1, 2], [1, 1, 0, 0, 0, 1, 1, 0, 0, 0, 1, 1]
    response = made_response(
        tokens=tokens, mask=np.array(says, bool), versions=np.array(says) - 1, outcome=Score(value=1.0)
    )
    assert shaped_reward(response, config) == response_reward(response, config) == pytest.approx(1.0 - 0.6 / 3)
    by_length = AlgorithmConfig(overlong_buffer=4, overlong_limit=14)  # which counts all of it: 12 of 10 .. 14
    assert shaped_reward(response, by_length) == 0.5
