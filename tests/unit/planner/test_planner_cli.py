"""``llamarl plan`` as a user meets it: help, table, JSON, recipe, and every nonsense input."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from llamarl.cli import plan as verb
from llamarl.cli.questions import hardware_of
from llamarl.config import load_config
from llamarl.engine.config import QUANTIZATIONS
from llamarl.errors import PlanError
from llamarl.planner.calibration_cache import calibration_path, load_calibration, save_calibration
from llamarl.planner.choices import Options, Workload
from llamarl.planner.hardware import device_names, find_hardware, this_machine
from llamarl.planner.lengths import constant
from llamarl.planner.model_spec import find_model, spec_from_config
from llamarl.planner.recipe import plan_settings, question_from_config, recipe_text
from llamarl.planner.search import best_resharding, best_separate

H100 = "--model Llama-3.1-8B --devices 8 --hardware h100 --prompts 16 --group-size 8 --response-tokens 300:lognormal"


def plan(line: str) -> int:
    parser = argparse.ArgumentParser()
    verb.add_parser(parser.add_subparsers())
    args = parser.parse_args(["plan", *line.split()])
    return int(args.run(args))


@pytest.fixture(autouse=True)
def _no_kept_calibration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_table_names_all_systems(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(H100) == 0
    text = capsys.readouterr().out
    for part in (
        "sync, one layout",
        "sync, re-sharding",
        "separate, staleness 0",
        "separate, staleness 4",
        "* recommended",
    ):
        assert part in text


def test_json_is_one_object_with_sources_and_plans(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(H100 + " --json --staleness 1,3 --price-per-device-hour 2") == 0
    answer = json.loads(capsys.readouterr().out)
    assert [p["max_staleness"] for p in answer["plans"] if p["system"] == "separate"] == [1, 3]
    best = answer["plans"][answer["recommended"]]
    assert best["cost_per_step"] == pytest.approx(8 * best["step_s"] * 2 / 3600)
    assert answer["hardware"]["device"]["sources"]["memory_bytes_per_s"]


def test_a_config_json_is_a_source(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for source in (tmp_path, tmp_path / "config.json"):
        assert plan(f"{source} --devices 2 --hardware a100 --response-tokens 50") == 0
        assert tmp_path.name in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "no model"),
        ("--model Llama-3.1-8B --hardware h100", "--devices N"),
        (H100.replace("--devices 8", "--devices 0"), "at least 1"),
        (H100.replace("h100", "h1000"), "nearest is 'h100-sxm'"),
        (H100.replace("Llama-3.1-8B", "Lama-3.1-8B"), "nearest bundled shape is 'Llama-3.1-8B'"),
        (H100.replace("Llama-3.1-8B", "Llama-3.1-405B"), r"does not fit on 8 .* devices would do"),
        (H100 + " --staleness -1", "staleness must be >= 0"),
        (H100 + " --staleness a", "whole numbers"),
        (H100 + " --precision bf17", "unknown bf17"),
        (H100 + " --max-segments 0", "at least 1"),
        (H100 + " --max-pipeline 0", "at least 1"),
        (H100 + " --price-per-device-hour -1", "must be >= 0"),
        (H100 + " --reward-s nan", "reward_s"),
        (H100 + " --prompts 0", "prompts_per_step"),
        (H100 + " --prompt-tokens 0", "prompt_tokens"),
        (H100 + " --calibrate", "leave --hardware out"),
        ("--model SmolLM2-135M --calibrate", "short runs of a recipe: give one"),
        (H100.replace("--hardware h100", "--calibration /nowhere.json"), "does not exist"),
        (H100 + " --picture /proc/nowhere/x.png", "cannot write"),
    ],
)
def test_nonsense_gets_an_error_that_helps(line: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan(line)


def test_planning_imports_no_torch() -> None:
    code = (
        "import argparse, sys; from llamarl.cli import plan as v; p = argparse.ArgumentParser(); v.add_parser(p.add_subparsers());"
        f"a = p.parse_args(['plan'] + {H100.split()!r}); a.run(a); sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120).returncode == 0


def _work() -> Workload:
    return Workload(
        model=find_model("SmolLM2-135M"), response=constant(64), prompts_per_step=8, group_size=4, prompt_tokens=32
    )


def test_a_recipe_keeps_unknown_settings_as_comments() -> None:
    hardware = find_hardware("h100")
    found = best_separate(hardware, _work(), Options(), 8, 1)
    settings = plan_settings(found, "some/model", hardware, 2.0)
    everything = {f"{s}.{k}" for s in settings for k in settings[s]} | {"generator.sampling.max_new_tokens"}
    parsed = tomllib.loads(recipe_text(settings, everything, "two\nlines"))
    assert parsed["schedule"] == {"prompts_per_step": 8, "max_staleness": 1, "colocated": False}
    assert parsed["trainer"]["fsdp"] * parsed["trainer"]["tp"] == found.trainer.layout.devices
    assert parsed["generator"]["sampling"]["max_new_tokens"] == 64
    fewer = recipe_text(
        {**settings, "generator": {**settings["generator"], "tp": 2}}, everything - {"generator.tp"}, ""
    )
    assert "# tp = 2" in fewer and "tp" not in tomllib.loads(fewer)["generator"]


def test_co_located_plans_become_co_located_recipes() -> None:
    cpu = this_machine()
    settings = plan_settings(best_resharding(cpu, _work(), Options(), 2), "m", cpu, 1.0)
    assert settings["generator"]["threads"] == settings["trainer"]["threads"] == 2
    assert settings["schedule"]["max_staleness"] == 0 and settings["schedule"]["colocated"] is True
    gpu = find_hardware("h100")
    settings = plan_settings(best_resharding(gpu, _work(), Options(), 2), "m", gpu, 1.0)
    assert settings["schedule"]["max_staleness"] == 0 and settings["schedule"]["colocated"] is True
    for sizes in (("generator", "dp", "tp"), ("trainer", "fsdp", "tp")):  # each takes both devices in its turn
        assert math.prod(settings[sizes[0]][key] for key in sizes[1:]) == 2


def test_a_lone_device_gets_a_co_located_recipe_that_loads(tmp_path: Path) -> None:
    file = tmp_path / "one.toml"
    asked = "--model SmolLM2-135M --devices 1 --hardware h100 --prompts 8 --group-size 4 --response-tokens 64"
    assert plan(f"{asked} --recipe {file}") == 0
    config = load_config(file)
    assert config.schedule.colocated and config.schedule.max_staleness == 0
    assert config.generator.dp * config.generator.tp == config.trainer.fsdp * config.trainer.tp == 1


def test_a_recipe_that_no_plan_has_written_is_not_replaced(tmp_path: Path) -> None:
    asked = "--model SmolLM2-135M --devices 2 --hardware h100 --prompts 8 --group-size 4 --response-tokens 64"
    planned, own = tmp_path / "planned.toml", tmp_path / "own.toml"
    own.write_text("[run]\nnum_ticks = 7\n")
    with pytest.raises(PlanError, match="own.toml: is there already, and no plan has written it"):
        plan(f"{asked} --recipe {own}")
    assert own.read_text() == "[run]\nnum_ticks = 7\n"
    for devices in (2, 4):
        assert plan(f"{asked} --devices {devices} --recipe {planned}") == 0
        assert f"{devices} x" in planned.read_text().splitlines()[0]


@pytest.mark.parametrize("device", device_names())
@pytest.mark.parametrize("devices", [1, 8])
def test_every_device_gets_a_recipe_that_loads(device: str, devices: int, tmp_path: Path) -> None:
    file = tmp_path / "r.toml"
    asked = "--model SmolLM2-135M --prompts 8 --group-size 4 --response-tokens 64"
    assert plan(f"{asked} --hardware {device} --devices {devices} --recipe {file}") == 0
    config = load_config(file)
    kind = "cpu" if device == "this-machine" else "cuda"
    assert config.generator.quantization in QUANTIZATIONS["native", kind]


def test_a_precision_that_the_engine_lacks_can_be_planned_but_not_written(tmp_path: Path) -> None:
    asked = "--model SmolLM2-135M --hardware b200 --devices 8 --prompts 8 --group-size 4 --response-tokens 64"
    assert plan(f"{asked} --precision fp4") == 0
    with pytest.raises(PlanError, match="generates in fp4.*bf16, fp8"):
        plan(f"{asked} --precision fp4 --recipe {tmp_path / 'r.toml'}")
    assert not (tmp_path / "r.toml").exists()


def test_a_recipe_and_a_run_pose_the_question(tmp_path: Path) -> None:
    config = {
        "model": {"path": "m"}, "schedule": {"prompts_per_step": 4},
        "generator": {"group_size": 2, "max_segments": 2, "sampling": {"max_new_tokens": 40}},
    }  # fmt: skip
    question = question_from_config(config)
    assert (question.response.limit, question.prompt_tokens, question.max_segments) == (40, None, 2)
    assert "not in the plan" not in question.note
    more = config | {"dynamic_sampling": {"enabled": True}, "algorithm": {"kl_coef": 0.1, "advantage": "group_mean"}}
    note = question_from_config(more).note
    assert note.endswith("not in the plan: the extra groups of dynamic_sampling, the reference executor")
    (tmp_path / "rollouts").mkdir()
    lines = [{"prompt_tokens": [0] * 6, "tokens": [0] * n} for n in (3, 5)]
    (tmp_path / "rollouts" / "tick_000000.jsonl").write_text("\n".join(map(json.dumps, lines)))
    measured = question_from_config(config, tmp_path)
    assert (measured.response.mean, measured.prompt_tokens) == (4.0, 6)
    with pytest.raises(PlanError, match="lacks"):
        question_from_config({"model": {}})


def test_plan_from_a_recipe_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = pytest.importorskip("llamarl.config")
    recipe, out = tmp_path / "r.toml", tmp_path / "out.toml"
    recipe.write_text('[model]\npath = "SmolLM2-135M"\n[schedule]\nprompts_per_step = 8\n[run]\ndir = "runs/old"\n')
    assert plan(f"{recipe} --hardware h100 --devices 4 --recipe {out}") == 0
    assert "max_new_tokens" in capsys.readouterr().out
    written = config.load_config(out)
    assert (written.schedule.prompts_per_step, written.run.dir) == (8, "runs/out")
    assert plan(f"{recipe} --hardware this-machine --devices 2 --recipe {out}") == 0
    config.load_config(out)


def test_a_kept_calibration_reads_back_equal_and_a_torn_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "calibration.json"
    save_calibration(path, this_machine(), "m")
    assert load_calibration(path) == this_machine()
    path.write_text(path.read_text()[:50])
    with pytest.raises(PlanError, match="calibrate again"):
        load_calibration(path)


def test_a_written_recipe_passes_the_dry_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``--recipe`` writes for this machine is what ``llamarl train --dry-run`` accepts."""
    pytest.importorskip("torch")
    from llamarl.config import load_config
    from llamarl.controller.run import plan_run

    recipe, out = Path(__file__).parents[3] / "recipes" / "tiny.toml", tmp_path / "out.toml"
    assert plan(f"{recipe} --response-tokens 40:lognormal:limit=80 --devices 2 --recipe {out}") == 0
    written = load_config(out)
    assert written.schedule.prompts_per_step == load_config(recipe).schedule.prompts_per_step
    assert "# placement" in plan_run(written)


def test_a_calibration_of_another_machine_is_passed_over_unless_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    path = calibration_path()
    save_calibration(path, this_machine().with_efficiency(matmul=0.123), "m")
    assert hardware_of(None, None).efficiency.matmul == 0.123 and not capsys.readouterr().err
    record = json.loads(path.read_text())
    record["machine"]["processor"] = "Another Processor"
    path.write_text(json.dumps(record))
    assert hardware_of(None, None) == this_machine()
    assert "was measured on Another Processor" in capsys.readouterr().err
    assert hardware_of(None, path).efficiency.matmul == 0.123 and not capsys.readouterr().err
    del record["machine"]  # as older files have it: nothing to compare
    path.write_text(json.dumps(record))
    assert hardware_of(None, None).efficiency.matmul == 0.123


@pytest.mark.parametrize("kind", ["jetmoe", "moshi", "hrm_text", "phi4_multimodal"])
def test_kinds_whose_keys_would_mislead_are_refused(kind: str) -> None:
    config = {
        "model_type": kind,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "vocab_size": 100,
    }
    with pytest.raises(PlanError, match=f"does not count the layers of {kind}"):
        spec_from_config(config, "m")


def test_times_of_a_machine_that_was_never_measured_say_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    here = "--model Llama-3.1-8B --devices 64 --hardware this-machine --response-tokens 30"
    for line, told in ((here, True), (H100, False)):
        assert plan(line) == 0
        assert ("never measured" in capsys.readouterr().out) == told
    kept = tmp_path / "kept.json"
    save_calibration(
        kept,
        dataclasses.replace(this_machine(), device=dataclasses.replace(this_machine().device, assumed=False)),
        "x",
    )
    assert plan(f"{here.replace(' --hardware this-machine', '')} --calibration {kept}") == 0
    assert "never measured" not in capsys.readouterr().out
