from __future__ import annotations

import math

import pytest
import torch

from llamarl.algorithms.diagnostics import token_statistics
from llamarl.algorithms.kl import k1, k2, k3


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
