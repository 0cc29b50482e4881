"""Experts over ranks, in one process: what the ranks compute adds up to what one computes."""

from typing import Any

import pytest
import torch
from tiny_models import tiny_config
from torch import Tensor

from llamarl.errors import ModelError
from llamarl.models import expert_parallel
from llamarl.models.expert_parallel import senders
from llamarl.models.sizes import check_tensor_parallel_size, fitting_sizes, whole_experts


def test_sizes_leave_each_rank_as_many_whole_experts() -> None:
    assert whole_experts([1, 2, 4, 8], 6) == [1, 2]
    assert whole_experts([1, 2, 4], 0) == [1, 2, 4]
    config = tiny_config("qwen3_moe")  # six experts, four heads, two key-value heads
    assert 4 in fitting_sizes(4, 4, 48)
    check_tensor_parallel_size(config, 2)
    with pytest.raises(ModelError, match="does not divide"):
        check_tensor_parallel_size(config, 3)


def test_a_token_travels_once_to_each_rank_that_has_one_of_its_experts() -> None:
    index = torch.tensor([[0, 1], [5, 2], [3, 2], [6, 6], [4, 0]])  # of three ranks with two experts each; 6 is nobody
    there = senders(index, own=2, num_ranks=3)
    assert [rank.nonzero()[:, 0].tolist() for rank in there] == [[0, 4], [1, 2], [1, 4]]


def test_the_host_waits_once_a_layer_to_learn_how_many_tokens_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that all do what this one does: everyone sends it what it sends them."""
    reads: list[str] = []
    tolist = Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda self: (reads.append("tolist"), tolist(self))[1])
    monkeypatch.setattr(Tensor, "nonzero", lambda self: pytest.fail("asks the host for its size"))

    def swap(out: Tensor, x: Tensor, received: object = None, sent: object = None, *, group: object) -> None:
        out.copy_(x)

    monkeypatch.setattr(expert_parallel.dist, "all_to_all_single", swap)
    group: Any = None
    compute = expert_parallel.exchange(
        lambda hidden, index, weights: hidden * weights.sum(dim=1, keepdim=True),
        own=2,
        rank=0,
        num_ranks=2,
        group=group,
    )
    hidden, index = torch.eye(3), torch.tensor([[0, 1], [1, 3], [2, 3]])
    out = compute(hidden, index, torch.tensor([[0.25, 0.5], [1.0, 2.0], [4.0, 8.0]]))
    # rank 0 gets tokens 0 and 1, and is also sent what would go to rank 1: tokens 1 and 2, whose choices 2, 3 it leaves out
    assert len(reads) == 1
    assert out.diagonal().tolist() == [0.75, 2.0, 0.0]
