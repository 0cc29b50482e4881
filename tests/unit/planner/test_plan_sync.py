"""``llamarl plan-sync`` as a user meets it, and its bytes a link against the full plan."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from llamarl.cli import main
from llamarl.cli import plan_sync as verb
from llamarl.errors import LlamaRLError
from llamarl.planner.model_spec import find_config
from llamarl.planner.sync_forecast import SyncQuestion, forecast_sync
from llamarl.planner.weight_traffic import MeshSide, report_links
from llamarl.shipped import find_recipe
from llamarl.weight_sync.layout import ParameterSpec, Shard, mesh_layout
from llamarl.weight_sync.mesh_layout import MeshLayout
from llamarl.weight_sync.model_layouts import ModelParameters, fsdp_tp_placements, model_parameters, tp_placements
from llamarl.weight_sync.plan import plan_transfer
from llamarl.weight_sync.stage_layouts import holding_stages


def plan_sync(line: str) -> int:
    parser = argparse.ArgumentParser()
    verb.add_parser(parser.add_subparsers())
    return int(verb.run(parser.parse_args(["plan-sync", *line.split()])))


def test_llama_405b_from_its_name_alone(capsys: pytest.CaptureFixture[str]) -> None:
    line = "Llama-3.1-405B --trainer fsdp=64,tp=8 --generator tp=16,replicas=32"
    assert plan_sync(f"{line} --hardware h100-sxm --json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["num_parameters"] == 405_853_388_800 and answer["model_bytes"] == 2 * 405_853_388_800
    norms = 2 * 16_384 * (2 * 126 + 1)  # bytes of what tp does not cut
    assert answer["uncut_bytes"] == norms
    heads = 2 * 2 * 126 * 8 * 128 * 16_384  # bytes of k and v: each of 8 heads lies on two of 16 ranks
    received = (2 * 405_853_388_800 - norms + heads) / 16 + norms
    assert answer["received_bytes_per_rank"] == {"mean": received, "max": received}
    assert answer["sent_bytes_per_rank"]["mean"] == pytest.approx(received)  # as many ranks on both sides
    assert answer["least_s"] == pytest.approx(received / (50e9 * 0.8) + 10e-6, rel=1e-4)  # some have a row more
    assert answer["trainer_ranks"] == answer["generator_ranks"] == 512
    assert answer["bytes_per_link"]["mean"] * answer["num_links"] == pytest.approx(512 * received)


def test_text_names_ranks_links_memory_and_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_sync("SmolLM2-135M --trainer fsdp=2 --generator replicas=3 --dtype fp32 --link-gb-per-s 2") == 0
    text = capsys.readouterr().out
    size = 4 * 134_515_008 / 1e6
    assert f"134,515,008 parameters, one version is {size:.2f} MB in float32" in text
    for part in (
        "fsdp 2 x tp 1", "tp 1 x 3 replicas", "links in use    6", "2 versions of its own shards",
        f"trainer memory  {size:.2f} MB a rank",  # two versions of half the model
        f"time            {3 * size / 2 / 2000:.3g} s at least",  # half the model to each of three replicas
    ):  # fmt: skip
        assert part in text, part


def test_recipe_gives_layouts_type_and_staleness(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text(
        "[schedule]\nmax_staleness = 3\nprompts_per_step = 8\n[generator]\ndp = 4\npp = 2\n[trainer]\nfsdp = 2\ntp = 2\n"
        "cp = 2\npp = 2\n"
    )
    assert plan_sync(f"{recipe} --generator tp=2 --json") == 0
    question = json.loads(capsys.readouterr().out)["question"]
    assert question == {
        "model": "tiny", "trainer_fsdp": 2, "trainer_tp": 2, "generator_tp": 2, "generator_replicas": 4,
        "trainer_cp": 2, "trainer_pp": 2, "generator_pp": 2, "versions": 4, "dtype": "float32",
        "adapter_rank": 0, "adapter_targets": [],
    }  # fmt: skip


def test_a_recipe_that_ships_goes_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_sync("pipeline --json") == 0
    named = json.loads(capsys.readouterr().out)
    assert plan_sync(f"{find_recipe('pipeline')} --json") == 0
    assert json.loads(capsys.readouterr().out) == named and named["question"]["trainer_pp"] > 1


def test_adapters_alone_are_counted_where_they_are_handed_over(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    recipe = tmp_path / "r.toml"
    lora = '[lora]\nrank = 4\nhand_over = "adapter"\n'
    recipe.write_text(f'{lora}targets = ["q_proj", "o_proj"]\n[trainer]\nfsdp = 2\n')
    assert plan_sync(f"{recipe} --generator tp=2 --json") == 0
    answer = json.loads(capsys.readouterr().out)
    _, model = find_config("bundled:tiny")
    hidden, layers = model["hidden_size"], model["num_hidden_layers"]
    each = 4 * hidden  # numbers of A, and of B: both layers are square
    assert answer["num_parameters"] == 2 * 2 * each * layers and answer["model_bytes"] == 4 * answer["num_parameters"]
    # q_proj is cut by columns, o_proj by rows: of each, one factor is cut over the two ranks and the other is whole on both
    assert answer["received_bytes_per_rank"]["max"] == 4 * layers * 2 * (each + each / 2)
    recipe.write_text(f"{lora}[trainer]\npp = 2\n")
    assert plan_sync(f"{recipe}") == 0
    assert "tiny: adapters of rank 4 alone, " in capsys.readouterr().out
    with pytest.raises(LlamaRLError, match="adapters alone travel"):
        plan_sync(f"{recipe} --dtype bf16")
    recipe.write_text(f'{lora}targets = ["qq"]\n')
    with pytest.raises(LlamaRLError, match="lora.targets: qq may have no adapter, but q_proj"):
        plan_sync(f"{recipe}")


@pytest.mark.parametrize("sink_mesh", [{"tp": 2}, {"replica": 3}, {"replica": 2, "tp": 3}])
def test_bytes_a_link_equal_the_full_plan(sink_mesh: dict[str, int]) -> None:
    specs = {"q": ParameterSpec((26, 8), "float32"), "o": ParameterSpec((8, 24), "float32")}
    tp = {"q": Shard("tp", 0), "o": Shard("tp", 1)}
    source = MeshSide(mesh={"fsdp": 3, "tp": 2}, placements={n: [tp[n], Shard("fsdp", 0)] for n in specs})
    sink = MeshSide(mesh=sink_mesh, placements={n: [cut] for n, cut in tp.items()} if "tp" in sink_mesh else {})
    plan = plan_transfer(
        mesh_layout(specs, source.mesh, source.placements), mesh_layout(specs, sink.mesh, sink.placements)
    )
    links = plan.link_bytes()
    report = report_links(specs, source, sink)
    assert (report.num_links, report.max_bytes) == (len(links), max(links.values()))
    assert report.mean_bytes == pytest.approx(sum(links.values()) / len(links))


def test_stages_on_both_sides_by_the_full_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Stages, data ranks, context ranks and tensor-parallel ranks to two replicas of two stages; the embedding is tied."""
    config = {
        "model_type": "llama", "hidden_size": 16, "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 24, "vocab_size": 36, "tie_word_embeddings": True,
    }  # fmt: skip
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    line = f"{file} --trainer pp=3,fsdp=2,cp=2,tp=2 --generator tp=4,pp=2,replicas=2 --json"
    assert plan_sync(line) == 0
    answer = json.loads(capsys.readouterr().out)
    parameters = model_parameters(config)
    source = MeshLayout(
        parameters, {"pp": 3, "shard": 4, "tp": 2}, fsdp_tp_placements(parameters, fsdp="shard"), holding_stages(parameters, 3)
    )  # fmt: skip
    sink = MeshLayout(
        parameters, {"replica": 2, "pp": 2, "tp": 4}, tp_placements(parameters), holding_stages(parameters, 2)
    )
    plan = plan_transfer(source.listed(), sink.listed())
    assert answer["num_copies"] == len(plan.copies)
    assert answer["received_bytes_per_rank"]["max"] == max(plan.received_bytes())
    assert answer["received_bytes_per_rank"]["mean"] == sum(plan.received_bytes()) / 16
    assert answer["sent_bytes_per_rank"]["mean"] == pytest.approx(sum(plan.sent_bytes()) / 24)
    assert answer["sent_bytes_per_rank"]["max"] == pytest.approx(max(plan.sent_bytes()), rel=0.1)
    assert answer["bytes_per_link"]["mean"] * answer["num_links"] == pytest.approx(sum(plan.received_bytes()))
    assert answer["num_links"] >= len(plan.link_bytes())  # replicated sources: each of them counts


def test_replicated_sources_share_a_link_evenly() -> None:
    specs = {"w": ParameterSpec((4,), "float32")}
    report = report_links(specs, MeshSide(mesh={"r": 2}, placements={}), MeshSide(mesh={"r": 3}, placements={}))
    assert (report.num_links, report.mean_bytes, report.max_bytes) == (6, 8.0, 8.0)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("Llama-3.1-8", "nearest bundled shape is 'Llama-3.1-8B'"),
        ("tiny.toml --json", "tiny.toml does not exist"),
        ("Llama-3.1-8B --trainer fdsp=2", "no axis 'fdsp'; did you mean 'fsdp'"),
        ("Llama-3.1-8B --generator fsdp=2", "no axis 'fsdp'.*it has tp, pp and replicas"),
        ("Llama-3.1-8B --trainer 8", "'8' is no axis with a size; write for example fsdp=64,tp=8"),
        ("Llama-3.1-8B --trainer tp=2,tp=4", "tp is given twice"),
        ("Llama-3.1-8B --generator tp=0", "tp must be >= 1, got 0"),
        ("Llama-3.1-8B --dtype bf17", "did you mean 'bf16'"),
        ("Llama-3.1-8B --hardware h10", "unknown hardware 'h10': the nearest is"),
        ("Llama-3.1-8B --link-gb-per-s -1", "--link-gb-per-s must be above 0"),
        ("Llama-3.1-8B --link-gb-per-s 5 --hardware h100", "not both"),
        ("Llama-3.1-8B --max-staleness -1", "--max-staleness must be >= 0"),
        ("Llama-3.1-8B --trainer fsdp=100000", "fsdp 100,000 = 100,000 ranks; at most 65,536"),
        ("Llama-3.1-8B --trainer pp=33", "--trainer pp=33: 32 layers cannot be cut into 33 stages"),
        ("Llama-3.1-8B --generator tp=8,replicas=9000", "tp 8 x replicas 9,000 = 72,000 ranks; at most 65,536"),
    ],
)
def test_nonsense_is_refused_by_name(line: str, message: str) -> None:
    with pytest.raises(LlamaRLError, match=message) as caught:
        plan_sync(line)
    assert caught.value.exit_code == 2


QWEN3_MOE = {
    "model_type": "qwen3_moe", "hidden_size": 16, "intermediate_size": 32, "moe_intermediate_size": 12,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_experts": 6,
    "num_experts_per_tok": 2, "vocab_size": 40, "tie_word_embeddings": False,
}  # fmt: skip
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "hidden_size": 16, "intermediate_size": 32, "moe_intermediate_size": 12,
    "num_hidden_layers": 2, "first_k_dense_replace": 1, "num_attention_heads": 4, "num_key_value_heads": 4,
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "n_shared_experts": 1,
    "vocab_size": 40, "tie_word_embeddings": False,
}  # fmt: skip


def test_experts_of_qwen3_moe_lie_over_ranks_and_the_rest_as_its_plan_says() -> None:
    parameters = model_parameters(QWEN3_MOE, cut_vocabulary=False)
    gate_up, down = (f"model.layers.1.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj"))
    assert parameters[gate_up].shape == (6, 24, 16) and parameters[down].shape == (6, 16, 12)
    assert (parameters.tp_dims[gate_up], parameters.tp_dims[down]) == (0, 0)  # whole experts
    assert not parameters.packed
    answer = forecast_sync(
        parameters, SyncQuestion(model="m", trainer_fsdp=2, trainer_tp=1, generator_tp=2, generator_replicas=1)
    )
    layer = 6 * 24 * 16 + 6 * 16 * 12 + 2 * 32 * 16 + 2 * 16 * 16  # experts; q and o; k and v: these are cut
    whole = {
        "model.embed_tokens.weight": 40 * 16, "lm_head.weight": 40 * 16, "model.norm.weight": 16,
        "model.layers.*.mlp.gate.weight": 2 * 6 * 16, "model.layers.*.input_layernorm.weight": 2 * 16,
        "model.layers.*.post_attention_layernorm.weight": 2 * 16, "model.layers.*.self_attn.q_norm.weight": 2 * 8,
        "model.layers.*.self_attn.k_norm.weight": 2 * 8,
    }  # fmt: skip
    assert {kind.name: kind.nbytes for kind in answer.whole} == {name: 2 * n for name, n in whole.items()}
    assert answer.report.received_bytes.tolist() == [2 * layer + 2 * sum(whole.values())] * 2
    reasons = {kind.name: kind.reason for kind in answer.whole}
    assert reasons["lm_head.weight"] == "not in the model's tensor-parallel plan"
    assert reasons["model.layers.*.self_attn.q_norm.weight"] == "whole by the model's tensor-parallel plan"
    text = answer.text()
    assert "lm_head.weight (not in the model's tensor-parallel plan)" in text and "3 smaller kinds" not in text


def test_halves_of_a_packed_expert_matrix_meet_only_their_own_ranks() -> None:
    """gate rows 0..4 and up rows 4..8 in one parameter: at tp 2 rank 1 holds rows 2..4 and 6..8, at tp 4 rank 1 row 1 and 5."""
    parameters = ModelParameters({"gate_up": ParameterSpec((1, 8, 1), "int8")}, {"gate_up": 1}, packed=["gate_up"])
    shape = {"trainer_fsdp": 1, "trainer_tp": 2, "generator_replicas": 1}
    answer = forecast_sync(parameters, SyncQuestion(model="m", generator_tp=4, **shape))
    assert answer.report.received_bytes.tolist() == [2, 2, 2, 2]
    assert (answer.links.num_links, answer.links.max_bytes) == (4, 2.0), (
        "each generator rank pulls from one trainer rank"
    )


def test_deepseek_v3_says_which_parameters_are_whole_and_why() -> None:
    parameters = model_parameters(DEEPSEEK_V3)
    assert parameters.tp_dims["model.layers.1.mlp.experts.gate_up_proj"] == 0
    assert parameters.tp_dims["model.layers.1.mlp.experts.down_proj"] == 0
    assert parameters.tp_dims["model.layers.1.mlp.shared_experts.down_proj.weight"] == 1
    attention = [name for name in parameters if ".self_attn." in name]
    assert attention and all(parameters.whole[n] == "not in the model's tensor-parallel plan" for n in attention)
    question = SyncQuestion(model="m", trainer_fsdp=1, trainer_tp=1, generator_tp=2, generator_replicas=1)
    assert "model.layers.*.self_attn.o_proj.weight (not in the model's" in forecast_sync(parameters, question).text()


@pytest.mark.parametrize(
    ("config", "line", "message"),
    [
        ({"model_type": "llama", "hidden_size": -3}, "", "not usable as a model's config"),
        ({"model_type": "no_such_model"}, "", "not usable as a model's config"),
        ({"hidden_size": 3}, "", "not usable as a model's config"),
        ({"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 9}, "--generator tp=2",
         "generator tp=2: .* no tensor-parallel plan.*fits: 1. Raise replicas"),
        (QWEN3_MOE, "--generator tp=3", "generator tp=3 cuts an attention head.*sizes that fit: 1, 2, 4"),
        (QWEN3_MOE, "--trainer tp=8", "trainer tp=8 cuts an attention head.*sizes that fit: 1, 2, 4"),
    ],
)  # fmt: skip
def test_models_that_make_no_sense_are_refused(
    tmp_path: Path, config: dict[str, object], line: str, message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(LlamaRLError, match=message) as caught:
        plan_sync(f"{tmp_path / 'config.json'} {line}")
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("flag", ["--trainer", "--generator", "--dtype", "--hardware"])
def test_empty_values_are_refused(flag: str) -> None:
    parser = argparse.ArgumentParser()
    verb.add_parser(parser.add_subparsers())
    with pytest.raises(LlamaRLError):
        verb.run(parser.parse_args(["plan-sync", "SmolLM2-135M", flag, ""]))


def test_layouts_may_be_written_as_the_docs_write_them() -> None:
    assert verb.parse_layout("trainer", "fsdp 64 x tp 8") == {"fsdp": 64, "tp": 8}
    assert verb.parse_layout("generator", "tp=16, dp=32") == {"tp": 16, "replicas": 32}


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        plan_sync("--help")
    text = capsys.readouterr().out
    for part in ("examples:", "Llama-3.1-405B --trainer fsdp=64,tp=8", "--link-gb-per-s", "each way"):
        assert part in text


def test_verb_is_found_from_the_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(main.signal, "signal", lambda *_: None)
    assert main.main(["plan-sync", "Llama-3.1-8B", "--trainer", "fdsp=2"]) == 2
    assert "llamarl plan-sync: --trainer 'fdsp=2'" in capsys.readouterr().err
