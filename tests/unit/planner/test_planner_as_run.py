"""Plans count what llamarl's own engine and trainer hold and move: copied heads, versions in the trainer's precision."""

from __future__ import annotations

import argparse
import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from llamarl.cli import plan as verb
from llamarl.cli.plan_recipe import choose_written
from llamarl.config import load_config
from llamarl.errors import PlanError
from llamarl.planner.choices import Options, Workload, generator_choices
from llamarl.planner.generation import weight_bytes
from llamarl.planner.hardware import find_hardware, this_machine
from llamarl.planner.lengths import constant
from llamarl.planner.model_spec import find_config, find_model
from llamarl.planner.recipe import plan_settings
from llamarl.planner.rooflines import GeneratorLayout, pulled_bytes, weight_sync_s
from llamarl.planner.runnable import why_not_run
from llamarl.planner.search import best_resharding, best_separate, recommend, search_all
from llamarl.planner.training import TrainerDemand, TrainerLayout, trainer_memory, trainer_tick
from llamarl.simulator.sources import scenario_from_plan
from llamarl.trainer.config import TrainerConfig

H100 = find_hardware("h100")
BODY, ENDS, HEAD = 70_553_706_496 - 2 * 128_256 * 8192, 2 * 128_256 * 8192, 128_256 * 8192  # Llama-3.1-70B


def plan(line: str) -> int:
    parser = argparse.ArgumentParser()
    verb.add_parser(parser.add_subparsers())
    args = parser.parse_args(["plan", *line.split()])
    return int(args.run(args))


@pytest.mark.parametrize(
    ("name", "fsdp", "trainer_tp", "tp", "replicas"),
    [("Llama-3.1-8B", 8, 1, 2, 4), ("Llama-3.1-70B", 16, 4, 8, 4), ("Llama-3.1-405B", 64, 8, 8, 16), ("Llama-3.1-405B", 64, 8, 32, 8), ("Qwen2.5-7B", 4, 1, 4, 1)],
)  # fmt: skip
def test_the_hand_over_takes_what_plan_sync_counts(
    name: str, fsdp: int, trainer_tp: int, tp: int, replicas: int
) -> None:
    pytest.importorskip("transformers")
    from llamarl.planner.sync_forecast import Link, SyncQuestion, forecast_sync
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


def test_a_generator_holds_the_version_and_what_it_derives_from_it() -> None:
    model = find_model("Llama-3.1-70B")
    assert model.total_params == BODY + ENDS and model.head_params == HEAD
    held = (BODY + ENDS) * 2 / 4
    assert weight_bytes(H100, model, GeneratorLayout(4, 1, "bf16", runnable=True)) == pytest.approx(held)
    both = held + (BODY + HEAD) / 4
    assert weight_bytes(H100, model, GeneratorLayout(4, 1, "fp8", runnable=True)) == pytest.approx(both)
    alone = BODY / 4 + ENDS * 2 / 4
    assert weight_bytes(H100, model, GeneratorLayout(4, 1, "fp8")) == pytest.approx(alone)
    packed = 4 * (BODY + ENDS) + 4 * (BODY + HEAD)  # a CPU core computes with packed copies
    assert weight_bytes(this_machine(), model, GeneratorLayout(1, 1, "fp32", runnable=True)) == pytest.approx(packed)


def test_a_trainer_holds_its_part_of_the_vocabulary_and_logits_of_a_chunk() -> None:
    model = find_model("Llama-3.1-70B")
    demand = TrainerDemand(lengths=constant(100), prompt_tokens=100, sequences=64)
    memory = trainer_memory(H100, model, TrainerLayout(tp=8, fsdp=4, runnable=True), demand)
    assert memory["parameters"] == pytest.approx(4 * (BODY + ENDS) / 8 / 4)
    assert memory["gathered_layers"] == pytest.approx(
        ENDS / 8 * 2
    )  # FSDP2's root holds both ends to the end of the pass
    assert memory["activations"] == pytest.approx(
        6 * ENDS / 8
    )  # so few tokens: at the end both ends' gradients, bf16 and fp32
    assert memory["logits"] == 0  # they are gone by then
    long = TrainerDemand(lengths=constant(7900), prompt_tokens=100, sequences=64)
    rows = trainer_memory(H100, model, TrainerLayout(tp=8, fsdp=4, recompute=False, runnable=True), long)["logits"]
    assert rows == pytest.approx(
        TrainerConfig().logprob_chunk_tokens * 128_256 / 8 * 4
    )  # a chunk, beside the head's gradient
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
    line = "--model DeepSeek-V3 --devices 1024 --hardware h100 --response-tokens 400 --staleness 1"
    assert plan(f"{line} --every-rank") == 0
    text = capsys.readouterr().out
    assert "every rank not counted: the plan is for a system that cuts more of DeepSeek-V3" in text
    assert "trainer: all its state" not in text
    assert "not yet    llamarl train does not run this plan: " in text
    assert "DeepSeek-V3 (671.0 B parameters) does not fit" in text
    plan(line + " --json")
    answer = json.loads(capsys.readouterr().out)
    assert "nor on any number" in answer["unrunnable"] and answer["options"]["runnable"] is False
    assert "counted for a system that also cuts latent attention" in answer["unrunnable"]
    with pytest.raises(PlanError, match=r"--recipe: .*does not fit"):
        plan(f"{line} --recipe {tmp_path}/out.toml")
    assert not (tmp_path / "out.toml").exists()


def test_sharing_gpus_in_turns_moves_the_training_state_through_host_memory() -> None:
    """As ``schedule.colocated`` does at every tick: weights and moments out and back, the version from the host."""
    model = find_model("Llama-3.2-1B")
    work = Workload(model=model, response=constant(200), prompts_per_step=16, group_size=8)
    found = best_resharding(H100, work, Options(), 2)
    rate = H100.device.host_bytes_per_s * H100.efficiency.link
    moved = 2 * (found.trainer.memory["parameters"] + found.trainer.memory["optimizer"])
    assert found.sync_s == pytest.approx(moved / rate + pulled_bytes(H100, model, found.generator.layout) / rate)
    assert found.step_s == pytest.approx(found.trainer.time.total_s + found.generator.time_s + found.sync_s)
    assert (
        best_resharding(H100, work, Options(runnable=False), 2).sync_s < found.sync_s / 5
    )  # it may stay on the device
    assert recommend(search_all(H100, work, Options(), 2)).system == "separate"
    cpu = best_resharding(this_machine(), replace(work, model=find_model("SmolLM2-135M")), Options(), 2)
    assert cpu.notes == ("training state stays on the device",)


def test_a_generator_in_stages_is_planned_and_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    line = "--model Llama-3.1-405B --devices 256 --hardware h100 --response-tokens 400 --staleness 1 --max-pipeline 4"
    plan(f"{line} --recipe {tmp_path}/out.toml")
    said = capsys.readouterr().out
    assert "·pp" in said and "not yet" not in said
    written = tomllib.loads((tmp_path / "out.toml").read_text())["generator"]
    assert written["pp"] > 1 and f"tp{written['tp']}·pp{written['pp']}·dp{written['dp']}" in said


def test_a_generator_gets_stages_unasked_where_its_tensor_parallel_ranks_are_too_few() -> None:
    small = replace(find_model("Llama-3.1-70B"), heads=8)  # so at most 8 ranks hold a layer
    device = replace(H100.device, memory_bytes=16e9)
    hardware = replace(H100, device=device)
    work = Workload(model=small, response=constant(400), prompts_per_step=16, group_size=8)
    options = Options(precisions=(device.train_precision,))
    limit = hardware.usable_memory_bytes
    found = [
        choice.layout for choice in generator_choices(hardware, work, options, 64, memory_limit=limit, partial=False)
    ]
    assert {layout.pp for layout in found} == {2} and {layout.tp for layout in found} == {8}
    assert all(weight_bytes(hardware, small, replace(layout, pp=1)) > limit for layout in found)
    not_cut = replace(work, model=replace(small, staged_by_llamarl=False))
    assert not list(generator_choices(hardware, not_cut, options, 64, memory_limit=limit, partial=False))


def test_a_plan_with_stages_that_the_model_is_not_cut_into_is_not_written() -> None:
    work = Workload(model=find_model("Llama-3.1-8B"), response=constant(400), prompts_per_step=16, group_size=8)
    plans = search_all(H100, work, Options(), 8, (1,))
    staged = [
        replace(found, generator=replace(found.generator, layout=replace(found.generator.layout, pp=2)))
        for found in plans
        if found.system == "separate"
    ]
    model = replace(find_model("Llama-3.1-8B"), staged_by_llamarl=False)
    with pytest.raises(PlanError, match="--recipe: .*generator of .* has 2 pipeline stages, llamarl has 1 for"):
        choose_written(staged, staged[0], model, H100)


def test_a_trainer_in_stages_runs_where_the_model_can_be_cut() -> None:
    work = Workload(model=find_model("Llama-3.1-8B"), response=constant(400), prompts_per_step=16, group_size=8)
    plans = search_all(H100, work, Options(), 8, (1,))
    staged = [
        replace(found, trainer=replace(found.trainer, layout=replace(found.trainer.layout, pp=2)))
        for found in plans
        if found.system == "separate"
    ]
    assert all(why_not_run(found, find_model("Llama-3.1-8B")) == [] for found in staged)
    assert all(why_not_run(found, find_model("Qwen3-30B-A3B")) == [] for found in staged)
    uncut = replace(find_model("Qwen3-30B-A3B"), staged_by_llamarl=False)
    assert any("the trainer of" in reason and "2 pipeline stages" in reason for reason in why_not_run(staged[0], uncut))


def test_a_written_recipe_keeps_to_the_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "out.toml"
    base = Path(__file__).parents[3] / "recipes" / "colocated.toml"
    line = f"plan {base} --hardware h100 --devices 8 --prompt-tokens 64 --recipe {out}".removeprefix("plan ")
    plan(line)
    written = load_config(out)  # which refuses a schedule that no run could have
    assert written.schedule.colocated is (written.schedule.max_staleness == 0 and "co-located" in out.read_text())
    with pytest.raises(PlanError, match="fp8, which llamarl's engine does not have on NVIDIA A100"):
        plan(f"--model Llama-3.1-8B --devices 8 --hardware a100 --response-tokens 300 --precision fp8 --recipe {out}")


def test_replicas_that_do_not_divide_the_prompts_are_a_kind_of_their_own(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "out.toml"
    line = "--model Llama-3.1-70B --devices 72 --hardware h100 --staleness 1"
    assert plan(f"{line} --recipe {out} --json") == 0
    answer = json.loads(capsys.readouterr().out)
    planned = answer["plans"][answer["recommended"]]["generator"]
    assert not planned["dealt_evenly"] and 128 % planned["replicas"]
    written = load_config(out)
    assert [(kind.dp, kind.share) for kind in written.generator.replicas] == [(planned["replicas"], 1)]
    assert (written.generator.tp, written.generator.dp) == (planned["tp"], 1)
    most = planned["sequences_per_replica"] // 16
    counts = written.dealing.counts(0)
    assert sum(counts) == 128 and max(counts) == most and min(counts) == most - 1


def test_a_simulation_of_replicas_that_do_not_divide_gives_all_as_many() -> None:
    model = find_model("Llama-3.1-8B")
    work = Workload(model=model, response=constant(200), prompts_per_step=7, group_size=4)
    found = best_separate(H100, work, Options(partial_rollouts=False), 8, 1)
    share = 3 * work.group_size
    demand = replace(found.generator.demand, sequences=share)
    uneven = replace(found, generator=replace(found.generator, replicas=3, demand=demand))
    scenario = scenario_from_plan(uneven, work, H100, Options())
    assert (scenario.replicas, scenario.prompts_per_step) == (3, 9) and "9 prompts a tick" in scenario.title
    tokens = 9 * 4 * (work.prompt_tokens + 200)
    assert scenario.trainer.tick_s + scenario.trainer.token_s * tokens == pytest.approx(found.trainer.time.total_s)


def test_a_trainers_busiest_rank_has_whole_groups() -> None:
    """Eight groups of four over three ranks: three, three and two of them."""
    demand = TrainerDemand(lengths=constant(100), prompt_tokens=100, sequences=32, together=4)
    assert [demand.most_of(ranks) for ranks in (1, 2, 3, 4, 5, 8)] == [32, 16, 12, 8, 8, 4]
    assert replace(demand, together=1).most_of(3) == 11
    four, five = (
        trainer_tick(H100, find_model("Llama-3.1-8B"), TrainerLayout(fsdp=ranks, runnable=True), demand)
        for ranks in (4, 5)
    )
    assert five.compute_s == four.compute_s  # both have a rank with two groups


def test_a_written_cache_stays_within_the_limit_of_the_plan() -> None:
    a100 = find_hardware("a100")
    work = Workload(model=find_model("Qwen3-30B-A3B"), response=constant(4096), prompts_per_step=128, group_size=16)
    for found in search_all(a100, work, Options(), 8):
        memory = found.generator.memory
        written = plan_settings(found, "m", a100, 2.0)["generator"]["engine"]["kv_cache_bytes"]
        assert memory["kv_cache"] <= written <= 1.25 * memory["kv_cache"] + 1
        assert sum(memory.values()) - memory["kv_cache"] + written <= found.memory_limit + 1
        tight = replace(found, memory_limit=sum(memory.values()) + 0.1 * memory["kv_cache"])
        written = plan_settings(tight, "m", a100, 2.0)["generator"]["engine"]["kv_cache_bytes"]
        assert written == pytest.approx(1.1 * memory["kv_cache"])
