"""Plans count what llamarl's own engine and trainer hold and move: whole vocabularies, versions in the trainer's precision."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import pytest

from llamarl.cli import plan as verb
from llamarl.errors import PlanError
from llamarl.planner.choices import Options, Workload
from llamarl.planner.costs import GeneratorLayout, pulled_bytes, weight_sync_s
from llamarl.planner.generation import weight_bytes
from llamarl.planner.hardware import find_hardware, this_machine
from llamarl.planner.lengths import constant
from llamarl.planner.model_spec import find_config, find_model
from llamarl.planner.search import search_all
from llamarl.planner.training import TrainerDemand, TrainerLayout, trainer_memory

H100 = find_hardware("h100")
BODY, ENDS, HEAD = 70_553_706_496 - 2 * 128_256 * 8192, 2 * 128_256 * 8192, 128_256 * 8192  # Llama-3.1-70B


def plan(line: str) -> int:
    parser = argparse.ArgumentParser()
    verb.add_parser(parser.add_subparsers())
    args = parser.parse_args(["plan", *line.split()])
    return int(args.run(args))


@pytest.mark.parametrize(
    ("name", "fsdp", "trainer_tp", "tp", "replicas"),
    [("Llama-3.1-8B", 8, 1, 2, 4), ("Llama-3.1-70B", 16, 4, 8, 4), ("Llama-3.1-405B", 64, 8, 8, 16), ("Qwen2.5-7B", 4, 1, 4, 1)],
)  # fmt: skip
def test_the_hand_over_takes_what_plan_sync_counts(
    name: str, fsdp: int, trainer_tp: int, tp: int, replicas: int
) -> None:
    pytest.importorskip("transformers")
    from llamarl.weight_sync.forecast import Link, SyncQuestion, forecast_sync
    from llamarl.weight_sync.model_layouts import model_parameters

    device, efficiency = H100.device, H100.efficiency
    one_node = fsdp * trainer_tp + tp * replicas <= device.devices_per_node
    rate = device.intra_node_bytes_per_s if one_node else device.inter_node_bytes_per_s
    latency = efficiency.intra_node_latency_s if one_node else efficiency.inter_node_latency_s
    layout = GeneratorLayout(tp, 1, "bf16", runnable=True)
    asked = SyncQuestion(
        model=name, trainer_fsdp=fsdp, trainer_tp=trainer_tp, generator_tp=tp, generator_replicas=replicas
    )
    link = Link(bytes_per_s=rate * efficiency.link, latency_s=latency, origin="")
    parameters = model_parameters(find_config(name)[1])
    counted = forecast_sync(parameters, asked, link)
    model = find_model(name)
    assert pulled_bytes(H100, model, layout) == pytest.approx(counted.report.received_bytes.max(), rel=0.005)
    found = weight_sync_s(H100, model, trainer_devices=fsdp * trainer_tp, replicas=replicas, layout=layout)
    assert found == pytest.approx(counted.least_s, rel=0.005)
    cut = GeneratorLayout(tp, 1, "fp8")  # codes from the source, vocabulary cut
    codes = forecast_sync(
        model_parameters(find_config(name)[1], cut_vocabulary=True), replace(asked, quantization="fp8"), link
    )
    assert pulled_bytes(H100, model, cut) == pytest.approx(codes.report.received_bytes.max(), rel=0.005)


def test_a_generator_holds_the_version_and_what_it_derives_from_it() -> None:
    model = find_model("Llama-3.1-70B")
    assert model.total_params == BODY + ENDS and model.head_params == HEAD
    held = BODY * 2 / 4 + ENDS * 2
    assert weight_bytes(H100, model, GeneratorLayout(4, 1, "bf16", runnable=True)) == pytest.approx(held)
    both = held + (BODY + HEAD) / 4
    assert weight_bytes(H100, model, GeneratorLayout(4, 1, "fp8", runnable=True)) == pytest.approx(both)
    alone = BODY / 4 + ENDS * 2 / 4
    assert weight_bytes(H100, model, GeneratorLayout(4, 1, "fp8")) == pytest.approx(alone)
    packed = 4 * (BODY + ENDS) + 4 * (BODY + HEAD)  # a CPU core computes with packed copies
    assert weight_bytes(this_machine(), model, GeneratorLayout(1, 1, "fp32", runnable=True)) == pytest.approx(packed)


def test_a_trainer_holds_whole_vocabularies_on_every_tensor_parallel_rank() -> None:
    model = find_model("Llama-3.1-70B")
    demand = TrainerDemand(lengths=constant(100), prompt_tokens=100, sequences=64)
    memory = trainer_memory(H100, model, TrainerLayout(tp=8, fsdp=4, runnable=True), demand)
    assert memory["parameters"] == pytest.approx(4 * (BODY / 8 + ENDS) / 4)
    assert memory["logits"] == pytest.approx(200 * 128_256 * 8)
    cut = trainer_memory(H100, model, TrainerLayout(tp=8, fsdp=4), demand)
    assert cut["parameters"] == pytest.approx(4 * (BODY + ENDS) / 32)
    assert cut["logits"] == pytest.approx(200 * 128_256)


def test_plans_hold_layouts_as_they_run_unless_told_otherwise() -> None:
    work = Workload(model=find_model("Llama-3.1-8B"), response=constant(200), prompts_per_step=16, group_size=4)
    for options in (Options(), Options(runnable=False)):
        for found in search_all(H100, work, options, 8):
            assert found.generator.layout.runnable == found.trainer.layout.runnable == options.runnable


def test_what_llamarl_cannot_run_is_planned_all_the_same_and_said(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    line = "--model Llama-3.1-405B --devices 1024 --hardware h100 --response-tokens 400 --staleness 1"
    assert plan(line) == 0
    text = capsys.readouterr().out
    assert "not yet    llamarl train runs no layout of this" in text and "planned as with --any-tp" in text
    plan(line + " --json")
    answer = json.loads(capsys.readouterr().out)
    assert "nor on any number" in answer["unrunnable"] and answer["options"]["runnable"] is False
    plan(line + " --any-tp --json")
    asked = json.loads(capsys.readouterr().out)
    assert asked["unrunnable"] is None and asked["plans"] == answer["plans"]
    with pytest.raises(PlanError, match=r"--recipe: .*does not fit"):
        plan(f"{line} --recipe {tmp_path}/out.toml")
    assert not (tmp_path / "out.toml").exists()
