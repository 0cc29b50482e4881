import json
from pathlib import Path

import pytest
import torch
from training_fixtures import write_model
from transformers import LlamaConfig

from llamarl.config import validate
from llamarl.controller.preflight import _check_tensor_parallel
from llamarl.errors import ConfigError, ModelError
from llamarl.models.loading import load_model
from llamarl.models.parallel import (
    AXES,
    EXPERT_SHARD,
    EXPERTS,
    SHARD,
    Cut,
    ParallelLayout,
    apply_tensor_parallel,
    holds_first,
    shard_box,
)
from llamarl.models.sizes import (
    check_tensor_parallel_size,
    fitting_sizes,
    part_of_rank,
    why_experts_not_spread,
    why_vocabulary_not_cut,
)
from llamarl.roles import ROLES


def test_sizes_divide_heads_and_intermediate_size_and_go_evenly_with_key_value_heads() -> None:
    assert fitting_sizes(32, 8, 14336) == [1, 2, 4, 8, 16, 32]
    assert fitting_sizes(9, 3, 1536) == [1, 3]  # SmolLM2-135M: 9 does not divide the intermediate size
    assert fitting_sizes(28, 4, 18944) == [1, 2, 4]  # Qwen2.5-7B: 7, 14 and 28 are no sizes of its MLP
    assert fitting_sizes(12, 4, 48) == [1, 2, 4, 12]  # 3 and 6 are neither divisors nor multiples of 4
    assert fitting_sizes(16, 1, 64) == [1, 2, 4, 8, 16]


def test_a_vocabulary_that_leaves_a_rank_without_a_token_is_refused() -> None:
    assert [why_vocabulary_not_cut(size, 4) is None for size in (4, 5, 6, 7, 8, 9, 10)] == [
        True, False, False, True, True, False, True,
    ]  # fmt: skip
    config = LlamaConfig(num_attention_heads=8, num_key_value_heads=8, intermediate_size=16, vocab_size=9)
    check_tensor_parallel_size(config, 2)
    with pytest.raises(ModelError, match="trainer.tp = 4: a vocabulary of 9 leaves some of 4"):
        check_tensor_parallel_size(config, 4)


def test_neighbouring_ranks_hold_the_same_part_where_there_are_fewer_parts() -> None:
    assert [part_of_rank(8, rank, 2) for rank in range(8)] == [(2, 0)] * 4 + [(2, 1)] * 4
    assert (
        [part_of_rank(2, rank, 8) for rank in range(2)]
        == [part_of_rank(2, rank) for rank in range(2)]
        == [(2, 0), (2, 1)]
    )


def test_a_wrong_size_is_refused_with_those_that_fit() -> None:
    config = LlamaConfig(hidden_size=576, num_attention_heads=9, num_key_value_heads=3, intermediate_size=1536)
    check_tensor_parallel_size(config, 3)
    with pytest.raises(ModelError, match=r"trainer.tp = 2 does not divide.* 9 heads.*sizes that fit: 1, 3"):
        check_tensor_parallel_size(config, 2)


def test_heads_that_a_config_json_leaves_out_are_those_of_its_family(tmp_path: Path) -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))  # of the 4B model
    _check_tensor_parallel(ROLES["generator"], validate({"generator": {"tp": 8}}), tmp_path)
    with pytest.raises(ModelError, match=r"generator.tp = 3 does not divide.* 8 heads.*sizes that fit: 1, 2, 4, 8"):
        _check_tensor_parallel(ROLES["generator"], validate({"generator": {"tp": 3}}), tmp_path)


def test_a_model_refuses_a_size_that_does_not_divide_it(tmp_path: Path) -> None:
    model = load_model(write_model(tmp_path / "model"), dtype=torch.float32)
    with pytest.raises(ModelError, match="sizes that fit: 1, 2"):
        apply_tensor_parallel(model, ParallelLayout(fsdp=1, tp=3, mesh=None))


def test_ranks_count_row_by_row_with_the_pipeline_outermost() -> None:
    layout = ParallelLayout(fsdp=3, tp=2, mesh=None, pp=2)
    assert layout.num_ranks == 12
    places = [tuple(layout.index_of(rank, axis) for axis in ("pp", "fsdp", "tp")) for rank in range(12)]
    assert places[:4] == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1)]
    assert places[5:8] == [(0, 2, 1), (1, 0, 0), (1, 0, 1)]
    assert shard_box((6, 4), [Cut("tp", 1), Cut("fsdp", 0)], layout, 7) == (
        (0, 2),
        (2, 4),
    )  # as rank 1: stages cut no box


def test_context_parallel_ranks_stand_between_data_and_tensor_parallel_ones_and_cut_what_fsdp_cuts() -> None:
    layout = ParallelLayout(fsdp=2, tp=2, mesh=None, cp=2)
    assert layout.num_ranks == layout.ranks_of_stage == 8 and layout.size(SHARD) == 4
    places = [tuple(layout.index_of(rank, axis) for axis in AXES) for rank in range(8)]
    assert places[:4] == [(0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 1, 0), (0, 0, 1, 1)] and places[4] == (0, 1, 0, 0)
    assert [layout.index_of(rank, SHARD) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    # 5 rows over four shards are 2 + 2 + 1 + 0, as torch.chunk cuts them; two cuts in turn would be 2 + 1 + 1 + 1
    boxes = [shard_box((5,), [Cut(SHARD, 0)], layout, rank) for rank in range(0, 8, 2)]
    assert boxes == [((0, 2),), ((2, 4),), ((4, 5),), ((5, 5),)]


def test_boxes_by_hand() -> None:
    layout = ParallelLayout(fsdp=2, tp=2, mesh=None)
    # tensor parallelism cuts 10 rows into 5 + 5, FSDP each five into 3 + 2; rank = fsdp_index * 2 + tp_index
    boxes = [shard_box((10, 4), [Cut("tp", 0), Cut("fsdp", 0)], layout, rank) for rank in range(4)]
    assert boxes == [((0, 3), (0, 4)), ((5, 8), (0, 4)), ((3, 5), (0, 4)), ((8, 10), (0, 4))]
    assert shard_box((3, 8), [Cut("tp", 1), Cut("fsdp", 0)], layout, 3) == ((2, 3), (4, 8))
    assert shard_box((1,), [Cut("fsdp", 0)], layout, 2) == ((1, 1),)  # more ranks than rows: nothing
    # two heads of five rows on four ranks: neighbours hold the same one, and FSDP cuts its five rows into 3 + 2
    layout = ParallelLayout(fsdp=2, tp=4, mesh=None)
    boxes = [shard_box((10,), [Cut("tp", 0, 2), Cut("fsdp", 0)], layout, rank) for rank in range(8)]
    assert boxes == [((0, 3),)] * 2 + [((5, 8),)] * 2 + [((3, 5),)] * 2 + [((8, 10),)] * 2


class _At(ParallelLayout):
    @property
    def tp_rank(self) -> int:
        return int(self.mesh)  # type: ignore[call-overload]


def test_each_part_is_counted_once_on_the_first_rank_that_holds_it() -> None:
    ranks = [_At(fsdp=1, tp=4, mesh=rank) for rank in range(4)]  # type: ignore[arg-type]
    assert [holds_first(Cut("tp", 0, 2), rank) for rank in ranks] == [True, False, True, False]
    assert [holds_first(Cut("tp", 0, 1), rank) for rank in ranks] == [True, False, False, False]
    assert all(holds_first(Cut("tp", 0), rank) for rank in ranks)


def test_experts_lie_over_tensor_parallel_ranks_then_over_neighbours_that_share_data_and_the_rest_by_rows() -> None:
    layout = ParallelLayout(fsdp=4, tp=2, mesh=None, ep=2)
    assert (layout.size(EXPERTS), layout.size(EXPERT_SHARD), layout.num_ranks) == (4, 2, 8)
    cuts = [Cut(EXPERTS, 0), Cut(EXPERT_SHARD, 0)]
    first = [shard_box((8, 5), cuts, layout, rank)[0] for rank in range(8)]  # rank = fsdp_index * 2 + tp_index
    assert first == [(0, 1), (4, 5), (2, 3), (6, 7), (1, 2), (5, 6), (3, 4), (7, 8)]
    context = ParallelLayout(fsdp=1, cp=2, tp=1, mesh=None, ep=2)
    assert [shard_box((4,), [Cut(EXPERTS, 0)], context, rank) for rank in range(2)] == [((0, 2),), ((2, 4),)]


def test_ranks_that_experts_do_not_divide_over_are_refused() -> None:
    assert why_experts_not_spread(128, tp=2, ep=8) is None
    assert why_experts_not_spread(6, tp=2, ep=2) == "it does not divide 6 experts over tp 2; sizes that fit: 1, 3"
    assert "no experts" in str(why_experts_not_spread(0, tp=1, ep=2))
    with pytest.raises(ConfigError, match="trainer.ep is 2, which does not divide the 3 ranks of fsdp 3 and cp 1"):
        validate({"trainer": {"fsdp": 3, "ep": 2}})
