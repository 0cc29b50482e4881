"""Unlike generator replicas on the virtual clock: ticks worked by hand, the real rule of who leaves, costs fitted kind by kind."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamarl.cli import simulate as verb
from llamarl.config import RunConfig, load_config, save_config, validate
from llamarl.engine.sequence import SamplingParams
from llamarl.engine.sequence import Sequence as TokenSequence
from llamarl.errors import PlanError
from llamarl.executors.generator_shard import ActiveGroup, GeneratorShard
from llamarl.planner.choices import Workload
from llamarl.planner.hardware import find_hardware
from llamarl.planner.lengths import constant, lognormal
from llamarl.planner.model_spec import find_model
from llamarl.planner.rooflines import GeneratorLayout, pulled_bytes, weight_sync_s, weight_syncs_s
from llamarl.simulator.calibrate import RecipeCalibration, calibrate_recipe, recipe_calibration_path
from llamarl.simulator.fitted_costs import FittedCosts, StageTick, fit_kinds, fit_runs, lengths_of_replicas
from llamarl.simulator.measured_machine import machine_of_run
from llamarl.simulator.placed import weight_bytes_of
from llamarl.simulator.scenario import ReplicaKind, Scenario
from llamarl.simulator.simulate import SimulationResult, simulate
from llamarl.simulator.sources import calibrated_scenario, scenario_from_recipe
from llamarl.simulator.tick_costs import LinearGeneratorCost, RewardCost, RooflineGeneratorCost, TrainerCost, Variation
from llamarl.tick_shares import Dealing
from llamarl.types import Prompt

RECIPE = Path(__file__).parents[3] / "recipes" / "unlike.toml"


@pytest.fixture(autouse=True)
def _no_kept_calibration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def two_kinds(first: float = 3.0, second: float = 1.0, **changes: Any) -> Scenario:
    """4 prompts of 2 responses of 10 tokens. A step takes the first 1 s and 0.1 s a sequence, the second 2 s."""
    scenario = Scenario(
        title="two kinds",
        prompts_per_step=4,
        group_size=2,
        lengths=constant(10),
        generator=LinearGeneratorCost(),
        kinds=(
            ReplicaKind(share=first, cost=LinearGeneratorCost(step_s=1.0, sequence_s=0.1)),
            ReplicaKind(share=second, cost=LinearGeneratorCost(tick_s=0.5, step_s=2.0)),
        ),
        trainer=TrainerCost(token_s=0.1),
        max_staleness=0,
        num_ticks=6,
    )
    return dataclasses.replace(scenario, **changes)


def generator_s(result: SimulationResult) -> list[float]:
    return [r.finished_s - r.started_s for r in result.reports if r.executor == "generator"]


# -- ticks by hand ----------------------------------------------------------------------------------------------------


def test_the_generators_tick_ends_with_the_slowest_replica_which_need_not_have_most_prompts() -> None:
    """Three prompts: 10 steps of 1 s + 0.1 s x 6 sequences = 16 s. One prompt: 0.5 s + 10 steps of 2 s = 20.5 s."""
    result = simulate(two_kinds())
    assert result.kind_s == pytest.approx((16.0, 20.5))
    assert generator_s(result) == pytest.approx([20.5] * 6)
    assert result.step_s == pytest.approx(20.5 + 0.1 * 4 * 2 * (10 + 1))  # then the trainer: 88 tokens, prompts too
    assert result.replica_idle == pytest.approx(1.0 - (16.0 + 20.5) / 2 / result.step_s)


def test_each_replica_has_the_work_of_its_own_share() -> None:
    """Shares turned: one prompt in 10 x (1 + 0.1 x 2) = 12 s; three in the same 20.5 s, for its steps cost alike."""
    result = simulate(two_kinds(1.0, 3.0))
    assert result.kind_s == pytest.approx((12.0, 20.5))


def test_a_share_that_makes_no_whole_number_alternates_as_a_run_deals_it() -> None:
    """Quotas 2.5 and 1.5: 3 and 2 prompts of the first in turn, so 10 x (1 + 0.6) and 10 x (1 + 0.4) s; the second is free."""
    scenario = two_kinds(5.0, 3.0)
    quick = dataclasses.replace(scenario.kinds[1], cost=LinearGeneratorCost(step_s=0.1))
    result = simulate(dataclasses.replace(scenario, kinds=(scenario.kinds[0], quick)))
    assert generator_s(result) == pytest.approx([16.0, 14.0] * 3)
    assert [r.metrics["tokens/trained"] for r in result.reports if r.executor == "trainer"] == [80.0] * 6


def test_a_replica_decodes_as_many_at_once_as_its_own_kind_does() -> None:
    """Of 6 sequences 3 at once: two waves of 10 steps, each of 1 s + 0.1 s x 3."""
    scenario = two_kinds()
    narrow = dataclasses.replace(scenario.kinds[0], slots=3)
    result = simulate(dataclasses.replace(scenario, kinds=(narrow, scenario.kinds[1])))
    assert result.kind_s == pytest.approx((26.0, 20.5))


def test_several_replicas_of_a_kind_share_its_part_and_each_takes_its_own_version() -> None:
    """Shares 1, 1, 2 of 4 prompts: 12 s for one; the lone replica has two in 10 x 1.4 s and takes 7 s for a version first."""
    cost = LinearGeneratorCost(step_s=1.0, sequence_s=0.1)
    kinds = (ReplicaKind(replicas=2, cost=cost), ReplicaKind(share=2.0, cost=cost, weights_load_s=7.0))
    result = simulate(two_kinds(kinds=kinds))
    assert result.scenario.num_replicas == 3
    assert result.kind_s == pytest.approx((12.0, 21.0))
    assert generator_s(result) == pytest.approx([21.0] * 6)


def test_alike_replicas_said_as_one_kind_give_the_same_reports() -> None:
    varied = Variation(generator_jitter=0.3, slow_fraction=0.5, slow_factor=2.0)
    cost = LinearGeneratorCost(tick_s=0.5, step_s=1.0, prefill_token_s=0.02)
    alike = Scenario(
        title="alike", prompts_per_step=4, group_size=3, lengths=lognormal(20, 0.8, 60), generator=cost, slots=4,
        trainer=TrainerCost(token_s=0.05), replicas=2, variation=varied, max_segments=2, oversubscription=1.5, num_ticks=9,
    )  # fmt: skip
    kind = ReplicaKind(replicas=2, cost=cost, slots=4)
    unlike = simulate(dataclasses.replace(alike, kinds=(kind,), replicas=1, slots=1))
    plain = simulate(alike)
    assert unlike.step_s == plain.step_s and unlike.staleness == plain.staleness
    assert generator_s(unlike) == generator_s(plain)


def test_a_part_of_a_tick_is_complete_when_every_replica_has_made_its_own() -> None:
    """Two prompts each, a sequence at a time, 10 tokens: groups end after 20 and 40 steps. Of 0.1 s in the first replica, and of
    0.2 s in the second: parts after 4 s and 8 s. A part is 2 x 2 x (10 + 1) = 44 tokens, 4.4 s of the trainer: from 4 s to 8.4 s,
    then to 12.8 s."""
    kinds = tuple(ReplicaKind(cost=LinearGeneratorCost(step_s=step_s), slots=1) for step_s in (0.1, 0.2))
    result = simulate(two_kinds(kinds=kinds, parts=2, group_size=2))
    assert generator_s(result) == pytest.approx([8.0] * 6)
    assert result.step_s == pytest.approx(12.8)


# -- against the real rule ---------------------------------------------------------------------------------------------


def shard_steps(scenario: Scenario, replica: int, lengths: Mapping[int, list[list[int]]]) -> list[int]:
    """Decode steps of each tick of a replica as ``GeneratorShard``, the generator's own rule, counts them one by one.

    Args:
        lengths: Tick -> responses of each group that it admits.
    """
    admitted: dict[int, list[list[int]]] = {}

    def new_group(index: int, tick: int) -> ActiveGroup:
        own = lengths[tick][len(admitted.setdefault(tick, []))]
        admitted[tick].append(own)
        prompt = Prompt(index=index, text="", tokens=np.zeros(1, np.int32), answer=None, task="t")
        sequences = [_sequence(index, sample, length) for sample, length in enumerate(own)]
        return ActiveGroup(prompt, tick, sequences)

    shard = GeneratorShard(
        replica, Dealing(scenario.shares, scenario.prompts_per_step), first_prompt=0,
        oversubscription=scenario.oversubscription, max_segments=scenario.max_segments, new_group=new_group,
    )  # fmt: skip
    found = []
    for tick in range(scenario.num_ticks):
        shard.admit(tick)
        steps = 0
        while (chosen := shard.deliverable(tick, shard.deadlines())) is None:
            ended = []
            for group in shard.active:
                for sequence in group.sequences:
                    if sequence.finish_reason is None:
                        sequence.tokens.append(0)
                        if len(sequence.tokens) == sequence.params.max_new_tokens:
                            sequence.finish_reason = "length"
                            ended.append(sequence)
            shard.heard_of(ended)
            steps += 1
        shard.take(chosen)
        found.append(steps)
    return found


def _sequence(index: int, sample: int, length: int) -> TokenSequence:
    params = SamplingParams(max_new_tokens=length)
    return TokenSequence(prompt_index=index, sample_index=sample, prompt_tokens=[0], params=params, seed=0)


@pytest.mark.parametrize(
    ("shares", "segments", "over"), [((5.0, 3.0), 2, 1.5), ((2.0, 1.0), 3, 2.5), ((3.0, 1.0), 1, 1.0)]
)
def test_partial_rollouts_of_unlike_replicas_end_ticks_as_the_generators_own_rule_does(
    shares: tuple[float, float], segments: int, over: float
) -> None:
    cost = LinearGeneratorCost(step_s=1.0)
    scenario = two_kinds(
        kinds=tuple(ReplicaKind(share=share, cost=cost) for share in shares), prompts_per_step=5, num_ticks=20,
        lengths=lognormal(12, 0.9, 60), max_segments=segments, oversubscription=over,
    )  # fmt: skip
    dealing = Dealing(shares, 5)
    active = [0, 0]
    lengths: list[dict[int, list[list[int]]]] = [{}, {}]
    for tick in range(20):
        rng = np.random.default_rng([0, 1, tick])
        for replica in range(2):
            wanted = dealing.num_active(replica, tick, oversubscription=over, max_segments=segments)
            new = max(0, wanted - active[replica])
            lengths[replica][tick] = scenario.lengths.sample(new * 2, rng).reshape(new, 2).tolist()
            active[replica] += new - dealing.counts(tick)[replica]
    steps = [shard_steps(scenario, replica, lengths[replica]) for replica in range(2)]
    result = simulate(scenario)
    assert [r.metrics["decode_steps"] for r in result.reports if r.executor == "generator"] == np.max(
        steps, axis=0
    ).tolist()
    assert result.kind_s == pytest.approx([np.mean(own[result.first_steady_tick :]) for own in steps])


def test_unlike_replicas_under_the_latest_weights_keep_the_bound_on_staleness() -> None:
    result = simulate(two_kinds(5.0, 3.0, weights="latest", max_staleness=2, max_segments=3, oversubscription=2.0,
                                lengths=lognormal(12, 0.9, 60), num_ticks=40, trainer=TrainerCost(tick_s=9.0)))  # fmt: skip
    assert max(result.staleness) <= 2
    assert sum(r.metrics["rollout/swaps"] for r in result.reports if r.executor == "generator") > 0


# -- costs of each kind ------------------------------------------------------------------------------------------------


def test_a_ticks_responses_are_those_of_the_replica_that_its_prompt_was_dealt_to() -> None:
    """Shares 3 and 1 of 4 prompts: 0, 2 and 3 go to the first, 1 to the second; tick 1 begins with prompt 4."""
    config = unlike_config(4)
    assert lengths_of_replicas(config, 0, [0, 1, 2, 3], [10, 20, 30, 40]) == [[10, 30, 40], [20]]
    assert lengths_of_replicas(config, 1, [5, 4, 5, 6, 7], [1, 2, 3, 4, 5]) == [[2, 4, 5], [1, 3]]
    assert lengths_of_replicas(config, 0, [0, 1, 2, 4], [1, 1, 1, 1]) is None  # of another tick
    assert lengths_of_replicas(config, 0, [0, 2, 3], [1, 1, 1]) is None  # nothing of the second


def test_each_kind_gets_its_own_line_and_what_the_stage_takes_beyond_them() -> None:
    """First kind 0.5 + 0.02 a step + 0.003 a token, second 0.1 + 0.05 a step; the stage 0.25 s after the slower one."""
    rng = np.random.default_rng(0)
    ticks = []
    for _ in range(30):
        work = [
            (float(steps), float(tokens))
            for steps, tokens in zip(rng.integers(5, 60, 2), rng.integers(60, 900, 2), strict=True)
        ]
        own = [0.5 + 0.02 * work[0][0] + 0.003 * work[0][1], 0.1 + 0.05 * work[1][0]]
        ticks.append(StageTick(stage_s=max(own) + 0.25, kinds=[0, 1], work=work, replica_s=own))
    (first, second), of_stage, of_replicas = fit_kinds(ticks)
    assert (first.tick_s, first.step_s, first.sequence_s) == pytest.approx((0.75, 0.02, 0.003))
    assert (second.tick_s, second.step_s, second.sequence_s) == pytest.approx((0.35, 0.05, 0.0), abs=1e-9)
    assert np.abs(of_stage).max() < 1e-9 and of_stage.shape == (30,)
    assert np.abs(of_replicas).max() < 1e-9 and of_replicas.shape == (60,)


def unlike_config(prompts: int, folder: Path | None = None, **sections: Any) -> RunConfig:
    return validate(
        {
            "run": {"dir": str(folder)} if folder else {},
            "schedule": {"prompts_per_step": prompts, "max_staleness": 0},
            "generator": {"group_size": 2, "replicas": [{"share": 3, "tp": 2}, {"share": 1, "quantization": "int8"}]},
            "evaluation": {"every": 0},
            **sections,
        }
    )


def write_run(folder: Path, *, leave_out: str = "", **sections: Any) -> tuple[RunConfig, Path]:
    """As a run of shares 3 and 1 would be measured in which the first took 0.5 + 0.02 a step + 0.003 a token, the second 0.1 + 0.05 a
    step, and the stage 0.25 s more than the slower one."""
    config = unlike_config(8, folder, **sections)
    (folder / "rollouts").mkdir(parents=True)
    save_config(config, folder / "config.toml")
    rng = np.random.default_rng(0)
    rows = []
    for tick in range(30):
        lengths = rng.integers(5, 60, (8, 2))
        samples = [
            json.dumps({"prompt_index": 8 * tick + place, "tokens": [0] * int(n), "prompt_tokens": [0] * 10})
            for place, own in enumerate(lengths)
            for n in own
        ]
        (folder / "rollouts" / f"tick_{tick:06d}.jsonl").write_text("\n".join(samples) + "\n")
        second = lengths[[1, 3]]  # of 8 prompts 6 and 2, in rounds: 0 1 | 0 1 | 0 0 0 0
        first = lengths[[0, 2, 4, 5, 6, 7]]
        own_s = (0.5 + 0.02 * first.max() + 0.003 * first.sum(), 0.1 + 0.05 * second.max())
        times = {
            "time/generator_s": max(own_s) + 0.25,
            "time/replica_0_s": own_s[0],
            "time/replica_1_s": own_s[1],
            "time/reward_s": 0.1,
            "time/trainer_s": 0.25 + 0.004 * float((lengths + 10).sum()),
        }
        step_s = times["time/generator_s"] + times["time/reward_s"] + times["time/trainer_s"]
        row = {"step": tick, **times, "time/step_s": step_s}
        rows.append(json.dumps({key: float(value) for key, value in row.items() if key != leave_out}))
    (folder / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    return config, folder


def run_simulate(line: str) -> int:
    parser = argparse.ArgumentParser()
    verb.add_parser(parser.add_subparsers())
    args = parser.parse_args(["simulate", *line.split()])
    return int(args.run(args))


def simulations(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["simulations"]
    return found


def test_a_run_of_unlike_replicas_is_simulated_with_what_each_of_them_measured(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    costs = fit_runs([write_run(tmp_path / "run")])
    first, second = costs.kinds
    assert costs.generator == first
    assert (first.tick_s, first.step_s, first.sequence_s) == pytest.approx((0.75, 0.02, 0.003))
    assert (second.tick_s, second.step_s, second.sequence_s) == pytest.approx((0.35, 0.05, 0.0), abs=1e-6)
    assert max(costs.errors.values()) < 1e-9 and max(costs.jitter.values()) < 1e-9
    run_simulate(f"{tmp_path / 'run'} --ticks 300 --json")
    (found,) = simulations(capsys)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert found["step_s"] == pytest.approx(np.mean([row["time/step_s"] for row in rows]), rel=0.03)
    for kind in (0, 1):
        measured = np.mean([row[f"time/replica_{kind}_s"] for row in rows]) + 0.25
        assert found["kinds"][kind]["busy_s"] == pytest.approx(measured, rel=0.03)
    run_simulate(f"{tmp_path / 'run'} --ticks 20")
    text = capsys.readouterr().out
    assert "2 generator replicas: 1 of share 3, 1 of share 1" in text and "kind 0  kind 1" in text


def test_a_run_that_does_not_say_what_its_replicas_took_names_the_way_that_works(tmp_path: Path) -> None:
    write_run(tmp_path / "old", leave_out="time/replica_1_s")
    with pytest.raises(
        PlanError, match=r"lacks time/replica_1_s at tick 2.*Run it again, or .*plan .*config.toml --calibrate"
    ):
        run_simulate(str(tmp_path / "old"))
    write_run(tmp_path / "chosen", dynamic_sampling={"enabled": True})
    with pytest.raises(PlanError, match="with dynamic_sampling the rollouts lack groups"):
        run_simulate(str(tmp_path / "chosen"))


def test_runs_of_alike_and_of_unlike_replicas_are_not_one_line(tmp_path: Path) -> None:
    unlike = write_run(tmp_path / "run")
    alike = dataclasses.replace(unlike[0], generator=dataclasses.replace(unlike[0].generator, replicas=()))
    with pytest.raises(PlanError, match="as many kinds"):
        fit_runs([unlike, (alike, unlike[1])])


def test_a_recipe_of_unlike_replicas_is_forecast_with_a_layout_and_a_precision_for_each(
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = validate(
        {
            "schedule": {"prompts_per_step": 10},
            "trainer": {"fsdp": 4},
            "generator": {
                "group_size": 2,
                "replicas": [
                    {"share": 3, "tp": 2, "quantization": "fp8", "max_sequences": 9},
                    {"dp": 2, "dtype": "bfloat16"},
                ],
            },
        }
    )
    model, hardware = find_model("Llama-3.1-8B"), find_hardware("h100")
    work = Workload(model=model, response=constant(100), prompts_per_step=10, group_size=2, prompt_tokens=10)
    found = scenario_from_recipe(config, work, hardware, {"generator": 1, "trainer": 1})
    layouts = [kind.cost.layout for kind in found.kinds if isinstance(kind.cost, RooflineGeneratorCost)]
    assert layouts == [GeneratorLayout(2, 1, "fp8", runnable=True), GeneratorLayout(1, 1, "bf16", runnable=True)]
    assert [(kind.replicas, kind.share, kind.slots) for kind in found.kinds] == [
        (1, 3.0, 9),
        (2, 1.0, config.generator.engine.max_sequences),
    ]
    assert found.generator_devices == 2 + 2 * 1
    assert found.kinds[0].weights_load_s < found.kinds[1].weights_load_s  # its ranks pull a half each
    result = simulate(found)
    assert result.role_s["generator"] == pytest.approx(max(result.kind_s))
    run_simulate("unlike --hardware h100 --ticks 8 --json")
    (shipped,) = simulations(capsys)
    assert [(kind["replicas"], kind["share"]) for kind in shipped["kinds"]] == [(1, 3.0), (1, 1.0)]


def test_trainer_ranks_send_to_the_replicas_of_all_kinds() -> None:
    """One trainer rank, two replicas that hold the whole each: two copies leave it, whoever of the kinds pulls."""
    hardware, model, whole = find_hardware("h100"), find_model("Llama-3.1-8B"), GeneratorLayout(runnable=True)
    copy_s = pulled_bytes(hardware, model, whole) / hardware.device.intra_node_bytes_per_s / hardware.efficiency.link
    latency_s = hardware.efficiency.intra_node_latency_s
    alone = weight_sync_s(hardware, model, trainer_devices=1, replicas=2, layout=whole)
    assert alone == pytest.approx(2 * copy_s + latency_s)
    found = weight_syncs_s(hardware, model, trainer_devices=1, kinds=[(1, whole), (1, whole)])
    assert found == pytest.approx([alone, alone])


def test_versions_travel_in_the_precision_that_all_kinds_take() -> None:
    kinds = [{"dtype": "bfloat16"}, {"dtype": "float32"}]
    config = validate({"schedule": {"prompts_per_step": 4}, "generator": {"replicas": kinds}})
    assert weight_bytes_of(config, 100.0) == 400.0
    both = validate({"schedule": {"prompts_per_step": 4}, "generator": {"replicas": [{"dtype": "bfloat16"}] * 2}})
    assert weight_bytes_of(both, 100.0) == 200.0


# -- calibration -------------------------------------------------------------------------------------------------------


def measured(*lines: LinearGeneratorCost) -> RecipeCalibration:
    costs = FittedCosts(
        generator=lines[0], kinds=lines, trainer=TrainerCost(token_s=1e-4), reward=RewardCost(), round_s=0.0,
        prompt_tokens=10, num_ticks=8, errors={"generator": 0.0, "trainer": 0.0}, jitter={"generator": 0.0, "trainer": 0.0},
    )  # fmt: skip
    return RecipeCalibration(cores=2, in_turn=costs, together=costs, groups=((40, 40),))


def test_a_calibrated_recipe_is_forecast_kind_by_kind_and_with_other_shares_too(tmp_path: Path) -> None:
    """16 prompts of 8 responses of 40 tokens, shares 3 and 1: 96 sequences in 40 steps of 10 ms and 0.1 ms each; 32 in 40 of 5 ms."""
    found = measured(LinearGeneratorCost(step_s=0.01, sequence_s=1e-4), LinearGeneratorCost(step_s=0.005))
    config = load_config(RECIPE)
    most = config.generator.engine.max_sequences
    assert most >= 96
    result = simulate(calibrated_scenario(config, found))
    assert result.kind_s == pytest.approx((40 * (0.01 + 96e-4), 40 * 0.005))
    assert result.scenario.generator_devices == 3
    other = load_config(RECIPE, ["--generator.replicas", '[{tp = 2, share = 1}, {quantization = "int8", share = 7}]'])
    assert recipe_calibration_path(other, tmp_path / "m") == recipe_calibration_path(config, tmp_path / "m")
    assert simulate(calibrated_scenario(other, found)).kind_s == pytest.approx((40 * (0.01 + 16e-4), 40 * 0.005))
    quantized = load_config(RECIPE, ["--generator.replicas", "[{tp = 2, share = 3}, {share = 1}]"])
    assert recipe_calibration_path(quantized, tmp_path / "m") != recipe_calibration_path(config, tmp_path / "m")


def test_the_machine_is_measured_by_the_plainest_of_unlike_replicas() -> None:
    """Of [tp 2, one rank, int8] the second: its line, as if it were the only kind, gives the machine's rates."""
    slow, plain, codes = (LinearGeneratorCost(step_s=step_s, sequence_s=1e-4) for step_s in (0.3, 0.02, 0.1))
    kinds = '[{tp = 2, share = 2}, {share = 1}, {quantization = "int8", share = 1}]'
    machine = machine_of_run(load_config(RECIPE, ["--generator.replicas", kinds]), measured(slow, plain, codes))
    # 16 prompts by a share of a quarter: what one of four alike replicas does
    alike = load_config(RECIPE, ["--generator.replicas", "[]", "--generator.dp", "4"])
    assert machine == machine_of_run(alike, measured(plain))


def test_a_recipe_of_unlike_replicas_is_calibrated_by_short_runs_of_it(tmp_path: Path) -> None:
    config = validate(
        {
            "run": {"dir": str(tmp_path / "run"), "runtime": "inline", "cores": 2},
            "model": {"path": "bundled:tiny"},
            "task": {"name": "steps"},
            "schedule": {"prompts_per_step": 4, "max_staleness": 1},
            "generator": {
                "group_size": 2,
                "threads": 1,
                "sampling": {"max_new_tokens": 12},
                "replicas": [{"quantization": "int8"}],  # this runtime holds one rank an executor
            },
            "trainer": {"threads": 1},
            "evaluation": {"every": 0},
        }
    )
    found = calibrate_recipe(config, ticks=7, enough_s=0.0)
    for costs in (found.in_turn, found.together):
        assert len(costs.kinds) == 1 and costs.num_ticks == 5
        assert all(line.tick_s + line.step_s + line.sequence_s > 0 for line in costs.kinds)
    assert "a tick +" in found.describe()[1]
    assert simulate(calibrated_scenario(config, found)).step_s > 0
