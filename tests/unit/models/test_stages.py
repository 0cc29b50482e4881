"""A decoder cut into stages: who holds what, under which names, and that nothing is computed otherwise."""

import pytest
import torch
from tiny_models import tiny_model

from llamarl.errors import ModelError
from llamarl.models import stages
from llamarl.models.attention import PACKED_ATTENTION, PackedSequences, attending
from llamarl.models.sizes import layers_of_stages
from llamarl.models.stages import Stage, check_stages, cut_into_stage


def test_layers_by_hand() -> None:
    assert layers_of_stages(8, 4) == [range(0, 2), range(2, 4), range(4, 6), range(6, 8)]
    assert layers_of_stages(9, 4) == [range(0, 2), range(2, 5), range(5, 7), range(7, 9)]  # one more in the middle
    assert layers_of_stages(11, 4) == [
        range(0, 3),
        range(3, 6),
        range(6, 9),
        range(9, 11),
    ]  # the last has the output layer
    assert layers_of_stages(3, 2) == [range(0, 2), range(2, 3)]


@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("gemma2", True), ("mistral", False)])
def test_each_parameter_has_its_name_and_one_stage_and_a_tied_one_the_first_and_the_last(
    family: str, tied: bool
) -> None:
    whole = list(dict(tiny_model(family, PACKED_ATTENTION).named_parameters()))
    held = []
    for index in range(3):
        model = tiny_model(family, PACKED_ATTENTION)
        cut_into_stage(model, index, 3)
        held.append([name for name, _ in model.named_parameters()])
    assert [name for name in whole if sum(name in names for names in held) != 1] == ["model.embed_tokens.weight"] * tied
    assert set(whole) == {name for names in held for name in names}
    embedding = "model.embed_tokens.weight"
    assert [embedding in names for names in held] == [True, False, tied]
    assert [any(".layers.1." in name for name in names) for names in held] == [False, True, False]
    assert "model.norm.weight" in held[2] and ("lm_head.weight" in held[2]) != tied


def test_hidden_states_and_their_gradients_pass_from_stage_to_stage() -> None:
    whole = tiny_model("granite", PACKED_ATTENTION)  # scales between embedding and layers
    parts = [tiny_model("granite", PACKED_ATTENTION) for _ in range(3)]
    cut = [cut_into_stage(part, index, 3) for index, part in enumerate(parts)]
    packed = PackedSequences.of([0, 4, 9])
    ids = torch.randint(0, 97, (1, 9), generator=torch.Generator().manual_seed(1))
    places = packed.position_ids("cpu")
    received: torch.Tensor | None = None
    with attending(packed):
        expected = Stage(whole).hidden_states(whole, ids, places)
        for part, stage in zip(parts, cut, strict=True):
            received = stage.hidden_states(part, ids, places, received)
    assert received is not None
    assert torch.equal(received, expected)
    expected.square().sum().backward()
    received.square().sum().backward()
    gradients = {name: p.grad for part in parts for name, p in part.named_parameters() if p.grad is not None}
    for name, parameter in whole.named_parameters():
        if name != "lm_head.weight":
            assert parameter.grad is not None
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-5, atol=1e-5, msg=name)


def test_what_cannot_be_cut_is_refused_with_what_to_do() -> None:
    with pytest.raises(ModelError, match="trainer.pp = 4 is more than the 3 layers of this model.*at most 3"):
        cut_into_stage(tiny_model("llama", PACKED_ATTENTION), 0, 4)
    with pytest.raises(
        ModelError, match="trainer.pp = 2: architecture 'gpt2' does not support pipeline stages.*set trainer.pp to 1"
    ):
        cut_into_stage(tiny_model("gpt2", "eager"), 0, 2)


def test_stages_that_compute_otherwise_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", PACKED_ATTENTION)
    check_stages(model, 3)
    monkeypatch.setattr(stages._Entry, "forward", lambda self, hidden_states, *args, **kwargs: 1.01 * self.hidden)
    with pytest.raises(ModelError, match="stages compute other hidden states than the whole"):
        check_stages(model, 3)


def test_a_parameter_that_no_stage_holds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "layers_of_stages", lambda layers, num_stages: [range(0, 1), range(2, 3)])
    with pytest.raises(ModelError, match="no stage holds model.layers.1"):
        check_stages(tiny_model("llama", PACKED_ATTENTION), 2)
