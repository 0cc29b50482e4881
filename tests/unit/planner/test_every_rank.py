"""The bytes of every rank of a plan: worked by hand for a small model, held against the planner's formula for large ones."""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("transformers")

from llamarl.cli import plan as verb
from llamarl.planner.choices import Options, Workload
from llamarl.planner.every_rank import EveryRank, count_every_rank
from llamarl.planner.generation import weight_bytes
from llamarl.planner.hardware import find_hardware
from llamarl.planner.lengths import constant
from llamarl.planner.model_spec import find_model, spec_from_config
from llamarl.planner.rooflines import GeneratorLayout, stage_params, weight_sync_s
from llamarl.planner.search import Plan, best_separate
from llamarl.planner.training import TrainerLayout
from llamarl.weight_sync.mesh_layout import MeshLayout
from llamarl.weight_sync.model_layouts import ModelParameters, fsdp_tp_placements, model_parameters, tp_placements
from llamarl.weight_sync.plan import plan_transfer
from llamarl.weight_sync.stage_layouts import holding_stages, stage_parameters

H100 = find_hardware("h100")
SMALL = {
    "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 4, "intermediate_size": 48, "vocab_size": 40, "tie_word_embeddings": False,
}  # fmt: skip


def planned(trainer: TrainerLayout, generator: GeneratorLayout, replicas: int, model: str = "Llama-3.1-8B") -> Plan:
    """A plan with these layouts; its times do not matter here."""
    work = Workload(model=find_model(model), response=constant(64), prompts_per_step=16, group_size=4)
    plan = best_separate(H100, work, Options(partial_rollouts=False), 32, 1)
    memory = {**plan.trainer.memory, "parameters": 0.0}
    return dataclasses.replace(
        plan,
        trainer=dataclasses.replace(plan.trainer, layout=trainer, memory=memory),
        generator=dataclasses.replace(plan.generator, layout=generator, replicas=replicas),
    )


def counted(trainer: TrainerLayout, generator: GeneratorLayout, replicas: int, **config: object) -> EveryRank:
    described = {**SMALL, **config}
    return count_every_rank(
        model_parameters(described), planned(trainer, generator, replicas), spec_from_config(described, "small"), H100
    )


def test_layers_and_ends_of_stages() -> None:
    parameters = model_parameters(SMALL)
    first, last = stage_parameters(parameters, 2)
    assert {name.split(".")[2] for name in first if "layers" in name} == {"0", "1"}
    assert "model.embed_tokens.weight" in first and "model.embed_tokens.weight" not in last
    assert {"model.norm.weight", "lm_head.weight"} <= set(last)
    assert sorted([*first, *last]) == sorted(parameters)
    tied = holding_stages(model_parameters({**SMALL, "tie_word_embeddings": True}), 2)
    assert tied["model.embed_tokens.weight"] == (0, 1) and tied["model.norm.weight"] == (1,)


def test_a_trainer_in_stages_holds_a_stage_each() -> None:
    """Two stages over a rank each: a layer has 2 * 32 of norms, q and o of 32 x 32, k and v of 8 x 32, three of 48 x 32."""
    layer = 2 * 32 + 2 * 32 * 32 + 2 * 8 * 32 + 3 * 48 * 32
    found = counted(TrainerLayout(pp=2), GeneratorLayout(), 2)
    numbers = [2 * layer + 40 * 32, layer + 32 + 40 * 32]
    assert found.trainer["version"].tolist() == [2 * n for n in numbers]
    assert found.trainer["optimizer"].tolist() == [8 * n for n in numbers]
    assert found.state().tolist() == [16 * n for n in numbers]
    assert found.trainer["sent"].tolist() == [2 * 2 * n for n in numbers]  # to two replicas
    assert found.generator["received"].tolist() == [2 * sum(numbers)] * 2
    assert found.model_bytes == 2 * sum(numbers)


def test_ranks_beyond_the_key_value_heads_hold_the_same_ones() -> None:
    found = counted(TrainerLayout(), GeneratorLayout(tp=4), 1)
    cut = 2 * (2 * 32 * 32 + 3 * 48 * 32) // 4 + 2 * (2 * 8 * 32) // 2  # k and v: two heads over four ranks
    whole = 2 * (2 * 32)
    ends = 2 * (2 * 40 * 32 + 32)
    assert found.generator["received"][0] in (3 * (cut + whole) + ends, 3 * (cut + whole) + 2 * 32 + 2 * 2 * 10 * 32)
    assert found.whole_sums == pytest.approx({"trainer": found.model_bytes, "generator": found.model_bytes})


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("trainer", "generator", "replicas"),
    [
        (TrainerLayout(tp=2, fsdp=3), GeneratorLayout(tp=4), 2),
        (TrainerLayout(tp=4, pp=3, fsdp=2), GeneratorLayout(tp=8), 1),
        (TrainerLayout(pp=2, fsdp=2, dp=2), GeneratorLayout(tp=2, pp=3), 3),
        (TrainerLayout(tp=2, fsdp=3, cp=2), GeneratorLayout(tp=4), 2),
    ],
)
def test_sums_over_ranks_are_the_model_and_what_is_sent_arrives(
    trainer: TrainerLayout, generator: GeneratorLayout, replicas: int, tied: bool
) -> None:
    found = counted(trainer, generator, replicas, tie_word_embeddings=tied)
    assert found.whole_sums == pytest.approx({"trainer": found.model_bytes, "generator": found.model_bytes})
    assert found.trainer["sent"].sum() == pytest.approx(found.generator["received"].sum())
    assert len(found.state()) == trainer.devices and len(found.generator["received"]) == replicas * generator.devices


def test_the_forecast_of_a_generator_in_stages_is_that_of_its_fullest_stage() -> None:
    """Three layers and two ends in two stages: two layers and the embedding, or a layer, the last norm and the output layer."""
    layout = GeneratorLayout(pp=2, runnable=True)
    found = counted(TrainerLayout(), layout, 1)
    assert found.forecast["received"] == pytest.approx(found.generator["received"].max(), rel=0.01)
    assert found.generator["received"].max() > 1.2 * found.generator["received"].mean()
    shape = spec_from_config(SMALL, "small")
    assert weight_bytes(H100, shape, layout) == pytest.approx(found.generator["received"].max(), rel=0.01)
    stages, head = stage_params(shape, layout), 40 * 32
    codes = [stages[0] - head, stages[1]]  # of all but the embedding
    lower = replace(layout, precision="fp8")
    assert weight_bytes(H100, shape, lower) == pytest.approx(max(2 * s + c for s, c in zip(stages, codes, strict=True)))
    sent = weight_sync_s(H100, shape, trainer_devices=16, replicas=64, layout=layout)
    link = H100.device.inter_node_bytes_per_s * H100.efficiency.link
    assert sent == pytest.approx(64 * 2 * sum(stages) / 16 / link + H100.efficiency.inter_node_latency_s)


SPARSE = SMALL | {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 20}


@pytest.mark.parametrize("trainer", [TrainerLayout(fsdp=4, ep=2), TrainerLayout(fsdp=4, tp=2, ep=4), TrainerLayout(pp=3, fsdp=2, cp=2, ep=4)])  # fmt: skip
def test_experts_over_ranks_that_share_data_are_counted_once(trainer: TrainerLayout) -> None:
    """As many bytes as without: whole experts lie on other ranks than slices of all of them would."""
    found = counted(trainer, GeneratorLayout(tp=2), 2, **SPARSE)
    assert found.whole_sums == pytest.approx({"trainer": found.model_bytes, "generator": found.model_bytes})
    assert found.trainer["sent"].sum() == pytest.approx(found.generator["received"].sum())
    assert len(found.state()) == trainer.devices and found.trainer_ep == trainer.ep
    apart = counted(dataclasses.replace(trainer, ep=1), GeneratorLayout(tp=2), 2, **SPARSE)
    np.testing.assert_allclose(found.state(), apart.state())  # eight experts divide evenly either way


def test_ranks_receive_what_the_full_plan_gives_them() -> None:
    """Two stages x two data ranks x two tensor-parallel ranks to four: every slice copy listed."""
    parameters: ModelParameters = model_parameters(SMALL)
    found = counted(TrainerLayout(tp=2, pp=2, fsdp=2), GeneratorLayout(tp=4), 1)
    source = MeshLayout(
        parameters, {"pp": 2, "fsdp": 2, "tp": 2}, fsdp_tp_placements(parameters), holding_stages(parameters, 2)
    )
    plan = plan_transfer(source.listed(), MeshLayout(parameters, {"tp": 4}, tp_placements(parameters)).listed())
    received, sent = plan.received_bytes(), plan.sent_bytes()
    assert found.generator["received"].tolist() == received
    assert sum(sent) == found.trainer["sent"].sum()
    np.testing.assert_allclose(
        found.trainer["sent"], sent, atol=2 * 2 * 40 * 32
    )  # replicated sources: to within a copy


def ask(line: str) -> int:
    parser = argparse.ArgumentParser()
    verb.add_parser(parser.add_subparsers())
    args = parser.parse_args(["plan", *line.split()])
    return int(args.run(args))


def test_the_405b_model_on_1024_devices_is_counted_rank_by_rank(capsys: pytest.CaptureFixture[str]) -> None:
    begun = time.monotonic()
    assert (
        ask(
            "--model Llama-3.1-405B --devices 1024 --hardware h100-sxm --staleness 1 --max-segments 1 --every-rank --json"
        )
        == 0
    )
    assert time.monotonic() - begun < 120.0
    answer = json.loads(capsys.readouterr().out)
    found = answer["every_rank"]
    plan = answer["plans"][answer["recommended"]]
    trainer, generator = found["trainer"], found["generator"]
    assert len(trainer["optimizer"]) == plan["trainer"]["devices"]
    assert len(generator["received"]) == plan["generator"]["devices"]
    idle = answer["idle"]["count"] if answer["idle"] else 0
    assert len(trainer["optimizer"]) + len(generator["received"]) == 1024 - idle
    whole = 2 * find_model("Llama-3.1-405B").total_params
    assert found["model_bytes"] == whole
    assert found["whole_sums"] == pytest.approx({"trainer": whole, "generator": whole}, rel=1e-9)
    assert sum(trainer["sent"]) == pytest.approx(sum(generator["received"]), rel=1e-6)
    state = [
        sum(parts) for parts in zip(*(trainer[name] for name in ("parameters", "gradients", "optimizer")), strict=True)
    ]
    assert max(state) == pytest.approx(found["forecast"]["state"], rel=0.01)
    assert max(generator["received"]) == pytest.approx(found["forecast"]["received"], rel=0.01)


def test_a_summary_is_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert ask("--model Llama-3.1-8B --devices 8 --hardware h100-sxm --staleness 1 --max-segments 1 --every-rank") == 0
    said = capsys.readouterr().out
    for words in (
        "trainer: all its state",
        "generator: receives and holds",
        "sum over one copy of the model",
        "slice copies",
    ):
        assert words in said
