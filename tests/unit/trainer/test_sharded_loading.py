import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import COMMON, SPARSE
from tiny_models import tiny_config as sparse_config
from training_fixtures import make_groups, tiny_config, write_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from llamarl.engine.engine import _eos_of
from llamarl.errors import ModelError
from llamarl.models.loading import load_model, stored_files
from llamarl.models.parallel import ParallelLayout, ParameterShard, parameter_shards
from llamarl.models.reward_model import load_reward_model, reward_skeleton
from llamarl.models.sharded_loading import StoredPart, give_storage, make_skeleton, read_parts, where_stored
from llamarl.models.small_copy import small_model
from llamarl.models.value import HEAD, load_value_model, value_head, value_skeleton
from llamarl.settings.algorithms import AlgorithmConfig
from llamarl.trainer.batch import make_microbatch, make_sequences
from llamarl.trainer.building import build_policy
from llamarl.trainer.logprobs import LogitTransform
from llamarl.trainer.policy import Policy

ONE_RANK = ParallelLayout(fsdp=1, tp=1, mesh=None)


@pytest.mark.parametrize("family", ["ernie4_5_moe", "afmoe"])
def test_a_router_bias_that_gets_no_gradient_is_held_by_ranks_of_a_mesh_as_by_a_lone_one(
    family: str, tmp_path: Path
) -> None:
    sizes = {"ernie4_5_moe": {"moe_num_experts": 8, "moe_k": 2, "moe_layer_start_index": 1, "moe_layer_end_index": 2},
             "afmoe": {"num_experts": 8, "num_experts_per_tok": 2, "num_dense_layers": 1}}[family]  # fmt: skip
    config = AutoConfig.for_model(family, **COMMON, moe_intermediate_size=24, **sizes)
    small_model(config).save_pretrained(tmp_path)
    loaded, skeleton = (
        {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        for model in (load_model(tmp_path, dtype=torch.float32), make_skeleton(tmp_path, attention="llamarl_packed"))
    )
    assert any("bias" in name for name in loaded) and skeleton == loaded


@pytest.mark.parametrize("family", SPARSE)
def test_of_published_experts_each_rank_reads_its_own(family: str, tmp_path: Path) -> None:
    small_model(sparse_config(family)).save_pretrained(tmp_path)
    loaded = dict(load_model(tmp_path, dtype=torch.float32).named_parameters())
    model = make_skeleton(tmp_path, attention="llamarl_packed")
    parts = where_stored(tmp_path, model)
    assert parts is not None
    give_storage(model, torch.device("cpu"))
    parameters = dict(model.named_parameters())
    read_parts(tmp_path, parameters, parameter_shards(parameters, {}, ONE_RANK, "float32"), parts)
    assert all(torch.equal(parameters[name], value) for name, value in loaded.items())
    gate_up = next(name for name in parameters if name.endswith("experts.gate_up_proj"))
    experts, rows, width = parameters[gate_up].shape
    box = ((1, 3), (rows // 2 - 2, rows // 2 + 5), (3, width))  # of two experts, across the border of gate and up
    here = torch.nn.Parameter(torch.zeros(2, 7, width - 3, dtype=torch.bfloat16))
    shard = ParameterShard(shape=(experts, rows, width), dtype="float32", box=box, cuts=())
    read_parts(tmp_path, {gate_up: here}, {gate_up: shard}, parts)
    expected = loaded[gate_up][tuple(slice(*extent) for extent in box)].bfloat16()
    assert torch.equal(here, expected)


def test_beside_other_files_ranks_read_the_one_that_transformers_reads(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "llama")
    loaded = dict(load_model(folder, dtype=torch.float32).named_parameters())
    others = {name: torch.zeros_like(value) for name, value in loaded.items()}
    save_file(others, folder / "model-00001-of-00001.safetensors")
    save_file(others, folder / "original.safetensors")
    index = {"weight_map": dict.fromkeys(others, "model-00001-of-00001.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert set(stored_files(folder).values()) == {folder / "model.safetensors"}
    again = dict(load_model(folder, dtype=torch.float32).named_parameters())
    assert all(torch.equal(again[name], value) for name, value in loaded.items())


def test_an_engine_over_ranks_ends_responses_where_one_of_one_rank_does(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "llama")
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    alone = load_model(folder, dtype=torch.float32, attention="llamarl_paged")
    cut = make_skeleton(folder, attention="llamarl_paged")
    assert _eos_of(cut) == _eos_of(alone) == [2, 7]
    (folder / "generation_config.json").unlink()
    assert _eos_of(make_skeleton(folder, attention="llamarl_paged")) == [alone.config.eos_token_id]


@pytest.mark.parametrize("exported", [False, True], ids=["language model", "exported critic"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_a_value_models_parts_are_the_loaded_ones_and_a_new_head_says_0(
    family: str, exported: bool, tmp_path: Path
) -> None:
    folder = write_model(tmp_path / "model", family)
    if exported:
        critic = load_value_model(folder, attention="llamarl_packed")
        torch.nn.init.normal_(value_head(critic).weight)
        critic.save_pretrained(folder := tmp_path / "critic")
    loaded = load_value_model(folder, attention="llamarl_packed")
    model = value_skeleton(folder, attention="llamarl_packed")
    assert all(p.is_meta for p in model.parameters())
    _fill(folder, model, where_stored(folder, model, new=HEAD))
    assert value_head(model).weight.any() == exported
    _same(model, loaded)


def test_a_reward_models_parts_are_the_loaded_ones_and_none_may_be_new(tmp_path: Path) -> None:
    language_model = write_model(tmp_path / "model")
    config = AutoConfig.from_pretrained(language_model, num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder := tmp_path / "classifier")
    arguments: dict[str, Any] = {"attention": "llamarl_packed", "key": "reward_model.path"}
    loaded = load_reward_model(folder, dtype=torch.float32, device="cpu", **arguments)
    model = reward_skeleton(folder, **arguments)
    assert all(p.is_meta and not p.requires_grad for p in model.parameters())
    _fill(folder, model, where_stored(folder, model))
    _same(model, loaded)
    assert not any(p.requires_grad for p in model.parameters())
    assert (
        where_stored(language_model, model) is None
    )  # its head is nowhere: left to whoever loads it whole, who says so


def _fill(folder: Path, model: PreTrainedModel, parts: dict[str, list[StoredPart]] | None) -> None:
    assert parts is not None
    give_storage(model, torch.device("cpu"))
    parameters = dict(model.named_parameters())
    read_parts(folder, parameters, parameter_shards(parameters, {}, ONE_RANK, "float32"), parts)


def _same(model: PreTrainedModel, loaded: PreTrainedModel) -> None:
    got, expected = dict(model.named_parameters()), dict(loaded.named_parameters())
    assert list(got) == list(expected) and all(torch.equal(got[name], p) for name, p in expected.items())
    facts, expected_facts = model.config.to_dict(), loaded.config.to_dict()
    for name in ("_name_or_path", "transformers_version"):
        facts.pop(name, None), expected_facts.pop(name, None)
    assert facts == expected_facts


def test_a_folder_that_lacks_an_expert_is_not_read_in_parts(tmp_path: Path) -> None:
    small_model(sparse_config("mixtral")).save_pretrained(tmp_path)
    model = make_skeleton(tmp_path, attention="llamarl_packed")
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[next(name for name in tensors if ".experts.2." in name)]
    save_file(tensors, tmp_path / "model.safetensors")
    assert where_stored(tmp_path, model) is None


def test_an_output_layer_that_config_ties_and_weights_do_not_is_not_trained(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "llama")
    model = make_skeleton(folder, attention="llamarl_packed")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert where_stored(folder, model) is not None
    tensors["lm_head.weight"] += 1.0
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert where_stored(folder, model) is None
    how = {"temperature": 1.0, "dtype": torch.float32, "chunk_tokens": 16, "device": torch.device("cpu")}
    with pytest.raises(ModelError, match="another matrix as lm_head.weight .*: set tie_word_embeddings to false"):
        build_policy(folder, ONE_RANK, attention="llamarl_packed", **how)


def test_a_folder_with_other_names_or_shapes_is_noticed(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    model = make_skeleton(folder, attention="llamarl_packed")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(7)
    save_file(tensors, folder / "model.safetensors")
    give_storage(model, torch.device("cpu"))
    parameters, parts = dict(model.named_parameters()), where_stored(folder, model)
    assert parts is not None
    with pytest.raises(ModelError, match=r"model.norm.weight has shape \(7,\), expected \(32,\)"):
        read_parts(folder, parameters, parameter_shards(parameters, {}, ONE_RANK, "float32"), parts)
    save_file({f"other.{name}": t for name, t in tensors.items()}, folder / "model.safetensors")
    assert where_stored(folder, model) is None


# Devices.


META = torch.device("meta")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("family", "shared"),
    [("llama", True), ("llama", False), ("qwen3", True), ("gemma2", False), ("gemma3_text", False)],
)
def test_every_tensor_of_a_microbatch_is_on_the_device(family: str, shared: bool, dtype: torch.dtype) -> None:
    attention = "llamarl_shared_prompts" if shared else "llamarl_packed"
    with META:
        model = AutoModelForCausalLM.from_config(tiny_config(family), attn_implementation=attention, dtype=dtype)
    policy = Policy(model, LogitTransform(temperature=0.9), chunk_tokens=8, entropy_needs_grad=True)
    sequences = make_sequences(make_groups(), AlgorithmConfig(), lambda counts: counts)
    batch = make_microbatch(sequences, [1.0] * len(sequences), META, share_prompts=shared)
    logprobs, entropy, *_ = policy(batch)
    assert logprobs.device == entropy.device == META and logprobs.shape == batch.targets.shape
    (logprobs.sum() + entropy.sum()).backward()
    assert all(p.grad is not None and p.grad.device == META for p in policy.parameters())
