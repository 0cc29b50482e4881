"""What a context-parallel rank computes of a row, by hand, and which architectures may be cut so."""

from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import tiny_model
from torch import Tensor, nn
from training_fixtures import tiny_config

from llamarl.errors import ModelError
from llamarl.model_support import FAMILIES
from llamarl.models.parallel import ParallelLayout
from llamarl.trainer import building
from llamarl.trainer.batch import TrainingSequence, make_microbatch
from llamarl.trainer.context_parallel import CONTEXT_ATTENTION, ContextRanks, RowOverRanks, check_context_parallel


def _rank(rank: int, of: int) -> ContextRanks:
    return ContextRanks(None, rank, of)  # type: ignore[arg-type]


def _sequence(tokens: list[int], positions: list[int], *, prompt: int, group: int = 0) -> TrainingSequence:
    return TrainingSequence(
        tokens=np.array(tokens),
        positions=np.array(positions),
        targets=np.array([100 + p for p in positions]),
        behavior_logprobs=np.zeros(len(positions), np.float32),
        policy_versions=np.zeros(len(positions), np.int64),
        advantage=1.0,
        group=group,
        num_prompt=prompt,
        experts=np.array(tokens, np.uint8)[:, None, None],
    )


def test_each_rank_has_its_tokens_and_the_trained_tokens_that_they_predict() -> None:
    # row: 1 2 | 3 4 5 | 6 6, its prompt shared: tokens 3 and 6 are both predicted at place 1
    sequences = [_sequence([1, 2, 3, 4, 5], [1, 2, 4], prompt=2), _sequence([1, 2, 6, 6], [1, 3], prompt=2)]
    first, second, third = (
        make_microbatch(
            sequences, [0.5, 0.25], torch.device("cpu"), share_prompts=True, replay=True, context=_rank(r, 3)
        )
        for r in range(3)
    )
    # 7 tokens are 3 on each of 3 ranks, the last filled up with 2
    assert [b.input_ids.tolist() for b in (first, second, third)] == [[[1, 2, 3]], [[4, 5, 6]], [[6, 0, 0]]]
    assert [b.position_ids.tolist() for b in (first, second, third)] == [[[0, 1, 2]], [[3, 4, 2]], [[3, 0, 0]]]
    # trained: targets 101, 102, 104 of the first response, predicted at 1, 2, 4; 101, 103 of the second, at 1 and 6
    assert [b.targets.tolist() for b in (first, second, third)] == [[101, 102, 101], [104], [103]]
    assert [b.positions.tolist() for b in (first, second, third)] == [[1, 2, 1], [1], [0]]
    assert first.own is not None and second.own is not None and third.own is not None
    assert [b.own.places.tolist() for b in (first, second, third)] == [[0, 1, 3], [2], [4]]  # type: ignore[union-attr]
    assert [b.own.num_tokens for b in (first, second, third)] == [3, 3, 1]  # type: ignore[union-attr]
    assert third.experts is not None and third.experts[:, 0, 0].tolist() == [6, -1, -1]
    for batch in (first, second, third):  # of the whole row on every rank
        assert batch.num_tokens == 7 and batch.num_trained == 5 and batch.sequence_ids.tolist() == [0, 0, 0, 1, 1]
        assert batch.weights.tolist() == [0.5, 0.5, 0.5, 0.25, 0.25]


def test_a_row_shorter_than_its_ranks_leaves_some_with_padding_alone() -> None:
    empty = make_microbatch([], [], torch.device("cpu"), context=_rank(3, 4))
    assert empty.input_ids.shape == (1, 1) and empty.num_tokens == 0 and empty.own is not None
    assert empty.own.num_tokens == 0 and isinstance(empty.packed, RowOverRanks) and empty.packed.num_tokens == 1


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_no_family_looks_at_several_tokens_outside_of_attention(family: str) -> None:
    check_context_parallel(tiny_model(family, CONTEXT_ATTENTION), 2)


def test_a_model_that_does_is_refused() -> None:
    model = tiny_model("llama", CONTEXT_ATTENTION)

    class WithTheTokenBefore(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            return hidden + 0.1 * hidden.roll(1, dims=1)

    model.model.layers[1].mlp = WithTheTokenBefore()
    with pytest.raises(
        ModelError, match="trainer.cp = 2: LlamaForCausalLM looks at several tokens outside of attention"
    ):
        check_context_parallel(model, 2)


@pytest.mark.parametrize(
    ("traits", "reason"),
    [
        (
            {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 48},
            "the 3 do not divide by 2; sizes that fit: 1, 3",
        ),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "rotary embedding follows the longest position",
        ),
    ],
)
def test_models_whose_rows_cannot_be_cut_are_refused_with_what_to_write(traits: dict[str, Any], reason: str) -> None:
    config = tiny_config("llama", **traits)
    with pytest.raises(ModelError, match=f"trainer.cp = 2: .*{reason}"):
        building._check_cuts(config, CONTEXT_ATTENTION, ParallelLayout(fsdp=1, tp=1, mesh=None, cp=2))
