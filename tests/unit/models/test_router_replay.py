"""Routers that choose what they are told, against the formula of each family and against themselves."""

import pytest
import torch
from tiny_models import BY_LOGITS, SPARSE, tiny_config, tiny_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from llamarl.errors import ModelError
from llamarl.models.experts import Routing, num_experts, watch_experts, watching
from llamarl.models.router_replay import let_replay, routers

TOKENS = torch.tensor([[5, 17, 33, 8, 91, 60, 4, 12]])


def passed(family: str, recorded: Tensor | None) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Hidden states, gradients of the routers, and what was chosen, [N, layers, k]."""
    model = tiny_model(family, "eager")
    routing = Routing(len(watch_experts(model)))
    let_replay(model)
    routing.recorded = recorded
    with watching(routing):
        hidden = model.base_model(TOKENS, use_cache=False).last_hidden_state[0]
    (hidden * torch.linspace(-1, 1, hidden.numel()).view_as(hidden)).sum().backward()
    gradients = {f"{i}": router.weight.grad for i, router in enumerate(routers(model))}
    return hidden.detach(), gradients, torch.stack([c for c in routing.chosen if c is not None], dim=1)


@pytest.mark.parametrize("family", SPARSE)
def test_what_a_router_would_choose_itself_changes_no_bit(family: str) -> None:
    hidden, gradients, chosen = passed(family, None)
    again, same, _ = passed(family, chosen.to(torch.int16))
    assert torch.equal(again, hidden)
    assert all(torch.equal(same[name], gradient) for name, gradient in gradients.items())


@pytest.mark.parametrize("family", SPARSE)
def test_other_experts_are_computed_and_their_weights_train_the_router(family: str) -> None:
    hidden, _, chosen = passed(family, None)
    count = num_experts(watch_experts(tiny_model(family, "eager"))[0])
    other = (chosen + 1) % count
    moved, gradients, made = passed(family, other.to(torch.int16))
    assert torch.equal(made, other)
    assert float((moved - hidden).abs().max()) > 1e-3
    assert all(float(gradient.abs().max()) > 1e-6 for gradient in gradients.values())


@pytest.mark.parametrize("family", BY_LOGITS)
def test_the_weights_of_recorded_experts_are_the_family_s_own(family: str) -> None:
    model = tiny_model(family, "eager")
    watch_experts(model)
    let_replay(model)
    router = routers(model)[0]
    hidden = torch.randn(5, model.config.hidden_size, generator=torch.Generator().manual_seed(3))
    recorded = torch.tensor([[3, 0], [1, 2], [0, 1], [2, 3], [3, 1]])
    routing = Routing(3)
    routing.recorded = recorded[:, None]
    with torch.no_grad(), watching(routing):
        weights = router(hidden)[1]
    of_all = torch.softmax(hidden @ router.weight.detach().T, dim=-1).gather(1, recorded)
    normalized = family in ("mixtral", "granitemoe") or model.config.norm_topk_prob
    assert normalized == (family != "olmoe")
    torch.testing.assert_close(weights, of_all / of_all.sum(1, keepdim=True) if normalized else of_all)


def test_deepseek_weighs_recorded_experts_by_their_own_scores_whatever_their_group() -> None:
    model = tiny_model("deepseek_v3", "eager")
    watch_experts(model)
    let_replay(model)
    router = routers(model)[0]
    hidden = torch.randn(3, model.config.hidden_size, generator=torch.Generator().manual_seed(3))
    routing = Routing(2)
    routing.recorded = (recorded := torch.tensor([[3, 0], [1, 5], [0, 1]]))[:, None]
    with torch.no_grad(), watching(routing):
        weights = router(hidden)[1]
    scores = torch.sigmoid(hidden @ router.weight.detach().T).gather(1, recorded)
    torch.testing.assert_close(weights, 2.5 * scores / scores.sum(1, keepdim=True))


def test_rows_of_which_nothing_is_known_are_left_to_the_router() -> None:
    _, _, chosen = passed("mixtral", None)
    recorded = (chosen + 1) % 4
    recorded[3:] = -1
    made = passed("mixtral", recorded.to(torch.int16))[2]
    assert torch.equal(made[:3], recorded[:3])
    assert torch.equal(made[3:, 0], chosen[3:, 0])  # of the first layer, whose input is the same


def test_a_model_without_experts_is_refused() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config("llama"))
    with pytest.raises(ModelError, match="LlamaForCausalLM has no experts"):
        let_replay(model)
