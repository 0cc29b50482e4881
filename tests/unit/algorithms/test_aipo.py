import math

import pytest
import torch

from llamarl.algorithms import aipo_loss  # the package offers it
from llamarl.algorithms.aipo import aipo
from llamarl.algorithms.base import TokenBatch
from llamarl.algorithms.config import AlgorithmConfig


def _batch(policy: torch.Tensor, behavior: torch.Tensor, advantages: torch.Tensor) -> TokenBatch:
    return TokenBatch(
        policy_logprobs=policy,
        behavior_logprobs=behavior,
        advantages=advantages,
        sequence_ids=torch.zeros(len(policy), dtype=torch.int64),
        num_sequences=1,
    )


def test_gradient_is_that_of_the_written_objective_in_float64() -> None:
    torch.manual_seed(0)
    policy = torch.randn(50, dtype=torch.float64).sub_(2).requires_grad_()
    behavior, advantages = torch.randn(50, dtype=torch.float64) - 2, torch.randn(50, dtype=torch.float64)
    mask = torch.rand(50) < 0.7
    aipo_loss(policy, behavior, advantages, mask, rho=2.0, num_loss_tokens=int(mask.sum())).backward()
    expected = [
        -min(math.exp(policy[t].item() - behavior[t].item()), 2.0) * advantages[t].item() / int(mask.sum())
        if mask[t]
        else 0.0
        for t in range(50)
    ]
    torch.testing.assert_close(policy.grad, torch.tensor(expected, dtype=torch.float64))


def test_masked_nan_reaches_neither_loss_nor_gradient() -> None:
    policy = torch.tensor([-1.0, -1.0], requires_grad=True)
    behavior = torch.tensor([float("nan"), -1.0])
    loss = aipo_loss(policy, behavior, torch.ones(2), torch.tensor([False, True]), rho=4.0, num_loss_tokens=1)
    loss.backward()
    assert loss.item() == 1.0
    torch.testing.assert_close(policy.grad, torch.tensor([0.0, -1.0]))


def test_registered_aipo_averages_to_aipo_loss_and_reports_what_it_clipped() -> None:
    policy, behavior = torch.tensor([-0.5, -1.0, -1.0]), torch.tensor([-3.5, -1.0, -0.5])
    mask, advantages = torch.tensor([True, True, True]), torch.tensor([1.0, -2.0, 3.0])
    out = aipo(_batch(policy, behavior, advantages), AlgorithmConfig(rho=4.0))
    torch.testing.assert_close(
        out.losses.sum() / 3, aipo_loss(policy, behavior, advantages, mask, rho=4.0, num_loss_tokens=3)
    )
    assert out.clipped.tolist() == [True, False, False]
    unclipped = aipo(_batch(policy, behavior, advantages), AlgorithmConfig(rho="none"))
    assert unclipped.clipped.tolist() == [False, False, False]
    assert unclipped.losses[0].item() == pytest.approx(0.5 * math.exp(3.0), rel=1e-6)


@pytest.mark.parametrize("arguments", [{"rho": 0.0, "num_loss_tokens": 1}, {"rho": 1.0, "num_loss_tokens": 0}])
def test_constants_out_of_range_are_refused(arguments: dict[str, float]) -> None:
    one = torch.ones(1)
    with pytest.raises(ValueError, match="must be"):
        aipo_loss(one, one, one, torch.tensor([True]), **arguments)  # type: ignore[arg-type]


def test_shapes_that_differ_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'behavior': \(2,\)"):
        aipo_loss(torch.ones(1), torch.ones(2), torch.ones(1), torch.tensor([True]), rho=1.0, num_loss_tokens=1)
