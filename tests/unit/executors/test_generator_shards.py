"""A generator whose work is cut into shards: its ranks driven alone, one, two, three and four of them."""

import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from lone_generators import Version, ranks_of

from llamarl.config import RunConfig, validate
from llamarl.errors import CheckpointError, ConfigError
from llamarl.executors.base import Elastic, StepResult
from llamarl.executors.generator import GeneratorExecutor
from llamarl.executors.generator_shard import shards_of_rank
from llamarl.executors.in_flight import digest_of
from llamarl.observability.keys import is_timing_key
from llamarl.runtime.rank_plans import combine_reports
from llamarl.runtime.worker import RankReport
from llamarl.types import Group

TICKS = 4


@pytest.mark.parametrize(
    ("num_ranks", "num_shards", "shares"),
    [
        (1, 4, [[0, 1, 2, 3]]),
        (2, 4, [[0, 1], [2, 3]]),
        (3, 4, [[0], [1], [2, 3]]),
        (4, 4, [[0], [1], [2], [3]]),
        (3, 8, [[0, 1], [2, 3, 4], [5, 6, 7]]),
    ],
)
def test_ranks_take_consecutive_shards_and_at_most_one_more_than_others(
    num_ranks: int, num_shards: int, shares: list[list[int]]
) -> None:
    assert [list(shards_of_rank(rank, num_ranks, num_shards)) for rank in range(num_ranks)] == shares


def recipe(dp: int, **generator: Any) -> RunConfig:
    return validate(
        {
            "run": {"num_ticks": TICKS},
            "schedule": {"prompts_per_step": 8, "max_staleness": 1},
            "generator": {
                "group_size": 2,
                "dp": dp,
                "shards": 4,
                "max_segments": 2,
                "oversubscription": 1.5,
                "device": "cpu",
                "threads": 1,
                "sampling": {"max_new_tokens": 12},
                "engine": {"kv_cache_bytes": 1 << 21},
                **generator,
            },
        }
    )


def tick_of(ranks: Sequence[GeneratorExecutor], tick: int) -> tuple[list[Group], Mapping[str, float]]:
    """Groups in the order of ranks, and the metrics of the executor but for times."""
    results = [rank.step(tick, {"weights": Version(max(0, tick - 1))}) for rank in ranks]
    report = combine_reports("generator", [_report(n, tick, r) for n, r in enumerate(results)], controller_bytes=0)
    groups = [group for result in results for group in result.outputs["completions"]]
    return groups, {key: value for key, value in sorted(report.metrics.items()) if not is_timing_key(key)}


def _report(rank: int, tick: int, result: StepResult) -> RankReport:
    return RankReport(
        rank=rank, tick=tick, outputs={}, metrics=result.metrics, share_metrics=result.share_metrics, spans=(),
        started_s=0.0, finished_s=1.0,
    )  # fmt: skip


Told = tuple[list[int], str, Mapping[str, float]]
"""Of a tick: prompts, a digest of every token with its log-probability and version, metrics."""


def run(moves: Mapping[int, int], move: Callable[..., list[GeneratorExecutor]], **generator: Any) -> list[Told]:
    """All ticks.

    Args:
        moves: Tick -> ranks from then on.
        move: (ranks, their number from now on, last tick) -> those that go on.
    """
    told: list[Told] = []
    ranks: list[GeneratorExecutor] = []
    for tick in range(TICKS):
        if tick in moves:
            ranks = move(ranks, moves[tick], tick - 1) if ranks else ranks_of(recipe(moves[tick], **generator))
        groups, metrics = tick_of(ranks, tick)
        told.append(([group.prompt.index for group in groups], digest_of(groups), metrics))
    return told


def test_every_response_has_a_seed_of_its_own() -> None:
    """Of prompts with equal text too: the seed follows the prompt's place, not its words."""
    (rank,) = ranks_of(recipe(1))
    groups = [rank._new_group(index, 0) for index in range(6)]
    seeds = [sequence.seed for group in groups for sequence in group.sequences]
    assert len(set(seeds)) == len(seeds) == 6 * rank.config.generator.group_size > 6
    assert seeds == [sequence.seed for index in range(6) for sequence in rank._new_group(index, 3).sequences]
    assert all(
        sequence.prompt_tokens is group.sequences[0].prompt_tokens for group in groups for sequence in group.sequences
    )


def test_no_group_is_looked_at_while_too_few_are_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    (rank,) = ranks_of(recipe(1))
    shard = rank.shards[0]
    shard.admit(0)
    with monkeypatch.context() as patch:
        patch.setattr(shard, "deadlines", lambda **_: pytest.fail("in each step, of thousands of groups"))
        assert shard.deliverable(0) is None
    for group in shard.active[:2]:
        for sequence in group.sequences:
            sequence.finish_reason = "stop"
        shard.heard_of(group.sequences)
    assert shard.deliverable(0) == [0, 1]  # two of three leave


def stay(ranks: list[GeneratorExecutor], num_ranks: int, tick: int) -> list[GeneratorExecutor]:
    raise AssertionError("nobody moves")


def by_journal(ranks: list[GeneratorExecutor], num_ranks: int, tick: int) -> list[GeneratorExecutor]:
    states = [rank.journal(tick) or b"" for rank in ranks]
    others = ranks_of(recipe(num_ranks))
    for rank in others:
        assert isinstance(rank, Elastic)
        rank.restore_from(states, tick)
    return others


@pytest.fixture(scope="module")
def alone() -> list[Told]:
    """Four ranks, a shard each."""
    return run({0: 4}, stay)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_any_number_of_ranks_makes_the_same_groups_in_the_same_order_and_the_same_metrics(
    alone: list[Told], num_ranks: int
) -> None:
    assert run({0: num_ranks}, stay) == alone
    assert any(metrics["tokens/carried"] for *_, metrics in alone)


def test_ranks_that_go_from_two_to_one_to_three_carry_on(alone: list[Told]) -> None:
    assert run({0: 2, 2: 1, 3: 3}, by_journal) == alone


def test_another_number_of_ranks_goes_on_from_saved_states(alone: list[Told], tmp_path: Path) -> None:
    def by_files(ranks: list[GeneratorExecutor], num_ranks: int, tick: int) -> list[GeneratorExecutor]:
        for rank, executor in enumerate(ranks):
            folder = tmp_path / f"{tick}" / f"rank_{rank}"
            folder.mkdir(parents=True)
            executor.save(folder, tick)
        others = ranks_of(recipe(num_ranks))
        for rank, executor in enumerate(others):
            executor.load(tmp_path / f"{tick}" / f"rank_{rank}", tick)
        return others

    assert run({0: 2, 2: 3, 3: 1}, by_files) == alone


def test_a_shard_that_nobody_saved_is_named(tmp_path: Path) -> None:
    (executor,) = ranks_of(recipe(1))
    (tmp_path / "rank_0").mkdir()
    with pytest.raises(CheckpointError, match="holds no state of shard 0: it was saved with fewer shards"):
        executor.load(tmp_path / "rank_0", 0)


def test_each_shard_is_as_many_replicas_without_shards(alone: list[Told]) -> None:
    assert run({0: 4}, stay, shards=0) == alone


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"generator": {"shards": 2, "dp": 3}}, "generator.shards is 2, fewer than the dp 3 replicas"),
        ({"generator": {"shards": 5}}, r"must be a multiple of generator.shards \(5\)"),
        ({"generator": {"shards": 4}, "schedule": {"weights": "latest"}}, "schedule.weights is 'latest'"),
    ],
)
def test_what_shards_do_not_go_with_is_refused(section: dict[str, Any], words: str) -> None:
    section = {**section, "schedule": {"prompts_per_step": 12, **section.get("schedule", {})}}
    with pytest.raises(ConfigError, match=words):
        validate(section)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("tokens", 10**9, "has the token 1000000000, and the vocabulary 43"),
        ("tokens", -7, "has the token -7"),
        ("logprobs", math.nan, "log-prob nan"),
        ("policy_versions", -1, "policy version -1"),
        ("loss_mask", None, "other numbers of what is noted of them"),
    ],
)
def test_a_state_with_numbers_that_no_engine_writes_is_refused(name: str, value: float | None, told: str) -> None:
    (rank,) = ranks_of(recipe(1))
    tick_of([rank], 0)
    state = json.loads(rank.journal(0) or b"")
    rank.restore(json.dumps(state).encode(), 0)
    carried = [s for shard in state["shards"].values() for group in shard["active"] for s in group["sequences"]]
    sequence = next(s for s in carried if s["tokens"])
    sequence[name][-1:] = [] if value is None else [value]
    with pytest.raises(ValueError, match=told):
        rank.restore(json.dumps(state).encode(), 0)


def test_a_state_of_another_shape_or_of_groups_that_cannot_be_is_refused() -> None:
    (rank,) = ranks_of(recipe(1))
    tick_of([rank], 0)
    whole = rank.journal(0) or b""
    rank.restore(whole, 0)

    def cursor(shard: dict[str, Any]) -> None:
        shard["cursor"] = 10**15

    def twice(shard: dict[str, Any]) -> None:
        shard["active"].append(shard["active"][0])
        shard["cursor"] += 1

    def complete(shard: dict[str, Any]) -> None:
        shard["completed"] = [group["prompt_index"] for group in shard["active"]] * 2

    def early(shard: dict[str, Any]) -> None:
        shard["active"][0]["admitted_tick"] = -3

    def late(shard: dict[str, Any]) -> None:
        shard["active"][0]["admitted_tick"] = 10**9

    def long(shard: dict[str, Any]) -> None:
        sequence = shard["active"][0]["sequences"][0]
        sequence |= {"tokens": [5] * 999, "logprobs": [-1.0] * 999}
        sequence |= {"policy_versions": [0] * 999, "loss_mask": [True] * 999}

    for change in (cursor, twice, complete, early, late, long):
        state = json.loads(whole)
        change(next(shard for shard in state["shards"].values() if shard["active"]))
        with pytest.raises(ValueError):
            rank.restore(json.dumps(state).encode(), 0)
    wrong = [None, "x", -1, 2**63, 0.5, [], {}, [[]], float("nan")]
    chance = random.Random(3)
    for _ in range(150):  # whatever stands in a place of it, it is taken as it is or refused
        state = json.loads(whole)
        shard = state["shards"][chance.choice(list(state["shards"]))]
        places = [shard, *shard["active"], *(s for group in shard["active"] for s in group["sequences"])]
        place = chance.choice(places)
        name = chance.choice(list(place))
        place[name] = chance.choice(wrong)
        try:
            rank.restore(json.dumps(state).encode(), 0)
        except (ValueError, TypeError, LookupError):
            continue
        assert json.loads(rank.journal(0) or b"")["shards"].keys() == state["shards"].keys()
        assert name in ("logprobs", "error", "experts", "completed", "sequences"), name
