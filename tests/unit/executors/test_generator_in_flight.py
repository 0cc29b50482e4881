"""The generator under ``schedule.weights = "latest"``, driven alone: versions arrive at scripted engine steps."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lone_generators import Version, generator

from llamarl.config import RunConfig, validate
from llamarl.errors import EventLogError
from llamarl.executors.generator import GeneratorExecutor
from llamarl.executors.in_flight import Logged, Moment, SwapPolicy, digest_of, tick_event
from llamarl.observability.events import EVENTS_FILE, REPLAY_FILE, EventLog, TickEvent
from llamarl.types import Group

TICKS = 5


def recipe(tp: int = 1) -> RunConfig:
    return validate(
        {
            "run": {"num_ticks": TICKS},
            "schedule": {"prompts_per_step": 2, "max_staleness": 1, "weights": "latest"},
            "generator": {
                "group_size": 2,
                "tp": tp,
                "max_segments": 2,
                "oversubscription": 1.5,
                "device": "cpu",
                "sampling": {"max_new_tokens": 64},
                "engine": {"kv_cache_bytes": 1 << 22},
            },
        }
    )


class Feed:
    """At tick k version max(0, k - 1) is there, and version k comes after ``asked`` looks."""

    def __init__(self, tick: int, asked: int) -> None:
        self.tick, self.left = tick, asked

    def newest(self) -> int:
        self.left -= 1
        return (self.tick if self.left < 0 else max(0, self.tick - 1)) - 1

    def take(self, source_tick: int) -> Version:
        return Version(source_tick + 1)


def run(executor: GeneratorExecutor, asked: list[int], first: int = 0) -> list[tuple[list[Group], dict[str, Any]]]:
    made = []
    for tick, looks in enumerate(asked, start=first):
        result = executor.step(tick, {"weights": Feed(tick, looks)})
        made.append((result.outputs["completions"], dict(result.events[0])))
    return made


ARRIVALS = [0, 6, 0, 11, 3]


def test_versions_are_swapped_in_within_a_tick_and_a_log_repeats_them_also_after_a_load(tmp_path: Path) -> None:
    config = recipe()
    live = generator(config)
    made = run(live, ARRIVALS[:3])
    (tmp_path / "saved").mkdir()
    live.save(tmp_path / "saved", 2)
    made += run(live, ARRIVALS[3:], first=3)

    # at tick 1 version 0 serves until version 1 has come, which the seventh look sees, before engine step 6
    assert [event["swaps"] for _, event in made] == [
        [[0, 0]],
        [[0, 0], [6, 1]],
        [[0, 2]],
        [[0, 2], [11, 3]],
        [[0, 3], [3, 4]],
    ]
    responses = [(tick, r) for tick, (groups, _) in enumerate(made) for g in groups for r in g.responses]
    assert all(len(groups) == 2 for groups, _ in made)
    assert max(tick - int(r.policy_versions.min()) for tick, r in responses) == 1  # max_staleness, and reached
    assert any(len(np.unique(r.policy_versions)) == 2 for _, r in responses)
    assert all((np.diff(r.policy_versions) >= 0).all() for _, r in responses)

    log = EventLog(tmp_path)
    log.append([event for _, event in made])
    (tmp_path / EVENTS_FILE).rename(tmp_path / REPLAY_FILE)
    again = generator(config, run_dir=tmp_path)
    repeated = run(again, [0] * 3)  # every version is there from the first look on
    loaded = generator(config, run_dir=tmp_path)
    loaded.load(tmp_path / "saved", 2)
    repeated += run(loaded, [0] * 2, first=3)
    assert [event for _, event in repeated] == [event for _, event in made]
    assert [digest_of(groups) for groups, _ in repeated] == [digest_of(groups) for groups, _ in made]


def test_groups_that_would_get_too_old_wait_for_a_newer_version() -> None:
    executor = generator(recipe())
    run(executor, [0])
    assert len(executor.shards[0].active) == 1  # carried, with tokens of version 0
    executor.step(1, {"weights": Feed(1, 10_000)})  # version 0 only: its tokens must leave in this very tick
    assert len(executor.shards[0].active) == 1
    assert all(not s.tokens for g in executor.shards[0].active for s in g.sequences)  # nobody who stays was sampled


def test_the_policies_are_functions_of_the_moment() -> None:
    moment = Moment(tick=3, step=17, serving=2, newest=3)
    assert SwapPolicy().choose(moment) == 3
    event = TickEvent(tick=3, rank=0, swaps=((0, 2), (17, 3)), steps=30, delivered="0-1", digest="x")
    logged = Logged({3: event}, Path("run/replay.jsonl"))
    assert logged.choose(moment) == 3
    assert logged.choose(Moment(tick=3, step=16, serving=2, newest=3)) == 2
    with pytest.raises(EventLogError, match="no decisions of tick 4"):
        logged.choose(Moment(tick=4, step=0, serving=3, newest=4))


def test_a_replay_that_comes_to_something_else_is_stopped_where_it_parts() -> None:
    event = TickEvent(tick=3, rank=0, swaps=((0, 2),), steps=30, delivered="0-1", digest="x")
    logged = Logged({3: event}, Path("run/replay.jsonl"))
    with pytest.raises(
        EventLogError, match=r"parts from run/replay.jsonl at tick 3, generator rank 0: steps was 30, is 0"
    ):
        logged.check(tick_event(3, 0, [(0, 2)], 0, []))
