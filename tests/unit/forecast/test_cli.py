"""``llamarl plan`` and ``llamarl simulate`` as a user meets them: tables, recipes, and every nonsense input."""

import dataclasses
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from llamarl.cli.main import main
from llamarl.config import load_config
from llamarl.forecast.costs import GeneratorLayout, weight_sync_s
from llamarl.forecast.hardware import device_names, find_hardware
from llamarl.forecast.lengths import constant
from llamarl.forecast.model import find_model
from llamarl.forecast.recipe import left_out, write_recipe
from llamarl.forecast.report import plans_text, seconds_text
from llamarl.forecast.search import Options, Workload, asynchronous
from llamarl.forecast.simulate import SimulationResult
from llamarl.settings.engine import ENGINES

RECIPE = Path(__file__).parents[3] / "recipes" / "tiny.toml"
JOB = "--model Llama-3.1-8B --devices 8 --hardware h100 --prompts 16 --group-size 8 --response-tokens 300:lognormal"
SMALL = "--model SmolLM2-135M --prompts 8 --group-size 4 --response-tokens 64"


def plan(line: str) -> int:
    return main(["plan", *line.split()])


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The plans, or results of simulations, that the last command has told of."""
    found: list[Any] = []

    def keep(things: Sequence[Any], *others: Any) -> str:
        found[:] = things
        return ""

    for name in ("plans_text", "results_text"):
        monkeypatch.setattr(f"llamarl.forecast.report.{name}", keep)
    return found


def simulations(shown: list[SimulationResult], line: str) -> list[SimulationResult]:
    assert main(["simulate", *line.split()]) == 0
    return list(shown)


def test_no_time_of_an_unmeasured_machine_looks_measured(capsys: pytest.CaptureFixture[str]) -> None:
    """Every time, rate and share of the table stands behind a ~, and the legend says on what it rests."""
    for line, legend in ((JOB, "~ estimated"), (f"{RECIPE}", "~ guessed")):
        assert plan(line) == 0
        out = capsys.readouterr().out
        assert legend in out
        for row in out.splitlines():
            if row.startswith(("synchronous", "asynchronous")):
                cells = re.split(r" {2,}", row)
                times = [cell for cell in cells[1:7] if cell != "0"]
                assert len(times) >= 5 and all(cell.startswith("~") for cell in times), row
    assert main(["simulate", str(RECIPE), "--ticks", "4"]) == 0
    row = next(row for row in capsys.readouterr().out.splitlines() if row.startswith("staleness 1,"))
    assert all(cell.startswith("~") for cell in re.split(r" {2,}", row)[1:3])


def test_the_70b_plan_names_the_unmeasured_constant_behind_its_pace(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--model Llama-3.1-70B --devices 256 --hardware h100-sxm --response-tokens 4096:lognormal --staleness 1") == 0  # fmt: skip
    out = capsys.readouterr().out
    assert "unused     80 of 256 devices: prompts are dealt whole, and no layout found is faster with them" in out
    assert "rests on   eager_layer_overhead_s = 300 us, which nobody measured" in out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("plan", "no model"),
        ("plan --model Llama-3.1-8B --hardware h100", "--devices N"),
        (f"plan {JOB.replace('--devices 8', '--devices 0')}", "at least 1"),
        ("plan --model Llama-3.1-8B --devices 8:h100,4", "numbers of kinds"),
        (f"plan {JOB.replace('h100', 'h1000')}", "nearest is 'h100-sxm'"),
        (f"plan {JOB.replace('Llama-3.1-8B', 'Lama-3.1-8B')}", "nearest bundled shape is 'Llama-3.1-8B'"),
        (f"plan {JOB.replace('Llama-3.1-8B', 'Llama-3.1-405B')}", "does not fit on 8 "),
        (f"plan {JOB} --staleness -1", "staleness must be >= 0"),
        (f"plan {JOB} --staleness a", "whole numbers"),
        (f"plan {JOB} --precision bf17", "unknown bf17"),
        (f"plan {JOB} --max-segments 0", "at least 1"),
        (f"plan {JOB} --prompts 0", "prompts_per_step"),
        (f"plan {JOB} --fit /nowhere", "is no run's folder"),
        ("simulate", "nothing to simulate"),
        ("simulate tiny --jitter x", "expected 1 to 2 numbers"),
        ("simulate tiny --devices 4", "unexpected argument '--devices'"),
        ("simulate unlike", "2 kinds of [[generator.replicas]]"),
    ],
)
def test_nonsense_gets_an_error_that_helps(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 2
    assert message in capsys.readouterr().err


def test_a_run_on_gpus_is_no_forecast_of_the_cores_of_this_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text(RECIPE.read_text().replace("[trainer]", '[trainer]\ndevice = "cuda"'))
    (run / "metrics.jsonl").touch()
    for line, asked in ((f"plan {run}", "--hardware h100-sxm --devices N"), (f"simulate {run}", "--hardware h100-sxm")):
        assert main(line.split()) == 2
        assert capsys.readouterr().err.strip().endswith(f"{run} was made on GPUs: say which, {asked}")


def test_a_job_that_samples_nothing_has_no_forecast(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "sft.toml"
    recipe.write_text(
        'model.path = "bundled:tiny"\ntask = { name = "demonstrations", data = "rows.jsonl" }\nalgorithm.name = "sft"\n'
    )
    for verb in ("plan", "simulate"):
        assert main([verb, str(recipe)]) == 2
        assert "a forecast knows jobs with a generator alone" in capsys.readouterr().err


@pytest.mark.parametrize("device", device_names())
@pytest.mark.parametrize("devices", [1, 8])
def test_every_device_gets_a_recipe_that_loads(device: str, devices: int, tmp_path: Path) -> None:
    file = tmp_path / "r.toml"
    assert plan(f"{SMALL} --hardware {device} --devices {devices} --recipe {file}") == 0
    config = load_config(file)
    assert config.schedule.colocated == (config.schedule.max_staleness == 0)
    assert config.schedule.colocated or devices > 1
    kind = "cpu" if device == "this-machine" else "cuda"
    assert config.generator.quantization in ("none", *ENGINES["native"].quantizations[kind])
    left = [config.generator.engine.kv_cache_bytes, *(one.kv_cache_bytes for one in config.generator.replicas)]
    assert (kind == "cuda") == (left == [0] * len(left)), "an evaluator that shares a GPU needs as large a cache there"


def test_a_recipe_that_no_plan_has_written_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planned, own = tmp_path / "planned.toml", tmp_path / "own.toml"
    own.write_text("[run]\nnum_ticks = 7\n")
    assert plan(f"{SMALL} --hardware h100 --devices 2 --recipe {own}") == 2
    assert "own.toml: is there already" in capsys.readouterr().err and own.read_text() == "[run]\nnum_ticks = 7\n"
    for devices in (2, 4):
        assert plan(f"{SMALL} --hardware h100 --devices {devices} --recipe {planned}") == 0
        assert f"{devices} x" in planned.read_text().splitlines()[0]


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_written_recipe_passes_the_dry_run_and_keeps_the_rest(staleness: int, tmp_path: Path) -> None:
    from llamarl.controller.prepare import plan_run

    out = tmp_path / "out.toml"
    assert plan(f"{RECIPE} --response-tokens 40:lognormal:limit=80 --staleness {staleness} --recipe {out}") == 0
    written, before = load_config(out), load_config(RECIPE)
    assert written.schedule.prompts_per_step == before.schedule.prompts_per_step
    assert written.algorithm == before.algorithm and written.schedule.max_staleness == staleness
    assert "# placement" in plan_run(written)


def test_a_written_recipe_names_tables_of_a_mixture_as_seen_from_here_and_no_mirror(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    task = tmp_path / "task"
    task.mkdir()
    (task / "q.jsonl").write_text('{"question": "1 + 1", "answer": "2"}\n')
    (task / "recipe.toml").write_text(
        '[run]\nmirror = "file:///mirror"\n[[task]]\nname = "math"\ndata = "q.jsonl"\n[[task]]\nname = "steps"\n'
    )
    assert plan("task/recipe.toml --recipe out.toml") == 0
    written = load_config("out.toml")
    assert [one.data for one in written.task.mixture] == ["task/q.jsonl", ""]
    assert written.run.mirror == ""


def test_several_kinds_get_a_recipe_of_replicas_whose_shares_are_their_prompts(tmp_path: Path) -> None:
    out = tmp_path / "kinds.toml"
    job = "--model Llama-3.1-8B --max-segments 1 --response-tokens 2048 --staleness 1"
    assert plan(f"{job} --devices 8:a100-80gb,8:h100-sxm --recipe {out}") == 0
    config = load_config(out)
    assert len(config.generator.replicas) == 2 and config.schedule.prompts_per_step == 128
    prompts = [kind.dp * kind.share for kind in config.generator.replicas]
    of_first = 128 * prompts[0] / math.fsum(prompts)
    assert of_first == pytest.approx(round(of_first)) and "generator_1 on a100-sxm" in out.read_text()


def test_replicas_of_another_kind_than_the_trainer_are_named_and_placed(tmp_path: Path) -> None:
    work = Workload(model=find_model("SmolLM2-135M"), response=constant(64), prompts_per_step=8, group_size=4)
    alone = asynchronous(find_hardware("h100"), work, Options(max_segments=1), 2, 1)
    other = dataclasses.replace(alone.generators[0], hardware=find_hardware("a100"))
    mixed = dataclasses.replace(alone, generators=(other,))
    rows = plans_text([alone, mixed], mixed, work, "2 x A + 2 x B").splitlines()
    assert rows[6].startswith("asynchronous, staleness 1 (2 x h100-sxm) ")
    assert rows[7].startswith("asynchronous, staleness 1* ")
    assert any(row.startswith("  generator  1 device a100-sxm: ") for row in rows)
    out = tmp_path / "kinds.toml"
    write_recipe(out, mixed, work, model_path="SmolLM2-135M", oversubscription=1.0, config={}, title="")
    assert "# Place the roles: hosts.on, trainer on h100-sxm, generator on a100-sxm;" in out.read_text()


def test_a_job_that_train_refuses_is_not_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.toml"
    assert plan(f"{SMALL.replace('size 4', 'size 1')} --hardware h100 --devices 2 --recipe {out}") == 2
    told = capsys.readouterr().err
    assert "llamarl train would refuse this job" in told and "generator.group_size is 1" in told and not out.exists()


def test_what_a_forecast_leaves_out_is_named() -> None:
    config = load_config(RECIPE)
    more = dataclasses.replace(
        config,
        lora=dataclasses.replace(config.lora, rank=8),
        trainer=dataclasses.replace(config.trainer, epochs=2, offload_optimizer=True),
    )
    keys = [name.rpartition("(")[2].rstrip(")") for name in left_out(more) if name not in left_out(config)]
    assert keys == ["lora.rank", "trainer.epochs", "trainer.offload_optimizer"]


def test_a_time_that_rounds_to_the_next_unit_is_told_in_it() -> None:
    seconds = (9.994e-4, 9.997e-4, 0.9994, 0.9997, 59.96, 599.9)
    assert [seconds_text(s) for s in seconds] == ["999 us", "1 ms", "999 ms", "1 s", "60 s", "10 min"]


def test_turns_that_the_recipe_forbids_are_not_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = tmp_path / "own.toml"
    own.write_text('[generator.engine]\nname = "vllm"\n')
    assert plan(f"{own} --staleness 0 --recipe {tmp_path / 'out.toml'}") == 2
    told = capsys.readouterr().err
    assert "forbid turns, so plan without 0 (--staleness 1,2)" in told and "an engine must give its memory back" in told
    assert not (tmp_path / "out.toml").exists()


def test_a_config_json_is_a_source(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "vocab_size": 100,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    for source in (tmp_path, tmp_path / "config.json"):
        assert plan(f"{source} --devices 2 --hardware a100 --response-tokens 50") == 0
        assert tmp_path.name in capsys.readouterr().out


# -- simulate ---------------------------------------------------------------------------------------------------------


def test_a_written_plan_is_simulated_near_its_forecast_and_failures_cost_time(shown: list[Any], tmp_path: Path) -> None:
    out = tmp_path / "plan.toml"
    assert plan(f"{JOB} --staleness 2 --max-segments 1 --recipe {out}") == 0
    planned = shown[0].step_s
    job = f"{out} --model Llama-3.1-8B --hardware h100 --response-tokens 300:lognormal --prompt-tokens 256 --ticks 40"
    (calm,) = simulations(shown, job)
    assert calm.step_s == pytest.approx(planned, rel=0.15)
    (broken,) = simulations(shown, f"{job} --mtbf-hours 0.05 --restart-s 30 --checkpoint-every 4")
    assert broken.num_failures > 0 and broken.step_s > calm.step_s


def test_a_simulation_says_how_many_prompts_of_which_length_it_plays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "three.toml"
    recipe.write_text(RECIPE.read_text() + "\n[[generator.replicas]]\ndp = 3\nshare = 1\n")
    assert main(["simulate", str(recipe), "--hardware", "h100", "--ticks", "2", "--generator.shards", "0"]) == 0
    out = capsys.readouterr().out
    assert "18 prompts x 8 responses a step; prompt 64 tokens; response constant 80; 3 generator replicas" in out
    assert "note: 18 prompts a tick where 16 are asked for: each replica is given 6" in out


def test_turns_are_simulated_on_shared_devices_with_what_moves_between_them(shown: list[Any]) -> None:
    alone = "--generator.max_segments 1 --generator.oversubscription 1 --hardware h100 --ticks 2"
    (one,) = simulations(shown, f"{RECIPE} {alone} --schedule.max_staleness 0 --schedule.colocated true")
    assert one.scenario.devices == 1
    model, hardware = find_model("bundled:tiny"), find_hardware("h100")
    direct = weight_sync_s(hardware, model, trainer_devices=1, replicas=[(1, GeneratorLayout())])
    parked = 12 * model.total_params / (64e9 * 0.8)  # weights and two moments over the host's link
    assert one.scenario.weights_load_s == pytest.approx(2 * parked + direct)


def test_a_recipe_and_changes_of_it_are_simulated(shown: list[Any]) -> None:
    job = f"{RECIPE} --hardware h100 --generator.max_segments 1 --generator.oversubscription 1 --ticks 20"
    (one,) = simulations(shown, job)
    (two,) = simulations(shown, f"{job} --generator.dp 2")
    assert (one.scenario.replicas, two.scenario.replicas) == (1, 2)
    assert two.role_s["generator"] < one.role_s["generator"]
