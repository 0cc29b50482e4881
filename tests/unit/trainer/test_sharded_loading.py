from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from training_fixtures import write_model

from llamarl.errors import ModelError
from llamarl.models.attention import PackedSequences
from llamarl.models.loading import load_model
from llamarl.models.parallel import ParallelLayout, parameter_shards
from llamarl.models.sharded_loading import can_stream, give_storage, make_skeleton, read_parts

ONE_RANK = ParallelLayout(fsdp=1, tp=1, mesh=None)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3_text"])
def test_a_skeleton_with_its_parts_read_is_the_loaded_model(family: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", family)
    loaded = load_model(folder, dtype=torch.float32, attention="llamarl_packed")
    model = make_skeleton(folder, attention="llamarl_packed")
    assert all(p.is_meta for p in model.parameters()) and not any(b.is_meta for b in model.buffers())
    assert can_stream(folder, model)
    give_storage(model, torch.device("cpu"))
    parameters = dict(model.named_parameters())
    read_parts(folder, parameters, parameter_shards(parameters, {}, ONE_RANK, "float32"))
    assert set(parameters) == {name for name, _ in loaded.named_parameters()}  # ties survive
    packed = PackedSequences.of([0, 4])
    inputs = {"input_ids": torch.tensor([[5, 6, 7, 8]]), "position_ids": packed.position_ids("cpu")}
    with torch.no_grad():
        got, expected = (m(**inputs, packed_sequences=packed).logits for m in (model, loaded))
    assert torch.equal(got, expected)


def test_a_folder_with_other_names_or_shapes_is_noticed(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    model = make_skeleton(folder, attention="llamarl_packed")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(7)
    save_file(tensors, folder / "model.safetensors")
    give_storage(model, torch.device("cpu"))
    parameters = dict(model.named_parameters())
    with pytest.raises(ModelError, match=r"model.norm.weight has shape \(7,\), expected \(32,\)"):
        read_parts(folder, parameters, parameter_shards(parameters, {}, ONE_RANK, "float32"))
    save_file({f"other.{name}": t for name, t in tensors.items()}, folder / "model.safetensors")
    assert not can_stream(folder, model)
