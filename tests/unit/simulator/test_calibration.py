"""A recipe calibrated by short runs of it: what the fit finds, what a forecast makes of it, which schedule it proposes."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from pathlib import Path

import numpy as np
import pytest

from llamarl.cli import plan as plan_verb
from llamarl.cli import simulate as simulate_verb
from llamarl.cli.measured_schedules import MeasuredSchedules
from llamarl.config import RunConfig, load_config, to_plain, validate
from llamarl.errors import PlanError
from llamarl.planner.calibration_cache import calibration_path
from llamarl.planner.choices import Workload
from llamarl.planner.lengths import grouped
from llamarl.planner.model_spec import find_model
from llamarl.planner.recipe import question_from_config
from llamarl.simulator.calibrate import (
    RecipeCalibration,
    calibrate_recipe,
    find_calibration,
    keep_calibration,
    load_recipe_calibration,
    recipe_calibration_path,
    settled_threads,
)
from llamarl.simulator.fitted_costs import FittedCosts, non_negative_line
from llamarl.simulator.measured_machine import machine_of_run
from llamarl.simulator.scenario import Scenario
from llamarl.simulator.schedules import apply_settings, forecast_schedules, recommend_schedule
from llamarl.simulator.simulate import SimulationResult, simulate
from llamarl.simulator.sources import calibrated_scenario, scenario_from_recipe
from llamarl.simulator.tick_costs import LinearGeneratorCost, RewardCost, TrainerCost, Variation

RECIPE = Path(__file__).parents[3] / "recipes" / "tiny.toml"


def costs(*, step_s: float = 0.01, token_s: float = 1e-4, jitter: float = 0.0) -> FittedCosts:
    return FittedCosts(
        generator=LinearGeneratorCost(step_s=step_s),
        trainer=TrainerCost(token_s=token_s),
        reward=RewardCost(),
        round_s=0.0,
        prompt_tokens=10,
        num_ticks=8,
        errors={"generator": 0.0, "trainer": 0.0},
        jitter={"generator": 0.0, "trainer": jitter},
    )


def made(**changes: object) -> RecipeCalibration:
    """As if measured: 10 ms a decode step, 0.1 ms a batch token; a tenth longer together."""
    found = RecipeCalibration(
        cores=2, in_turn=costs(), together=costs(step_s=0.011, token_s=1.1e-4), groups=((20, 30), (40, 50))
    )
    return dataclasses.replace(found, **changes)  # type: ignore[arg-type]


def recipe(**generator: object) -> RunConfig:
    return validate(
        {
            "run": {"num_ticks": 40},
            "schedule": {"prompts_per_step": 40, "max_staleness": 0},
            "generator": {"group_size": 2, "threads": 1, **generator},
            "trainer": {"threads": 1},
            "evaluation": {"every": 0},
        }
    )


def at_staleness(config: RunConfig, max_staleness: int) -> RunConfig:
    return dataclasses.replace(config, schedule=dataclasses.replace(config.schedule, max_staleness=max_staleness))


def test_a_line_is_found_with_no_coefficient_below_zero() -> None:
    rng = np.random.default_rng(0)
    features = np.column_stack([np.ones(50), rng.uniform(1, 100, 50), rng.uniform(1, 9000, 50)])
    assert non_negative_line(features, features @ np.array([2.0, 0.3, 1e-4])) == pytest.approx([2.0, 0.3, 1e-4])
    noisy = features @ np.array([2.0, 0.3, -1e-5]) * rng.lognormal(0, 0.05, 50)
    assert non_negative_line(features, noisy)[2] == 0.0


def test_a_forecast_is_the_sum_of_its_parts_in_turn_and_the_longer_one_together() -> None:
    found = made(groups=((40, 40),))  # 80 responses of 40 tokens: 40 steps of 10 ms; 80 x 50 tokens of 0.1 ms
    assert simulate(calibrated_scenario(recipe(), found)).step_s == pytest.approx(0.4 + 0.4)
    together = simulate(calibrated_scenario(at_staleness(recipe(), 1), found))
    assert together.step_s == pytest.approx(0.4 * 1.1, rel=0.01)  # the costs measured while both worked


def test_a_recipe_of_the_latest_weights_is_forecast_with_them() -> None:
    raw = to_plain(recipe())
    config = validate(raw | {"schedule": {"prompts_per_step": 40, "max_staleness": 1, "weights": "latest"}})
    found = made(together=costs(), groups=((40, 40),))
    latest = calibrated_scenario(config, found)
    assert (latest.weights, latest.kv_on_update) == ("latest", "recompute")
    # Generator 0.4 s and trainer 0.2 s of a tick: half of the tokens are one version old, under exact weights all.
    quick = dataclasses.replace(latest, trainer=TrainerCost(tick_s=0.2))
    assert simulate(quick).staleness_mean == pytest.approx(0.5, abs=0.05)
    assert simulate(dataclasses.replace(quick, weights="exact")).staleness_mean == pytest.approx(1.0, abs=0.05)
    assert all(one.result.scenario.weights == "latest" for one in forecast_schedules(config, found, num_ticks=12))


def test_the_schedule_proposed_is_the_least_stale_of_the_fast_ones() -> None:
    forecasts = forecast_schedules(recipe(), made(), num_ticks=30)
    assert {one.name for one in forecasts} == {
        "synchronous",
        "staleness 1",
        "staleness 2",
        "staleness 1, partial rollouts",
        "staleness 2, partial rollouts",
    }
    chosen = recommend_schedule(forecasts)
    near = [one for one in forecasts if one.result.step_s <= 1.02 * forecasts[0].result.step_s]
    assert chosen in near and chosen.token_staleness == min(one.token_staleness for one in near)
    assert chosen.settings["schedule.max_staleness"] >= 1
    # Where working together takes three times as long, nothing is gained by it.
    slow = made(together=costs(step_s=0.03, token_s=3e-4))
    assert recommend_schedule(forecast_schedules(recipe(), slow, num_ticks=20)).name == "synchronous"


def test_a_co_located_recipe_is_compared_with_roles_apart() -> None:
    raw = to_plain(recipe())
    together = validate(raw | {"schedule": raw["schedule"] | {"colocated": True}})
    for one in forecast_schedules(together, made(), num_ticks=12):
        settled = apply_settings(together, one.settings)
        assert settled.schedule.colocated == (settled.schedule.max_staleness == 0)
    apart = forecast_schedules(recipe(), made(), num_ticks=12)
    assert all("schedule.colocated" not in one.settings for one in apart)


def test_a_kept_calibration_reads_back_equal_and_belongs_to_its_recipe(tmp_path: Path) -> None:
    path = recipe_calibration_path(recipe(), tmp_path / "calibration.json")
    keep_calibration(path, made())
    assert load_recipe_calibration(path) == made()
    assert recipe_calibration_path(recipe(max_segments=3), tmp_path / "calibration.json") == path
    assert recipe_calibration_path(recipe(threads=2), tmp_path / "calibration.json") != path
    for text in ("{", "[]", '{"format": 2}', '{"format": 1}'):
        path.write_text(text)
        with pytest.raises(PlanError, match="calibrate again"):
            load_recipe_calibration(path)
    with pytest.raises(PlanError, match="does not exist"):
        load_recipe_calibration(tmp_path / "none.json")


def test_plan_and_simulate_use_what_a_recipe_was_measured_to_need(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    parser = argparse.ArgumentParser()
    verbs = parser.add_subparsers()
    plan_verb.add_parser(verbs)
    simulate_verb.add_parser(verbs)

    def run(line: str) -> str:
        args = parser.parse_args(line.split())
        assert args.run(args) == 0
        return capsys.readouterr().out

    assert "forecast from short runs of it" not in run(f"plan {RECIPE}")
    keep_calibration(recipe_calibration_path(load_config(RECIPE)), made())
    text = run(f"plan {RECIPE} --recipe {tmp_path}/out.toml")
    assert "forecast from short runs of it" in text and "mean 35" in text
    answer = json.loads(run(f"plan {RECIPE} --json"))["measured"]
    settings = {one["name"]: one["settings"] for one in answer["schedules"]}[answer["recommended"]]
    assert load_config(tmp_path / "out.toml").schedule.max_staleness == settings["schedule.max_staleness"]
    (found,) = json.loads(run(f"simulate {RECIPE} --ticks 30 --json"))["simulations"]
    assert "calibrated" in found["title"]
    slow = f"simulate {RECIPE} --ticks 30 --reward-s 60 --response-tokens 10 --prompt-tokens 5 --staleness 0 --json"
    (given,) = json.loads(run(slow))["simulations"]
    assert "calibrated" in given["title"] and given["role_s"]["reward"] == 60 and given["step_s"] > 60
    samples = load_config(RECIPE).schedule.prompts_per_step * load_config(RECIPE).generator.group_size
    assert given["role_s"]["trainer"] == pytest.approx(samples * 15 * 1e-4)
    for one in json.loads(run(f"plan {RECIPE} --reward-s 60 --json"))["measured"]["schedules"]:
        assert one["step_s"] >= 60 * 0.99
    kept = load_recipe_calibration(recipe_calibration_path(load_config(RECIPE)))
    assert kept.in_turn.reward.tick_s == 0.0  # as measured
    both = json.loads(run(f"simulate {RECIPE} --ticks 30 --staleness 0,1 --json"))["simulations"]
    in_turn, together = (one["role_s"]["trainer"] for one in both)
    assert together == pytest.approx(1.1 * in_turn, rel=0.1)  # each staleness with the costs that hold there
    (double,) = json.loads(run(f"simulate {RECIPE} --ticks 30 --prompts 80 --staleness 0 --json"))["simulations"]
    (single,) = json.loads(run(f"simulate {RECIPE} --ticks 30 --prompts 40 --staleness 0 --json"))["simulations"]
    assert "calibrated" in double["title"]  # costs are of sequences and tokens: another batch has them too
    assert double["role_s"]["trainer"] == pytest.approx(2 * single["role_s"]["trainer"], rel=0.1)
    run(f"plan {RECIPE} --prompts 80 --group-size 4 --recipe {tmp_path}/out.toml")
    written = load_config(tmp_path / "out.toml")
    assert (written.schedule.prompts_per_step, written.generator.group_size) == (80, 4)
    run(f"plan {RECIPE} --staleness 2 --max-segments 1 --recipe {tmp_path}/out.toml")
    written = load_config(tmp_path / "out.toml")
    assert (written.schedule.max_staleness, written.generator.max_segments) == (2, 1)


def test_what_a_plan_leaves_out_is_named_with_measured_lengths_too() -> None:
    config = to_plain(recipe())
    measured = MeasuredSchedules(calibration=made(), forecasts=[])
    assert (
        measured.question(question_from_config(config)).note == "measured while calibrating, under the initial policy"
    )
    asked = question_from_config(config | {"algorithm": {"advantage": "gae", "kl_coef": 0.1}})
    found = measured.question(asked)
    assert found.note.startswith("measured while calibrating")
    assert found.note.endswith("; not in the plan: the reference executor, the critic")
    assert (found.response.mean, found.prompt_tokens) == (35.0, 10)


@pytest.mark.parametrize("colocated", [False, True])
def test_the_recipe_itself_is_run_in_turn_and_together(tmp_path: Path, colocated: bool) -> None:
    config = validate(
        {
            "run": {"dir": str(tmp_path / "run"), "runtime": "inline", "cores": 2},
            "model": {"path": "bundled:tiny"},
            "task": {"name": "steps"},
            "schedule": {"prompts_per_step": 2, "max_staleness": 0 if colocated else 1, "colocated": colocated},
            "generator": {"group_size": 2, "threads": 1, "sampling": {"max_new_tokens": 12}},
            "trainer": {"threads": 1},
            "evaluation": {"every": 1},
        }
    )
    lines: list[str] = []
    found = calibrate_recipe(config, ticks=7, enough_s=0.0, log=lines.append)
    assert lines == ["in turn: 7 ticks", "together: 7 ticks"] and not (tmp_path / "run").exists()
    assert len(found.groups) == 7 * 2 and all(len(group) == 2 and max(group) <= 12 for group in found.groups)
    assert found.in_turn.num_ticks == 5  # two of warm-up are left out
    line = found.in_turn.generator  # equal lengths may leave any of its three terms at 0
    assert line.tick_s + line.decode_step_s(np.ones(1), np.ones(1))[0] > 0
    assert simulate(calibrated_scenario(config, found)).step_s > 0
    with pytest.raises(PlanError, match="at least 7 ticks"):
        calibrate_recipe(config, ticks=6)


def test_measured_jitter_stays_unless_the_command_line_gives_another(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    parser = argparse.ArgumentParser()
    simulate_verb.add_parser(parser.add_subparsers())
    keep_calibration(recipe_calibration_path(load_config(RECIPE)), made(together=costs(jitter=0.3)))
    seen: list[Variation] = []

    def watched(scenario: Scenario) -> SimulationResult:
        seen.append(scenario.variation)
        return simulate(scenario)

    monkeypatch.setattr("llamarl.simulator.simulate.simulate", watched)
    for flags in ("", "--jitter 0.1", "--jitter 0,0", "--slow-replicas 1:2"):
        args = parser.parse_args(f"simulate {RECIPE} --ticks 8 {flags}".split())
        assert args.run(args) == 0
    capsys.readouterr()
    measured = Variation(trainer_jitter=0.3)
    assert seen == [
        measured,
        Variation(generator_jitter=0.1),
        Variation(),
        dataclasses.replace(measured, slow_fraction=1.0, slow_factor=2.0),
    ]


def test_what_changes_the_costs_has_a_calibration_of_its_own_and_a_saved_run_its_recipes() -> None:
    plain = recipe_calibration_path(load_config(RECIPE))
    for words in (["--lora.rank", "8"], ["--reference.enabled", "true"], ["--dynamic_sampling.enabled", "true"]):
        assert recipe_calibration_path(load_config(RECIPE, words)) != plain
    threads = settled_threads(load_config(RECIPE))
    words = [
        "--generator.device",
        '"cpu"',
        "--trainer.device",
        '"cpu"',
        "--generator.threads",
        str(threads["generator"]),
    ]
    words += ["--trainer.threads", str(threads["trainer"]), "--schedule.max_staleness", "2"]
    assert recipe_calibration_path(load_config(RECIPE, words)) == plain


def test_a_calibration_of_another_machine_does_not_hide_the_one_of_this(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    said: list[str] = []
    other, own = recipe(threads=2), recipe()
    keep_calibration(recipe_calibration_path(own), made())
    keep_calibration(recipe_calibration_path(other), made(cores=99))
    found = find_calibration((other, own), log=said.append)
    assert found is not None and found.cores == 99 and not said
    path = recipe_calibration_path(other)
    record = json.loads(path.read_text())
    record["machine"]["cores"] = 1000
    path.write_text(json.dumps(record))
    assert find_calibration((other, own), log=said.append) == made()
    assert len(said) == 1 and f"--calibration {calibration_path()} takes it" in said[0]


def test_short_ticks_are_measured_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamarl.simulator.calibrate._MAX_TICKS", 9)
    config = validate(
        {
            "run": {"runtime": "inline"},
            "schedule": {"prompts_per_step": 1, "max_staleness": 1},
            "generator": {"group_size": 2, "threads": 1, "sampling": {"max_new_tokens": 4}},
            "trainer": {"threads": 1},
        }
    )
    lines: list[str] = []
    calibrate_recipe(config, ticks=7, enough_s=3600.0, log=lines.append)
    assert [line.split(": ")[1] for line in lines] == ["7 ticks", "9 ticks", "9 ticks"]


def test_a_calibration_on_a_busy_machine_says_so() -> None:
    for jitter, said in ((0.6, True), (0.4, False)):
        lines = "\n".join(made(together=costs(jitter=jitter)).describe())
        assert ("was the machine idle?" in lines) is said


@pytest.mark.parametrize(("threads", "fsdp"), [(1, 1), (2, 1), (1, 3)])  # three ranks share what cores there are
def test_rooflines_of_the_measured_machine_give_back_the_runs_own_ticks(
    threads: int, fsdp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    config = recipe(threads=threads)
    config = dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, fsdp=fsdp))
    line = LinearGeneratorCost(step_s=0.02, sequence_s=0.003)
    measured = dataclasses.replace(costs(token_s=2e-4), generator=line, trainer=TrainerCost(tick_s=0.7, token_s=2e-4))
    hardware = machine_of_run(config, made(in_turn=measured))
    assert not hardware.device.assumed and "was it idle" not in hardware.device.title
    work = Workload(
        model=find_model(config.model.path), response=grouped(made().groups), prompts_per_step=40, group_size=2,
        prompt_tokens=10,
    )  # fmt: skip
    found = scenario_from_recipe(config, work, hardware, settled_threads(config), cores=2)
    assert (found.trainer.tick_s, found.trainer.token_s) == pytest.approx((0.7, 2e-4), rel=1e-4)
    active = np.array([1.0, float(min(80, config.generator.engine.max_sequences))])
    context = np.full(2, 10 + work.response.mean_in_flight)
    assert found.generator.decode_step_s(active, context) == pytest.approx(0.02 + 0.003 * active, rel=1e-4)


def test_time_that_only_the_ticks_have_is_that_of_their_batch() -> None:
    """Lengths that never differ: no line tells a tick from its steps, and the rooflines must still repeat the tick."""
    config = recipe()
    alike = dataclasses.replace(
        costs(), generator=LinearGeneratorCost(tick_s=4.0), trainer=TrainerCost(tick_s=3.0), prompt_tokens=10
    )
    hardware = machine_of_run(config, made(in_turn=alike, groups=((40, 40),)))
    work = Workload(
        model=find_model(config.model.path), response=grouped(((40, 40),)), prompts_per_step=40, group_size=2,
        prompt_tokens=10,
    )  # fmt: skip
    result = simulate(scenario_from_recipe(config, work, hardware, settled_threads(config)))
    assert result.role_s["generator"] == pytest.approx(4.0, rel=0.1)  # prefill and a longer context come to it
    assert result.role_s["trainer"] == pytest.approx(3.0, rel=0.1)


def test_a_machine_faster_than_was_assumed_is_measured_as_that() -> None:
    # A step that costs next to nothing cannot be an overhead: the memory it reads the weights from is faster.
    quick = dataclasses.replace(costs(token_s=1e-8), generator=LinearGeneratorCost(step_s=1e-7))
    hardware, assumed = machine_of_run(recipe(), made(in_turn=quick)), machine_of_run(recipe(), made())
    assert hardware.device.memory_bytes_per_s > 10 * assumed.device.memory_bytes_per_s
    assert hardware.matmul_rate("fp32") > 10 * assumed.matmul_rate("fp32")
    assert hardware.efficiency.decode_step_overhead_s == pytest.approx(0.0, abs=1e-7)


def test_a_machine_measured_while_busy_is_named_so_in_every_plan() -> None:
    assert "differed by 60%: was it idle?" in machine_of_run(recipe(), made(in_turn=costs(jitter=0.6))).device.title


def test_a_calibration_serves_later_plans_of_its_recipe_and_of_any_model(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked: list[RunConfig] = []

    def measured(config: RunConfig, **_: object) -> RecipeCalibration:
        asked.append(config)
        return made()

    monkeypatch.setattr("llamarl.cli.measured_schedules.calibrate_recipe", measured)
    parser = argparse.ArgumentParser()
    plan_verb.add_parser(parser.add_subparsers())

    def plan(line: str) -> str:
        args = parser.parse_args(["plan", *line.split()])
        assert args.run(args) == 0
        return capsys.readouterr().out

    assert "never measured" in plan("--model SmolLM2-135M --devices 2")
    assert "forecast from short runs of it" in plan(f"{RECIPE} --calibrate --prompts 12")
    assert [config.schedule.prompts_per_step for config in asked] == [12]
    assert ", measured)" in plan("--model SmolLM2-135M --devices 2")
    assert len(asked) == 1
