import math

import pytest
import torch

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
    aipo(_batch(policy, behavior, advantages), AlgorithmConfig(rho=2.0)).losses.sum().backward()
    expected = [-min(math.exp(policy[t].item() - behavior[t].item()), 2.0) * advantages[t].item() for t in range(50)]
    torch.testing.assert_close(policy.grad, torch.tensor(expected, dtype=torch.float64))


def test_tokens_above_rho_count_as_clipped_and_none_do_without_it() -> None:
    policy, behavior = torch.tensor([-0.5, -1.0, -1.0]), torch.tensor([-3.5, -1.0, -0.5])
    batch = _batch(policy, behavior, torch.tensor([1.0, -2.0, 3.0]))
    assert aipo(batch, AlgorithmConfig(rho=4.0)).clipped.tolist() == [True, False, False]
    unclipped = aipo(batch, AlgorithmConfig(rho="none"))
    assert unclipped.clipped.tolist() == [False, False, False]
    assert unclipped.losses[0].item() == pytest.approx(0.5 * math.exp(3.0), rel=1e-6)
