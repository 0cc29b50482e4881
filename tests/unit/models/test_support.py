"""The table of what is supported, against planner, preflight, engine, trainer and critic: none may disagree with another."""

import json
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from engine_runs import run
from safetensors.torch import save_file
from tiny_models import FAMILIES as TINY
from tiny_models import tiny_config
from training_fixtures import make_groups
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
)

from llamarl.config import RunConfig, validate
from llamarl.controller.preflight import check_models
from llamarl.controller.prepare import plan_run, prepare
from llamarl.controller.run import start_run
from llamarl.engine.engine import NativeEngine
from llamarl.engine.sequence import SamplingParams, Sequence
from llamarl.errors import ConfigError, LlamaRLError, ModelError, PlanError
from llamarl.executors.self_check import find_differences
from llamarl.forecast.model import find_model, tensor_parallel_sizes
from llamarl.model_support import FAMILIES, NOT_COMPUTED, USES, Use, why_unsupported
from llamarl.models.adapters import adapter_shapes, base_parameters
from llamarl.models.decoder import adaptable_layers
from llamarl.models.folders import read_model_config, resolve_model_path
from llamarl.models.loading import load_model
from llamarl.models.parallel import _STYLES
from llamarl.models.router_replay import let_replay
from llamarl.models.small_copy import small_model
from llamarl.models.stages import check_stages
from llamarl.settings.algorithms import AlgorithmConfig
from llamarl.settings.engine import EngineConfig
from llamarl.settings.trainer import CriticConfig, LoraConfig, OptimizerConfig, TrainerConfig
from llamarl.trainer.critic import Critic
from llamarl.trainer.reward_scoring import RewardScorer
from llamarl.trainer.step import Trainer

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
OTHERS: dict[str, dict[str, Any]] = {"gpt_oss": {"head_dim": 8, "num_local_experts": 4}}
"""Architectures that transformers knows and llamarl is known not to compute."""
_SHAPE = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
          "num_key_value_heads": 2, "max_position_embeddings": 256}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of each family; of the others the ``config.json``. All with the bundled tokenizer."""
    root = tmp_path_factory.mktemp("models")
    for family in TINY:
        torch.manual_seed(0)
        config = tiny_config(family)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").save_pretrained(
            root / family
        )
    for kind, traits in OTHERS.items():
        (root / kind).mkdir()
        config = AutoConfig.for_model(kind, **{**_SHAPE, **traits}).to_dict()
        (root / kind / "config.json").write_text(json.dumps(config))
    for folder in root.iterdir():
        for file in resolve_model_path("bundled:tiny").glob("tokenizer*"):
            shutil.copy(file, folder)
    return root


def recipe(folder: Path, **sections: Any) -> RunConfig:
    small = {"model": {"path": str(folder)}, "evaluation": {"every": 0}, "run": {"dir": f"{folder}-run"}}
    sampling = {"max_new_tokens": 16}
    return validate(
        {**small, **sections, "generator": {"device": "cpu", "sampling": sampling, **sections.get("generator", {})}}
    )


def generate_in_int8(folder: Path) -> None:
    engine = NativeEngine(
        folder, EngineConfig(kv_cache_bytes=1 << 20), device="cpu", quantization="int8", eos_token_ids=()
    )
    params = SamplingParams(max_new_tokens=2)
    sequence = Sequence(prompt_index=0, sample_index=0, prompt_tokens=[3, 4, 5], params=params, seed=1)
    run(engine, [sequence])
    assert len(sequence.tokens) == 2


def train(folder: Path, lora: LoraConfig | None = None) -> Trainer:
    trainer = Trainer(folder, TrainerConfig(), OptimizerConfig(lr=1e-3), AlgorithmConfig(), temperature=1.0, lora=lora)
    assert trainer.train(make_groups(), 0)["grad_norm"] > 0
    return trainer


def learn_values(folder: Path) -> None:
    Critic(folder, CriticConfig(), AlgorithmConfig(advantage="gae"), TrainerConfig(), OptimizerConfig()).step(
        make_groups(), 0
    )


def score(folder: Path) -> None:
    """A classifier with the family's body; the scorer itself proves packed scores against the library's."""
    config = AutoConfig.from_pretrained(folder)
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise ModelError("no such form")
    config.num_labels = 1
    with tempfile.TemporaryDirectory() as name:
        AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).save_pretrained(name)
        scorer = RewardScorer(name)
    assert len(scorer.score([[[3, 4, 5], [3, 4, 6, 7]]])) == 2


def cut(folder: Path) -> None:
    """The styles of the model's own plan are those that are carried out; the multi-process tests carry them out."""
    plan = AutoConfig.from_pretrained(folder).base_model_tp_plan
    if plan is None:
        raise ModelError("no plan")
    of_layers = {style for name, style in plan.items() if "*" in name and ".experts" not in name}  # no embedding
    if not of_layers or (unknown := of_layers - set(_STYLES)):
        raise ModelError(f"styles {unknown}" if of_layers else "experts alone")
    if not any("attn" in name or "attention" in name for name in plan):
        raise ModelError("attention is left whole")


TARGETS = {
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    "glm4": (*ATTENTION, "gate_up_proj", "down_proj"),
    "starcoder2": (*ATTENTION, "c_fc", "c_proj"),
    "phi": ("q_proj", "k_proj", "v_proj", "dense", "fc1", "fc2"),
    "nemotron": (*ATTENTION, "up_proj", "down_proj"),
    "gpt_neox": ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
    "opt": ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"),
    "deepseek_v3": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
    **dict.fromkeys(("qwen3_moe", "olmoe", "mixtral", "granitemoe"), ATTENTION),
}
"""Family -> where adapters lie by default; all others have Llama's layers."""


def adapters(folder: Path, family: str) -> None:
    """Beside the layers of the default, and what is handed over knows of every parameter that is trained."""
    lora = LoraConfig(rank=2)
    trainer = train(folder, lora)
    targets = TARGETS.get(family, (*ATTENTION, "gate_proj", "up_proj", "down_proj"))
    assert trainer.lora is not None and set(trainer.lora.targets) == set(targets)
    learning = {name for name, p in trainer.policy.model.named_parameters() if p.requires_grad}
    shapes = {name: tuple(p.shape) for name, p in base_parameters(trainer.policy.model).items()}
    assert learning == set(adapter_shapes(shapes, rank=2, targets=targets))


def done(use: Use, folder: Path, family: str) -> None:
    """Really do it, with a model of the family."""
    {
        "int8": lambda: generate_in_int8(folder),
        "critic": lambda: learn_values(folder),
        "reward_model": lambda: score(folder),
        "lora": lambda: adapters(folder, family),
        "tensor_parallel": lambda: cut(folder),
        "pipeline": lambda: check_stages(small_model(AutoConfig.from_pretrained(folder)), 3),
        "router_replay": lambda: let_replay(load_model(folder, dtype=torch.float32, attention="llamarl_packed")),
    }[use]()


ASKED: dict[Use, Any] = {
    "generate": {},
    "train": {"reference": {"enabled": True}},
    "replicate": {"generator": {"dp": 2}},
    "int8": {"generator": {"quantization": "int8"}},
    "critic": {"algorithm": {"advantage": "gae"}},
    "lora": {"lora": {"rank": 2}},
    "tensor_parallel": {"generator": {"tp": 2}},
    "router_replay": {"trainer": {"router": "replay"}},
}
"""What a recipe says to ask for it."""


def test_every_family_has_a_tiny_model_and_every_use_a_name() -> None:
    assert set(TINY) == set(FAMILIES)
    assert set(USES) == set(get_args(Use))
    assert all(use in USES for family in FAMILIES.values() for use in family)


DONE_ELSEWHERE = {"generate", "train", "replicate", "fp8", "vllm"}
"""By ``test_every_family_round_trip``, which generates and trains with every family; and what needs a GPU or vLLM."""


@pytest.mark.parametrize("use", sorted(set(USES) - DONE_ELSEWHERE))
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_does_what_the_table_says_and_nothing_else(folders: Path, family: str, use: Use) -> None:
    folder = folders / family
    reason = why_unsupported(read_model_config(folder), use)
    assert (reason is None) == (use not in FAMILIES[family])
    if reason is None:
        done(use, folder, family)
    else:
        with pytest.raises(ModelError):
            done(use, folder, family)


@pytest.mark.parametrize("use", ASKED)
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "phi3", "olmo2", "gpt2", "mixtral"])  # each way of lacking
def test_a_dry_run_takes_what_the_table_says(folders: Path, family: str, use: Use) -> None:
    config = recipe(folders / family, **ASKED[use])
    if why_unsupported(read_model_config(folders / family), use) is None:
        assert "# placement" in plan_run(config)
    else:
        with pytest.raises(LlamaRLError, match=family):
            plan_run(config)


def test_layers_that_the_model_does_not_have_are_no_target_of_adapters(folders: Path) -> None:
    for family, asked, has in (
        ("phi3", "q_proj", '"o_proj", "qkv_proj", "gate_up_proj", "down_proj"'),
        ("qwen3_moe", "gate_proj", '"q_proj", "k_proj", "v_proj", "o_proj"'),  # of the layer without experts
    ):
        line = rf"lora.targets: {asked} may have no adapter.*; set lora.targets = \[{has}\]"
        with pytest.raises(ConfigError, match=line):
            plan_run(recipe(folders / family, lora={"rank": 2, "targets": ["o_proj", asked]}))


def test_a_run_says_which_layers_have_adapters_where_its_recipe_does_not(folders: Path) -> None:
    config = recipe(folders / "qwen3_moe", lora={"rank": 2})
    assert config.lora.targets == ()
    assert set(prepare(config).config.lora.targets) == set(ATTENTION)
    assert prepare(recipe(folders / "llama")).config.lora.targets == ()  # which has none


@pytest.mark.parametrize("kind", ["deepseek_v2", "deepseek_v3", "glm4_moe_lite"])
@pytest.mark.parametrize("q_lora_rank", [None, 24])
def test_adapters_of_latent_attention_lie_where_its_configuration_has_layers(
    kind: str, q_lora_rank: int | None
) -> None:
    own = {key: value for key, value in tiny_config("deepseek_v3").to_dict().items() if key != "model_type"}
    config = AutoConfig.for_model(kind, **{**own, "q_lora_rank": q_lora_rank})
    queries = ["q_proj"] if q_lora_rank is None else ["q_a_proj", "q_b_proj"]
    assert list(adaptable_layers(config)) == [*queries, "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]


def test_a_family_outside_the_table_gets_what_needs_no_knowledge(folders: Path, tmp_path: Path) -> None:
    AutoConfig.for_model("arcee", **_SHAPE).save_pretrained(tmp_path)
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    for file in (folders / "llama").glob("tokenizer*"):
        shutil.copy(file, tmp_path)
    for asked in ({}, {"generator": {"dp": 2}}, {"lora": {"rank": 2}}):
        assert "# placement" in plan_run(recipe(tmp_path, **asked))
    with pytest.raises(ConfigError, match=r'gate_proj may have no adapter.*; set lora.targets = \["q_proj", "k_proj"'):
        plan_run(recipe(tmp_path, lora={"rank": 2, "targets": ["gate_proj"]}))
    for asked in (
        {"generator": {"tp": 2}},
        {"generator": {"quantization": "int8"}},
        {"algorithm": {"advantage": "gae"}},
    ):
        with pytest.raises(
            LlamaRLError, match="'arcee' does not support .* known of the families in docs/models.md alone"
        ):
            plan_run(recipe(tmp_path, **asked))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_planner_plans_what_the_table_says(folders: Path, family: str) -> None:
    spec = find_model(folders / family)
    assert spec.unsupported == ""
    config = read_model_config(folders / family)
    assert (2 in tensor_parallel_sizes(spec, 2)) == (why_unsupported(config, "tensor_parallel") is None)


@pytest.mark.parametrize("kind", OTHERS)
def test_other_architectures_are_refused_by_everyone_before_anything_is_made(folders: Path, kind: str) -> None:
    folder = folders / kind
    config = read_model_config(folder)
    assert all(f"architecture {kind!r} is not supported" in str(why_unsupported(config, use)) for use in get_args(Use))
    run = recipe(folder)
    for refuses in (plan_run, start_run, check_models):
        with pytest.raises(ModelError, match=f"model.path: architecture {kind!r} is not supported: its"):
            refuses(run)
    assert not Path(run.run.dir).exists()
    for attention in ("llamarl_paged", "llamarl_packed"):
        with pytest.raises(ModelError, match=f"architecture {kind!r} is not supported"):
            load_model(folder, dtype=torch.float32, attention=attention)
    with pytest.raises(PlanError, match=f"architecture {kind!r} is not supported"):
        find_model(folder)


@pytest.mark.parametrize(("key", "section"), [("reference.path", {"reference": {"enabled": True}}),
                                              ("critic.path", {"algorithm": {"advantage": "gae"}})])  # fmt: skip
def test_a_model_beside_the_policy_is_asked_too(folders: Path, key: str, section: dict[str, Any]) -> None:
    name = key.partition(".")[0]
    merged = {**section, name: {**section.get(name, {}), "path": str(folders / "gpt_oss")}}
    with pytest.raises(ModelError, match=f"{key}: architecture 'gpt_oss' is not supported"):
        check_models(recipe(folders / "llama", **merged))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({}, "names no model_type"),
        ({"model_type": ["llama"]}, "names no model_type, got \\['llama'\\]"),
        ({"model_type": "mistral3", "text_config": {"model_type": "gpt_oss"}}, "'gpt_oss' is not supported"),
        ({"model_type": "llava", "text_config": {"hidden_size": 8}}, None),
        ({"model_type": "arcee"}, None),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "not a causal decoder"),
        ({"model_type": "phi3", "max_position_embeddings": 8192, "original_max_position_embeddings": 4096,
          "rope_scaling": {"type": "su"}}, "longrope"),
        ({"model_type": "llama", "max_position_embeddings": 8192,
          "rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 4096}}, "longrope"),
        ({"model_type": "phi3", "max_position_embeddings": 4096, "original_max_position_embeddings": 4096,
          "rope_scaling": {"type": "longrope"}}, None),
        ({"model_type": "qwen3", "quantization_config": {"quant_method": "fp8"}}, "stored quantized .*, fp8"),
        ({"model_type": "mistral3", "text_config": {"model_type": "mistral"},
          "quantization_config": {"quant_method": "bitsandbytes"}}, "stored quantized .*, bitsandbytes"),
        ({"model_type": "qwen3", "quantization_config": None}, None),
    ],
)  # fmt: skip
def test_what_else_a_config_may_ask_for(config: dict[str, Any], reason: str | None) -> None:
    found = why_unsupported(config, "generate")
    assert found is None if reason is None else re.search(reason, str(found))


def test_vllm_alone_may_be_given_quantized_weights() -> None:
    config = {"model_type": "qwen3", "quantization_config": {"quant_method": "awq"}}
    assert [use for use in USES if "quantized (" not in str(why_unsupported(config, use))] == ["vllm"]


@pytest.mark.parametrize(
    ("first_window", "sliding", "computed"), [(0, True, True), (1, True, False), (3, True, True), (1, False, True)]
)
def test_vllm_gets_no_qwen2_with_windows_in_some_of_its_layers(
    first_window: int, sliding: bool, computed: bool
) -> None:
    config = {
        "model_type": "qwen2",
        "num_hidden_layers": 3,
        "max_window_layers": first_window,
        "use_sliding_window": sliding,
    }
    assert (why_unsupported(config, "vllm") is None) == computed
    assert why_unsupported(config, "generate") is None


def test_what_is_known_to_fail_fails_its_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """The words are a courtesy; the check decides. One that passes some day must leave the list."""
    known = dict(NOT_COMPUTED)
    monkeypatch.setattr("llamarl.model_support.NOT_COMPUTED", {})
    for kind in known:
        if kind in (
            "jamba",
            "falcon_h1",
            "mamba",
            "mamba2",
            "qwen3_next",
        ):  # seconds each; qwen3_5_text stands for them
            continue
        assert not all(finding.passed for finding in find_differences(CONFIG_MAPPING[kind]())), kind


PAGE = Path(__file__).parents[3] / "docs" / "models.md"
EXAMPLES = {
    "llama": "Llama 2 and 3, SmolLM2", "qwen2": "Qwen2, Qwen2.5", "qwen3": "Qwen3, dense", "mistral": "Mistral 7B",
    "gemma2": "Gemma 2", "gemma3_text": "Gemma 3, and the text of its larger ones", "phi3": "Phi-3, Phi-4", "gemma": "Gemma",
    "granite": "Granite 3", "smollm3": "SmolLM3", "olmo2": "OLMo 2", "olmo3": "OLMo 3", "glm4": "GLM-4-0414",
    "starcoder2": "StarCoder2", "stablelm": "StableLM 2", "phi": "Phi-1.5, Phi-2", "cohere": "Command R",
    "cohere2": "Command R7B", "nemotron": "Nemotron 4, Minitron", "exaone4": "EXAONE 4", "ernie4_5": "ERNIE 4.5, dense",
    "gpt_neox": "Pythia", "gpt2": "GPT-2", "opt": "OPT", "qwen3_moe": "Qwen3-30B-A3B", "olmoe": "OLMoE", "mixtral": "Mixtral",
    "deepseek_v3": "DeepSeek V3 and R1, Kimi K2, Moonlight",
    "granitemoe": "Granite 3 MoE",
}  # fmt: skip
COLUMNS: dict[str, Use] = {
    "tp": "tensor_parallel", "pp": "pipeline", "critic": "critic", "reward model": "reward_model", "int8, fp8": "int8", "LoRA": "lora",
    "vLLM": "vllm",
}  # fmt: skip


def family_table() -> str:
    """What the page says of each family, from the table that everyone asks and the tests above prove."""
    rows = [f"| `model_type` | for example | {' | '.join(COLUMNS)} |", f"|---|---|{'---|' * len(COLUMNS)}"]
    for kind, family in FAMILIES.items():
        marks = ["-" if use in family else "yes" for use in COLUMNS.values()]
        rows.append(f"| `{kind}` | {EXAMPLES[kind]} | {' | '.join(marks)} |")
    return "\n".join(rows) + "\n"


def test_the_page_has_the_table() -> None:
    assert all(("int8" in family) == ("fp8" in family) for family in FAMILIES.values())
    assert family_table() in PAGE.read_text(), f"write it anew: PYTHONPATH=tests python {Path(__file__).name}"


if __name__ == "__main__":
    before, _, rest = PAGE.read_text().partition("| `model_type` |")
    PAGE.write_text(before + family_table() + "\n" + rest.split("\n\n", 1)[1])
