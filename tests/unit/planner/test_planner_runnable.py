"""Tensor-parallel sizes of plans are those that ``llamarl train`` takes."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from llamarl.cli import plan as verb
from llamarl.config import load_config
from llamarl.errors import PlanError
from llamarl.models.sizes import fitting_sizes, whole_experts
from llamarl.planner.choices import Options, Workload, generator_choices
from llamarl.planner.hardware import find_hardware
from llamarl.planner.lengths import constant
from llamarl.planner.model_spec import find_model, model_names
from llamarl.planner.rooflines import tensor_parallel_sizes
from llamarl.planner.runnable import why_not_run
from llamarl.planner.search import search_all

H100 = find_hardware("h100")


@pytest.mark.parametrize("name", model_names())
def test_sizes_are_those_of_the_run_with_whole_experts_on_a_rank(name: str) -> None:
    spec = find_model(name)
    fitting = fitting_sizes(spec.heads, spec.kv_heads, spec.intermediate)
    run = whole_experts(fitting, spec.experts) if spec.cut_by_llamarl else [1]
    assert tensor_parallel_sizes(spec, 1024) == run
    assert tensor_parallel_sizes(spec, 4) == [tp for tp in run if tp <= 4]


def test_any_divisor_of_the_heads_is_there_for_another_system() -> None:
    spec = find_model("Llama-3.1-405B")  # 128 heads, 8 key-value heads
    assert tensor_parallel_sizes(spec, 1024) == [1, 2, 4, 8, 16, 32, 64, 128]  # above 8, ranks hold copies of these
    spec = find_model("Qwen2.5-7B")  # 28 heads, 4 key-value heads, 7 does not divide the MLP's width
    assert tensor_parallel_sizes(spec, 1024) == [1, 2, 4]
    assert tensor_parallel_sizes(spec, 1024, runnable=False) == [1, 2, 4, 7, 14, 28]
    work = Workload(model=find_model("Llama-3.1-405B"), response=constant(400), prompts_per_step=32, group_size=8)
    for runnable in (True, False):
        plans = search_all(H100, work, Options(runnable=runnable), 512)
        assert max(plan.generator.layout.tp for plan in plans) > 8


@pytest.mark.parametrize(("name", "devices"), [("Llama-3.1-70B", 128), ("Qwen3-30B-A3B", 32), ("Qwen2.5-7B", 16)])
def test_every_system_of_every_plan_has_sizes_that_run(name: str, devices: int) -> None:
    model = find_model(name)
    work = Workload(model=model, response=constant(400), prompts_per_step=32, group_size=8)
    run = set(tensor_parallel_sizes(model, devices))
    for plan in search_all(H100, work, Options(), devices):
        assert {plan.trainer.layout.tp, plan.generator.layout.tp} <= run


@pytest.mark.parametrize(
    "shape",
    [
        dict(model_type="qwen2", num_attention_heads=28, num_key_value_heads=4, intermediate_size=18944, hidden_size=3584,
             num_hidden_layers=28, vocab_size=152064),
        dict(model_type="llama", num_attention_heads=64, num_key_value_heads=8, intermediate_size=28672, hidden_size=8192,
             num_hidden_layers=20, vocab_size=128256),
    ],
    ids=lambda shape: shape["model_type"],
)  # fmt: skip
def test_a_written_recipe_has_a_tp_that_the_dry_run_takes(tmp_path: Path, shape: dict[str, object]) -> None:
    pytest.importorskip("transformers")
    from llamarl.controller.preflight import check_models, check_parallel_sizes

    folder, recipe = tmp_path / "model", tmp_path / "r.toml"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(shape))
    parser = argparse.ArgumentParser()
    verb.add_parser(parser.add_subparsers())
    asked = f"plan {folder} --devices 8 --hardware h200 --prompts 32 --group-size 8 --response-tokens 600"
    args = parser.parse_args([*asked.split(), "--recipe", str(recipe)])
    assert args.run(args) == 0
    config = load_config(recipe)
    check_models(config)
    check_parallel_sizes(config, folder, cores=64)
    assert config.model.path == str(folder)


def test_a_model_that_is_not_cut_fits_only_another_system() -> None:
    work = Workload(model=find_model("DeepSeek-V3"), response=constant(64), prompts_per_step=64, group_size=8)
    with pytest.raises(PlanError, match="does not fit"):
        search_all(H100, work, Options(), 64)
    assert search_all(H100, work, Options(runnable=False), 512)


@pytest.mark.parametrize(("name", "devices"), [("Llama-3.1-8B", 256), ("Llama-3.1-70B", 256), ("Llama-3.1-405B", 1024)])
def test_every_plan_for_the_papers_models_runs(name: str, devices: int) -> None:
    work = Workload(
        model=find_model(name), response=constant(2048), prompts_per_step=128, group_size=16, prompt_tokens=256
    )
    plans = search_all(H100, work, Options(partial_rollouts=False), devices, (0, 1))
    assert [plan.max_staleness for plan in plans if plan.system == "separate"] == [0, 1]
    assert [why_not_run(plan, work.model) for plan in plans] == [[]] * len(plans)


def test_a_plan_for_what_llamarl_does_not_run_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    verb.add_parser(parser.add_subparsers())
    asked = "plan --model DeepSeek-V3 --devices 256 --hardware h100-sxm --prompts 64 --group-size 16 --response-tokens 2048 --json"
    args = parser.parse_args(asked.split())
    assert args.run(args) == 0
    answer = json.loads(capsys.readouterr().out)
    assert "at most 1 tensor-parallel rank in llamarl" in answer["unrunnable"]
    assert answer["options"]["runnable"] is False


def test_a_model_that_the_engine_does_not_quantize_is_planned_without() -> None:
    hardware = find_hardware("h200")
    for name, expected in (("Qwen3-30B-A3B", {"bf16"}), ("Qwen3-8B", {"bf16", "fp8"})):
        work = Workload(model=find_model(name), response=constant(256), prompts_per_step=8, group_size=4)
        asked = {"memory_limit": 130e9, "partial": False}
        found = generator_choices(hardware, work, Options(), 8, **asked)
        assert {choice.layout.precision for choice in found} == expected
    work = Workload(model=find_model("Qwen3-30B-A3B"), response=constant(256), prompts_per_step=8, group_size=4)
    with pytest.raises(PlanError, match="does not quantize this architecture, it serves bf16"):
        list(generator_choices(hardware, work, Options(precisions=("fp8",)), 8, memory_limit=130e9, partial=False))


def ask(line: str) -> int:
    parser = argparse.ArgumentParser()
    verb.add_parser(parser.add_subparsers())
    args = parser.parse_args(line.split())
    return int(args.run(args))


@pytest.mark.parametrize(
    ("job", "reason"),
    [
        ("--model SINKS --devices 8 --hardware h200 --prompts 32", "architecture 'gpt_oss' is not supported"),
        ("--model NEW --devices 8 --hardware h200 --prompts 32", "whether it computes 'arcee', the check before a run finds out"),
    ],
)  # fmt: skip
def test_a_plan_that_train_does_not_run_says_so_and_is_not_written(
    job: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = {"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32, "num_key_value_heads": 4,
             "intermediate_size": 8192, "vocab_size": 32000}  # fmt: skip
    for name, kind in (("SINKS", "gpt_oss"), ("NEW", "arcee")):
        (tmp_path / f"{name}.json").write_text(json.dumps({**shape, "model_type": kind}))
        job = job.replace(name, str(tmp_path / f"{name}.json"))
    job = f"plan {job} --group-size 16 --response-tokens 1024"
    assert ask(job) == 0
    assert f"not yet    llamarl train does not run this plan: {reason}" in capsys.readouterr().out
    with pytest.raises(PlanError, match=f"--recipe: llamarl train does not run this plan: {reason}"):
        ask(f"{job} --recipe {tmp_path / 'out.toml'}")
    assert not (tmp_path / "out.toml").exists()


def test_a_recipe_of_a_shape_says_that_it_needs_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.toml"
    job = (
        "plan --model Llama-3.1-8B --devices 8 --hardware h100-sxm --prompts 32 --group-size 16 --response-tokens 1024"
    )
    assert ask(f"{job} --recipe {out}") == 0
    printed = capsys.readouterr().out
    assert "not yet" not in printed and "to do      Llama-3.1-8B is a shape without weights" in printed
    assert "set model.path to the Hugging Face folder" in out.read_text()
