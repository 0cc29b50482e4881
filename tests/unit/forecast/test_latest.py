"""``weights = "latest"`` on the virtual clock: hand-worked ticks, the bound, and theory where nothing varies."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
from linear_cost import LinearCost

from llamarl.cli.main import main
from llamarl.errors import PlanError
from llamarl.executors.base import ExecutorContext
from llamarl.forecast.costed import STALENESS_METRIC, CostedGenerator
from llamarl.forecast.lengths import constant, empirical, lognormal
from llamarl.forecast.scenario import Failures, RewardCost, Scenario, TrainerCost, Variation, durations_scenario
from llamarl.forecast.simulate import SimulationResult, simulate
from llamarl.forecast.step_time import mean_staleness


def one_sequence(**changes: Any) -> Scenario:
    """Ten tokens after a prompt of four; a decode step takes 1 s, a token of prefill 0.5 s."""
    scenario = Scenario(
        title="one",
        prompts_per_step=1,
        group_size=1,
        lengths=constant(10),
        generator=LinearCost(step_s=1.0, prefill_token_s=0.5),
        trainer=TrainerCost(tick_s=1.0),
        prompt_tokens=4,
        weights="latest",
    )
    return dataclasses.replace(scenario, **changes)


def generator(scenario: Scenario) -> CostedGenerator:
    context = ExecutorContext(name="generator", rank=0, num_ranks=1, device="cpu", run_dir=None, seed=0)
    return CostedGenerator(scenario, context)


@pytest.mark.parametrize(("kv", "duration"), [("recompute", 15.5), ("keep", 12.0)])
def test_a_version_is_taken_after_the_decode_step_that_runs(kv: str, duration: float) -> None:
    executor = generator(one_sequence(kv_on_update=kv))
    executor.step(0, {"weights": 0})
    assert executor.step(1, {"weights": 0}).duration_s == 12.0  # 4 * 0.5 + 10
    # the third decode step ends at 5 s; the cache of 4 + 3 tokens takes 3.5 s again, or nothing
    step = executor.revise(4.5, 1)
    assert step.duration_s == duration
    assert step.outputs["completions"].tokens_of_version == {0: 3, 1: 7}
    assert step.metrics["rollout/swaps"] == 1
    assert executor.revise(6.0, 1).duration_s == duration  # no news


def test_news_after_the_last_decode_step_began_changes_nothing() -> None:
    executor = generator(one_sequence())
    executor.step(0, {"weights": 0})
    executor.step(1, {"weights": 0})
    step = executor.revise(11.5, 1)
    assert step.duration_s == 12.0
    assert step.outputs["completions"].tokens_of_version == {0: 10}


def test_loading_a_version_holds_decoding_up() -> None:
    executor = generator(one_sequence(weights_load_s=2.0, kv_on_update="keep"))
    executor.step(0, {"weights": 0})
    assert executor.step(1, {"weights": 0}).duration_s == 14.0
    assert executor.revise(8.0, 1).duration_s == 16.0


def steady_staleness(result: SimulationResult) -> float:
    """Mean over the tokens of the ticks after the first ones."""
    total = weighted = 0.0
    for report in result.reports:
        if report.executor == "trainer" and report.tick >= result.first_steady_tick:
            for key, tokens in report.metrics.items():
                if key.startswith(STALENESS_METRIC):
                    total += tokens
                    weighted += tokens * int(key.removeprefix(STALENESS_METRIC))
    return weighted / total


def test_theory_of_staleness_is_simulation_when_nothing_varies() -> None:
    rng = random.Random(0)
    bound_by_generator = 0
    for _ in range(15):
        generator_s, reward_s, trainer_s = (10 ** rng.uniform(-1, 1) for _ in range(3))
        durations = {
            "generator_s": generator_s,
            "reward_s": reward_s,
            "trainer_s": trainer_s,
            "sync_s": rng.choice([0.0, 0.3]),
            "max_staleness": rng.randint(0, 4),
        }
        theory = mean_staleness(**durations)  # type: ignore[arg-type]
        result = simulate(durations_scenario(**durations, weights="latest", tokens=400, num_ticks=24))  # type: ignore[arg-type]
        assert steady_staleness(result) == pytest.approx(theory, abs=0.01), durations
        assert result.step_s == pytest.approx(result.theory_s, rel=0.01), durations
        bound_by_generator += theory not in (0.0, float(durations["max_staleness"]))
    assert bound_by_generator >= 3


def test_the_period_is_that_of_exact_weights_and_staleness_stops_growing_with_its_bound() -> None:
    """6 s, 1 s, 4 s: version v comes 5 s into tick v, so five sixths of the tokens are one version old."""
    for level in (1, 2, 5):
        result = simulate(
            durations_scenario(
                generator_s=6, reward_s=1, trainer_s=4, max_staleness=level, weights="latest", tokens=600, num_ticks=40
            )
        )
        assert result.step_s == pytest.approx(6.0)
        assert steady_staleness(result) == pytest.approx(5 / 6, abs=1e-9)
        assert result.staleness_theory == pytest.approx(5 / 6)


@pytest.mark.parametrize("kv", ["recompute", "keep"])
@pytest.mark.parametrize(("staleness", "segments", "over"), [(0, 1, 1.0), (1, 2, 1.5), (1, 3, 3.0), (3, 2, 2.0)])
def test_no_token_is_older_than_max_staleness_whatever_varies(
    kv: Any, staleness: int, segments: int, over: float
) -> None:
    scenario = Scenario(
        title="varied",
        prompts_per_step=4,
        group_size=3,
        lengths=empirical([2, 3, 5, 9, 14, 30]),
        generator=LinearCost(step_s=1.0, sequence_s=0.1, cache_token_s=0.01, prefill_token_s=0.02),
        trainer=TrainerCost(tick_s=1.0, token_s=0.05),
        prompt_tokens=7,
        replicas=2,
        slots=4,
        max_staleness=staleness,
        max_segments=segments,
        oversubscription=over,
        weights="latest",
        kv_on_update=kv,
        weights_load_s=0.2,
        weights_latency_s=0.7,
        variation=Variation(generator_jitter=0.3, trainer_jitter=0.8),
        num_ticks=25,
    )
    result = simulate(scenario)
    assert max(result.staleness) <= staleness
    assert sum(result.staleness.values()) == sum(
        report.metrics["tokens/trained"] for report in result.reports if report.executor == "trainer"
    )
    assert simulate(scenario).reports == result.reports
    if staleness:
        assert any(report.metrics.get("rollout/swaps", 0) for report in result.reports)


def test_a_failed_job_goes_on_from_its_checkpoint() -> None:
    scenario = one_sequence(
        lengths=lognormal(10, 0.8, 60),
        max_segments=2,
        oversubscription=2.0,
        prompts_per_step=2,
        num_ticks=60,
        failures=Failures(device_mtbf_hours=0.2, restart_s=5.0, checkpoint_every=5),
    )
    result = simulate(scenario)
    assert result.num_failures > 0
    assert max(result.staleness) <= 1
    assert {r.tick for r in result.reports if r.executor == "trainer"} == set(range(60))


def test_kept_cache_is_refused_where_it_is_not_simulated() -> None:
    with pytest.raises(PlanError, match='"keep" is simulated with weights "latest" only'):
        one_sequence(weights="exact", kv_on_update="keep")


def test_the_command_line_compares_both_policies(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["simulate", "--durations", "6,1,4", "--staleness", "1", "--ticks", "20"]
    assert main([*arguments, "--weights", "exact,latest"]) == 0
    out = capsys.readouterr().out
    assert "staleness 1 " in out and "latest (recompute) (mean 0.79 versions, theory 0.83)" in out
    assert main([*arguments, "--weights", "newest"]) == 2
    assert "expected exact, latest" in capsys.readouterr().err


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_what_was_decoded_before_a_version_is_counted_at_its_own_context(kv: str) -> None:
    """1,000 tokens, 20 us a cached token: 20e-6 * sum(1 .. 1000) = 10.01 s, and a version in the middle adds nothing if the cache
    stays; filled again it costs no time here either."""
    scenario = Scenario(
        title="x",
        prompts_per_step=1,
        group_size=1,
        lengths=constant(1000),
        prompt_tokens=1,
        generator=LinearCost(cache_token_s=2e-5),
        trainer=TrainerCost(tick_s=4.0),
        reward=RewardCost(tick_s=1.0),
        max_staleness=1,
        num_ticks=40,
    )
    exact = simulate(scenario).role_s["generator"]
    latest = simulate(dataclasses.replace(scenario, weights="latest", kv_on_update=kv)).role_s["generator"]
    assert exact == pytest.approx(10.01, rel=1e-3)
    assert latest == pytest.approx(exact, rel=1e-3)


def test_no_theory_of_staleness_where_batches_drain() -> None:
    varied = durations_scenario(generator_s=6, reward_s=1, trainer_s=4, tokens=100, weights="latest", num_ticks=30)
    assert simulate(varied).staleness_theory is not None
    drained = dataclasses.replace(varied, lengths=lognormal(100))
    assert simulate(drained).staleness_theory is None
