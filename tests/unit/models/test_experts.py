"""What a pass chose of the experts, against the library's own record of its routers."""

from __future__ import annotations

import pytest
import torch
from tiny_models import FAMILIES, SPARSE, tiny_config, tiny_model

from llamarl.models.experts import Routing, expert_layers, expert_metrics, num_experts, watch_experts, watching

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
        {"experts/load_max": 2.0, "experts/load_mean": (2.0 + 4 / 3) / 2, "experts/unused": 1 / 8, "experts/dropped": 0}
    )


def test_a_choice_of_no_expert_counts_as_dropped() -> None:
    counts = routing_of([[0, 4], [1, 7]]).counts(4)
    assert counts.tolist() == [[1, 1, 0, 0, 2]]
    assert expert_metrics(counts)["experts/dropped"] == 2


def test_without_tokens_nothing_is_said() -> None:
    assert expert_metrics(torch.zeros(2, 5)) == {}


@pytest.mark.parametrize("family", SPARSE)
def test_what_is_noted_are_the_largest_logits_of_the_routers(family: str) -> None:
    model = tiny_model(family, "eager")
    layers = watch_experts(model)
    routing = Routing(len(layers))
    with torch.no_grad(), watching(routing):
        logits = model(TOKENS, output_router_logits=True, use_cache=False).router_logits
    k = model.config.num_experts_per_tok
    assert len(logits) == len(layers) == (2 if family == "qwen3_moe" else 3)  # one layer of Qwen's is dense
    for of_layer, chosen in zip(logits, routing.chosen, strict=True):
        assert torch.equal(chosen, of_layer.float().topk(k, dim=-1).indices)
        assert of_layer.shape[1] == num_experts(layers[0])


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
