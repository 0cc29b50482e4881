"""The report against the full plan, and against numbers worked by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from llamarl.errors import ModelError, PlanError
from llamarl.planner.weight_traffic import MeshSide, report_transfer
from llamarl.weight_sync.layout import ParameterSpec, Shard, mesh_layout
from llamarl.weight_sync.model_layouts import ModelParameters, fsdp_tp_placements, model_parameters, tp_placements
from llamarl.weight_sync.plan import plan_transfer

LLAMA_405B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16384, "intermediate_size": 53248,
    "num_hidden_layers": 126, "num_attention_heads": 128, "num_key_value_heads": 8, "vocab_size": 128256,
    "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def llama_405b(tmp_path_factory: pytest.TempPathFactory) -> ModelParameters:
    folder: Path = tmp_path_factory.mktemp("llama")
    (folder / "config.json").write_text(json.dumps(LLAMA_405B))
    return model_parameters(folder / "config.json")


@pytest.mark.parametrize("sink_mesh", [{"tp": 2}, {"replica": 3}, {"replica": 2, "tp": 3}])
def test_report_equals_the_full_plan(sink_mesh: dict[str, int]) -> None:
    specs = {
        "embed": ParameterSpec((50, 8), "float32"),
        "q": ParameterSpec((24, 8), "float32"),
        "o": ParameterSpec((8, 24), "float32"),
        "norm": ParameterSpec((8,), "float32"),
        "scale": ParameterSpec((), "float32"),
    }
    tp = {"embed": Shard("tp", 0), "q": Shard("tp", 0), "o": Shard("tp", 1)}
    source = MeshSide(
        mesh={"fsdp": 3, "tp": 2},
        placements={n: [*([tp[n]] if n in tp else []), Shard("fsdp", 0)] for n in specs if specs[n].shape},
    )
    sink = MeshSide(mesh=sink_mesh, placements={n: [cut] for n, cut in tp.items()} if "tp" in sink_mesh else {})
    plan = plan_transfer(
        mesh_layout(specs, source.mesh, source.placements), mesh_layout(specs, sink.mesh, sink.placements)
    )
    report = report_transfer(specs, source, sink)
    np.testing.assert_array_equal(report.received_bytes, plan.received_bytes())
    assert report.num_copies == len(plan.copies)
    largest = max(c.nbytes for c in plan.copies)
    np.testing.assert_allclose(report.sent_bytes, plan.sent_bytes(), atol=2 * largest)
    assert report.sent_bytes.sum() == pytest.approx(sum(plan.sent_bytes()))
    assert report.model_bytes == 4 * (400 + 192 + 192 + 8 + 1)


def test_two_shards_to_two_replicas_by_hand() -> None:
    specs = {"w": ParameterSpec((10, 4), "float32")}
    source = MeshSide(mesh={"fsdp": 2}, placements={"w": [Shard("fsdp", 0)]})
    report = report_transfer(specs, source, MeshSide(mesh={"replica": 2}, placements={}))
    assert report.sent_bytes.tolist() == [160.0, 160.0]  # half of 160 bytes to each of two
    assert report.received_bytes.tolist() == [160.0, 160.0]
    assert report.source_slot_bytes.tolist() == [80.0, 80.0]
    assert (report.num_copies, report.num_links) == (4, 4)


def test_llama_405b_as_its_config_says(llama_405b: ModelParameters) -> None:
    assert llama_405b.num_elements == 405_853_388_800
    source = MeshSide(mesh={"fsdp": 64, "tp": 8}, placements=fsdp_tp_placements(llama_405b))
    sink = MeshSide(mesh={"replica": 32, "tp": 16}, placements=tp_placements(llama_405b))
    report = report_transfer(llama_405b, source, sink)
    cut = sum(2 * np.prod(s.shape, dtype=np.int64) for n, s in llama_405b.items() if n in llama_405b.tp_dims)
    heads = 2 * 2 * 126 * 8 * 128 * 16_384  # bytes of k and v: each of 8 heads lies on two of 16 ranks
    assert report.received_bytes.max() == (cut + heads) / 16 + (report.model_bytes - cut)
    assert report.sent_bytes.sum() == pytest.approx(report.received_bytes.sum())


def test_bytes_per_rank_stay_when_model_and_ranks_double() -> None:
    per_rank = []
    for scale in (1, 2, 4, 8, 16, 32):
        specs = {f"layer.{i}": ParameterSpec((8192, 1024), "bfloat16") for i in range(4 * scale)}
        source = MeshSide(mesh={"fsdp": 256 * scale}, placements={n: [Shard("fsdp", 0)] for n in specs})
        sink = MeshSide(mesh={"tp": 256 * scale}, placements={n: [Shard("tp", 0)] for n in specs})
        report = report_transfer(specs, source, sink)
        per_rank.append((report.sent_bytes.max(), report.received_bytes.max()))
    assert per_rank == [per_rank[0]] * 6
    assert 2 * 256 * 32 == 16_384


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no config.json"):
        model_parameters(tmp_path / "nothing")
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(ModelError, match="not usable"):
        model_parameters(tmp_path)
    side = MeshSide(mesh={"fsdp": 2}, placements={"w": [Shard("tp", 0)]})
    with pytest.raises(PlanError, match="cannot be cut"):
        report_transfer({"w": ParameterSpec((2,), "float32")}, side, side)
