"""Partial rollouts in the plan against the simulation of the real generator's rule."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest

from llamarl.planner.choices import Options, Workload, generator_choices
from llamarl.planner.hardware import find_hardware
from llamarl.planner.lengths import constant, lognormal, pareto
from llamarl.planner.model_spec import find_model
from llamarl.planner.partial import expected_largest, partial_profile
from llamarl.planner.search import best_separate
from llamarl.simulator.simulate import simulate
from llamarl.simulator.sources import scenario_from_plan


def test_plan_and_simulation_agree_on_random_instances_with_partial_rollouts() -> None:
    """Generator's tick within 15% on each of 16 instances, within 4% in the mean."""
    rng = random.Random(0)
    hardware, model = find_hardware("h100"), find_model("Llama-3.1-8B")
    quotients = []
    for _ in range(16):
        mean = rng.choice([200, 700, 2000])
        work = Workload(
            model=model,
            response=rng.choice([lognormal(mean, rng.uniform(0.3, 0.9)), pareto(mean, 2.2), constant(mean)]),
            prompts_per_step=rng.choice([8, 16, 32]),
            group_size=rng.choice([1, 4, 8]),
            prompt_tokens=rng.choice([50, 500]),
        )
        segments = rng.choice([2, 3, 4])
        options = Options(
            max_segments=segments, oversubscription=rng.choice([1.5, float(segments)]), precisions=("bf16",),
            max_slots=rng.choice([16, 1024]),
        )  # fmt: skip
        limit = hardware.usable_memory_bytes
        choices = list(generator_choices(hardware, work, options, 4, memory_limit=limit, partial=True))
        chosen = rng.choice(choices)
        plan = dataclasses.replace(
            best_separate(hardware, work, options, 8, 1), generator=chosen, sync_s=0.0, max_staleness=1
        )
        result = simulate(scenario_from_plan(plan, work, hardware, options, num_ticks=120))
        quotients.append(chosen.time_s / result.role_s["generator"])
    assert max(abs(q - 1) for q in quotients) < 0.15, quotients
    assert abs(np.mean(quotients) - 1) < 0.04, quotients


def test_a_tick_of_equal_lengths_is_worked_out_by_hand() -> None:
    # Two of three groups of one response of 10 tokens leave a tick; the third is complete too and waits. From then on every
    # tick decodes two new ones, 10 steps, and one of them waits in its turn.
    profile = partial_profile(constant(10), 1, 2, 3, 8, 2)
    assert profile.slowest(profile.steps, 5) == 10.0
    assert (profile.peak_active, profile.peak_written, profile.refilled) == (2, 20.0, 0.0)


def test_replicas_in_step_are_long_and_short_together() -> None:
    # Two of six leave a tick: 10 steps for all six, then two ticks that find their groups complete.
    profile = partial_profile(constant(10), 1, 2, 6, 8, 3)
    assert profile.slowest(profile.steps, 1) == pytest.approx(10 / 3)
    assert profile.slowest(profile.steps, 50) == pytest.approx(10 / 3)


def test_the_largest_of_several_draws() -> None:
    values = np.array([1.0, 2.0, 3.0])
    assert expected_largest(values, 1) == pytest.approx(2.0)
    assert expected_largest(values, 2) == pytest.approx((1 * 1 + 2 * 3 + 3 * 5) / 9)
    assert expected_largest(values, 10**6) == pytest.approx(3.0)
