"""Parameter counts against transformers' own modules and published totals."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llamarl.errors import PlanError
from llamarl.forecast import model as models
from llamarl.forecast.model import find_model, spec_from_config

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


TINY: dict[str, dict[str, Any]] = {
    "llama": dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                  num_key_value_heads=2, vocab_size=97, tie_word_embeddings=True),
    "qwen2": dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                  num_key_value_heads=2, vocab_size=97, tie_word_embeddings=False),
    "qwen3_moe": dict(hidden_size=32, intermediate_size=48, moe_intermediate_size=24, num_experts=6,
                      num_experts_per_tok=2, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
                      head_dim=16, vocab_size=97, tie_word_embeddings=False),
    "mixtral": dict(hidden_size=32, intermediate_size=48, num_local_experts=4, num_experts_per_tok=2,
                    num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=97),
    "deepseek_v3": dict(hidden_size=32, intermediate_size=48, moe_intermediate_size=16, n_routed_experts=8,
                        n_shared_experts=1, num_experts_per_tok=2, first_k_dense_replace=1, num_hidden_layers=3,
                        num_attention_heads=4, num_key_value_heads=4, q_lora_rank=12, kv_lora_rank=8,
                        qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, vocab_size=97, n_group=2, topk_group=1),
}  # fmt: skip


@pytest.mark.parametrize("kind", TINY)
def test_total_parameters_equal_those_of_the_transformers_module(kind: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(kind, **TINY[kind])
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(config)
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
        ({"hidden_size": 8}, "num_attention_heads"),
        ({"hidden_size": 0, "num_attention_heads": 1, "num_hidden_layers": 1, "vocab_size": 4}, "at least 1"),
        ({"hidden_size": "x", "num_attention_heads": 1, "num_hidden_layers": 1, "vocab_size": 4}, "number"),
        ({"model_type": "mamba2", "hidden_size": 8}, "recurrent"),
    ],
)
def test_an_unusable_config_says_what_is_wrong(config: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        spec_from_config(config, "broken")


_BASE: dict[str, Any] = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=97,
)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (dict(model_type="ernie4_5_moe", moe_num_experts=64, moe_k=6), "moe_k = 6; moe_num_experts = 64"),
        (dict(model_type="dbrx", ffn_config=dict(moe_num_experts=16, moe_top_k=4)), "ffn_config"),
        (dict(model_type="llama4_text", num_local_experts=16, num_experts_per_tok=1, interleave_moe_layer_step=1),
         "interleave_moe_layer_step = 1"),
        (dict(model_type="nemotron_h", mamba_num_heads=128, hybrid_override_pattern="M-M*"),
         "hybrid_override_pattern = 'M-M\\*'; mamba_num_heads = 128"),
        (dict(model_type="lfm2", conv_L_cache=3, layer_types=["conv", "full_attention"]),
         "conv_L_cache = 3; layer_types with conv"),
        (dict(model_type="new", layer_types=["full_attention", "linear_attention"]), "layer_types with linear_attention"),
        (dict(model_type="new", num_experts=8, num_experts_per_tok=2, mlp_layer_types=["hash_moe"]),
         "mlp_layer_types with hash_moe"),
        (dict(model_type="deepseek_v2", n_routed_experts=8, num_experts_per_tok=2, moe_layer_freq=2), "moe_layer_freq = 2"),
        (dict(model_type="new", num_experts=8), "no num_experts_per_tok"),
        (dict(model_type="gemma3n_text", hidden_size_per_layer_input=256), "hidden_size_per_layer_input"),
    ],
)  # fmt: skip
def test_layers_that_are_not_interpreted_are_refused_by_their_keys(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        spec_from_config({**_BASE, **extra}, "strange")
    with pytest.raises(PlanError, match=message):  # as the language part of a larger model
        spec_from_config({"model_type": "outer", "text_config": {**_BASE, **extra}}, "strange")


@pytest.mark.parametrize(
    "extra",
    [
        dict(conv_bias=False, num_experts=None, moe_intermediate_size=0, mamba_heads=None, layer_types=None),
        dict(is_moe=False, num_experts=64, num_experts_per_tok=2),
        dict(layer_types=["full_attention", "sliding_attention"]),
    ],
)
def test_keys_that_say_nothing_leave_a_dense_model(extra: dict[str, Any]) -> None:
    found = spec_from_config({**_BASE, **extra}, "x")
    windows = "sliding_attention" in (extra.get("layer_types") or ())
    assert found == replace(spec_from_config(_BASE, "x"), shares_prompts=not windows)


def test_keys_of_routing_alone_are_no_obstacle_and_dense_layers_are_counted() -> None:
    moe = dict(model_type="deepseek_v3", n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=16)
    plain = spec_from_config({**_BASE, **moe}, "x")
    routing = dict(moe_layer_freq=1, moe_router_dtype="float32", use_expert_bias=True, experts_implementation="eager")
    assert spec_from_config({**_BASE, **moe, **routing}, "x") == plain
    kinds = ["dense", "dense", "sparse", "sparse"]
    assert spec_from_config({**_BASE, **moe, "mlp_layer_types": kinds}, "x").sparse_layers == 2


SPARSE_KINDS = (
    "cohere2_moe", "deepseek_v3", "exaone_moe", "flex_olmo", "glm4_moe", "gpt_oss", "granitemoe", "granitemoeshared",
    "minimax_m2", "mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe",
)  # fmt: skip
STRANGE_KINDS = (
    "bamba", "dbrx", "ernie4_5_moe", "falcon_h1", "granitemoehybrid", "jamba", "lfm2", "lfm2_moe", "llama4_text", "longcat_flash",
    "mamba2", "minimax", "nemotron_h", "qwen3_next", "recurrent_gemma", "zamba", "zamba2",
)  # fmt: skip


@pytest.mark.parametrize("kind", [*SPARSE_KINDS, *STRANGE_KINDS])
def test_default_configs_of_transformers_are_counted_right_or_refused(kind: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {kind}")
    config = transformers.AutoConfig.for_model(kind)
    if kind in STRANGE_KINDS:
        with pytest.raises(PlanError, match="not interpret|recurrent"):
            spec_from_config(config.to_dict(), kind)
        return
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(config)
    count = sum({id(p): p.numel() for p in module.parameters()}.values())
    assert spec_from_config(config.to_dict(), kind).total_params == pytest.approx(count, rel=5e-3)


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
