"""A tick that is trained part by part while it is still being decoded, worked by hand on the virtual clock."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from llamarl.errors import PlanError
from llamarl.planner.lengths import constant, lognormal
from llamarl.simulator.scenario import Scenario
from llamarl.simulator.simulate import simulate
from llamarl.simulator.tick_costs import LinearGeneratorCost, RewardCost, TrainerCost


def two_groups(**changes: Any) -> Scenario:
    """Two responses of 4 tokens, one after the other in one slot: complete after 4 s and 8 s. With its prompt token each costs
    the trainer 5 s, and its update 2 s more."""
    scenario = Scenario(
        title="two groups",
        prompts_per_step=2,
        group_size=1,
        lengths=constant(4),
        generator=LinearGeneratorCost(step_s=1.0),
        trainer=TrainerCost(tick_s=2.0, token_s=1.0),
        slots=1,
        max_staleness=0,
        num_ticks=6,
    )
    return dataclasses.replace(scenario, **changes)


def test_a_whole_tick_is_trained_when_it_is_decoded() -> None:
    assert simulate(two_groups()).step_s == pytest.approx(8.0 + 12.0)


def test_the_first_part_is_trained_while_the_second_is_decoded() -> None:
    # first part from 4 s to 9 s, beyond the end of decoding at 8 s; second part to 14 s; update to 16 s
    assert simulate(two_groups(parts=2)).step_s == pytest.approx(16.0)


def test_a_trainer_that_is_done_with_a_part_waits_for_the_next() -> None:
    # first part from 4 s to 6 s; second from 8 s to 10 s; update to 12 s
    result = simulate(two_groups(parts=2, trainer=TrainerCost(tick_s=2.0, token_s=0.4)))
    assert result.step_s == pytest.approx(12.0)
    assert result.role_s["trainer"] == pytest.approx(6.0)  # what was done ahead is its work too
    assert result.idle["trainer"] == pytest.approx(1.0 - 6.0 / 12.0)


def test_a_part_is_judged_before_it_is_trained() -> None:
    # judged from 4 s to 5 s and from 8 s to 9 s; trained from 5 s to 10 s and on to 15 s; update to 17 s
    assert simulate(two_groups(parts=2, reward=RewardCost(tick_s=2.0))).step_s == pytest.approx(17.0)


def test_parts_give_a_steady_pipeline_nothing() -> None:
    assert simulate(two_groups(max_staleness=1)).step_s == pytest.approx(12.0)
    assert simulate(two_groups(max_staleness=1, parts=2)).step_s == pytest.approx(12.0)


def test_longest_first_shortens_a_tick_that_has_more_sequences_than_slots() -> None:
    varied = two_groups(prompts_per_step=16, lengths=lognormal(30, sigma=1.0, limit=200), slots=4, num_ticks=40)
    sampled, ordered = simulate(varied), simulate(dataclasses.replace(varied, longest_first=True))
    assert ordered.role_s["generator"] < 0.95 * sampled.role_s["generator"]
    enough = dataclasses.replace(varied, slots=16)
    assert simulate(dataclasses.replace(enough, longest_first=True)).step_s == simulate(enough).step_s


@pytest.mark.parametrize("parts", [0, 3])
def test_a_tick_is_not_cut_into_more_parts_than_groups(parts: int) -> None:
    with pytest.raises(PlanError, match="cut into 1 to 2 parts"):
        two_groups(parts=parts)
