"""What stages noted of their own layers, put side by side."""

from __future__ import annotations

import numpy as np
import pytest

from llamarl.engine.expert_record import ExpertRecord, Experts, layers_joined, of_all_stages
from llamarl.engine.ranks import EngineRanks


def rows(*layers: int, tokens: int = 2) -> Experts:
    """Of each layer l the experts 10 l and 10 l + 1, for every token."""
    return np.array([[[10 * layer, 10 * layer + 1] for layer in layers]] * tokens, np.uint8)


def test_layers_of_all_stages_lie_in_the_order_of_the_model() -> None:
    whole = layers_joined([rows(0, 1), rows(2), rows(3, 4)])
    assert whole is not None and whole.dtype == np.uint8
    np.testing.assert_array_equal(whole, rows(0, 1, 2, 3, 4))


def test_a_stage_without_experts_adds_no_layer() -> None:
    whole = layers_joined([rows(0), np.zeros((2, 0, 0), np.uint8), rows(2)])
    np.testing.assert_array_equal(whole, rows(0, 2))


def test_what_no_stage_noted_stays_unknown() -> None:
    assert layers_joined([None, None]) is None
    assert layers_joined([np.zeros((2, 0, 0), np.uint8)] * 2) is None


def test_stages_that_noted_other_tokens_are_refused() -> None:
    with pytest.raises(AssertionError, match=r"stages noted \[2, 3\] tokens"):
        layers_joined([rows(0), rows(1, tokens=3)])
    with pytest.raises(AssertionError, match="noted nothing where others did"):
        layers_joined([rows(0), None])


def test_a_single_rank_gives_what_it_noted() -> None:
    own = [rows(0, 1), None]
    assert all(a is b for a, b in zip(of_all_stages(own, EngineRanks()), own, strict=True))


def test_a_stage_without_experts_carries_its_record_through_a_checkpoint() -> None:
    empty = np.zeros((3, 0, 0), np.uint8)
    record = ExpertRecord.from_plain(ExpertRecord(prompt=empty, parts=[empty[:2]]).to_plain())
    found = record.rows(4)
    assert record.num_tokens == 2 and found is not None and found.shape == (4, 0, 0)
