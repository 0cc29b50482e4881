"""The simulator: theory where nothing varies, the real controller's rules, and tick by tick against a slow loop."""

import dataclasses
import random
from typing import Any

import numpy as np
import pytest
from linear_cost import LinearCost
from simulator import of_durations

from llamarl.controller.controller import run_graph
from llamarl.controller.marking import Marking
from llamarl.errors import ConfigError, DeadlineExceeded, PlanError
from llamarl.forecast.costs import GeneratorLayout
from llamarl.forecast.hardware import find_hardware
from llamarl.forecast.lengths import constant, empirical, lognormal
from llamarl.forecast.model import find_model
from llamarl.forecast.scenario import Failures, GeneratorCost, Scenario, TrainerCost, Variation
from llamarl.forecast.simulate import SimulationResult, simulate
from llamarl.forecast.step_time import step_period
from llamarl.forecast.ticks import GeneratorDemand, generator_tick_s
from llamarl.forecast.virtual_clock import VirtualClockRuntime
from llamarl.settings.job import DeadlineConfig
from llamarl.tick_schedule import constant_batches, select_due, slot_starts


def small(**changes: Any) -> Scenario:
    scenario = Scenario(
        title="small",
        prompts_per_step=4,
        group_size=3,
        lengths=empirical([2, 3, 5, 9, 14, 30]),
        generator=LinearCost(step_s=1.0, sequence_s=0.1, cache_token_s=0.01, prefill_token_s=0.02),
        trainer=TrainerCost(tick_s=1.0, token_s=0.05),
        prompt_tokens=7,
        replicas=2,
        num_ticks=12,
    )
    return dataclasses.replace(scenario, **changes)


def test_theory_is_simulation_when_nothing_varies() -> None:
    """Random durations, also of versions on their way, at every staleness from 0 to 8."""
    rng = random.Random(0)
    for staleness in range(9):
        for _ in range(5):
            generator, reward, trainer = (10 ** rng.uniform(-1, 1) for _ in range(3))
            sync = rng.choice([0.0, 10 ** rng.uniform(-2, 0.5)])
            durations = {"generator_s": generator, "reward_s": reward, "trainer_s": trainer, "sync_s": sync}
            ticks = 12 * (staleness + 1)  # a whole number of rounds
            result = simulate(of_durations(**durations, max_staleness=staleness, num_ticks=ticks))
            theory, _ = step_period(**durations, max_staleness=staleness)
            assert result.step_s == pytest.approx(theory, rel=0.01), (durations, staleness)


def test_a_simulated_tick_of_whole_batches_takes_what_the_plan_says() -> None:
    """4 prompts of 4,096 tokens: what they attend to while the cache is filled counts too."""
    hardware, model = find_hardware("h100"), find_model("Llama-3.1-8B")
    own = GeneratorCost(hardware=hardware, model=model, layout=GeneratorLayout())
    played = simulate(small(generator=own, lengths=constant(8), group_size=1, prompt_tokens=4096, replicas=1, slots=4))
    demand = GeneratorDemand(
        lengths=constant(8), prompt_tokens=4096, group_size=1, sequences=4, total_sequences=4, slots=4
    )
    planned = generator_tick_s(hardware, model, GeneratorLayout(), demand)
    assert played.role_s["generator"] == pytest.approx(planned, rel=1e-9)


def test_of_a_run_of_one_tick_each_role_waits_while_the_others_work() -> None:
    result = simulate(of_durations(generator_s=6, reward_s=4, trainer_s=5, num_ticks=1))
    assert result.total_s == pytest.approx(15.0)
    assert result.idle == pytest.approx({"generator": 9 / 15, "reward": 11 / 15, "trainer": 10 / 15})
    assert result.replica_idle == pytest.approx(9 / 15)


def slow_schedule(remaining: list[int], slots: int) -> tuple[list[int], list[int]]:
    """One replica, step by step: (start, end) of each sequence."""
    start, end = [0] * len(remaining), [0] * len(remaining)
    waiting, running, step = list(range(len(remaining))), {}, 0
    while waiting or running:
        while waiting and (len(running) < slots or remaining[waiting[0]] == 0):
            i = waiting.pop(0)
            start[i] = end[i] = step
            if remaining[i]:
                running[i] = remaining[i]
        step += 1
        for i in list(running):
            running[i] -= 1
            if not running[i]:
                end[i] = step
                del running[i]
    return start, end


@pytest.mark.parametrize("slots", [1, 2, 3, 7, 20])
def test_the_schedule_and_its_time_are_those_of_a_loop_over_decode_steps(slots: int) -> None:
    rng = np.random.default_rng(slots)
    remaining = rng.integers(1, 12, (5, 9))
    written = rng.integers(0, 6, (5, 9))
    cost = LinearCost(step_s=1.0, sequence_s=0.25, cache_token_s=0.03)
    starts = slot_starts(remaining, slots)
    ends = starts + remaining
    stop = rng.integers(1, ends.max(axis=1) + 1)
    runs = constant_batches(remaining, starts, written, stop, slots)
    seconds = np.bincount(runs.replica, runs.steps * cost.decode_step_s(runs.active, 4 + runs.written), 5)
    for replica in range(5):
        start, end = slow_schedule(remaining[replica].tolist(), slots)
        assert starts[replica].tolist() == start and ends[replica].tolist() == end
        slow = 0.0
        for step in range(stop[replica]):
            active = [i for i in range(9) if start[i] <= step < end[i]]
            cached = sum(4 + written[replica, i] + step - start[i] for i in active)
            slow += 1.0 + 0.25 * len(active) + 0.03 * cached
        assert seconds[replica] == pytest.approx(slow, rel=1e-12)


def slow_generator(scenario: Scenario, lengths_of_tick: list[np.ndarray]) -> list[tuple[list[int], int]]:
    """The real generator's loop for one replica: (lengths delivered in order, decode steps) of each tick."""
    per_tick, size = scenario.prompts_per_step, scenario.group_size
    active: list[dict[str, Any]] = []
    completed: list[int] = []
    cursor, ticks = 0, []
    for tick in range(scenario.num_ticks):
        new = lengths_of_tick[tick].reshape(-1, size)
        for lengths in new:
            active.append({"id": cursor, "at": tick, "left": lengths.tolist(), "length": lengths.tolist()})
            cursor += 1
        steps = 0
        while True:
            position = {group["id"]: i for i, group in enumerate(active)}
            chosen = select_due(
                [g["at"] + scenario.max_segments - 1 for g in active], [position[i] for i in completed],
                tick=tick, prompts_per_step=per_tick,
            )  # fmt: skip
            if chosen is not None:
                break
            steps += 1
            for group in active:
                group["left"] = [max(0, n - 1) for n in group["left"]]
                if not any(group["left"]) and group["id"] not in completed:
                    completed.append(group["id"])
        gone = [active[i] for i in chosen]
        ids = {g["id"] for g in gone}
        active = [g for g in active if g["id"] not in ids]
        completed = [i for i in completed if i not in ids]
        ticks.append(([n for g in gone for n in g["length"]], steps))
    return ticks


def test_partial_rollouts_deliver_what_the_real_generators_loop_delivers() -> None:
    scenario = small(replicas=1, prompts_per_step=4, oversubscription=1.75, max_segments=3, num_ticks=25)
    lengths = [
        scenario.lengths.sample((7 if tick == 0 else 4) * 3, np.random.default_rng([0, 1, tick])) for tick in range(25)
    ]
    expected = slow_generator(scenario, lengths)
    result = simulate(scenario)
    generator = [r for r in result.reports if r.executor == "generator"]
    trainer = [r for r in result.reports if r.executor == "trainer"]
    assert [r.metrics["decode_steps"] for r in generator] == [steps for _, steps in expected]
    assert [r.metrics["tokens/trained"] for r in trainer] == [sum(lengths) for lengths, _ in expected]


def test_staleness_is_exact_without_and_bounded_with_partial_rollouts() -> None:
    whole = simulate(small(max_staleness=3))
    assert set(whole.staleness) == {0, 1, 2, 3}  # min(k, 3)
    partial = simulate(small(max_staleness=2, max_segments=3, oversubscription=2.5, num_ticks=60))
    assert max(partial.staleness) == 2 + 3 - 1
    assert sum(partial.staleness.values()) == sum(
        r.metrics["tokens/trained"] for r in partial.reports if r.executor == "trainer"
    )


def test_the_same_scenario_gives_the_same_reports() -> None:
    scenario = small(variation=Variation(generator_jitter=0.3, trainer_jitter=0.2))
    assert simulate(scenario).reports == simulate(scenario).reports
    assert simulate(scenario).step_s != simulate(dataclasses.replace(scenario, seed=1)).step_s


def test_a_run_that_fails_and_resumes_trains_on_the_same_tokens() -> None:
    scenario = small(max_segments=2, oversubscription=1.5, num_ticks=40)
    undisturbed = simulate(scenario)
    hours = undisturbed.total_s / 3600.0 / 3.0 * scenario.devices  # about three failures
    broken = simulate(
        dataclasses.replace(scenario, failures=Failures(device_mtbf_hours=hours, restart_s=11.0, checkpoint_every=4))
    )
    assert broken.num_failures >= 1 and broken.total_s > undisturbed.total_s

    def trained(result: SimulationResult) -> dict[int, float]:
        return {r.tick: r.metrics["tokens/trained"] for r in result.reports if r.executor == "trainer"}

    assert trained(broken) == trained(undisturbed)
    assert broken.staleness == undisturbed.staleness
    assert broken.total_s - undisturbed.total_s == pytest.approx(broken.lost_share * broken.total_s, rel=0.25)


def test_a_job_that_dies_before_every_checkpoint_is_refused() -> None:
    failures = Failures(device_mtbf_hours=1e-3, restart_s=1.0, checkpoint_every=10)
    with pytest.raises(PlanError, match="take checkpoints more often than every 10 ticks"):
        simulate(small(failures=failures))


def test_variable_durations_make_the_step_longer_than_theory_and_staleness_wins_it_back() -> None:
    scenario = small(lengths=lognormal(20, 0.8, 200), num_ticks=300, replicas=1)
    scenario = dataclasses.replace(scenario, trainer=TrainerCost(token_s=simulate(scenario).role_s["generator"] / 260))
    results = [simulate(dataclasses.replace(scenario, max_staleness=s)) for s in (1, 2, 4, 8)]
    assert results[0].step_s > 1.05 * results[0].theory_s
    totals = [r.total_s for r in results]  # more tokens on an edge never make a marked graph slower
    assert totals == sorted(totals, reverse=True) and totals[-1] < 0.95 * totals[0]


def test_a_schedule_that_no_run_could_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="oversubscription must be between 1 and max_segments"):
        small(oversubscription=2.0)
    with pytest.raises(ConfigError, match="must be a multiple of generator.dp"):
        small(replicas=3)
    with pytest.raises(PlanError, match="at least 1 tick"):
        small(num_ticks=0)


def test_the_controllers_deadline_runs_on_virtual_time() -> None:
    graph = of_durations(generator_s=1, reward_s=100, trainer_s=1).graph
    runtime = VirtualClockRuntime()
    with pytest.raises(DeadlineExceeded, match="out for 30 virtual seconds"):
        run_graph(Marking(graph, num_ticks=2), runtime, seed=0, deadlines=DeadlineConfig(step_s=30))
    assert runtime.now() == pytest.approx(31.0)  # the oldest order is the reward's, sent at 1 s
