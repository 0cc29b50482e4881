"""What a pass chose of the experts, against the library's own record of its routers."""

import pytest
import torch
from tiny_models import BY_LOGITS, FAMILIES, SPARSE, tiny_config, tiny_model

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
        {"experts/load_max": 2.0, "experts/load_mean": (2.0 + 4 / 3) / 2, "experts/unused": 1 / 8}
    )


def test_a_choice_of_no_expert_is_counted_apart() -> None:
    counts = routing_of([[0, 4], [1, 7]]).counts(4)
    assert counts.tolist() == [[1, 1, 0, 0, 2]]


def test_without_tokens_nothing_is_said() -> None:
    assert expert_metrics(torch.zeros(2, 5)) == {}


@pytest.mark.parametrize("family", BY_LOGITS)
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


def test_deepseek_chooses_among_the_best_groups_by_biased_scores_and_weighs_by_plain_ones() -> None:
    """Six experts in two groups, one group allowed, two experts of it; scaled by 2.5."""
    model = tiny_model("deepseek_v3", "eager")
    layers = watch_experts(model)
    assert len(layers) == 2  # of three layers the first is dense
    for layer in model.model.layers[1:]:
        layer.mlp.gate.e_score_correction_bias.copy_(torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.9]))
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    for layer in model.model.layers[1:]:
        layer.mlp.gate.register_forward_hook(lambda module, args, out: seen.append((args[0], out[1])))
    routing = Routing(2)
    with torch.no_grad(), watching(routing):
        model(TOKENS, use_cache=False)
    for (hidden, weights), chosen, layer in zip(seen, routing.chosen, model.model.layers[1:], strict=True):
        assert chosen is not None
        scores = torch.sigmoid(hidden.reshape(-1, 32) @ layer.mlp.gate.weight.T)
        for token, own in enumerate(scores.tolist()):
            biased = [*own[:5], own[5] + 0.9]
            groups = [biased[:3], biased[3:]]
            best = max((0, 1), key=lambda g: sum(sorted(groups[g])[1:]))
            expected = sorted(range(3 * best, 3 * best + 3), key=lambda e: -biased[e])[:2]
            assert set(chosen[token].tolist()) == set(expected)
            total = sum(own[e] for e in expected)
            assert weights[token].tolist() == pytest.approx(
                [2.5 * own[e] / total for e in chosen[token].tolist()], rel=1e-4
            )


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
