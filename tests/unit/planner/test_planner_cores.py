"""Generator and trainer on the cores of one CPU, and ticks that are trained in parts: worked by hand, measured, simulated."""

from __future__ import annotations

import tomllib
from dataclasses import replace

import numpy as np
import pytest

from llamarl.config import known_keys, validate
from llamarl.planner.choices import Options, Workload, filling_choices
from llamarl.planner.cores import SIDE_BY_SIDE, core_rate, finished_s, shares_cores
from llamarl.planner.generation import GeneratorDemand, generator_tick_s, group_ends_s
from llamarl.planner.hardware import Hardware, find_hardware, this_machine
from llamarl.planner.lengths import lognormal
from llamarl.planner.model_spec import find_model
from llamarl.planner.plan_report import report_text
from llamarl.planner.recipe import plan_settings, recipe_text
from llamarl.planner.rooflines import GeneratorLayout
from llamarl.planner.search import best_resharding, best_separate
from llamarl.planner.training import TrainerDemand, TrainerLayout, trainer_memory, trainer_tick
from llamarl.simulator.scenario import Scenario, durations_scenario
from llamarl.simulator.simulate import simulate
from llamarl.simulator.sources import on_shared_cores, scenario_from_recipe


def machine(cores: int) -> Hardware:
    here = this_machine()
    return replace(here, device=replace(here.device, devices_per_node=cores, memory_bytes=64e9))


WORK = Workload(
    model=find_model("Qwen2.5-0.5B"), response=lognormal(200, limit=800), prompts_per_step=8, group_size=4, prompt_tokens=50
)  # fmt: skip
WHOLE = Options(partial_rollouts=False)


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([(0.0, 30.0)], 20.0),  # 10 s beside the generator on one core, then 20 s of work on two
        ([(0.0, 5.0)], 5.0),
        ([(12.0, 6.0)], 15.0),  # the generator is done by then
        ([(4.0, 8.0), (10.0, 6.0)], 14.0),  # 6 s of the first by 10 s, its rest to 11 s, the second to 14 s
        ([(4.0, 2.0), (10.0, 6.0)], 13.0),  # done at 6 s, it waits
    ],
)
def test_a_trainer_has_the_cores_that_the_generator_leaves(parts: list[tuple[float, float]], expected: float) -> None:
    assert finished_s(parts, cores=2, held=1, held_s=10.0) == pytest.approx(expected)


def test_a_trainer_with_devices_of_its_own_takes_parts_as_they_come() -> None:
    assert finished_s([(4.0, 5.0), (8.0, 5.0)], cores=1) == pytest.approx(14.0)
    assert finished_s([(4.0, 2.0), (8.0, 2.0)], cores=1) == pytest.approx(10.0)


def test_steps_on_two_cores_are_those_that_were_measured() -> None:
    """docs/results.md, a step on two cores: the trainer's time of a token on one core (the middle of what is given), times the
    tokens of the step; the generator's tick. Bfloat16 on idle cores; beside it float32, when others took 12% of the cores."""
    bfloat16 = finished_s([(0.0, 7.25 / 1189 * 4322 / SIDE_BY_SIDE)], cores=2, held=1, held_s=10.9)
    assert bfloat16 == pytest.approx(20.9, rel=0.03)
    float32 = finished_s([(0.0, 11.45 / 1189 * 4416 / SIDE_BY_SIDE)], cores=2, held=1, held_s=15.7)
    assert float32 == pytest.approx(35.9 * 0.88, rel=0.05)


def test_only_a_few_cores_of_one_machine_are_filled() -> None:
    assert [shares_cores(machine(4), devices) for devices in (1, 2, 4, 5)] == [False, True, True, False]
    assert not shares_cores(machine(2), 4)  # two machines
    assert not shares_cores(find_hardware("h100"), 2)


def test_micro_batches_side_by_side_hold_activations_and_gradients_each() -> None:
    demand = TrainerDemand(lengths=WORK.response, prompt_tokens=50, sequences=32)
    hardware = machine(2)
    alone = trainer_memory(hardware, WORK.model, TrainerLayout(micro_batch=4, runnable=True), demand)
    both = trainer_memory(
        hardware, WORK.model, TrainerLayout(micro_batch=4, runnable=True, threads=2, at_once=2), demand
    )
    for part, times in (("activations", 2), ("logits", 2), ("gradients", 4), ("optimizer", 1), ("parameters", 1)):
        assert both[part] == times * alone[part]


def test_a_filling_trainer_leaves_no_micro_batch_without_a_thread() -> None:
    found = list(filling_choices(machine(2), WORK, WHOLE, 2, memory_limit=60e9, held=1))
    assert found and max(choice.layout.micro_batch for choice in found) == 16  # of 32 sequences
    for choice in found:
        assert (choice.layout.threads, choice.layout.at_once) == (2, 2)
        demand = TrainerDemand(lengths=WORK.response, prompt_tokens=50, sequences=32, group_size=4)
        core_s = trainer_tick(machine(2), WORK.model, choice.layout, demand).total_s
        assert choice.time.total_s == pytest.approx(core_s / core_rate(2))
        assert choice.core_s == pytest.approx(core_s / SIDE_BY_SIDE)


def test_two_cores_are_never_idle_while_the_trainer_has_work() -> None:
    plan = best_separate(machine(2), WORK, WHOLE, 2, 1)
    assert plan.trainer.layout.threads == 2 and plan.generator.devices == 1
    busy = plan.generator.time_s + plan.sync_s + plan.trainer.core_s
    assert plan.step_s == pytest.approx(busy / 2)
    assert plan.bubble == pytest.approx(0.0, abs=1e-9)
    said = report_text([plan], plan, WORK, machine(2))
    assert "trainer    what the generator leaves of 2 cores, 2 threads, 2 micro-batches at once" in said


def test_sharing_in_turns_computes_side_by_side_too() -> None:
    plan = best_resharding(machine(2), WORK, WHOLE, 2)
    assert plan.trainer.layout.threads == 2
    assert plan.trainer.time.total_s == pytest.approx(plan.trainer.core_s / 2)


def test_groups_end_in_order_and_the_last_ends_the_tick() -> None:
    hardware, layout = find_hardware("h100"), GeneratorLayout(runnable=True)
    demand = GeneratorDemand(
        lengths=WORK.response, prompt_tokens=50, group_size=4, sequences=32, total_sequences=32, slots=8
    )
    ends = group_ends_s(hardware, WORK.model, layout, demand)
    assert len(ends) == 8 and ends == sorted(ends)
    assert ends[-1] == pytest.approx(generator_tick_s(hardware, WORK.model, layout, demand))
    assert ends[0] > 0.1 * ends[-1]


def of_recipe(cores: int | None, **sections: dict[str, object]) -> Scenario:
    config = validate({"model": {"path": "m"}, "generator": {"group_size": 4}, **sections})
    return scenario_from_recipe(config, WORK, machine(2), {"generator": 1, "trainer": 1}, cores=cores)


def test_more_ranks_of_a_role_than_cores_share_these() -> None:
    eight: dict[str, dict[str, object]] = {"trainer": {"fsdp": 8}}
    assert of_recipe(2, **eight).trainer.token_s == pytest.approx(4 * of_recipe(8, **eight).trainer.token_s)
    one, batch = np.ones(1), np.full(1, 100.0)
    replicas: dict[str, dict[str, object]] = {"generator": {"group_size": 4, "dp": 8}}
    few, many = (of_recipe(cores, **replicas).generator for cores in (2, 8))
    assert few.decode_step_s(one, batch) == pytest.approx(4 * many.decode_step_s(one, batch))
    assert of_recipe(8, **eight).trainer == of_recipe(None, **eight).trainer
    assert of_recipe(2, **eight).title.endswith("; 9 threads share 2 cores") and "share" not in of_recipe(9).title


@pytest.mark.parametrize(
    ("generator", "trainer", "cores", "step_s"),
    [
        (1, 1, 2, 6.0),  # a core each
        (1, 8, 2, 7.5),  # 5 s of one core and 5 s of two are 15 s of one
        (2, 2, 4, 6.0),
        (4, 1, 2, 11.0),  # nothing is left for 5 s, then 6 s of one
        (8, 8, 2, 10.0),
    ],
)
def test_a_trainer_with_threads_beyond_the_cores_has_what_the_generators_leave(
    generator: int, trainer: int, cores: int, step_s: float
) -> None:
    trainer_s = 6.0 if trainer <= 2 else 5.0
    scenario = replace(
        durations_scenario(generator_s=5.0, reward_s=0.0, trainer_s=trainer_s, max_staleness=1, num_ticks=30),
        generator_devices=generator, trainer_devices=trainer,
    )  # fmt: skip
    assert simulate(on_shared_cores(scenario, cores)).step_s == pytest.approx(step_s)
    in_turn = replace(scenario, max_staleness=0)
    assert on_shared_cores(in_turn, cores) is in_turn


@pytest.mark.parametrize("staleness", [0, 1])
def test_the_written_recipe_has_the_threads_of_the_plan(staleness: int) -> None:
    hardware = machine(2)
    plan = best_separate(hardware, WORK, WHOLE, 2, staleness)
    settings = plan_settings(plan, "bundled:tiny", hardware, 1.0)
    config = validate(tomllib.loads(recipe_text(settings, set(known_keys()), "")))
    assert (config.generator.threads, config.trainer.threads) == (1, plan.trainer.layout.threads)
