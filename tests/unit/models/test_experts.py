"""What a pass chose of the experts, against the library's own record of its routers."""

import pytest
import torch
from tiny_models import FAMILIES, SPARSE, tiny_config, tiny_model

from llamarl.models.experts import Routing, expert_layers, expert_metrics, watch_experts

TOKENS = torch.tensor([[5, 17, 33, 8, 91, 60, 4, 12]])


def routing_of(*chosen: list[list[int]]) -> Routing:
    routing = Routing(len(chosen))
    routing.chosen = [torch.tensor(layer) for layer in chosen]
    return routing


def test_metrics_of_two_layers_worked_by_hand() -> None:
    # four experts; layer 0: loads 3/6, 2/6, 1/6, 0; layer 1: 2/6, 2/6, 1/6, 1/6
    routing = routing_of([[0, 1], [0, 1], [0, 2]], [[0, 1], [2, 3], [1, 0]])
    counts = routing.counts(4)
    assert counts.tolist() == [[3, 2, 1, 0, 0], [2, 2, 1, 1, 0]]
    assert expert_metrics(counts) == pytest.approx(
        {"experts/load_max": 2.0, "experts/load_mean": (2.0 + 4 / 3) / 2, "experts/unused": 1 / 8}
    )


def test_a_choice_of_no_expert_is_counted_apart() -> None:
    counts = routing_of([[0, 4], [1, 7]]).counts(4)
    assert counts.tolist() == [[1, 1, 0, 0, 2]]


def test_without_tokens_nothing_is_said() -> None:
    assert expert_metrics(torch.zeros(2, 5)) == {}


def test_outside_of_watching_nothing_is_noted() -> None:
    model = tiny_model("mixtral", "eager")
    routing = Routing(len(watch_experts(model)))
    with torch.no_grad():
        model(TOKENS, use_cache=False)
    assert routing.chosen == [None] * 3


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(SPARSE)))
def test_a_dense_model_has_no_sparse_layers(family: str) -> None:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        assert expert_layers(AutoModelForCausalLM.from_config(tiny_config(family))) == []
