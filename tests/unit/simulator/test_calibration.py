"""A recipe calibrated by its own executors: what the fit finds, what a forecast makes of it, which split it proposes."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamarl.cli import plan as plan_verb
from llamarl.cli import simulate as simulate_verb
from llamarl.cli.measured_splits import MeasuredSplits, measure_splits
from llamarl.config import RunConfig, load_config, to_plain, validate
from llamarl.errors import PlanError
from llamarl.planner.kept_hardware import calibration_path
from llamarl.planner.recipe import question_from_config
from llamarl.simulator.calibration import calibrate_recipe, calibrated_scenario, mean_costs
from llamarl.simulator.costs import LinearGeneratorCost, TrainerCost, Variation
from llamarl.simulator.kept_calibration import (
    RecipeCalibration,
    RoleCosts,
    find_calibration,
    keep_calibration,
    kept_calibration,
    recipe_calibration_path,
    settled_threads,
)
from llamarl.simulator.scenario import Scenario
from llamarl.simulator.simulate import SimulationResult, simulate
from llamarl.simulator.splits import Allowed, Split, apply, forecast_splits, recommend_split, variants_of
from llamarl.simulator.watched_run import Beside, non_negative_line, slowdown, warm_up_ticks

RECIPE = Path(__file__).parents[3] / "recipes" / "tiny.toml"


def made(**changes: object) -> RecipeCalibration:
    """As if measured: 10 ms a decode step, 1 ms a batch token; two threads are 1.2 times as fast, int8 a quarter slower."""
    steps = {"1:none": 0.010, "2:none": 0.010 / 1.2, "1:int8": 0.0125}
    found = RecipeCalibration(
        cores=2,
        generators={
            key: RoleCosts(cost=LinearGeneratorCost(step_s=step), jitter=0.0, ticks=4) for key, step in steps.items()
        },
        trainers={
            key: RoleCosts(cost=TrainerCost(token_s=token), jitter=0.0, ticks=4)
            for key, token in {"1": 1e-4, "2": 1e-4 / 1.2}.items()
        },
        reward_s=0.0,
        round_s=0.0,
        slowdowns={"1+1": {"generator": 1.1, "trainer": 1.1}},
        groups=((20, 30), (40, 50)),
        prompt_tokens=10,
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


def inline_recipe(max_new_tokens: int) -> RunConfig:
    """Small enough to be measured in a unit test."""
    return validate(
        {
            "run": {"runtime": "inline"},
            "schedule": {"prompts_per_step": 2, "max_staleness": 1},
            "generator": {"group_size": 2, "threads": 1, "sampling": {"max_new_tokens": max_new_tokens}},
            "trainer": {"threads": 1},
        }
    )


def test_a_line_is_found_with_no_coefficient_below_zero_and_the_sum_kept() -> None:
    rng = np.random.default_rng(0)
    features = np.column_stack([np.ones(50), rng.uniform(1, 100, 50), rng.uniform(1, 9000, 50)])
    assert non_negative_line(features, features @ np.array([2.0, 0.3, 1e-4])) == pytest.approx([2.0, 0.3, 1e-4])
    noisy = features @ np.array([2.0, 0.3, -1e-5]) * rng.lognormal(0, 0.05, 50)
    found = non_negative_line(features, noisy)
    assert found[2] == 0.0 and (features @ np.array(found)).sum() == pytest.approx(noisy.sum())


def test_a_forecast_is_the_sum_of_its_parts_in_turn_and_the_slowed_maximum_together() -> None:
    found = made(groups=((40, 40),))  # 80 responses of 40 tokens: 40 steps of 10 ms; 80 x 50 tokens of 0.1 ms
    scenario = calibrated_scenario(recipe(), found)
    assert simulate(scenario).step_s == pytest.approx(0.4 + 0.4)
    together = simulate(dataclasses.replace(scenario, max_staleness=1))
    assert together.step_s == pytest.approx(0.4 * 1.1, rel=0.01)
    with pytest.raises(PlanError, match="3:none"):
        calibrated_scenario(recipe(threads=3), found)


def test_a_recipe_of_the_latest_weights_is_forecast_with_them() -> None:
    config = validate(
        to_plain(recipe()) | {"schedule": {"prompts_per_step": 40, "max_staleness": 1, "weights": "latest"}}
    )
    found = made(slowdowns={"1+1": {"generator": 1.0, "trainer": 1.0}}, groups=((40, 40),))
    latest = calibrated_scenario(config, found)
    assert (latest.weights, latest.kv_on_update) == ("latest", "recompute")
    # Generator 0.4 s and trainer 0.2 s of a tick: half of the tokens are one version old, under exact weights all.
    quick = dataclasses.replace(latest, trainer=TrainerCost(tick_s=0.2))
    assert simulate(quick).staleness_mean == pytest.approx(0.5, abs=0.05)
    assert simulate(dataclasses.replace(quick, weights="exact")).staleness_mean == pytest.approx(1.0, abs=0.05)
    assert all(split.result.scenario.weights == "latest" for split in forecast_splits(config, found, num_ticks=12))


def test_the_split_proposed_is_the_fastest_of_all_that_were_measured() -> None:
    splits = forecast_splits(recipe(), made(), num_ticks=30)
    names = {split.name for split in splits}
    assert {"synchronous, threads 2+2", "staleness 1, threads 1+1", "staleness 1, threads 1+1, int8"} <= names
    chosen = recommend_split(splits, "none")
    assert chosen.settings["schedule.max_staleness"] >= 1
    assert (chosen.settings["generator.threads"], chosen.settings["trainer.threads"]) == (1, 1)
    assert chosen.result.step_s <= 1.02 * min(split.result.step_s for split in splits)
    near = [split for split in splits if split.result.step_s <= 1.02 * splits[0].result.step_s]
    assert chosen.token_staleness == min(split.token_staleness for split in near)
    assert apply(recipe(), chosen.settings).generator.quantization == "none"
    assert variants_of(recipe(), 2) == [(1, "none", 1), (2, "none", 2), (1, "int8", 1)]


def test_where_cores_hardly_share_work_in_turn_with_all_threads_wins() -> None:
    """Two threads twice as fast, and roles that slow each other three times: nothing is gained by overlap."""
    base = made()
    found = made(
        generators={**base.generators, "2:none": RoleCosts(cost=LinearGeneratorCost(step_s=0.005), jitter=0.0, ticks=4)},
        trainers={"1": base.trainers["1"], "2": RoleCosts(cost=TrainerCost(token_s=5e-5), jitter=0.0, ticks=4)},
        slowdowns={"1+1": {"generator": 3.0, "trainer": 3.0}},
    )  # fmt: skip
    assert recommend_split(forecast_splits(recipe(), found, num_ticks=20), "none").name == "synchronous, threads 2+2"


def test_another_precision_is_proposed_only_for_more_than_forecasts_err() -> None:
    base = made()
    for quicker, quantization in ((0.90, "none"), (0.80, "int8")):
        other = RoleCosts(cost=LinearGeneratorCost(step_s=0.01 * quicker), jitter=0.0, ticks=4)
        found = made(
            generators={"1:none": base.generators["1:none"], "1:int8": other},
            trainers={"1": RoleCosts(cost=TrainerCost(token_s=1e-6), jitter=0.0, ticks=4)},
        )
        splits = forecast_splits(recipe(), found, num_ticks=20)
        assert recommend_split(splits, "none").settings["generator.quantization"] == quantization
        assert recommend_split(splits, "int8").settings["generator.quantization"] == "int8"


def test_constants_of_several_runs_are_averaged() -> None:
    runs = [
        RoleCosts(cost=LinearGeneratorCost(tick_s=t, step_s=2 * t, prefill_token_s=t * t), jitter=j, ticks=3)
        for t, j in ((1.0, 0.1), (3.0, 0.3))
    ]
    expected = LinearGeneratorCost(tick_s=2.0, step_s=4.0, prefill_token_s=5.0)
    assert mean_costs(runs) == RoleCosts(cost=expected, jitter=pytest.approx(0.2), ticks=6)


def test_a_kept_calibration_reads_back_equal_and_belongs_to_its_recipe(tmp_path: Path) -> None:
    path = recipe_calibration_path(recipe(), tmp_path / "calibration.json")
    keep_calibration(path, made())
    assert kept_calibration(path) == made()
    assert recipe_calibration_path(recipe(max_segments=3), tmp_path / "calibration.json") == path
    assert recipe_calibration_path(recipe(threads=2), tmp_path / "calibration.json") != path
    path.write_text("{")
    with pytest.raises(PlanError, match="calibrate again"):
        kept_calibration(path)
    with pytest.raises(PlanError, match="does not exist"):
        kept_calibration(tmp_path / "none.json")


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

    assert "forecast from this recipe's own executors" not in run(f"plan {RECIPE}")
    keep_calibration(recipe_calibration_path(load_config(RECIPE)), made())
    text = run(f"plan {RECIPE} --recipe {tmp_path}/out.toml")
    assert "forecast from this recipe's own executors" in text and "mean 35" in text
    answer = json.loads(run(f"plan {RECIPE} --json"))
    best = answer["splits"]["splits"][0]
    assert load_config(tmp_path / "out.toml").schedule.max_staleness == best["settings"]["schedule.max_staleness"]
    (found,) = json.loads(run(f"simulate {RECIPE} --ticks 30 --json"))["simulations"]
    assert "calibrated" in found["title"]
    slow = f"simulate {RECIPE} --ticks 30 --reward-s 60 --response-tokens 10 --prompt-tokens 5 --staleness 0 --json"
    (given,) = json.loads(run(slow))["simulations"]
    assert "calibrated" in given["title"] and given["role_s"]["reward"] == 60 and given["step_s"] > 60
    samples = load_config(RECIPE).schedule.prompts_per_step * load_config(RECIPE).generator.group_size
    assert given["role_s"]["trainer"] == pytest.approx(samples * 15 * 1e-4)
    for split in json.loads(run(f"plan {RECIPE} --reward-s 60 --json"))["splits"]["splits"]:
        assert split["step_s"] >= 60 * 0.99
    assert kept_calibration(recipe_calibration_path(load_config(RECIPE))).reward_s == 0.0  # as measured
    (double,) = json.loads(run(f"simulate {RECIPE} --ticks 30 --prompts 80 --staleness 0 --json"))["simulations"]
    (single,) = json.loads(run(f"simulate {RECIPE} --ticks 30 --prompts 40 --staleness 0 --json"))["simulations"]
    assert "calibrated" in double["title"]  # costs are of sequences and tokens: another batch has them too
    assert double["role_s"]["trainer"] == pytest.approx(2 * single["role_s"]["trainer"], rel=0.1)
    splits = json.loads(run(f"plan {RECIPE} --prompts 80 --json"))["splits"]["splits"]
    named = {split["name"]: split for split in splits}
    run(f"plan {RECIPE} --prompts 80 --group-size 4 --recipe {tmp_path}/out.toml")
    written = load_config(tmp_path / "out.toml")
    assert (written.schedule.prompts_per_step, written.generator.group_size) == (80, 4)
    run(f"plan {RECIPE} --staleness 2 --precision int8 --max-segments 1 --recipe {tmp_path}/out.toml")
    written = load_config(tmp_path / "out.toml")
    assert (written.schedule.max_staleness, written.generator.quantization) == (2, "int8")
    assert written.generator.max_segments == 1
    assert named["synchronous, threads 1+1"]["role_s"]["trainer"] == pytest.approx(double["role_s"]["trainer"], rel=0.1)
    with pytest.raises(PlanError, match="--calibrate --splits"):
        run("plan --model Llama-3.1-8B --splits")


def test_what_a_plan_leaves_out_is_named_with_measured_lengths_too() -> None:
    config = to_plain(recipe())
    splits = MeasuredSplits(config=recipe(), calibration=made(), splits=[])
    assert splits.question(question_from_config(config)).note == "measured while calibrating, under the initial policy"
    asked = question_from_config(config | {"algorithm": {"advantage": "gae", "kl_coef": 0.1}})
    found = splits.question(asked)
    assert found.note.startswith("measured while calibrating")
    assert found.note.endswith("; not in the plan: the reference executor, the critic")
    assert (found.response.mean, found.prompt_tokens) == (35.0, 10)


def test_a_co_located_recipe_is_compared_with_roles_apart() -> None:
    raw = to_plain(recipe())
    together = validate(raw | {"schedule": raw["schedule"] | {"colocated": True}})
    for split in forecast_splits(together, made(), num_ticks=12):
        settled = apply(together, split.settings)
        assert settled.schedule.colocated == (settled.schedule.max_staleness == 0)
    assert all("schedule.colocated" not in split.settings for split in forecast_splits(recipe(), made(), num_ticks=12))


@pytest.mark.parametrize("colocated", [False, True])
def test_the_recipes_own_executors_are_measured(tmp_path: Path, colocated: bool) -> None:
    config = validate(
        {
            "run": {"dir": str(tmp_path / "run"), "runtime": "inline", "cores": 2},
            "model": {"path": "bundled:tiny"},
            "task": {"name": "steps"},
            "schedule": {"prompts_per_step": 2, "max_staleness": 0 if colocated else 1, "colocated": colocated},
            "generator": {"group_size": 2, "threads": 1, "sampling": {"max_new_tokens": 12}},
            "trainer": {"threads": 1},
        }
    )
    lines: list[str] = []
    found = calibrate_recipe(config, ticks=4, enough_s=0.0, log=lines.append)
    assert len(lines) == 2 and len(found.groups) == 8 and max(map(max, found.groups)) <= 12
    generator = found.generators["1:none"].cost
    assert isinstance(generator, LinearGeneratorCost) and generator.decode_step_s(np.ones(1), np.ones(1)) > 0
    assert set(found.slowdowns["1+1"]) == {"generator", "trainer"}
    result = simulate(calibrated_scenario(dataclasses.replace(config, run=config.run), found))
    assert result.step_s > 0
    with pytest.raises(PlanError, match="at least 4 ticks"):
        calibrate_recipe(config, ticks=3)


def test_measured_jitter_stays_unless_the_command_line_gives_another(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    parser = argparse.ArgumentParser()
    simulate_verb.add_parser(parser.add_subparsers())
    uneven = dataclasses.replace(made().trainers["1"], jitter=0.3)
    found = made(trainers={"1": uneven, "2": uneven})
    keep_calibration(recipe_calibration_path(load_config(RECIPE)), found)
    seen: list[Variation] = []

    def watched(scenario: Scenario) -> SimulationResult:
        seen.append(scenario.variation)
        return simulate(scenario)

    monkeypatch.setattr("llamarl.simulator.simulate.simulate", watched)
    for flags in ("", "--jitter 0.1", "--jitter 0,0", "--slow-replicas 1:2"):
        line = f"simulate {RECIPE} --ticks 8 --trace {tmp_path}/trace.json {flags}"  # its evaluator has a lane too
        args = parser.parse_args(line.split())
        assert args.run(args) == 0
    capsys.readouterr()
    measured = Variation(trainer_jitter=0.3)
    assert seen == [
        measured,
        Variation(generator_jitter=0.1),
        Variation(),
        dataclasses.replace(measured, slow_fraction=1.0, slow_factor=2.0),
    ]
    assert "evaluator" in (tmp_path / "trace.json").read_text()


def test_variants_are_measured_twice_in_opposite_order_beside_the_recipes_own() -> None:
    config = inline_recipe(max_new_tokens=8)
    lines: list[str] = []
    found = calibrate_recipe(config, variants=[(1, "int8", 1)], ticks=4, enough_s=0.0, log=lines.append)
    turns = [line for line in lines if line.startswith("in turn")]
    assert ["none" in line for line in turns] == [True, False, False, True]
    assert sum(line.startswith("together") for line in lines) == 2  # one pair of threads, in both orders
    assert set(found.generators) == {"1:none", "1:int8"} and set(found.trainers) == {"1"}
    assert found.generators["1:int8"].ticks == found.generators["1:none"].ticks == 2 * 2  # 4 ticks, 2 of them counted
    assert found.trainers["1"].ticks == 4 * 2
    names = {split.name for split in forecast_splits(config, found, num_ticks=8)}
    assert {"synchronous, threads 1+1", "synchronous, threads 1+1, int8"} <= names
    assert sum("at once" in name for name in names) == 2  # the fastest of each precision with half its concurrency


def test_what_changes_the_costs_has_a_calibration_of_its_own_and_a_saved_run_its_recipes(tmp_path: Path) -> None:
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
    keep_calibration(recipe_calibration_path(other), made(prompt_tokens=99))
    found = find_calibration((other, own), log=said.append)
    assert found is not None and found.prompt_tokens == 99 and not said
    path = recipe_calibration_path(other)
    record = json.loads(path.read_text())
    record["machine"]["cores"] = 1000
    path.write_text(json.dumps(record))
    assert find_calibration((other, own), log=said.append) == made()
    assert len(said) == 1 and f"--calibration {calibration_path()} takes it" in said[0]


def test_slow_downs_of_several_runs_are_those_of_their_sums() -> None:
    runs = [
        Beside(overlap_s=3.0, work_s=1.0),
        Beside(overlap_s=1.0, work_s=-0.2),
    ]  # a noisy run alone would say nothing
    assert slowdown(runs, turns=2.0) == pytest.approx(4.0 / 0.8 / 2.0)
    assert slowdown(runs[1:], turns=2.0) == slowdown([], turns=1.0) == 1.0
    assert slowdown([Beside(overlap_s=1.0, work_s=1.2)], turns=1.0) == 1.0
    assert slowdown([Beside(overlap_s=9.0, work_s=1e-6)], turns=1.0) == 99.0


def test_first_ticks_are_left_out_for_a_while_but_three_stay() -> None:
    assert warm_up_ticks([0.0, 0.6, 1.2, 1.8, 2.4, 3.0, 3.6]) == 3
    assert warm_up_ticks([0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6]) == 3
    assert warm_up_ticks([5.0, 6.0, 7.0, 8.0, 9.0, 10.0]) == 2
    assert warm_up_ticks([0.0, 15.0, 30.0, 45.0, 60.0]) == 1
    assert warm_up_ticks([0.0, 0.1, 0.2, 0.3, 0.4]) == 2
    assert warm_up_ticks([0.0, 0.1, 0.2, 0.3]) == 1


def test_short_ticks_are_measured_for_longer() -> None:
    config = inline_recipe(max_new_tokens=4)
    lines: list[str] = []
    calibrate_recipe(config, ticks=4, enough_s=3600.0, log=lines.append)
    assert [line.split(", ")[2] for line in lines] == ["4 ticks", "24 ticks", "24 ticks"]


def test_half_the_concurrency_is_half_of_what_a_replica_has() -> None:
    def halves(config: RunConfig) -> list[int]:
        splits = forecast_splits(config, made(), Allowed(staleness=[0]), num_ticks=6)
        return sorted({split.settings.get("generator.engine.max_sequences", 0) for split in splits} - {0})

    assert halves(recipe()) == [40]  # 40 groups of 2
    assert halves(recipe(dp=2)) == [20]
    assert halves(recipe(engine={"max_sequences": 32})) == [16]
    with pytest.raises(PlanError, match="nothing that was measured generates in fp8"):
        forecast_splits(recipe(), made(), Allowed(precisions=["fp8"]))


def test_what_ran_against_each_other_is_kept_and_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def finals(config: RunConfig, splits: list[Split], **_: object) -> dict[str, float]:
        ran.extend(split.name for split in splits[:4])
        return {name: 1.0 - 0.1 * i for i, name in enumerate(ran)}  # the slowest of these forecasts is the fastest

    monkeypatch.setattr("llamarl.cli.measured_splits.calibrate_recipe", lambda *_, **__: made())
    monkeypatch.setattr("llamarl.cli.measured_splits.run_finals", finals)
    kept = tmp_path / "machine.json"

    def asked(**changes: Any) -> MeasuredSplits:
        few = Allowed(staleness=(1,), max_segments=2, precisions=("none",))
        calls: dict[str, Any] = {"measure": False, "variants": False, "log": lambda line: None, **changes}
        found = measure_splits(RECIPE, kept, allowed=few, **calls)
        assert found is not None
        return found

    first = asked(measure=True, variants=True)
    assert len(ran) > 1 and first.chosen.name == ran[-1] != first.splits[0].name
    assert f"{1.0 - 0.1 * (len(ran) - 1):.3g} s" in first.text() and "fastest measured" in first.text()
    assert asked().chosen.name == ran[-1]
    for other in ({"changes": {"schedule.prompts_per_step": 32}}, {"reward_s": 0.5}):  # these did not run
        text = asked(**other).text()
        assert "measured:" not in text and "fastest measured" not in text
    lines: list[str] = []
    wider = measure_splits(
        RECIPE, kept, measure=False, variants=False, allowed=Allowed(staleness=(0, 1, 2)), log=lines.append
    )
    assert wider is not None and wider.chosen.name in ran  # the fastest forecast has run, though others are allowed too
    slow = dataclasses.replace(first.calibration, finals={ran[-1]: 0.5})
    keep_calibration(recipe_calibration_path(load_config(RECIPE), kept), slow)
    assert not asked(log=lines.append).calibration.finals and "the forecasts decide" in lines[-1]
    again = asked(measure=True)  # without --splits: other constants, no finals
    assert not again.calibration.finals


def test_a_calibration_on_a_busy_machine_says_so() -> None:
    noisy = {"1": RoleCosts(cost=TrainerCost(token_s=1e-6), jitter=0.6, ticks=9)}
    quiet = {"1": RoleCosts(cost=TrainerCost(token_s=1e-6), jitter=0.4, ticks=9)}
    for trainers, said in ((noisy, True), (quiet, False)):
        lines = "\n".join(made(trainers=trainers).describe())
        assert ("was the machine idle?" in lines) is said
