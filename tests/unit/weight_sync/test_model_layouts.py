"""Layouts of whole models with more tensor-parallel ranks than key-value heads and a vocabulary that does not divide: who holds
what, and what is handed over."""

import pytest
from hand_over_plan import holding_stages
from tiny_models import tiny_config, tiny_model

from llamarl.models.stages import cut_into_stage
from llamarl.weight_sync.layout import MeshLayout
from llamarl.weight_sync.model_layouts import ModelParameters, fsdp_tp_placements, model_parameters, tp_placements

HEAD_DIM = 4


def small_llama(heads: int, kv_heads: int, *, vocabulary: int = 61, tied: bool = False) -> ModelParameters:
    return model_parameters(
        {
            "model_type": "llama", "hidden_size": 2 * heads, "intermediate_size": 16 * heads, "num_hidden_layers": 1,
            "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": HEAD_DIM, "vocab_size": vocabulary,
            "tie_word_embeddings": tied,
        },
        dtype="float32",
    )  # fmt: skip


def box_of(layout: MeshLayout, rank: int, name: str) -> tuple[tuple[int, int], ...]:
    (box,) = (piece.box for piece in layout.pieces_of(rank) if piece.parameter.endswith(name))
    return box


def test_neighbouring_ranks_hold_the_same_key_value_head_and_other_query_heads() -> None:
    parameters = small_llama(heads=8, kv_heads=2)
    layout = MeshLayout(parameters, {"dp": 1, "tp": 8}, tp_placements(parameters))
    assert [box_of(layout, rank, "k_proj.weight")[0] for rank in range(8)] == [(0, 4)] * 4 + [(4, 8)] * 4
    assert [box_of(layout, rank, "q_proj.weight")[0] for rank in range(8)] == [(4 * r, 4 * r + 4) for r in range(8)]
    assert [box_of(layout, rank, "lm_head.weight")[0] for rank in (0, 1, 7)] == [(0, 8), (8, 16), (56, 61)]
    sharded = MeshLayout(parameters, {"fsdp": 2, "tp": 4}, fsdp_tp_placements(parameters))
    assert [box_of(sharded, rank, "v_proj.weight")[0] for rank in range(8)] == [
        (0, 2), (0, 2), (4, 6), (4, 6), (2, 4), (2, 4), (6, 8), (6, 8),
    ]  # fmt: skip


def test_tied_and_untied_vocabularies_are_cut() -> None:
    ends = {"model.embed_tokens.weight", "lm_head.weight"}
    assert ends <= small_llama(4, 2).cuts.keys()
    tied = small_llama(4, 2, tied=True)
    assert "model.embed_tokens.weight" in tied.cuts and "lm_head.weight" not in tied
    phi = {"model_type": "phi", "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 61,
           "num_attention_heads": 2, "partial_rotary_factor": 0.5}  # fmt: skip
    assert model_parameters(phi).cuts["lm_head.bias"].dim == 0


# Pipeline stages.


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])  # tied, not tied, tied with norms on both sides
def test_names_of_each_stage_are_those_of_the_model_cut(family: str) -> None:
    parameters = model_parameters({**tiny_config(family).to_dict()})
    for num_stages in (1, 2, 3):
        holding = holding_stages(parameters, num_stages)
        for index in range(num_stages):
            model = tiny_model(family, "llamarl_packed")
            cut_into_stage(model, index, num_stages)
            names = {name for name in parameters if index in holding.get(name, (0,))}
            assert names == {name for name, _ in model.named_parameters()}
