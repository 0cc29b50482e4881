"""What was made of parts of a tick before the tick came: used only where it is true of the whole tick."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from llamarl.config import validate
from llamarl.controller.config import why_parts_gain_nothing
from llamarl.errors import ConfigError
from llamarl.tick_parts import PartsAhead, digest_of, split_into_parts
from llamarl.types import Group, Prompt, Response, Score


def group(index: int, part: int = 0, **changes: Any) -> Group:
    response = Response(
        prompt_index=index,
        sample_index=0,
        tokens=np.array([5, 6], np.int32),
        behavior_logprobs=np.array([-1.0, -2.0], np.float32),
        policy_versions=np.array([3, 3], np.int32),
        loss_mask=np.array([True, True]),
        text="56",
        finish_reason="stop",
        outcome=Score(value=1.0),
    )
    prompt = Prompt(index=index, tokens=np.array([1, 2], np.int32), text="12")
    return Group(prompt=prompt, responses=(dataclasses.replace(response, **changes),), part=part)


def test_a_tick_is_split_in_its_own_order() -> None:
    tick = [group(0, part=1), group(1, part=0), group(2, part=1), group(3, part=0)]
    split = split_into_parts(tick, 3)
    assert [[one.prompt.index for one in part] for part in split] == [[1, 3], [0, 2], []]


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": np.array([5, 7], np.int32)},
        {"behavior_logprobs": np.array([-1.0, np.nextafter(np.float32(-2.0), np.float32(0))], np.float32)},
        {"policy_versions": np.array([3, 4], np.int32)},
        {"loss_mask": np.array([True, False])},
        {"outcome": Score(value=1.0, parts={"form": 1.0})},
        {"outcome": None},
        {"finish_reason": "length"},
        {"values": np.zeros(2, np.float32)},
    ],
)
def test_a_digest_sees_every_change_of_a_response(change: dict[str, Any]) -> None:
    assert digest_of([group(0)]) == digest_of([group(0)])
    assert digest_of([group(0, **change)]) != digest_of([group(0)])


def test_a_digest_sees_order_and_number_of_groups() -> None:
    found = {digest_of(groups) for groups in ([], [group(0)], [group(0), group(1)], [group(1), group(0)])}
    assert len(found) == 4


def test_parts_count_in_their_turn_alone() -> None:
    ahead = PartsAhead[str]()
    assert not ahead.is_next(4, 1), "part 0 has not come"
    assert ahead.is_next(4, 0)
    ahead.keep(4, [group(0)], "first")
    assert not ahead.is_next(4, 0), "it came twice"
    assert ahead.is_next(4, 1)
    assert ahead.is_next(5, 0), "each tick has its own"


def test_what_was_made_is_given_out_up_to_the_first_part_that_is_another_by_now() -> None:
    ahead = PartsAhead[str]()
    for number in range(3):
        ahead.keep(0, [group(number)], f"part {number}")
    whole = [[group(0)], [group(1, text="judged anew")], [group(2)], [group(3)]]
    assert ahead.take(0, whole) == ["part 0"]
    assert ahead.take(0, whole) == [], "it is given out once"


def test_a_tick_takes_with_it_what_belongs_to_earlier_ones() -> None:
    ahead = PartsAhead[str]()
    for tick in (3, 4, 5):
        ahead.keep(tick, [group(tick)], f"tick {tick}")
    assert ahead.take(4, [[group(4)]]) == ["tick 4"]
    assert [ahead.num_done(tick) for tick in (3, 4, 5)] == [0, 0, 1]


IN_PARTS = {"schedule": {"prompts_per_step": 8, "max_staleness": 0, "parts": 4}}


def recipe(**sections: dict[str, Any]) -> dict[str, Any]:
    return {**IN_PARTS, **sections, "schedule": {**IN_PARTS["schedule"], **sections.get("schedule", {})}}


def test_a_recipe_in_parts_is_accepted() -> None:
    assert validate(recipe()).schedule.parts == 4
    validate(recipe(generator={"dp": 2}, schedule={"max_staleness": 1}))
    validate(
        recipe(
            executors={
                "second": {"factory": "my.module:Watcher", "reads": ["weights2"]},
                "trainer": {"writes": ["weights", "eval_weights", "weights2"]},
            }
        )
    )


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"algorithm": {"advantage": "batch_std"}}, "algorithm.advantage"),
        ({"algorithm": {"advantage": "group_mean_batch_std"}}, "algorithm.advantage"),
        ({"algorithm": {"advantage": "gae"}}, "algorithm.advantage is 'gae', which asks for a critic"),
        ({"algorithm": {"kl_coef": 0.1}}, "algorithm.kl_coef is 0.1, which asks for a reference"),
        ({"algorithm": {"name": "grpo"}}, "algorithm.kl_coef is 0.04, as in 'grpo', which asks for a reference"),
        ({"reference": {"enabled": True}}, "reference.enabled asks for a reference"),
        ({"reward_model": {"path": "some/model"}}, "reward_model.path"),
        ({"judge": {"path": "some/model"}}, "judge.path"),
        ({"judge": {"url": "http://host", "model": "m"}}, "judge.url"),
        ({"trainer": {"minibatches": 2}}, "trainer.minibatches cuts"),
        ({"trainer": {"epochs": 2}}, "trainer.epochs cuts"),
        ({"trainer": {"selection": {"pairs": 1}}, "generator": {"group_size": 4}}, "trainer.selection cuts"),
        ({"trainer": {"fsdp": 2}}, "trainer.fsdp is 2, and several ranks"),
        ({"trainer": {"pp": 2}}, "trainer.pp is 2, and several ranks"),
        ({"dynamic_sampling": {"enabled": True}}, "dynamic_sampling.enabled"),
        ({"schedule": {"weights": "latest", "max_staleness": 1}}, "schedule.weights"),
        ({"schedule": {"colocated": True}}, "schedule.colocated"),
        (
            {
                "executors": {
                    "filter": {"factory": "my.module:Filter", "reads": ["scored"], "writes": ["kept"]},
                    "trainer": {"reads": ["kept"]},
                }
            },
            "executors.filter",
        ),
    ],
)
def test_what_cannot_be_done_part_by_part_is_refused_by_name(sections: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=rf"schedule.parts is 4, but {key}[ ,].*or set schedule.parts to 1"):
        validate(recipe(**sections))


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        (
            {"schedule": {"prompts_per_step": 3}},
            "3 groups a tick, and each part needs one: set schedule.parts to at most 3",
        ),
        (
            {"generator": {"dp": 4}},
            "8 groups a tick, 2 for each of 4 generator replicas, .*: set schedule.parts to at most 2",
        ),
        (
            {"generator": {"shards": 4}},
            "8 groups a tick, 2 for each of 4 generator shards, .*: set schedule.parts to at most 2",
        ),
    ],
)
def test_more_parts_than_groups_are_refused_with_the_most_that_there_may_be(
    sections: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=f"schedule.parts is 4, but schedule.prompts_per_step is {told}, or raise"):
        validate(recipe(**sections))


@pytest.mark.parametrize(
    ("sections", "why"),
    [
        ({}, ""),
        ({"schedule": {"parts": 1, "max_staleness": 2}}, ""),
        ({"schedule": {"max_staleness": 2}}, "at schedule.max_staleness 2 nobody waits for a part"),
        ({"run": {"runtime": "inline"}}, "run.runtime is 'inline', which passes no parts on"),
        ({"hosts": {"workers": ["a:1", "b:1"]}}, "parts are not passed on between hosts"),
    ],
)
def test_where_parts_gain_nothing_the_reason_is_told(sections: dict[str, Any], why: str) -> None:
    assert why_parts_gain_nothing(validate(recipe(**sections))) == why
