"""Links between hosts in the simulator, against values worked by hand."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pickle

import numpy as np
import pytest

from llamarl.channels.base import ChannelKind, ChannelSpec
from llamarl.errors import PlanError
from llamarl.simulator.links import (
    DATA_ROUND_TRIPS,
    HOP_ROUND_TRIPS,
    WEIGHT_ROUND_TRIPS,
    Distances,
    Link,
    Links,
    distances,
    hand_over_s,
    parse_link,
    parse_links,
    payload_bytes,
)
from llamarl.simulator.scenario import durations_scenario
from llamarl.simulator.simulate import simulate
from llamarl.transports import fan_out
from llamarl.types import Group, Prompt, Response

MB = 1e6
FLAT = Links(common=Link(bytes_per_s=10 * MB))


def hosts(count: int) -> list[str]:
    return [f"h{number}" for number in range(count)]


@pytest.mark.parametrize(
    ("text", "bytes_per_s", "round_trip_s"),
    [("100mbit:50ms", 12.5e6, 0.05), ("1gbit:1ms", 125e6, 1e-3), ("8kbit:2s", 1e3, 2.0), ("1.5gbit", 187.5e6, 0.0)],
)
def test_a_link_is_a_rate_and_a_round_trip(text: str, bytes_per_s: float, round_trip_s: float) -> None:
    assert parse_link(text) == Link(bytes_per_s=bytes_per_s, round_trip_s=round_trip_s)


@pytest.mark.parametrize("text", ["100", "100mbit:50", "fast", "0mbit", "1..5gbit", "a=", "100mb:1ms"])
def test_another_form_of_a_link_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(PlanError, match="100mbit:50ms"):
        parse_link(text)


def test_a_pair_of_hosts_may_have_a_link_of_its_own() -> None:
    links = parse_links(["1gbit", "a,b=100mbit:5ms"], ["a", "b", "c"])
    assert links.between("b", "a") == Link(bytes_per_s=12.5e6, round_trip_s=5e-3)
    assert links.between("a", "c") == Link(bytes_per_s=125e6)
    assert links.between("a", "a") == Link()
    for wrong in (["1gbit", "2gbit"], ["a,d=1gbit"], ["a,b=1gbit", "b,a=1gbit"], ["a=1gbit"]):
        with pytest.raises(PlanError, match="--link"):
            parse_links(wrong, ["a", "b", "c"])


def test_one_host_takes_a_version_in_its_bytes_over_the_link_and_four_round_trips() -> None:
    links = Links(common=Link(bytes_per_s=10 * MB, round_trip_s=0.1))
    assert hand_over_s(["t"], ["h"], links, 20 * MB) == [pytest.approx(2.0 + WEIGHT_ROUND_TRIPS * 0.1)]


def test_each_further_host_of_a_chain_is_one_block_behind() -> None:
    found = hand_over_s(["t"], hosts(4), FLAT, 20 * MB, block_bytes=1 * MB)
    assert found == pytest.approx([2.0, 2.1, 2.2, 2.3])  # 20 blocks of 0.1 s each
    far = Links(common=Link(bytes_per_s=10 * MB, round_trip_s=0.01))
    step = 0.1 + HOP_ROUND_TRIPS * 0.01
    found = hand_over_s(["t"], hosts(3), far, 20 * MB, block_bytes=1 * MB)
    assert found == pytest.approx([2.04, 2.04 + step, 2.04 + 2 * step])


def test_the_slowest_link_of_a_chain_sets_the_pace_of_all_behind_it() -> None:
    links = Links(common=Link(bytes_per_s=10 * MB), pairs={frozenset(("h0", "h1")): Link(bytes_per_s=5 * MB)})
    found = hand_over_s(["t"], hosts(3), links, 20 * MB, block_bytes=1 * MB)
    # one block to h0 in 0.1 s, then 20 to h1 at 0.2 s each; the last one goes on to h2 in 0.1 s
    assert found == pytest.approx([2.0, 0.1 + 4.0, 0.1 + 4.0 + 0.1])


def test_a_host_that_feeds_two_gives_each_half_of_its_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fan_out, "CHAIN", 1)  # a binary tree from the first host on: h1 and h2 read h0
    found = hand_over_s(["t"], hosts(3), FLAT, 20 * MB, block_bytes=1 * MB)
    assert found == pytest.approx([2.0, 0.1 + 4.0, 0.1 + 4.0])


def test_parts_of_several_sources_travel_side_by_side_and_a_hosts_own_does_not_travel() -> None:
    assert hand_over_s(["t0", "t1"], ["h"], FLAT, 20 * MB) == [pytest.approx(1.0)]
    assert hand_over_s(["t"], ["t", "h"], FLAT, 20 * MB) == [0.0, pytest.approx(2.0)]


def pipeline(rates: list[float], blocks: int, block: float) -> float:
    """The same by following each block: a link sends one at a time, and a host sends a block on when it has all of it."""
    free = [0.0] * len(rates)
    arrived = 0.0
    for _ in range(blocks):
        arrived = 0.0
        for hop, rate in enumerate(rates):
            arrived = free[hop] = max(arrived, free[hop]) + block / rate
    return arrived


def test_a_chain_of_any_rates_takes_what_following_each_block_gives() -> None:
    for rates in itertools.product((2.0, 5.0, 9.0), repeat=3):
        names = ["t", *hosts(3)]
        pairs = {
            frozenset(pair): Link(bytes_per_s=rate) for pair, rate in zip(itertools.pairwise(names), rates, strict=True)
        }
        found = hand_over_s(["t"], hosts(3), Links(pairs=pairs), 70.0, block_bytes=10.0)
        assert found[-1] == pytest.approx(pipeline(list(rates), 7, 10.0))


def test_a_jobs_distances_are_those_of_its_farthest_ranks() -> None:
    channels = [
        ChannelSpec(name="completions", kind=ChannelKind.GATHER, source="generator", sink="reward"),
        ChannelSpec(name="scored", kind=ChannelKind.SCATTER, source="reward", sink="trainer"),
        ChannelSpec(name="weights", kind=ChannelKind.WEIGHTS, source="trainer", sink="generator", delay=2),
    ]
    links = Links(common=Link(bytes_per_s=1 * MB, round_trip_s=0.02))
    where = {"generator": ["b", "c"], "reward": ["a"], "trainer": ["a", "b"]}
    found = distances(where, channels, links, controller="a", data_bytes=1 * MB, weight_bytes=4 * MB)
    assert found.message_s == pytest.approx({"generator": 0.01, "reward": 0.0, "trainer": 0.01})
    one = DATA_ROUND_TRIPS * 0.02
    assert found.pull_s["completions"] == pytest.approx(2 * (one + 0.5))  # one generator after the other
    assert found.pull_s["scored"] == pytest.approx(
        one + 0.5
    )  # the trainer's second rank takes half, the first is there
    assert found.weights_s > 0.01 + 0.01 + 4.0


# generator 6 s, reward 5 s, trainer 5 s; orders and reports of the generator take 0.5 s, its payload 1 s, a version 3 s
FAR = Distances(message_s={"generator": 0.5}, pull_s={"completions": 1.0}, weights_s=3.0)


@pytest.mark.parametrize(
    ("staleness", "step_s"),
    [
        (0, 6 + 0.5 + (1 + 5) + 5 + 3),  # all in turn; the version's 3 s have the generator's order in them
        (1, (6 + 0.5 + (1 + 5) + 5 + 3) / 2),
        (2, 7.0),  # the generator alone, with an order and a report between its ticks
    ],
)
def test_a_far_generator_adds_what_lies_on_the_cycle_that_sets_the_pace(staleness: int, step_s: float) -> None:
    near = durations_scenario(generator_s=6, reward_s=5, trainer_s=5, max_staleness=staleness, num_ticks=60)
    result = simulate(dataclasses.replace(near, distances=FAR))
    assert result.step_s == pytest.approx(step_s, rel=0.01)
    assert result.theory_s == pytest.approx(step_s, rel=0.01)
    assert result.role_s["reward"] == pytest.approx(6.0)  # with the second in which it reads


def test_a_version_on_the_way_reaches_a_far_generator_inside_its_tick() -> None:
    near = durations_scenario(
        generator_s=6, reward_s=1, trainer_s=4, max_staleness=2, num_ticks=60, tokens=600, weights="latest"
    )
    plain, far = (simulate(dataclasses.replace(near, distances=d)) for d in (Distances(), Distances(weights_s=2.0)))
    assert far.step_s == pytest.approx(plain.step_s) == pytest.approx(6.0)
    # theory: (reward + trainer + way) / generator
    assert plain.staleness_mean == pytest.approx(5 / 6, abs=0.03)
    assert far.staleness_mean == pytest.approx(7 / 6, abs=0.03)


def test_the_verb_places_a_recipe_as_a_run_would(capsys: pytest.CaptureFixture[str]) -> None:
    from test_simulate_cli import RECIPE
    from test_simulate_cli import simulate as simulate_verb

    line = f"{RECIPE} --staleness 0,1 --json --ticks 20 --hardware h100 --hosts a,b --on generator=b --on trainer=a --on reward=a"
    simulate_verb(f"{line} --link 100mbit:50ms")
    far = json.loads(capsys.readouterr().out)["simulations"]
    simulate_verb(f"{line} --link 100gbit")
    near = json.loads(capsys.readouterr().out)["simulations"]
    # 2.24 MB of weights at 12.5 MB/s and four round trips, two to read completions, and the messages of generator, reward
    # and trainer: the controller is on a host of its own
    expected = 559_360 * 4 / 12.5e6 + 4 * 0.05 + 2 * 0.05 + 3 * 0.05
    lost = [f["step_s"] - n["step_s"] for f, n in zip(far, near, strict=True)]
    assert lost[0] == pytest.approx(expected, rel=0.08)
    assert lost[1] < lost[0]
    with pytest.raises(PlanError, match="--hosts a,b"):
        simulate_verb(f"{RECIPE} --link 1gbit --hardware h100")
    with pytest.raises(PlanError, match="--link"):
        simulate_verb(f"{RECIPE} --hosts a,b --hardware h100")


def test_the_bytes_of_a_payload_are_near_what_groups_pickle_to() -> None:
    groups = []
    for index in range(8):
        prompt = Prompt(
            index=index,
            tokens=np.zeros(100, np.int32),
            text="word " * 99 + f"{index}",
            question="w" * 399 + f"{index}",
            answer="1",
            task="t",
        )
        responses = tuple(
            Response(
                prompt_index=index, sample_index=sample, tokens=np.zeros(64, np.int32),
                behavior_logprobs=np.zeros(64, np.float32), policy_versions=np.zeros(64, np.int32),
                loss_mask=np.ones(64, np.bool_), text="word" * 63 + f"{index}{sample}", finish_reason="stop",
            )
            for sample in range(8)
        )  # fmt: skip
        groups.append(Group(prompt=prompt, responses=responses))
    assert payload_bytes(64, 64 * 64) == pytest.approx(len(pickle.dumps(groups, protocol=5)), rel=0.15)
