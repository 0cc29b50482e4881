"""Every registered loss: its gradient is that of the written objective in float64, and hand-worked cases."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from llamarl.algorithms.base import TokenBatch
from llamarl.algorithms.diagnostics import token_statistics
from llamarl.algorithms.kl import k1, k2, k3
from llamarl.algorithms.registry import LOSSES
from llamarl.settings.algorithms import AlgorithmConfig
from llamarl.trainer.critic import value_loss
from llamarl.trainer.objective import ratio_keep_mask

LENGTHS = [3, 1, 6, 4, 2, 1, 8, 1, 2, 3]
CONFIG = {"rho": 2.0, "clip_low": 0.3, "clip_high": 0.5}


def _random_batch() -> TokenBatch:
    generator = torch.Generator().manual_seed(5)
    T = sum(LENGTHS)

    def draw() -> Tensor:
        return torch.randn(T, generator=generator, dtype=torch.float64)

    behavior = draw() - 2
    ids = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    policy = (behavior + 0.7 * draw() + 0.7 * draw()[ids]).requires_grad_()  # responses drift as a whole, too
    return TokenBatch(
        policy_logprobs=policy,
        behavior_logprobs=behavior,
        advantages=draw()[ids],  # one a response
        sequence_ids=ids,
        num_sequences=len(LENGTHS),
        proximal_logprobs=behavior + 0.7 * draw(),
    )


def _clip(u: Tensor, a: float) -> Tensor:
    return torch.minimum(u * a, torch.clamp(u, 0.7, 1.5) * a)


def _moved_on(pi: float, mu: float, a: float) -> float:
    """0 where the probability has moved beyond 0.05 down or 0.1 up, and the advantage pushes further."""
    moved = math.exp(pi) - math.exp(mu)
    return 0.0 if (a > 0 and moved > 0.1) or (a < 0 and moved < -0.05) else 1.0


def _written(name: str, pi: Tensor, mu: Tensor, prox: Tensor, a: float) -> Tensor:
    """The objective of one response, to be maximised, summed over its trained tokens; token by token."""
    total = torch.zeros((), dtype=torch.float64)
    if name == "gspo":
        u = torch.exp(sum((pi[t] - mu[t] for t in range(len(pi))), torch.zeros(())) / len(pi))
        return len(pi) * _clip(u, a)
    product = math.exp(sum(pi[t].item() - mu[t].item() for t in range(len(pi))))
    for t in range(len(pi)):
        ratio = math.exp(pi[t].item() - mu[t].item())
        weight = math.exp(prox[t].item() - mu[t].item())
        total = (
            total
            + {
                "aipo": lambda t=t, r=ratio: min(r, 2.0) * a * pi[t],
                "reinforce": lambda t=t: a * pi[t],
                "ppo": lambda t=t: _clip(torch.exp(pi[t] - mu[t]), a),
                "decoupled_ppo": lambda t=t, w=weight: w * _clip(torch.exp(pi[t] - prox[t]), a),
                "truncated_is": lambda t=t, w=weight: min(w, 2.0) * _clip(torch.exp(pi[t] - prox[t]), a),
                "cispo": lambda t=t, r=ratio: min(max(r, 0.7), 1.5) * a * pi[t],
                "sequence_is": lambda t=t: min(product, 2.0) * a * pi[t],
                "dppo": lambda t=t, r=ratio: _moved_on(pi[t].item(), mu[t].item(), a) * min(r, 2.0) * a * pi[t],
            }[name]()
        )
    return total


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_gradient_is_that_of_the_written_objective(name: str) -> None:
    batch = _random_batch()
    bounds = {"clip_low": 0.05, "clip_high": 0.1} if name == "dppo" else {}  # of probabilities, not of ratios
    out = LOSSES[name](batch, AlgorithmConfig(name=name, **{**CONFIG, **bounds}))  # type: ignore[arg-type]
    assert out.losses.shape == batch.policy_logprobs.shape and out.clipped.dtype == torch.bool
    (got,) = torch.autograd.grad(out.losses.sum(), batch.policy_logprobs)
    pi = batch.policy_logprobs.detach().clone().requires_grad_()
    objective = torch.zeros((), dtype=torch.float64)
    for s in range(batch.num_sequences):
        rows = [t for t in range(len(pi)) if batch.sequence_ids[t] == s]
        a = batch.advantages[batch.sequence_ids == s][0].item()
        objective = objective + _written(
            name, pi[rows], batch.behavior_logprobs[rows], batch.proximal_logprobs[rows], a
        )
    (expected,) = torch.autograd.grad(-objective, pi)
    torch.testing.assert_close(out.losses.sum(), -objective)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-13)
    if name in ("ppo", "decoupled_ppo"):  # a clipped token is one without a gradient
        assert torch.equal(out.clipped, expected == 0)
    if name != "reinforce":
        assert out.clipped.any() and not out.clipped.all()  # the case covers both sides


def _batch(ratios: list[float], advantages: list[float], ids: list[int] | None = None) -> TokenBatch:
    """Behaviour log-probs of log(0.1), policy log-probs of log(0.1 * ratio)."""
    policy = torch.tensor([math.log(0.1 * r) for r in ratios], dtype=torch.float64, requires_grad=True)
    ids = ids or [0] * len(ratios)
    return TokenBatch(
        policy_logprobs=policy,
        behavior_logprobs=torch.full((len(ratios),), math.log(0.1), dtype=torch.float64),
        advantages=torch.tensor(advantages, dtype=torch.float64),
        sequence_ids=torch.tensor(ids),
        num_sequences=max(ids) + 1,
    )


def _gradient(batch: TokenBatch, **config: Any) -> list[float]:
    out = LOSSES[config["name"]](batch, AlgorithmConfig(**config))
    return torch.autograd.grad(out.losses.sum(), batch.policy_logprobs)[0].tolist()


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_on_policy_each_token_moves_by_its_own_advantage(name: str) -> None:
    batch = _batch([1.0, 1.0, 1.0, 1.0], [1.0, -2.0, 0.0, 3.0], [0, 0, 0, 1])
    assert _gradient(batch, name=name) == pytest.approx([-1.0, 2.0, 0.0, -3.0], abs=1e-12)


def test_gspo_leaves_a_masked_token_where_it_is_and_the_others_keep_the_ratio_of_all() -> None:
    batch = _batch([1.21, 1.0], [1.0, 1.0])  # the response's ratio is 1.1
    losses = LOSSES["gspo"](batch, AlgorithmConfig(name="gspo")).losses
    (gradient,) = torch.autograd.grad(losses[0], batch.policy_logprobs)  # the second is masked
    assert gradient.tolist() == pytest.approx([-1.1, 0.0], abs=1e-12)


def test_with_one_update_a_tick_decoupled_ppo_is_plain_importance_sampling() -> None:
    ratios, advantages = [3.0, 0.5, 1.0], [1.0, -2.0, 1.0]
    assert _gradient(_batch(ratios, advantages), name="decoupled_ppo") == pytest.approx([-3.0, 1.0, -1.0])


@pytest.mark.parametrize("rho", [2.0, 4.0, "none"])
def test_with_one_update_a_tick_truncated_is_has_the_gradient_of_aipo(rho: Any) -> None:
    ratios, advantages = [5.0, 3.0, 0.5], [1.0, -2.0, 1.0]
    aipo = _gradient(_batch(ratios, advantages), name="aipo", rho=rho)
    bound = math.inf if rho == "none" else rho
    assert aipo == pytest.approx([-min(r, bound) * a for r, a in zip(ratios, advantages, strict=True)])
    assert _gradient(_batch(ratios, advantages), name="truncated_is", rho=rho) == pytest.approx(aipo)


def _kept(ratios: list[float], ids: list[int] | None = None, **config: Any) -> list[bool]:
    return ratio_keep_mask(_batch(ratios, [1.0] * len(ratios), ids), AlgorithmConfig(**config)).tolist()


def test_token_mask_drops_single_tokens_on_both_sides() -> None:
    assert _kept([0.4, 0.6, 1.0, 4.9, 5.1], ratio_mask="token") == [False, True, True, True, False]
    assert _kept([1e-9, 6.0], ratio_mask="token", ratio_mask_low=0.0) == [True, False]


def test_sequence_mask_drops_a_response_by_its_geometric_mean() -> None:
    # means 1 and 6: the first keeps even its extreme tokens
    ratios, ids = [8.0, 0.125, 6.0, 6.0], [0, 0, 1, 1]
    assert _kept(ratios, ids, ratio_mask="sequence") == [True, True, False, False]
    assert _kept(ratios, ids) == [True] * 4


@pytest.mark.parametrize("function", [LOSSES[name] for name in sorted(LOSSES)])
def test_no_tokens_give_no_loss(function: Callable[..., Any]) -> None:
    empty = torch.zeros(0, requires_grad=True)
    batch = TokenBatch(
        policy_logprobs=empty,
        behavior_logprobs=torch.zeros(0),
        advantages=torch.zeros(0),
        sequence_ids=torch.zeros(0, dtype=torch.int64),
        num_sequences=0,
    )
    out = function(batch, AlgorithmConfig())
    out.losses.sum().backward()
    assert out.losses.shape == out.clipped.shape == (0,)


@pytest.mark.parametrize("name", sorted(LOSSES))
@pytest.mark.parametrize("advantage", [0.0, 1.0, -1.0])
@pytest.mark.parametrize("rho", ["none", 2.0])
def test_a_ratio_beyond_float32_leaves_loss_and_gradient_finite(name: str, advantage: float, rho: str | float) -> None:
    policy = torch.tensor([-0.1, -0.2], requires_grad=True)
    batch = TokenBatch(
        policy_logprobs=policy,
        behavior_logprobs=torch.tensor([-500.0, -400.0]),
        advantages=torch.full((2,), advantage),
        sequence_ids=torch.tensor([0, 0]),
        num_sequences=1,
        proximal_logprobs=torch.tensor([-250.0, -200.0]),
    )
    found = LOSSES[name](batch, AlgorithmConfig(**({**CONFIG, "rho": rho} | {"name": name})))
    found.losses.sum().backward()
    assert torch.isfinite(found.losses).all() and policy.grad is not None and torch.isfinite(policy.grad).all()


@pytest.mark.parametrize(
    ("name", "advantage", "rho", "clipped"),
    [
        ("aipo", 1.0, "none", [True, False, False]),
        ("aipo", 1.0, 1e12, [True, False, False]),  # a bound beyond the cap bounds nothing
        ("aipo", 1.0, 1e6, [True, True, False]),
        ("truncated_is", 1.0, "none", [True, False, False]),
        ("decoupled_ppo", 1.0, "none", [True, False, False]),
        ("ppo", -1.0, "none", [True, False, False]),  # where A < 0 the clip leaves rising tokens alone
        ("ppo", 0.0, "none", [False, False, False]),  # nothing was cut from a term that is 0
        ("reinforce", 1.0, "none", [False, False, False]),
    ],
)
def test_a_token_cut_at_the_cap_counts_as_clipped(
    name: str, advantage: float, rho: float | str, clipped: list[bool]
) -> None:
    batch = _batch([math.exp(21), math.exp(19), 1.0], [advantage] * 3)
    assert LOSSES[name](batch, AlgorithmConfig(name=name, rho=rho)).clipped.tolist() == clipped  # type: ignore[arg-type]


# The critic's loss.


def test_without_clipping_it_is_half_the_squared_error() -> None:
    v = torch.tensor([1.0, -2.0], requires_grad=True)
    losses, clipped = value_loss(v, torch.tensor([0.0, 1.0]), torch.zeros(2), clip=0.0)
    assert losses.tolist() == [0.5, 4.5] and not clipped.any()
    losses.sum().backward()
    assert v.grad is not None and v.grad.tolist() == [1.0, -3.0]


def test_an_estimate_that_moved_too_far_towards_its_return_gets_no_gradient() -> None:
    """Return 1, first estimate 0, clip 0.25: at 0.75 the clipped error (0.75^2) is the larger; at -0.75, moved away, the
    plain one is (1.75^2 > 1.25^2); at 0.125, inside, both are equal."""
    v = torch.tensor([0.75, -0.75, 0.125], requires_grad=True)
    losses, clipped = value_loss(v, torch.ones(3), torch.zeros(3), clip=0.25)
    assert losses.tolist() == [0.75**2 / 2, 1.75**2 / 2, 0.875**2 / 2]
    assert clipped.tolist() == [True, False, False]
    losses.sum().backward()
    assert v.grad is not None and v.grad.tolist() == [0.0, -1.75, -0.875]


def test_estimates_within_the_clip_do_not_count_as_clipped_though_both_errors_are_rounded() -> None:
    generator = torch.Generator().manual_seed(0)
    earlier, v = (torch.randn(1000, generator=generator) * scale for scale in (0.03, 0.05))
    returns = torch.rand(1000, generator=generator)
    assert float((v - earlier).abs().max()) < 0.5
    assert (
        (earlier + (v - earlier) - returns).square() > (v - returns).square()
    ).any()  # rounding alone makes it larger
    assert not value_loss(v, returns, earlier, clip=0.5)[1].any()


# What is told of each loss.


def test_statistics_by_hand() -> None:
    sums = token_statistics(
        torch.tensor([math.log(0.5), math.log(0.2)]),
        torch.tensor([math.log(0.25), math.log(0.4)]),  # ratios 2 and 0.5
        torch.tensor([1.0, 0.5]),
        torch.tensor([True, False]),
    )
    assert sums["ratio/mean"].item() == pytest.approx(2.5)
    assert sums["ratio/max"].item() == pytest.approx(2.0)
    assert sums["ratio/clipped_fraction"].item() == 1.0
    assert sums["entropy"].item() == 1.5
    # (2 - 1 - log 2) + (0.5 - 1 + log 2)
    assert sums["mismatch/kl"].item() == pytest.approx(0.5, rel=1e-5)


def test_no_tokens_give_zeros() -> None:
    none, mask = torch.zeros(0), torch.zeros(0, dtype=torch.bool)
    assert all(value.item() == 0.0 for value in token_statistics(none, none, none, mask).values())


def test_k1_and_k3_average_to_the_true_kl_and_k3_is_never_negative() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    log_ratio = (q / p).log()  # one "sample" of each outcome, weighted by its probability
    true = (p * (p / q).log()).sum()
    torch.testing.assert_close((p * k1(log_ratio)).sum(), true)
    torch.testing.assert_close((p * k3(log_ratio)).sum(), true)
    assert (k3(log_ratio) >= 0).all()
    torch.testing.assert_close(k2(log_ratio), log_ratio**2 / 2)
