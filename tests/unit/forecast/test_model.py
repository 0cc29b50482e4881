"""Parameter counts against transformers' own modules and published totals."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_config
from transformers import AutoConfig, AutoModelForCausalLM

from llamarl.errors import PlanError
from llamarl.forecast import model as models
from llamarl.forecast.model import find_model, spec_from_config
from llamarl.model_support import FAMILIES

PUBLISHED = {  # from the model cards' safetensors metadata
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.1-70B": 70_553_706_496,
    "Llama-3.1-405B": 405_853_388_800,
    "SmolLM2-135M": 134_515_008,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Mixtral-8x7B": 46_702_792_704,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_total_parameters_equal_the_published_count(name: str) -> None:
    assert find_model(name).total_params == PUBLISHED[name]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3_moe", "mixtral", "deepseek_v3"])
def test_total_parameters_equal_those_of_the_transformers_module(kind: str) -> None:
    config = tiny_config(kind)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    unique = {id(p): p.numel() for p in module.parameters()}
    assert spec_from_config(config.to_dict(), kind).total_params == sum(unique.values())


def test_a_sparse_model_multiplies_only_the_chosen_experts() -> None:
    spec = find_model("Qwen3-30B-A3B")
    per_expert = 3 * 2048 * 768
    idle = (
        48 * (128 - 8) * per_expert + spec.vocab * spec.hidden + (2 * 48 + 1) * 2048
    )  # look-up and norms: no products
    assert spec.active_params == spec.total_params - idle


def test_cache_of_grouped_query_and_latent_attention() -> None:
    assert find_model("Llama-3.1-405B").kv_bytes_per_token() == 126 * 2 * 8 * 128 * 2
    assert find_model("DeepSeek-V3").kv_bytes_per_token() == 61 * (512 + 64) * 2


def test_names_are_forgiving_and_folders_are_read(tmp_path: Path) -> None:
    assert find_model("meta-llama/Llama-3.1-8B-Instruct").name == "Llama-3.1-8B"
    config = {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 11, "n_positions": 16}
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = find_model(tmp_path)
    assert (spec.hidden, spec.layers, spec.kv_heads, spec.intermediate, spec.gated, spec.max_context) == (
        8, 1, 2, 32, False, 16,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_size": 8}, "names no model_type"),
        ({"model_type": "llama", "hidden_size": 8}, "num_attention_heads"),
        (
            {
                "model_type": "llama",
                "hidden_size": 0,
                "num_attention_heads": 1,
                "num_hidden_layers": 1,
                "vocab_size": 4,
            },
            "at least 1",
        ),
        (
            {
                "model_type": "llama",
                "hidden_size": "x",
                "num_attention_heads": 1,
                "num_hidden_layers": 1,
                "vocab_size": 4,
            },
            "number",
        ),
        ({"model_type": "mamba2", "hidden_size": 8}, "recurrent"),
        ({"model_type": "dbrx", "hidden_size": 8}, "the layers of 'dbrx' are not known"),
        ({"model_type": "outer", "text_config": {"hidden_size": 8}}, "the layers of 'outer_text' are not known"),
    ],
)
def test_an_unusable_config_says_what_is_wrong(config: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        spec_from_config(config, "broken")


@pytest.mark.parametrize(("stride", "own"), [(1, []), (1, [0, 3]), (2, []), (2, [1]), (2, [0, 2]), (3, [2, 9])])
def test_layers_that_are_dense_by_two_rules_count_once(stride: int, own: list[int]) -> None:
    sizes = {"num_hidden_layers": 4, "decoder_sparse_step": stride, "mlp_only_layers": own}
    config = AutoConfig.for_model(**{**tiny_config("qwen3_moe").to_dict(), **sizes, "layer_types": None})
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    assert spec_from_config(config.to_dict(), "x").total_params == sum(p.numel() for p in module.parameters())


def test_layers_of_a_sparse_model_that_are_dense_are_counted_by_their_kinds() -> None:
    moe = tiny_config("deepseek_v3").to_dict()
    assert spec_from_config(moe, "x").sparse_layers == 2
    kinds = ["dense", "dense", "sparse"]
    assert spec_from_config({**moe, "first_k_dense_replace": 0, "mlp_layer_types": kinds}, "x").sparse_layers == 1


@pytest.mark.parametrize("kind", [kind for kind in FAMILIES if kind not in ("nemotron", "gpt2", "opt")])
def test_default_configs_of_every_family_are_counted_right(kind: str) -> None:
    """But for positions that are learned (gpt2, opt), and a family without a usable default."""
    config = AutoConfig.for_model(kind)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    count = sum({id(p): p.numel() for p in module.parameters()}.values())
    assert spec_from_config(config.to_dict(), kind).total_params == pytest.approx(count, rel=5e-4)


def test_an_unknown_name_gets_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="'Llama-3.1-70B'"):
        find_model("Llama-3.1-71B")
    bad = tmp_path / "config.json"
    bad.write_text("{")
    with pytest.raises(PlanError, match="not JSON"):
        find_model(bad)


def test_all_bundled_shapes_load() -> None:
    for name in json.loads((Path(models.__file__).parent / "models.json").read_text()):
        spec = find_model(name)
        assert 0 < spec.active_params <= spec.total_params
