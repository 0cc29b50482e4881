"""The critic's loss by hand."""

from __future__ import annotations

import torch

from llamarl.trainer.critic import value_loss


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
