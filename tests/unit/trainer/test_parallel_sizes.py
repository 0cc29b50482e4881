from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from training_fixtures import write_model

from llamarl.errors import ModelError
from llamarl.models.loading import load_model
from llamarl.models.parallel import ParallelLayout, apply_tensor_parallel, shard_box
from llamarl.models.sizes import check_tensor_parallel_size, fitting_sizes


def test_sizes_divide_heads_key_value_heads_and_intermediate_size() -> None:
    assert fitting_sizes(32, 8, 14336) == [1, 2, 4, 8]
    assert fitting_sizes(9, 3, 1536) == [1, 3]  # SmolLM2-135M


def test_a_wrong_size_is_refused_with_those_that_fit(tmp_path: Path) -> None:
    config = {"num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536}
    (tmp_path / "config.json").write_text(json.dumps(config))
    check_tensor_parallel_size(tmp_path, 3)
    with pytest.raises(ModelError, match=r"trainer.tp = 2 does not divide.* 9 heads.*sizes that fit: 1, 3"):
        check_tensor_parallel_size(tmp_path, 2)
    (tmp_path / "config.json").write_text(json.dumps({"text_config": config}))
    check_tensor_parallel_size(tmp_path, 3)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="does not say"):
        check_tensor_parallel_size(tmp_path, 2)


def test_the_check_needs_no_torch() -> None:
    code = "import sys, llamarl.models.sizes; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


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
    assert shard_box((6, 4), [("tp", 1), ("fsdp", 0)], layout, 7) == ((0, 2), (2, 4))  # as rank 1: stages cut no box


def test_boxes_by_hand() -> None:
    layout = ParallelLayout(fsdp=2, tp=2, mesh=None)
    # tensor parallelism cuts 10 rows into 5 + 5, FSDP each five into 3 + 2; rank = fsdp_index * 2 + tp_index
    boxes = [shard_box((10, 4), [("tp", 0), ("fsdp", 0)], layout, rank) for rank in range(4)]
    assert boxes == [((0, 3), (0, 4)), ((5, 8), (0, 4)), ((3, 5), (0, 4)), ((8, 10), (0, 4))]
    assert shard_box((3, 8), [("tp", 1), ("fsdp", 0)], layout, 3) == ((2, 3), (4, 8))
    assert shard_box((1,), [("fsdp", 0)], layout, 2) == ((1, 1),)  # more ranks than rows: nothing
